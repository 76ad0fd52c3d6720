"""The HTTP face of an engine: OpenAI's routes, health and metrics, over any EngineClient."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from typing import TYPE_CHECKING, Any, NoReturn

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from glm5ray import __version__
from glm5ray.engine.client import EngineState
from glm5ray.errors import EngineUnavailable, RequestError
from glm5ray.openai_api.requests import parse_chat_body, parse_completion_body
from glm5ray.openai_api.responses import chat_completion_body, completion_body
from glm5ray.server.calls import RunningCall
from glm5ray.server.exposition import ServerMetrics
from glm5ray.server.sse import read_stream_fields, stream_call

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from glm5ray.engine.client import EngineClient, EngineStatus
    from glm5ray.engine.results import RequestResult
    from glm5ray.openai_api.requests import PreparedCall, ServedModel

MAX_BODY_BYTES = 64 * 2**20
_STATUS_TIMEOUT_S = 3.0
_CLIENT_LEFT = 499
"""As proxies write it into their logs; nobody is there to get it."""
_FINAL_CODES = frozenset({"quarantined", "numerical_error"})
"""Failures that the same request would meet again, and others' requests with it."""
RETRY_AFTER_S = 5


def create_app(
    client: EngineClient,
    served: ServedModel,
    *,
    max_model_len: int,
    api_key: str | None = None,
    max_step_age_s: float = 4.0,
    max_body_bytes: int = MAX_BODY_BYTES,
    keep_alive_s: float = 5.0,
) -> FastAPI:
    """The application. ``api_key``: what ``/v1`` asks for as a bearer token. ``max_step_age_s``: ``/health`` is 503
    when a step takes longer. ``keep_alive_s``: the longest silence of a stream."""
    app = FastAPI(title="glm5ray", version=__version__, openapi_url=None)
    server = _Server(client, served, max_model_len, api_key, max_step_age_s, max_body_bytes, keep_alive_s)
    app.state.metrics = server.metrics  # for whoever shows them elsewhere, too
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(EngineUnavailable, _on_unavailable)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.get("/health")(server.health)
    app.get("/ping")(server.health)
    app.get("/version")(server.version)
    app.get("/metrics")(server.metrics_page)
    app.get("/v1/models")(server.models)
    app.get("/v1/models/{name:path}")(server.model)
    app.post("/v1/completions")(server.completions)
    app.post("/v1/chat/completions")(server.chat_completions)
    return app


def error_body(error: RequestError | EngineUnavailable) -> dict[str, Any]:
    """OpenAI's error object."""
    if isinstance(error, RequestError):
        return error.body()
    return RequestError(str(error), code=error.code, status=503).body()


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    if error.status == 503:
        return JSONResponse(error.body(), 503, {"Retry-After": str(RETRY_AFTER_S)})
    # OpenAI's own clients repeat every 5xx, unless they are told not to
    headers = {"x-should-retry": "false"} if error.code in _FINAL_CODES else None
    return JSONResponse(error.body(), error.status, headers)


async def _on_unavailable(request: Request, error: Exception) -> Response:
    assert isinstance(error, EngineUnavailable)
    return JSONResponse(error_body(error), 503, {"Retry-After": str(RETRY_AFTER_S)})


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(RequestError(message, status=error.status_code).body(), error.status_code, error.headers)


