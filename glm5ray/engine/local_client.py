"""LocalClient: an engine in a thread of this process, for an event loop of this process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from glm5ray.engine.client import EngineInfo, EngineStatus
from glm5ray.engine.engine_loop import STALLED_AFTER_S, EngineLoop, seeded
from glm5ray.engine.streams import EventStreams
from glm5ray.errors import EngineUnavailable, Glm5RayError
from glm5ray.protocol import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType

    from glm5ray.engine.core import EngineCore
    from glm5ray.protocol import GenerateRequest, TokenEvent


class _LoopSink:
    """Hands what a step brought to the event loop: one wake-up a step, however many tokens it has."""

    def __init__(self, loop: asyncio.AbstractEventLoop, streams: EventStreams) -> None:
        self._loop = loop
        self._streams = streams

    def deliver(self, events: list[TokenEvent]) -> None:
        if not self._loop.is_closed():  # else there is nobody left to tell
            self._loop.call_soon_threadsafe(self._streams.route, events)

    def end(self, error: EngineUnavailable) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._streams.fail_all, error)


class LocalClient:
    """An :class:`~glm5ray.engine.client.EngineClient`.

    >>> async with LocalClient(make_core, model_path="nano") as client:  # doctest: +SKIP
    ...     async for event in client.generate(request): ...
    """

    def __init__(
        self,
        make_core: Callable[[], EngineCore],
        *,
        model_path: str,
        load_format: str = "checkpoint",
        max_logprobs: int = 20,
        engine: str = "default",
        layout: str = "tp 1",
        stalled_after_s: float = STALLED_AFTER_S,
    ) -> None:
        """``make_core`` makes the engine, weights and all; it is called once, in the engine's thread, by
        :meth:`start`."""
        self._make_core = make_core
        self._model_path = model_path
        self._load_format = load_format
        self._max_logprobs = max_logprobs
        self._engine = engine
        self._layout = layout
        self._stalled_after_s = stalled_after_s
        self._streams = EventStreams()
        self._loop: EngineLoop | None = None

    async def start(self, timeout_s: float | None = None) -> None:
        """Loads the engine and waits until it answers. Raises :class:`EngineUnavailable` if it does not come up;
        ``timeout_s=None`` only returns when it did or did not."""
        self.begin()
        await asyncio.to_thread(self._running.wait_ready, 1e9 if timeout_s is None else timeout_s)

    def begin(self) -> None:
        """Like :meth:`start`, without waiting: :meth:`status` tells when the engine is ready."""
        assert self._loop is None, "start() was called twice"
        sink = _LoopSink(asyncio.get_running_loop(), self._streams)
        self._loop = EngineLoop(
            self._make_core,
            sink,
            engine=self._engine,
            layout=self._layout,
            stalled_after_s=self._stalled_after_s,
        )
        self._loop.start()

    @property
    def _running(self) -> EngineLoop:
        if self._loop is None:
            raise EngineUnavailable(f"engine {self._engine!r} was not started")
        return self._loop

    async def info(self) -> EngineInfo:
        return EngineInfo(
            engine=self._engine,
            model_path=self._model_path,
            capacity=replace(self._running.capacity, max_model_len=self._running.limits.max_model_len),
            max_logprobs=self._max_logprobs,
            load_format=self._load_format,
        )

    async def status(self) -> EngineStatus:
        return self._running.status()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        loop = self._running
        stream = self._streams.open(request)
        try:
            loop.submit(seeded(request))
        except Glm5RayError:
            self._streams.forget(request.request_id)
            raise
        try:
            async for event in stream.events():
                yield event
        finally:
            if self._streams.close(request.request_id):
                await self.abort(request.request_id)

    async def abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        try:
            self._running.abort(request_id, index, reason)
        except EngineUnavailable:
            return  # what does not run is ended already

    async def close(self) -> None:
        """Ends the engine; open iterators raise :class:`EngineUnavailable`. Harmless if called twice."""
        if self._loop is not None:
            await asyncio.to_thread(self._loop.stop)

    async def __aenter__(self) -> LocalClient:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
