"""The scheduler as an actor: an engine loop in a thread, and an asynchronous front that many clients share.

A client attaches, sends its requests and aborts in numbered calls, and fetches what has happened since its last poll:
one call for the tokens of many steps. Every call may be repeated; what was done already is not done twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from glm5ray.actors.mailboxes import Mailboxes, engine_id
from glm5ray.actors.metrics_export import EngineExport, Ticker
from glm5ray.actors.status_log import StatusLog
from glm5ray.engine.client import EngineInfo, EngineStatus
from glm5ray.engine.core import EngineCore, collect_garbage_rarely
from glm5ray.engine.engine_loop import EngineLoop
from glm5ray.errors import EngineUnavailable, RequestError
from glm5ray.protocol import FinishReason, TokenEvent, decode_request

if TYPE_CHECKING:
    from glm5ray.actors.spec import EngineSpec
    from glm5ray.config import EngineConfig
    from glm5ray.protocol import GenerateRequest

logger = logging.getLogger(__name__)

MAX_POLL_S = 10.0
"""Longest that a poll waits here for events."""


class Submit(NamedTuple):
    """A command of a client: ``request`` is encoded and has its seed."""

    request: bytes


class Abort(NamedTuple):
    """A command of a client."""

    request_id: str
    choice: int | None
    """The index of one answer; ``None``: all."""
    reason: str


class Letter(NamedTuple):
    """The answer to a poll."""

    number: int
    """To be given with the next poll."""
    events: bytes
    """See :func:`glm5ray.protocol.decode_events`; empty if there are none."""
    ended: str | None
    """Why no event will follow; ``None`` while the engine lives."""


class _Sink:
    """Hands what a step brought to the actor's event loop: one wake-up a step."""

    def __init__(self, mail: Mailboxes) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        """Known with the first call to the actor; before it nobody waits for events."""
        self.ended: str | None = None
        self._mail = mail

    def deliver(self, events: list[TokenEvent]) -> None:
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._mail.deliver, events)

    def end(self, error: EngineUnavailable) -> None:
        self.ended = str(error)
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._mail.wake_all)


