"""Server-sent events: a running call as ``data:`` lines, never silent for long."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from glm5ray.errors import EngineUnavailable, RequestError
from glm5ray.openai_api.body import shown
from glm5ray.openai_api.chunks import ChatChunks, CompletionChunks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from glm5ray.openai_api.requests import PreparedCall
    from glm5ray.server.calls import News, RunningCall
    from glm5ray.tokenizer import Tokenizer

KEEP_ALIVE = b": waiting\n\n"
"""A comment: clients pass it over, proxies see that the connection lives."""


def read_stream_fields(values: Any) -> tuple[bool, bool]:
    """Takes ``stream`` and ``stream_options`` out of a body; whether to stream, and with usage. Raises
    :class:`RequestError`."""
    if not isinstance(values, dict):
        return False, False  # whoever reads the body says so
    stream, options = values.pop("stream", None), values.pop("stream_options", None)
    if stream is not None and not isinstance(stream, bool):
        raise RequestError(f"stream is {shown(stream)}; it must be true or false.", param="stream")
    if options is None:
        return bool(stream), False
    known = {"include_usage", "include_obfuscation"}
    is_right = isinstance(options, dict) and all(isinstance(x, bool | None) for x in options.values())
    if not is_right or options.keys() - known:
        message = f'stream_options is {shown(options)}; it must be {{"include_usage": true or false}}.'
        raise RequestError(message, param="stream_options")
    if not stream:
        raise RequestError("stream_options needs stream: true.", param="stream_options")
    return True, bool(options.get("include_usage"))


def _line(values: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def stream_call(
    running: RunningCall,
    call: PreparedCall,
    tokenizer: Tokenizer,
    *,
    is_chat: bool,
    with_usage: bool,
    keep_alive_s: float,
) -> AsyncGenerator[bytes]:
    """The lines of a call. Errors before the first line are raised; later ones become an ``error`` event."""
    chunks = ChatChunks(call, tokenizer) if is_chat else CompletionChunks(call, tokenizer)
    usage_field = {"usage": None} if with_usage else {}
    results, has_begun, has_role = [], False, False
    while running.is_open:
        news = await _next(running, keep_alive_s)
        if news is None:
            has_begun = True
            yield KEEP_ALIVE
            continue
        if news.error is not None:
            if not has_begun:
                raise news.error
            body = news.error.body() if isinstance(news.error, RequestError) else _unavailable(str(news.error))
            yield _line(body)
            yield b"data: [DONE]\n\n"
            return
        if news.result is not None:
            results.append(news.result)
        new = [] if has_role else chunks.first()
        new += [] if news.delta is None else chunks.of(news.number, news.delta)
        has_role = True
        if new:
            has_begun = True
            yield b"".join(_line({**chunk, **usage_field}) for chunk in new)
    if with_usage:
        yield _line(chunks.usage(results))
    yield b"data: [DONE]\n\n"


def _unavailable(message: str) -> dict[str, Any]:
    return RequestError(message, code=EngineUnavailable.code, status=503).body()


async def _next(running: RunningCall, keep_alive_s: float) -> News | None:
    """``None`` after a silence."""
    try:
        async with asyncio.timeout(keep_alive_s):
            return await running.next()
    except TimeoutError:
        return None
