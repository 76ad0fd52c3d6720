"""The HTTP server as an actor: the same application as in a process of its own, over a scheduler actor.

It remembers nothing. Ray starts it again when it dies, on the same machine and port, and it finds the engine by name.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from glm5ray.actors.client import RayEngineClient
from glm5ray.actors.metrics_export import EVERY_S, ServerExport, Ticker
from glm5ray.errors import ConfigError, EngineUnavailable, Glm5RayError
from glm5ray.server.http_server import HttpServer
from glm5ray.server.late_app import LateApp
from glm5ray.server.listening import bind, url_of
from glm5ray.server.served import app_over, served_names
from glm5ray.server.state_watch import watch_state

if TYPE_CHECKING:
    import socket

logger = logging.getLogger(__name__)

DRAIN_S = 30.0
"""How long requests in flight have to end before they get an error."""
_RETRY_S = 0.2
_RESTART_PAUSE_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpSpec:
    """What an HTTP actor is started with, and started again with by Ray."""

    engine: str
    host: str = "127.0.0.1"
    port: int
    """Not 0: the actor that comes after a death must find the port of the one before."""
    names: tuple[str, ...] = ()
    """What requests may call the model, besides its path and folder."""
    api_key: str | None = field(default=None, repr=False)
    metrics_every_s: float = EVERY_S
    """How often figures are handed to Ray."""

    @property
    def url(self) -> str:
        return url_of(self.host, self.port)


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpStatus:
    """How far an HTTP actor is."""

    url: str
    is_listening: bool
    is_open: bool
    """It has the engine's tokenizer and limits, and sends requests to it. Without, everything gets 503."""
    error: str | None
    """Why it will not get so far."""
    detail: str
    """One sentence for people."""
    names: tuple[str, ...]
    """Of the model; empty until :attr:`is_open`."""
    pid: int
    """The actor's process."""


class HttpActor:
    """Plain class; :mod:`glm5ray.actors.http_launch` makes an actor of it. The server has a thread of its own, so that
    the actor answers whatever the server does."""

    def __init__(self, spec: HttpSpec) -> None:
        """Returns at once; :meth:`status` tells how far it is."""
        logging.basicConfig(level=logging.INFO, format=f"%(levelname)s %(name)s {spec.engine}: %(message)s")
        self._spec = spec
        self._app = LateApp(f"the server looks for engine {spec.engine!r}")
        self._names: tuple[str, ...] = ()
        self._error: str | None = None
        self._server: HttpServer | None = None
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"glm5ray {self._spec.engine}: http ({self._spec.host}:{self._spec.port})"

    def status(self) -> HttpStatus:
        """Answers at once."""
        return HttpStatus(
            url=self._spec.url,
            is_listening=self._server is not None and self._server.started,
            is_open=self._app.app is not None,
            error=self._error,
            detail=self._app.detail,
            names=self._names,
            pid=os.getpid(),
        )

    def stop(self, drain_s: float = DRAIN_S) -> bool:
        """Closes the port; requests in flight have ``drain_s`` to end, then they get 503. False if some of it still
        runs after that. Harmless if called twice."""
        self._is_stopped.set()
        if self._server is not None:
            self._server.end(drain_s)
        self._thread.join(drain_s + 5.0)
        return not self._thread.is_alive()

    # --- the server's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:  # the outermost loop: a bug of ours, or a system without files, memory ...
            logger.exception("the server failed")
        if not self._is_stopped.is_set():
            time.sleep(_RESTART_PAUSE_S)
            os._exit(1)  # Ray starts the actor again; sys.exit would end this thread alone

    async def _serve(self) -> None:
        bound = await self._bind()
        if bound is None:
            return
        client = RayEngineClient(self._spec.engine)
        self._server = HttpServer(self._app, drain_s=DRAIN_S, give_up=client.close)
        opening = asyncio.create_task(self._open(client))
        try:
            with bound:
                if not self._is_stopped.is_set():
                    await self._server.serve(sockets=[bound])
        finally:
            opening.cancel()
            await client.close()

    async def _bind(self) -> socket.socket | None:
        """As soon as the port is free: the process that had it before may not be quite gone. ``None`` if stopped."""
        while not self._is_stopped.is_set():
            try:
                return bind(self._spec.host, self._spec.port)
            except ConfigError as error:
                self._app.detail = str(error)
            await asyncio.sleep(_RETRY_S)
        return None

    async def _open(self, client: RayEngineClient) -> None:
        """Puts the application in place once the engine answers; then tells the log what becomes of it."""
        while True:
            try:
                info = await client.info()
                break
            except EngineUnavailable as error:
                self._app.detail = str(error)
            await asyncio.sleep(_RETRY_S)
        spec = self._spec
        try:
            app = await asyncio.to_thread(app_over, client, info, names=spec.names, api_key=spec.api_key)
        except Glm5RayError as error:
            self._error = self._app.detail = f"the server cannot read the model's tokenizer: {error}"
            logger.error("%s", self._error)
            return
        self._ticker = Ticker(ServerExport(app.state.metrics, engine=spec.engine).tell, every_s=spec.metrics_every_s)
        self._ticker.start()
        self._names = served_names(info.model_path, spec.names)
        self._app.app = app
        self._app.detail = "it answers requests"
        logger.info("serving %s at %s", self._names[0], spec.url)
        await watch_state(client, logger.warning, engine=spec.engine)
