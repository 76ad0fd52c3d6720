"""uvicorn, with an end in two stages: requests in flight first have time, then get an error that may be retried."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from starlette.types import ASGIApp

IDLE_CONNECTION_S = 75
"""Longer than the minute after which common proxies close an idle connection: whoever reuses one must not find it
closed by us in that moment."""
LAST_WORDS_S = 3.0
"""From the moment that an engine is given up to the last byte of an answer that says so."""


class HttpServer(uvicorn.Server):
    """Serves until ``should_exit`` is set, by :meth:`end` or a signal; then closes the port and waits for requests in
    flight. Those that still run after ``drain_s`` are ended by ``give_up``, which closes the engine's client: they get
    503, or an error event."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        drain_s: float,
        give_up: Callable[[], Awaitable[None]],
        idle_connection_s: int = IDLE_CONNECTION_S,
    ) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_keep_alive=idle_connection_s))
        self._give_up = give_up
        self._drain_s = drain_s

    def end(self, drain_s: float | None = None) -> None:
        """From any thread. ``drain_s``: in place of the one that was given at first."""
        if drain_s is not None:
            self._drain_s = drain_s
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.timeout_graceful_shutdown = round(self._drain_s + LAST_WORDS_S)
        giving_up = asyncio.create_task(self._give_up_later())
        try:
            await super().shutdown(sockets)
        finally:
            giving_up.cancel()

    async def _give_up_later(self) -> None:
        await asyncio.sleep(self._drain_s)
        await self._give_up()