class _Server:
    """The routes and what they share."""

    def __init__(
        self,
        client: EngineClient,
        served: ServedModel,
        max_model_len: int,
        api_key: str | None,
        max_step_age_s: float,
        max_body_bytes: int,
        keep_alive_s: float,
    ) -> None:
        self._client = client
        self._served = served
        self._max_model_len = max_model_len
        self._api_key = api_key
        self._max_step_age_s = max_step_age_s
        self._max_body_bytes = max_body_bytes
        self._keep_alive_s = keep_alive_s
        self.metrics = ServerMetrics(served.names[0])
        self._created = int(time.time())

    async def _status(self) -> EngineStatus | str:
        """The engine's status, or why there is none."""
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                return await self._client.status()
        except TimeoutError:
            return f"the engine did not answer within {_STATUS_TIMEOUT_S:.0f} s"
        except EngineUnavailable as error:
            return str(error)

    async def health(self) -> Response:
        """200 only if the engine is ready and its oldest step young."""
        status = await self._status()
        if isinstance(status, str):
            return JSONResponse({"state": "unreachable", "detail": status}, 503)
        is_well = status.state is EngineState.READY and status.seconds_since_step < self._max_step_age_s
        body = {"state": status.state, "detail": status.detail, "seconds_since_step": status.seconds_since_step}
        return JSONResponse(body, 200 if is_well else 503)

    async def version(self) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics_page(self) -> Response:
        status = await self._status()
        text = self.metrics.text(None if isinstance(status, str) else status)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        self._authorize(request)
        return JSONResponse({"object": "list", "data": [self._entry(name) for name in self._served.names]})

    async def model(self, request: Request) -> Response:
        self._authorize(request)
        return JSONResponse(self._entry(self._served.require(request.path_params["name"])))

    def _entry(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "glm5ray",
            "max_model_len": self._max_model_len,
        }

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, parse_completion_body, is_chat=False)

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, parse_chat_body, is_chat=True)

    async def _answer(self, request: Request, parse: Callable[..., PreparedCall], *, is_chat: bool) -> Response:
        self._authorize(request)
        data = await self._read_body(request)

        def prepare() -> tuple[PreparedCall, bool, bool]:
            values = _read_json(data)
            streams, with_usage = read_stream_fields(values)
            return parse(values, self._served, request_id=uuid.uuid4().hex), streams, with_usage

        # templates and tokens of a long prompt take a while: not in the event loop
        call, streams, with_usage = await asyncio.to_thread(prepare)
        if streams and call.echo and call.requests[0].sampling.prompt_logprobs is not None:
            raise RequestError("echo with logprobs cannot be streamed; leave one of the three out.", param="echo")
        running = RunningCall(self._client, call, self._served.tokenizer, self.metrics)
        if not streams:
            results = await _gather(request, running, len(call.requests))
            if is_chat:
                return JSONResponse(chat_completion_body(call, results[0], self._served.tokenizer))
            return JSONResponse(completion_body(call, results, self._served.tokenizer))
        lines = stream_call(
            running,
            call,
            self._served.tokenizer,
            is_chat=is_chat,
            with_usage=with_usage,
            keep_alive_s=self._keep_alive_s,
        )
        try:
            first = await anext(lines)  # a request that is refused gets its status, not a broken stream
        except BaseException:
            running.leave()
            raise

        async def body() -> AsyncGenerator[bytes]:
            try:
                yield first
                async for line in lines:
                    yield line
            finally:
                running.leave()

        return StreamingResponse(body(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    def _authorize(self, request: Request) -> None:
        if self._api_key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._api_key.encode()):
            raise RequestError("the API key is missing or wrong.", code="invalid_api_key", status=401)

    async def _read_body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "application/json")
        if "json" not in kind:
            raise RequestError(f"the content type is {kind[:80]}; send application/json.", status=415)
        parts, size = [], 0
        try:
            async for part in request.stream():
                size += len(part)
                if size > self._max_body_bytes:
                    raise RequestError(f"the body is larger than {self._max_body_bytes} bytes.", status=413)
                parts.append(part)
        except ClientDisconnect as error:
            self.metrics.aborted.inc()
            raise RequestError("the client left.", status=_CLIENT_LEFT) from error
        return b"".join(parts)


async def _gather(request: Request, running: RunningCall, num_requests: int) -> list[RequestResult]:
    """All results in the order of the requests; a client that leaves ends them."""
    results: dict[int, RequestResult] = {}

    async def collect() -> None:
        while running.is_open:
            news = await running.next()
            if news.error is not None:
                raise news.error
            if news.result is not None:
                results[news.number] = news.result

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(collect()), asyncio.create_task(watch())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise RequestError("the client left.", status=_CLIENT_LEFT)
        tasks[0].result()
    finally:
        running.leave()
        for task in tasks:
            task.cancel()
    return [results[i] for i in range(num_requests)]


def _read_json(data: bytes) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(data, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {str(error)[:200]}.", code="invalid_json") from error
