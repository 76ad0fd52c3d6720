"""An EngineCore that turns in a thread of its own: under a server in one process, and in the scheduler actor."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from glm5ray.engine.client import EngineState, EngineStatus
from glm5ray.engine.step_rate import StepRate
from glm5ray.errors import EngineUnavailable, Glm5RayError, RequestError
from glm5ray.protocol import FinishReason, TokenEvent
from glm5ray.scheduler.stats import SchedulerStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from glm5ray.engine.core import EngineCore
    from glm5ray.protocol import Capacity, GenerateRequest
    from glm5ray.scheduler.limits import RequestLimits

logger = logging.getLogger(__name__)

STALLED_AFTER_S = 4.0
"""A step of this age makes the status say so, long before the watchdog ends the worker: a load balancer asks every few
seconds."""

CHECK_EVERY_S = 1.0
"""How often the workers are looked after while there is nothing to do."""

_NO_STATS = SchedulerStats(
    num_running=0,
    num_waiting=0,
    num_pages=0,
    num_pages_free=0,
    num_pages_held=0,
    num_pages_idle=0,
    num_pages_cached=0,
    num_steps=0,
    num_tokens_scheduled=0,
    num_tokens_sampled=0,
    num_admissions=0,
    num_preemptions=0,
    prefix_query_tokens=0,
    prefix_hit_tokens=0,
    num_finished={},
    num_corrupted=0,
)


def seeded(request: GenerateRequest) -> GenerateRequest:
    """``request`` with a seed, drawn if it has none. Drawn once, so that asking again gives the same tokens."""
    if request.sampling.seed is not None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=secrets.randbits(63)))


class EventSink(Protocol):
    """Who takes the events; both methods are called in the engine's thread and return at once."""

    def deliver(self, events: list[TokenEvent]) -> None:
        """What one step brought."""
        ...

    def end(self, error: EngineUnavailable) -> None:
        """The engine has failed or was stopped: what is unfinished gets no further event."""
        ...


