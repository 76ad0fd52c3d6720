"""EngineCore: the loop that joins a scheduler and an executor. It knows tokens only; text is above it."""

from __future__ import annotations

import gc
from collections import deque
from typing import TYPE_CHECKING

from glm5ray.protocol import FinishReason
from glm5ray.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from glm5ray.config import CacheSection, SchedulerSection
    from glm5ray.engine.executor import Executor, PendingStep
    from glm5ray.protocol import GenerateRequest, StepInput, TokenEvent


def collect_garbage_rarely() -> None:
    """For a process that does nothing but run an engine, once it is loaded: takes what lives so far out of the garbage
    collector's sight and lets it run every 50,000 objects.

    Each token is an object that it would look at, and by default it looks every 700: a third of the scheduler's time
    (docs/experiments/0001-scheduler-cost.md). It changes the whole process, so a library must not do it unasked.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


class EngineCore:
    """Requests in, token events out, one step at a time.

    *Plain loop*: schedule, compute, update. *Overlapped loop*: step n+1 is scheduled and submitted while step n runs,
    and only then is the output of n waited for; so the executor always has its next step. Both give the same tokens.
    """

    def __init__(self, executor: Executor, scheduler: SchedulerSection, cache: CacheSection, *, overlap: bool) -> None:
        self._executor = executor
        self.capacity = executor.start()
        self.scheduler = Scheduler(scheduler, self.capacity, prefix_caching=cache.prefix_caching)
        self._overlap = overlap
        self._running: deque[tuple[StepInput, PendingStep]] = deque()
        self._events: list[TokenEvent] = []

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return bool(self._running or self._events or self.scheduler.has_unfinished)

    def add(self, request: GenerateRequest) -> None:
        """Queues a request. Raises :class:`RequestError` if it cannot be served; nothing is left of it then."""
        self.scheduler.add(request)

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request, or one of its answers; its last event comes with the next :meth:`step`. Unknown ones are
        ignored."""
        self._events += self.scheduler.abort(request_id, index, reason)

    def step(self) -> list[TokenEvent]:
        """One turn of the loop; an empty list is no end (see :attr:`has_work`). Raises :class:`WorkerDied`."""
        self._finish_until(left=1)  # more are left only by a turn that was interrupted while it waited
        step = self.scheduler.schedule()
        if step is not None:
            self._running.append((step, self._executor.submit(step)))
        # overlapped: leave the step just submitted running, unless nothing else would be waited for
        self._finish_until(left=1 if self._overlap and step is not None else 0)
        events, self._events = self._events, []
        return events

    def _finish_until(self, left: int) -> None:
        """Waits for the oldest steps until no more than ``left`` run. A step leaves the queue only when its output is
        there."""
        while len(self._running) > left:
            done, pending = self._running[0]
            output = pending.result()
            self._running.popleft()
            self._events += self.scheduler.update(done, output)

    def shutdown(self) -> None:
        """Ends the executor; what was running is lost."""
        self._running.clear()
        self._executor.shutdown()
