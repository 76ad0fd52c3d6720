"""One call in flight: its requests run side by side, their news arrive in one bounded queue."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

from glm5ray.engine.outputs import RequestOutput
from glm5ray.engine.results import RequestFailure, RequestResult
from glm5ray.errors import EngineUnavailable, RequestError
from glm5ray.protocol import FinishReason
from glm5ray.server.timings import RequestTimings

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from glm5ray.engine.client import EngineClient
    from glm5ray.engine.results import TextDelta
    from glm5ray.openai_api.requests import PreparedCall
    from glm5ray.protocol import GenerateRequest, TokenEvent
    from glm5ray.server.exposition import ServerMetrics
    from glm5ray.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_QUEUE_SIZE = 256
_SLOWEST_READER_S = 60.0
"""A client that takes nothing for so long, with the queue full, is given up: its text must not be kept for ever."""


class News(NamedTuple):
    """What happened to one request of a call."""

    number: int
    """The request's place in the call."""
    delta: TextDelta | None = None
    result: RequestResult | None = None
    error: RequestError | EngineUnavailable | None = None
    """The call has failed; nothing comes after it."""

    def joined(self, later: News) -> News | None:
        """Both as one; ``None`` if they are not of one answer."""
        first, second = self.delta, later.delta
        if first is None or second is None or (self.number, first.index) != (later.number, second.index):
            return None
        delta = replace(
            second,
            text=first.text + second.text,
            token_ids=first.token_ids + second.token_ids,
            logprobs=first.logprobs + second.logprobs,
        )
        return later._replace(delta=delta)


class RunningCall:
    """Starts with its construction, inside an event loop; :meth:`leave` ends what still runs."""

    def __init__(self, client: EngineClient, call: PreparedCall, tokenizer: Tokenizer, metrics: ServerMetrics) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._queue: asyncio.Queue[News] = asyncio.Queue(_QUEUE_SIZE)
        self._held: News | None = None
        """Taken out of the queue, and not given yet."""
        self._num_open = len(call.requests)
        self._tasks = [asyncio.create_task(self._run(i, request)) for i, request in enumerate(call.requests)]
        for task in self._tasks:
            task.add_done_callback(self._tell_of_bug)

    @property
    def is_open(self) -> bool:
        """More news will come."""
        return self._num_open > 0

    async def next(self) -> News:
        """The next news; only while :attr:`is_open`. What came of one answer since the last call comes as one: a
        server that is behind has fewer lines to write."""
        news, self._held = self._held or await self._queue.get(), None
        while not self._queue.empty():
            later = self._queue.get_nowait()
            both = news.joined(later)
            if both is None:
                self._held = later
                break
            news = both
        if news.error is not None:
            self._num_open = 0
        elif news.result is not None:
            self._num_open -= 1
        return news

    def leave(self) -> None:
        """Aborts what runs. Does not wait, so that it may be called while the caller is cancelled itself."""
        for task in self._tasks:
            task.cancel()

    async def _run(self, number: int, request: GenerateRequest) -> None:
        try:
            await self._pump(number, request)
        except (RequestError, EngineUnavailable) as error:
            await self._put(News(number, error=error))
        except (asyncio.CancelledError, TimeoutError):  # the client left, or reads nothing any more
            self._metrics.aborted.inc()
            self._num_open = 0

    def _tell_of_bug(self, task: asyncio.Task[None]) -> None:
        """What only a bug of ours raises must not leave the reader waiting."""
        if task.cancelled() or (bug := task.exception()) is None:
            return
        logger.error("a request failed", exc_info=bug)
        if self._queue.full():
            self._queue.get_nowait()
        self._queue.put_nowait(News(0, error=RequestError("internal error", code="internal_error", status=500)))

    async def _put(self, news: News) -> None:
        if not self._queue.full():
            self._queue.put_nowait(news)
            return
        async with asyncio.timeout(_SLOWEST_READER_S):
            await self._queue.put(news)

    async def _pump(self, number: int, request: GenerateRequest) -> None:
        output = RequestOutput(request, self._tokenizer)
        timings = RequestTimings(self._metrics, len(request.prompt_token_ids))
        events = cast("AsyncGenerator[TokenEvent]", self._client.generate(request))
        async with aclosing(events):
            async for event in events:
                progress = output.process(event)
                if progress.stop:
                    await self._client.abort(request.request_id, event.index, FinishReason.STOP)
                if isinstance(progress.result, RequestFailure):
                    self._metrics.ended("error")
                    raise progress.result.error
                if (delta := progress.delta) is None:
                    continue
                timings.arrived(delta, is_last=progress.result is not None)
                await self._put(News(number, delta, progress.result))
                if progress.result is not None:
                    return
