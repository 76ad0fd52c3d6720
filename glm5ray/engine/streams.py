"""From a list of events for everybody to one stream for each request. For one event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from glm5ray.errors import Glm5RayError, RequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from glm5ray.protocol import GenerateRequest, TokenEvent


class EventStream:
    """The events of one request, until each of its answers has had its end."""

    def __init__(self, request: GenerateRequest) -> None:
        self._open = set(range(request.sampling.n))
        self._events: list[TokenEvent] = []
        self._error: Glm5RayError | None = None
        self._news = asyncio.Event()

    def push(self, event: TokenEvent) -> None:
        """Events behind the end of an answer are dropped."""
        if event.index not in self._open:
            return
        if event.finish_reason is not None:
            self._open.discard(event.index)
        self._events.append(event)
        self._news.set()

    def fail(self, error: Glm5RayError) -> None:
        """``error`` is raised behind the events that are here."""
        self._error = error
        self._news.set()

    @property
    def has_failed(self) -> bool:
        """No further event comes."""
        return self._error is not None

    @property
    def is_finished(self) -> bool:
        """Every answer has had its end."""
        return not self._open

    async def events(self) -> AsyncIterator[TokenEvent]:
        """Raises what :meth:`fail` was given, if the end does not come before."""
        while True:
            batch, self._events = self._events, []
            for event in batch:
                yield event
            if self._events:
                continue
            if self.is_finished:
                return
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()


class EventStreams:
    """The open requests of a client. An id may be used again as soon as nobody listens to it: what still comes from
    its earlier use is told apart by order."""

    def __init__(self) -> None:
        self._open: dict[str, EventStream] = {}
        self._closing: dict[str, list[EventStream]] = {}
        """Streams that nobody reads and whose end has not come."""

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: GenerateRequest) -> EventStream:
        """Raises :class:`RequestError` if an open request has the same id."""
        if request.request_id in self._open:
            raise RequestError(
                f"request_id {request.request_id!r} is in use by an unfinished request; choose another.",
                param="request_id",
            )
        stream = EventStream(request)
        self._open[request.request_id] = stream
        return stream

    def route(self, events: Iterable[TokenEvent]) -> None:
        """Events of requests that nobody listens to any more are dropped."""
        for event in events:
            if self._closing and event.request_id in self._closing:
                self._drop(event)
            elif (stream := self._open.get(event.request_id)) is not None:
                stream.push(event)

    def _drop(self, event: TokenEvent) -> None:
        streams = self._closing[event.request_id]
        streams[0].push(event)
        if streams[0].is_finished:
            streams.pop(0)
            if not streams:
                del self._closing[event.request_id]

    def fail_all(self, error: Glm5RayError) -> None:
        """No more events come; ``error`` says why."""
        self._closing.clear()
        for stream in self._open.values():
            stream.fail(error)

    def forget(self, request_id: str) -> None:
        """The engine never took the request."""
        self._open.pop(request_id, None)

    def close(self, request_id: str) -> bool:
        """Nobody listens any more. Whether the engine is still to be told to end the request."""
        stream = self._open.pop(request_id, None)
        if stream is None or stream.is_finished or stream.has_failed:
            return False
        self._closing.setdefault(request_id, []).append(stream)
        return True