class SchedulerActor:
    """Plain class; :mod:`glm5ray.actors.launch` makes an actor of it."""

    def __init__(self, spec: EngineSpec) -> None:
        """Returns at once: the workers are started in the engine's thread, and :meth:`status` tells how far it is.
        Ray calls this again, in a new process, when the actor died."""
        logging.basicConfig(level=logging.INFO, format=f"%(levelname)s %(name)s {spec.engine}: %(message)s")
        # Of this process alone: what its runtime environment says, its workers would inherit, and see no GPU either.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._spec = spec
        self._mail = Mailboxes()
        self._sink = _Sink(self._mail)
        self._reaper: asyncio.Task[None] | None = None
        # Larger than that of any workers before, also of those that a scheduler of this name started and did not live
        # to replace: they come up less than once a second.
        epoch = int(time.time())
        self._engine = EngineLoop(
            lambda: self._make_core(epoch),
            self._sink,
            engine=spec.engine,
            layout=spec.layout,
            stalled_after_s=spec.config.recovery.stalled_after_s,
        )
        self._engine.start()
        self._export = EngineExport(model_name=Path(spec.config.model.path).name, engine=spec.engine)
        self._log = StatusLog()
        self._ticker = Ticker(self._tell, every_s=spec.metrics_every_s)
        self._ticker.start()

    def __repr__(self) -> str:
        model = Path(self._spec.config.model.path).name
        return f"glm5ray {self._spec.engine}: scheduler ({model}, {self._spec.layout})"

    def _tell(self) -> None:
        status = self._engine.status()
        self._log.tell(status)
        self._export.tell(status)

    def _make_core(self, epoch: int) -> EngineCore:
        spec = self._spec
        executor = spec.make_executor(spec, epoch)
        try:
            core = EngineCore(
                executor,
                spec.config.scheduler,
                spec.config.cache,
                overlap=spec.overlap,
                epoch=epoch,
                dp_size=spec.config.parallel.dp_size,
            )
        except BaseException:
            executor.shutdown()
            raise
        collect_garbage_rarely()
        return core

    # --- the engine -------------------------------------------------------------------------------------------------

    async def status(self) -> EngineStatus:
        """Answers at once, whatever the engine does."""
        self._listen()
        return self._engine.status()

    async def info(self) -> tuple[EngineInfo, EngineConfig]:
        """Raises :class:`EngineUnavailable` before the engine is ready."""
        self._listen()
        limits = self._engine.limits
        info = EngineInfo(
            engine=self._spec.engine,
            model_path=self._spec.config.model.path,
            capacity=replace(self._engine.capacity, max_model_len=limits.max_model_len),
            max_logprobs=self._spec.config.scheduler.max_logprobs,
            load_format=self._spec.config.model.load_format,
        )
        return info, self._spec.config

    async def stop(self, timeout_s: float = 20.0) -> None:
        """Ends the engine and its workers; clients are told. Harmless if called twice."""
        self._listen()
        await asyncio.to_thread(self._engine.stop, timeout_s)
        await asyncio.to_thread(self._ticker.stop)

    # --- clients ----------------------------------------------------------------------------------------------------

    async def attach(self) -> str:
        """A new client's id."""
        self._listen()
        client_id = uuid.uuid4().hex
        self._mail.add(client_id)
        return client_id

    async def send(self, client_id: str, number: int, commands: list[Submit | Abort]) -> bool:
        """Carries out ``commands`` in order. ``number`` grows by one with each call; a call that was carried out
        already changes nothing. False: the client is unknown, for this process started after it attached, or it was
        silent for too long; its requests have ended."""
        self._listen()
        if client_id not in self._mail:
            return False
        box = self._mail[client_id]
        box.last_seen_s = time.monotonic()
        if number > box.last_call:
            box.last_call = number
            for command in commands:
                self._carry_out(client_id, command)
        return True

    def _carry_out(self, client_id: str, command: Submit | Abort) -> None:
        if isinstance(command, Abort):
            name = engine_id(client_id, command.request_id)
            self._abort(name, command.choice, FinishReason(command.reason))
            return
        request = self._mail.take(client_id, decode_request(command.request))
        try:
            self._engine.submit(request)
        except RequestError as error:
            self._mail.deliver(_refusal(request, error.message, error.code or "invalid_request"))
        except EngineUnavailable as error:
            self._mail.deliver(_refusal(request, str(error), error.code))

    def _abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        try:
            self._engine.abort(request_id, index, reason)
        except EngineUnavailable:
            logger.debug("abort of %s: the engine has ended", request_id)

    async def poll(self, client_id: str, num_received: int, max_wait_s: float) -> Letter | None:
        """What happened to the client's requests since letter ``num_received``, as soon as there is something.
        ``None``: the client is unknown, see :meth:`send`."""
        self._listen()
        if client_id not in self._mail:
            return None
        box = self._mail[client_id]
        box.num_polls += 1
        try:
            wait_s = 0.0 if self._sink.ended is not None else min(max_wait_s, MAX_POLL_S)
            number, events = await box.fetch(num_received, wait_s)
        finally:
            box.num_polls -= 1
            box.last_seen_s = time.monotonic()
        # what the thread delivered before its end is routed before: both came through the event loop, in order
        return Letter(number, events, self._sink.ended if not events else None)

    async def detach(self, client_id: str) -> None:
        """Ends what the client left running. Unknown ones are ignored."""
        if client_id in self._mail:
            for request_id in self._mail.remove(client_id):
                self._abort(request_id)

    def _listen(self) -> None:
        if self._sink.loop is None:
            self._sink.loop = asyncio.get_running_loop()
            self._reaper = asyncio.ensure_future(self._end_silent_clients())

    async def _end_silent_clients(self) -> None:
        while True:
            await asyncio.sleep(self._spec.client_timeout_s / 4)
            for client_id in self._mail.silent(self._spec.client_timeout_s):
                logger.info("client=%s is gone, num_requests=%d", client_id[:8], len(self._mail[client_id].open))
                await self.detach(client_id)


def _refusal(request: GenerateRequest, message: str, code: str) -> list[TokenEvent]:
    return [
        TokenEvent(request.request_id, index, finish_reason=FinishReason.ERROR, error=message, error_code=code)
        for index in range(request.sampling.n)
    ]
