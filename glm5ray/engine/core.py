"""EngineCore: the loop that joins a scheduler and an executor. It knows tokens only; text is above it."""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from glm5ray.engine.executor import RestartableExecutor
from glm5ray.errors import WorkerDied
from glm5ray.protocol import FinishReason
from glm5ray.scheduler.data_parallel import DataParallelScheduler
from glm5ray.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from glm5ray.config import CacheSection, SchedulerSection
    from glm5ray.engine.executor import Executor, PendingStep
    from glm5ray.protocol import GenerateRequest, StepInput, TokenEvent

logger = logging.getLogger(__name__)

MAX_RESTARTS_IN_A_ROW = 3
"""Restarts of the workers after which no step came to its end: then the engine gives up."""
LIVED_S = 10.0
"""Workers that die without a step, but not before this age, are no sign that new ones would die as well."""
MAX_EXPLAINED_QUARANTINES = 2
"""A request that was quarantined meanwhile explains three such restarts; but if it goes on like that, it is the engine
that kills its workers, and not the requests."""


def collect_garbage_rarely() -> None:
    """For a process that does nothing but run an engine, once it is loaded: takes what lives so far out of the garbage
    collector's sight and lets it run every 50,000 objects.

    Each token is an object that it would look at, and by default it looks every 700: a third of the scheduler's time
    (docs/experiments/0001-scheduler-cost.md). It changes the whole process, so a library must not do it unasked.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


class _Running(NamedTuple):
    """A step that the executor has."""

    step: StepInput
    pending: PendingStep
    started_s: float
    """``time.monotonic()`` when it was submitted."""


class EngineCore:
    """Requests in, token events out, one step at a time.

    *Plain loop*: schedule, compute, update. *Overlapped loop*: step n+1 is scheduled and submitted while step n runs,
    and only then is the output of n waited for; so the executor always has its next step. Both give the same tokens.

    If workers die and the executor can replace them, :meth:`step` does so and goes on: every unfinished sequence is
    computed again from its tokens (docs/recovery.md). The attributes may be read from any thread.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: SchedulerSection,
        cache: CacheSection,
        *,
        overlap: bool,
        epoch: int = 0,
        dp_size: int = 1,
    ) -> None:
        """``epoch`` is that of the workers that ``executor`` starts, ``dp_size`` the number of their data-parallel
        groups; what the executor says it holds is what each group holds."""
        self._executor = executor
        self.capacity = executor.start()
        options: dict[str, Any] = {"prefix_caching": cache.prefix_caching, "epoch": epoch}
        self.scheduler: Scheduler | DataParallelScheduler = (
            DataParallelScheduler(scheduler, self.capacity, dp_size, **options)
            if dp_size > 1
            else Scheduler(scheduler, self.capacity, **options)
        )
        self.epoch = epoch
        """Incarnation of the workers."""
        self.num_restarts = 0
        """Of the workers, since the engine started."""
        self.is_recovering = False
        self.last_failure = ""
        """What the workers died of most recently; empty if they never did."""
        self.num_decode_steps = 0
        """Steps in which every sequence had one token."""
        self.num_graph_steps = 0
        """Of these, the ones that a CUDA graph computed."""
        self._overlap = overlap
        self._running: deque[_Running] = deque()
        self._events: list[TokenEvent] = []
        self._num_restarts_in_a_row = 0
        self._num_quarantined_in_a_row = 0
        self._came_up_s = time.monotonic()

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return bool(self._running or self._events or self.scheduler.has_unfinished)

    @property
    def seconds_since_step(self) -> float:
        """Age of the oldest step in flight; 0 if none is."""
        try:
            return time.monotonic() - self._running[0].started_s
        except IndexError:
            return 0.0

    def add(self, request: GenerateRequest) -> None:
        """Queues a request. Raises :class:`RequestError` if it cannot be served; nothing is left of it then."""
        self.scheduler.add(request)

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request, or one of its answers; its last event comes with the next :meth:`step`. Unknown ones are
        ignored."""
        self._events += self.scheduler.abort(request_id, index, reason)

    def step(self) -> list[TokenEvent]:
        """One turn of the loop; an empty list is no end (see :attr:`has_work`). Raises :class:`WorkerDied` if workers
        died and could not be replaced; then there is no further step."""
        try:
            self._turn()
        except WorkerDied as error:
            self._recover(error)
        events, self._events = self._events, []
        return events

    def check_workers(self) -> None:
        """For times in which there is no step to do: replaces workers if one of them has died. Raises
        :class:`WorkerDied` if they could not be replaced; then there is no further step."""
        if not isinstance(self._executor, RestartableExecutor):
            return
        try:
            self._executor.check()
        except WorkerDied as error:
            if time.monotonic() - self._came_up_s > LIVED_S:
                self._num_restarts_in_a_row = 0
            self._recover(error)

    def _turn(self) -> None:
        self._finish_until(left=1)  # more are left only by a turn that was interrupted while it waited
        step = self.scheduler.schedule()
        if step is not None:
            started_s = time.monotonic()
            self._running.append(_Running(step, self._executor.submit(step), started_s))
        # overlapped: leave the step just submitted running, unless nothing else would be waited for
        self._finish_until(left=1 if self._overlap and step is not None else 0)

    def _finish_until(self, left: int) -> None:
        """Waits for the oldest steps until no more than ``left`` run. A step leaves the queue only when its output is
        there."""
        while len(self._running) > left:
            oldest = self._running[0]
            output = oldest.pending.result()
            self._running.popleft()
            self._num_restarts_in_a_row = self._num_quarantined_in_a_row = 0
            self.num_decode_steps += oldest.step.is_decode
            self.num_graph_steps += output.from_graph
            self._events += self.scheduler.update(oldest.step, output)

    def _recover(self, cause: WorkerDied) -> None:
        """Replaces the workers; the scheduler starts again from the tokens that it knows. Raises :class:`WorkerDied`
        if that is hopeless."""
        self.last_failure = str(cause)
        self._running.clear()
        if not isinstance(self._executor, RestartableExecutor):
            raise cause
        self.is_recovering = True
        while True:
            allowed = MAX_RESTARTS_IN_A_ROW * (1 + min(self._num_quarantined_in_a_row, MAX_EXPLAINED_QUARANTINES))
            if self._num_restarts_in_a_row >= allowed:
                raise WorkerDied(
                    f"{self._num_restarts_in_a_row} restarts in a row did not bring one step to its end; "
                    f"the last cause: {self.last_failure}"
                )
            self._num_restarts_in_a_row += 1
            self.epoch += 1
            self.num_restarts += 1
            logger.warning("workers are replaced: epoch=%d cause=%r", self.epoch, self.last_failure)
            try:
                self._executor.restart(self.epoch)
            except WorkerDied as error:
                self.last_failure = str(error)
                continue
            break
        quarantined = self.scheduler.restart(self.epoch)
        self._num_quarantined_in_a_row += len({event.request_id for event in quarantined})
        self._events += quarantined
        self._came_up_s = time.monotonic()
        self.is_recovering = False

    def shutdown(self) -> None:
        """Ends the executor; what was running is lost."""
        self._running.clear()
        self._executor.shutdown()
