"""An application that comes later than its port: while an engine loads, callers are told so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi.responses import JSONResponse

from glm5ray.errors import EngineUnavailable
from glm5ray.server.app import RETRY_AFTER_S, error_body

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

HEALTH_PATHS = frozenset({"/health", "/ping"})


class LateApp:
    """An ASGI application: :attr:`app` once it is there; before that, 503 with ``Retry-After`` and :attr:`detail` for
    every request."""

    def __init__(self, detail: str) -> None:
        self.app: ASGIApp | None = None
        self.detail = detail
        """What it waits for, in a sentence."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
            return
        is_health = scope.get("path") in HEALTH_PATHS
        body = {"state": "starting", "detail": self.detail} if is_health else error_body(EngineUnavailable(self.detail))
        await JSONResponse(body, 503, {"Retry-After": str(RETRY_AFTER_S)})(scope, receive, send)
