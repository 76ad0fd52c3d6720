"""RemoteCore: a running engine of the cluster with the interface of an EngineCore, so that an LLM works on it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from glm5ray.actors.handles import SchedulerHandle, find_scheduler
from glm5ray.actors.scheduler_actor import Abort, Letter, Submit
from glm5ray.config import SchedulerSection
from glm5ray.engine.client import EngineState
from glm5ray.errors import EngineUnavailable, RequestError, WorkerDied
from glm5ray.protocol import FinishReason, TokenEvent, decode_events, encode_request
from glm5ray.scheduler.limits import RequestLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    from glm5ray.config import EngineConfig
    from glm5ray.engine.client import EngineInfo, EngineStatus
    from glm5ray.protocol import Capacity, GenerateRequest
    from glm5ray.scheduler.stats import SchedulerStats

logger = logging.getLogger(__name__)

POLL_S = 0.2
"""How long a step waits for news: Ctrl-C waits as long."""
PATIENCE_S = 3600.0
"""How long a scheduler that died may take to come back: it loads the model again."""
_RETRY_S = 0.2


class _Answer:
    """One answer while it grows, kept so that it can be asked for again."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.has_begun = False
        """Its first event was handed on."""
        self.num_replayed = 0
        """Of ``token_ids``, how many the present scheduler has sent."""

    def follow(self, event: TokenEvent) -> TokenEvent | None:
        """``event`` without what was handed on before; ``None`` if nothing is left. Raises ``ValueError`` if the tokens
        are others than before."""
        num_old = min(len(self.token_ids) - self.num_replayed, len(event.token_ids))
        known = self.token_ids[self.num_replayed : self.num_replayed + num_old]
        if list(event.token_ids[:num_old]) != known or (event.finish_reason and len(event.token_ids) < self._missing):
            raise ValueError(f"{event} after {self.token_ids}")
        self.num_replayed += len(event.token_ids)
        new = event.token_ids[num_old:]
        self.token_ids += new
        if num_old == 0 and not self.has_begun:
            self.has_begun = True
            return event
        if not new and event.finish_reason is None:
            return None
        return event._replace(token_ids=new, logprobs=event.logprobs[num_old:], prompt_logprobs=(), num_cached_tokens=0)

    @property
    def _missing(self) -> int:
        """Tokens that were handed on and that the present scheduler has not sent."""
        return len(self.token_ids) - self.num_replayed