class EngineLoop:
    """The engine's thread, and what other threads may ask of it: none of them waits for a step.

    Requests and aborts are left in a queue that the thread empties between two steps.
    """

    def __init__(
        self,
        make_core: Callable[[], EngineCore],
        sink: EventSink,
        *,
        engine: str = "default",
        layout: str = "tp 1",
        stalled_after_s: float = STALLED_AFTER_S,
    ) -> None:
        """``make_core`` is called in the thread: it loads the weights."""
        self._make_core = make_core
        self._sink = sink
        self._engine = engine
        self._layout = layout
        self._stalled_after_s = stalled_after_s
        self._core: EngineCore | None = None
        self._stats = _NO_STATS
        self._step_rate = StepRate()
        self._changed = threading.Condition()
        self._state = EngineState.STARTING
        self._detail = "workers start and load the model"
        self._inbox: deque[Callable[[EngineCore], None]] = deque()
        self._refused: list[TokenEvent] = []
        self._thread = threading.Thread(target=self._run, name=f"glm5ray-{engine}", daemon=True)

    # --- from any thread ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns at once; see :meth:`wait_ready`."""
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> Capacity:
        """Raises :class:`EngineUnavailable` if the engine failed, or does not answer within ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._state is not EngineState.STARTING, timeout_s)
            if self._core is None or self._state is not EngineState.READY:
                raise EngineUnavailable(f"engine {self._engine!r} is {self._state.value}: {self._detail}")
            return self._core.capacity

    @property
    def capacity(self) -> Capacity:
        """Raises :class:`EngineUnavailable` before the engine is ready."""
        if self._core is None:
            raise EngineUnavailable(f"engine {self._engine!r} is {self._state.value}: {self._detail}")
        return self._core.capacity

    @property
    def limits(self) -> RequestLimits:
        """Raises :class:`EngineUnavailable` before the engine is ready."""
        if self._core is None:
            raise EngineUnavailable(f"engine {self._engine!r} is {self._state.value}: {self._detail}")
        return self._core.scheduler.limits

    def submit(self, request: GenerateRequest) -> None:
        """Queues a request that has its seed. Raises :class:`RequestError` if it could never be served, and
        :class:`EngineUnavailable`. A ``request_id`` in use is found later: the request then ends with an error."""
        core = self._core
        if core is not None:
            core.scheduler.limits.max_len(request)
        self._leave(lambda core: self._add(core, request))

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request, or one of its answers, before the next step. Raises :class:`EngineUnavailable`."""
        self._leave(lambda core: core.abort(request_id, index, reason))

    def status(self) -> EngineStatus:
        """Of this moment."""
        core, state, detail = self._core, self._state, self._detail
        age = core.seconds_since_step if core is not None else 0.0
        if core is not None and state is EngineState.READY:
            if core.is_recovering:
                state, detail = EngineState.RECOVERING, f"workers are replaced: {core.last_failure}"
            elif age > self._stalled_after_s:
                state, detail = EngineState.RECOVERING, f"a step has been running for {age:.1f} s"
        return EngineStatus(
            engine=self._engine,
            state=state,
            detail=detail,
            epoch=core.epoch if core is not None else 0,
            layout=self._layout,
            seconds_since_step=age,
            num_restarts=core.num_restarts if core is not None else 0,
            steps_per_second=self._step_rate.per_second(time.monotonic()),
            num_decode_steps=core.num_decode_steps if core is not None else 0,
            num_graph_steps=core.num_graph_steps if core is not None else 0,
            scheduler=self._stats,
        )

    def stop(self, timeout_s: float = 30.0) -> None:
        """Ends the engine after the step that runs; unfinished requests end with :class:`EngineUnavailable`. Harmless
        if called twice."""
        self._set_state(EngineState.STOPPED, "it was stopped", unless_failed=True)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _leave(self, command: Callable[[EngineCore], None]) -> None:
        with self._changed:
            if self._state is not EngineState.READY:
                raise EngineUnavailable(f"engine {self._engine!r} is {self._state.value}: {self._detail}")
            self._inbox.append(command)
            self._changed.notify_all()

    def _set_state(self, state: EngineState, detail: str, *, unless_failed: bool = False) -> None:
        with self._changed:
            if unless_failed and self._state in (EngineState.FAILED, EngineState.STOPPED):
                return
            self._state, self._detail = state, detail
            self._changed.notify_all()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        core: EngineCore | None = None
        try:
            core = self._make_core()
            with self._changed:
                self._core = core
                if self._state is EngineState.STARTING:
                    self._state, self._detail = EngineState.READY, "it answers requests"
                self._changed.notify_all()
            self._turn_until_stopped(core)
        except Glm5RayError as error:
            logger.error("engine=%s failed: %s", self._engine, error)
            self._set_state(EngineState.FAILED, str(error), unless_failed=True)
        except Exception as error:  # the outermost loop: a bug of ours ends the engine, and is told
            logger.exception("engine=%s failed", self._engine)
            self._set_state(EngineState.FAILED, f"{type(error).__name__}: {error}", unless_failed=True)
        finally:
            self._inbox.clear()
            self._sink.end(EngineUnavailable(f"engine {self._engine!r} is {self._state.value}: {self._detail}"))
            if core is not None:
                core.shutdown()

    def _turn_until_stopped(self, core: EngineCore) -> None:
        while True:
            with self._changed:
                has_news = self._changed.wait_for(
                    lambda: self._inbox or core.has_work or self._refused or self._state is EngineState.STOPPED,
                    CHECK_EVERY_S,
                )
                if self._state is EngineState.STOPPED:
                    return
            if not has_news:
                core.check_workers()
                continue
            while self._inbox:
                self._inbox.popleft()(core)
            events, self._refused = self._refused, []
            if core.has_work:
                events += core.step()
            self._stats = core.scheduler.stats()
            self._step_rate.note(self._stats.num_steps, time.monotonic())
            if events:
                self._sink.deliver(events)

    def _add(self, core: EngineCore, request: GenerateRequest) -> None:
        try:
            core.add(request)
        except RequestError as error:
            self._refused += [
                TokenEvent(
                    request.request_id,
                    index,
                    finish_reason=FinishReason.ERROR,
                    error=error.message,
                    error_code=error.code or "invalid_request",
                )
                for index in range(request.sampling.n)
            ]
