"""RayEngineClient: an engine of the cluster, for an event loop of this process."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from glm5ray.actors.handles import SchedulerHandle
from glm5ray.actors.scheduler_actor import MAX_POLL_S, Abort, Letter, Submit
from glm5ray.config import SchedulerSection
from glm5ray.engine.client import EngineState, EngineStatus
from glm5ray.engine.engine_loop import seeded
from glm5ray.engine.streams import EventStreams
from glm5ray.errors import EngineUnavailable, Glm5RayError
from glm5ray.protocol import FinishReason, decode_events, encode_request
from glm5ray.scheduler.limits import RequestLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from glm5ray.engine.client import EngineInfo
    from glm5ray.protocol import GenerateRequest, TokenEvent

STATUS_TIMEOUT_S = 4.0
FRESH_S = 1.0
"""A client without open requests that spoke with the scheduler within this time is known there. Far below
:attr:`EngineSpec.client_timeout_s`."""


class RayEngineClient:
    """An :class:`~glm5ray.engine.client.EngineClient` over a scheduler actor, made by
    :func:`glm5ray.actors.launch.connect`.

    One poll waits at the actor as long as requests are open, and one call carries all requests and aborts that came
    up while the one before was on its way. If the scheduler dies, what is open ends with :class:`EngineUnavailable`,
    and the next request finds the scheduler that Ray started in its place.
    """

    def __init__(self, engine: str = "default") -> None:
        self.engine = engine
        self._handle = SchedulerHandle(engine)
        self._streams = EventStreams()
        self._attaching = asyncio.Lock()
        self._client_id: str | None = None
        self._info: EngineInfo | None = None
        self._limits: RequestLimits | None = None
        self._outbox: list[Submit | Abort] = []
        self._num_sent = 0
        self._num_received = 0
        self._last_contact_s = 0.0
        self._sender: asyncio.Task[None] | None = None
        self._poller: asyncio.Task[None] | None = None

    async def info(self) -> EngineInfo:
        if self._info is None:
            info: EngineInfo
            info, _ = await self._handle.acall("info")
            self._limits = RequestLimits(SchedulerSection(max_logprobs=info.max_logprobs), info.capacity)
            self._info = info
        return self._info

    async def status(self) -> EngineStatus:
        return await self._handle.acall("status", timeout_s=STATUS_TIMEOUT_S)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        await self._attach()
        assert self._limits is not None
        self._limits.max_len(request)
        stream = self._streams.open(request)
        self._post(Submit(encode_request(seeded(request))))
        try:
            async for event in stream.events():
                yield event
        finally:
            if self._streams.close(request.request_id):
                await self.abort(request.request_id)

    async def abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        if self._client_id is not None:
            self._post(Abort(request_id, index, reason.value))

    async def close(self) -> None:
        """Ends what is open. The engine goes on."""
        client_id, self._client_id = self._client_id, None
        for task in (self._sender, self._poller):
            if task is not None:
                task.cancel()
        self._streams.fail_all(EngineUnavailable("this client was closed"))
        if client_id is not None:
            try:
                await self._handle.acall("detach", client_id, timeout_s=STATUS_TIMEOUT_S)
            except EngineUnavailable:
                return  # it has no such client any more

    async def __aenter__(self) -> RayEngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _attach(self) -> None:
        """Makes this client known. One that was idle is made known anew: the scheduler may have dropped it."""
        async with self._attaching:
            is_busy = len(self._streams) > 0 or time.monotonic() - self._last_contact_s < FRESH_S
            if self._client_id is not None and is_busy:
                return
            status = await self.status()
            if status.state not in (EngineState.READY, EngineState.RECOVERING):
                raise EngineUnavailable(f"engine {self.engine!r} is {status.state.value}: {status.detail}")
            await self.info()
            self._num_sent = self._num_received = 0
            self._client_id = await self._handle.acall("attach")
            if self._poller is not None:  # its poll may still wait for news of the client that this one was
                self._poller.cancel()
                self._poller = None
            self._last_contact_s = time.monotonic()

    def _lose(self, why: str) -> None:
        """The scheduler that knew this client is gone, or the engine."""
        self._client_id = self._info = None
        self._outbox.clear()
        self._streams.fail_all(EngineUnavailable(why))

    def _post(self, command: Submit | Abort) -> None:
        self._outbox.append(command)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.ensure_future(self._send())
        if self._poller is None or self._poller.done():
            self._poller = asyncio.ensure_future(self._poll())

    async def _send(self) -> None:
        while self._outbox and self._client_id is not None:
            client_id = self._client_id
            commands, self._outbox = self._outbox, []
            self._num_sent += 1
            try:
                is_known = await self._handle.acall("send", client_id, self._num_sent, commands)
            except Glm5RayError as error:
                self._lose_if(client_id, str(error))
                return
            self._last_contact_s = time.monotonic()
            if not is_known:
                self._lose_if(client_id, f"the scheduler of engine {self.engine!r} was started again")

    async def _poll(self) -> None:
        """Until no request is open. Whatever ends it ends the streams: none of them waits for a task that is gone."""
        try:
            await self._fetch_events()
        except Exception as error:  # a bug of ours, or a scheduler of another version
            self._lose(f"{type(error).__name__}: {error}")
            raise

    async def _fetch_events(self) -> None:
        while self._client_id is not None and len(self._streams):
            client_id = self._client_id
            try:
                letter: Letter | None = await self._handle.acall(
                    "poll", client_id, self._num_received, MAX_POLL_S, timeout_s=3 * MAX_POLL_S
                )
            except Glm5RayError as error:
                self._lose_if(client_id, str(error))
                continue
            if client_id != self._client_id:
                continue
            self._last_contact_s = time.monotonic()
            if letter is None:
                self._lose(f"the scheduler of engine {self.engine!r} was started again")
                return
            if letter.events:
                self._num_received = letter.number
                self._streams.route(decode_events(letter.events))
            if letter.ended is not None:
                self._lose(letter.ended)

    def _lose_if(self, client_id: str, why: str) -> None:
        if client_id == self._client_id:
            self._lose(why)