class _Request:
    """A request without its end."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.answers = {index: _Answer() for index in range(request.sampling.n)}
        """Those that go on."""


class RemoteScheduler:
    """What an LLM asks of the scheduler."""

    def __init__(self, core: RemoteCore) -> None:
        self._core = core

    @property
    def num_unfinished(self) -> int:
        """Sequences of this client, not requests."""
        return self._core.num_unfinished

    def stats(self) -> SchedulerStats:
        """Of all clients together. Raises :class:`EngineUnavailable`."""
        return self._core.status().scheduler


class RemoteCore:
    """Has no thread: events are fetched by :meth:`step`, as they are made by it in one process.

    If the scheduler dies, the unfinished requests are submitted again, with the seeds that they have, to the one that
    Ray starts in its place; tokens that were handed on before are checked and not handed on again.
    """

    def __init__(self, engine: str, *, patience_s: float = PATIENCE_S, on_shutdown: Callable[[], object] | None = None):
        """This process must be a driver of the cluster. ``on_shutdown`` is called once, by :meth:`shutdown`. Raises
        :class:`EngineUnavailable`."""
        self._handle = SchedulerHandle(engine)
        self._patience_s = patience_s
        self._on_shutdown = on_shutdown
        self.info: EngineInfo
        self.config: EngineConfig
        self.info, self.config = self._handle.call("info")
        limits = SchedulerSection(max_logprobs=self.info.max_logprobs)
        self._limits = RequestLimits(limits, self.info.capacity)
        self.scheduler = RemoteScheduler(self)
        self.num_unfinished = 0
        """Sequences."""
        self._requests: dict[str, _Request] = {}
        self._events: list[TokenEvent] = []
        self._lost_since_s: float | None = None
        self._attach()

    @property
    def capacity(self) -> Capacity:
        return self.info.capacity

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return bool(self._events or self._requests or self._outbox)

    def status(self) -> EngineStatus:
        """Raises :class:`EngineUnavailable`."""
        return self._handle.call("status")

    def add(self, request: GenerateRequest) -> None:
        """Queues a request that has its seed. Raises :class:`RequestError`."""
        if request.request_id in self._requests:
            raise RequestError(
                f"request_id {request.request_id!r} is in use by an unfinished request; choose another.",
                param="request_id",
            )
        self._limits.max_len(request)
        self._requests[request.request_id] = _Request(request)
        self.num_unfinished += request.sampling.n
        self._outbox.append(Submit(encode_request(request)))

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request, or one of its answers; its last event comes with the next :meth:`step`. Unknown ones are
        ignored."""
        entry = self._requests.get(request_id)
        if entry is None:
            return
        for one in [one for one in entry.answers if index is None or one == index]:
            self._events.append(TokenEvent(request_id, one, (), reason))
            self._end(request_id, one)
        self._outbox.append(Abort(request_id, index, reason.value))

    def step(self) -> list[TokenEvent]:
        """News since the last call, after a short wait if there is none. Raises :class:`WorkerDied` if the engine has
        ended for good."""
        if self._lost_since_s is not None:
            self._resume(self._lost_since_s)
        else:
            try:
                self._exchange()
            except EngineUnavailable as error:
                self._lose(str(error))
        events, self._events = self._events, []
        return events

    def shutdown(self) -> None:
        """Ends what this client left running; the engine goes on, unless it was started for this client. Harmless if
        called twice."""
        self._outbox.clear()
        try:
            self._handle.call("detach", self._client_id)
        except EngineUnavailable as error:
            logger.debug("detach: %s", error)
        on_shutdown, self._on_shutdown = self._on_shutdown, None
        if on_shutdown is not None:
            on_shutdown()

    # --- one exchange -----------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        self._client_id: str = self._handle.call("attach")
        self._num_sent = self._num_received = 0
        self._outbox: list[Submit | Abort] = []

    def _exchange(self) -> None:
        """Sends what is to be sent, and fetches what has happened."""
        if self._outbox:
            self._num_sent += 1
            commands, self._outbox = self._outbox, []
            if not self._handle.call("send", self._client_id, self._num_sent, commands):
                self._lose("the scheduler was started again")
                return
        if not self._requests:
            return
        wait_s = 0.0 if self._events else POLL_S
        letter: Letter | None = self._handle.call("poll", self._client_id, self._num_received, wait_s)
        if letter is None:
            self._lose("the scheduler was started again")
            return
        if letter.events:
            self._num_received = letter.number
            for event in decode_events(letter.events):
                self._take(event)
        if letter.ended is not None:
            raise WorkerDied(letter.ended)

    def _take(self, event: TokenEvent) -> None:
        entry = self._requests.get(event.request_id)
        if entry is None or event.index not in entry.answers:
            return  # aborted meanwhile
        try:
            news = event if event.error_code else entry.answers[event.index].follow(event)
        except ValueError:
            self._outbox.append(Abort(event.request_id, event.index, FinishReason.ABORT.value))
            why = "the scheduler died, and the tokens came out differently when they were computed again"
            news = TokenEvent(event.request_id, event.index, (), FinishReason.ERROR, error=why, error_code=LOST)
        if news is None:
            return
        self._events.append(news)
        if news.finish_reason is not None:
            self._end(event.request_id, event.index)

    def _end(self, request_id: str, index: int) -> None:
        entry = self._requests[request_id]
        del entry.answers[index]
        self.num_unfinished -= 1
        if not entry.answers:
            del self._requests[request_id]

    # --- a scheduler that died --------------------------------------------------------------------------------------

    def _lose(self, why: str) -> None:
        logger.warning("engine=%s is lost: %s", self._handle.engine, why)
        self._lost_since_s = time.monotonic()

    def _resume(self, lost_since_s: float) -> None:
        """One attempt to find the next scheduler and to submit again what is unfinished."""
        try:
            find_scheduler(self._handle.engine)
        except EngineUnavailable as error:
            raise WorkerDied(str(error)) from error
        try:
            status = self.status()
            if status.state in (EngineState.FAILED, EngineState.STOPPED):
                raise WorkerDied(f"the engine is {status.state.value}: {status.detail}")
            if status.state is not EngineState.STARTING:
                self._attach()
                self._submit_again()
                self._lost_since_s = None
                return
            why = status.detail
        except EngineUnavailable as error:
            why = str(error)
        if time.monotonic() - lost_since_s > self._patience_s:
            raise WorkerDied(f"the scheduler died and did not come back within {self._patience_s:.0f} s: {why}")
        time.sleep(_RETRY_S)

    def _submit_again(self) -> None:
        for request_id, entry in self._requests.items():
            self._outbox.append(Submit(encode_request(entry.request)))
            for index in range(entry.request.sampling.n):
                if index in entry.answers:
                    entry.answers[index].num_replayed = 0
                else:
                    self._outbox.append(Abort(request_id, index, FinishReason.ABORT.value))


LOST = "engine_failed"
"""The code of a request that failed with the engine: a batch runs it again with ``--resume``."""
