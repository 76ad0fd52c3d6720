"""A real server in this process, on a free port: nano behind it, or an engine whose tokens are known."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from glm5ray.config import load_config
from glm5ray.engine.core import EngineCore
from glm5ray.engine.engine_loop import STALLED_AFTER_S
from glm5ray.engine.executor import InProcessExecutor
from glm5ray.engine.llm import LLM
from glm5ray.engine.local_client import LocalClient
from glm5ray.model.checkpoint_folder import resolve_checkpoint
from glm5ray.openai_api.requests import ServedModel
from glm5ray.server.app import create_app
from glm5ray.server.http_server import IDLE_CONNECTION_S, HttpServer
from glm5ray.tokenizer import Tokenizer
from glm5ray.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from glm5ray.engine.executor import Executor


@contextmanager
def serving(
    executor: Executor,
    *,
    idle_connection_s: int = IDLE_CONNECTION_S,
    stalled_after_s: float = STALLED_AFTER_S,
    drain_s: float = 5.0,
    **options,
) -> Iterator[str]:
    """The server's address while it runs."""
    settings = load_config(None, ())
    tokenizer = Tokenizer.from_checkpoint(resolve_checkpoint("nano"))
    bound = socket.create_server(("127.0.0.1", 0))
    started, end = threading.Event(), []

    async def run() -> None:
        client = LocalClient(
            lambda: EngineCore(executor, settings.scheduler, settings.cache, overlap=False),
            model_path="nano",
            stalled_after_s=stalled_after_s,
        )
        async with client:
            capacity = (await client.info()).capacity
            served = ServedModel(tokenizer=tokenizer, names=("nano",), vocab_size=capacity.vocab_size)
            app = create_app(client, served, max_model_len=capacity.max_model_len, **options)
            server = HttpServer(app, drain_s=drain_s, give_up=client.close, idle_connection_s=idle_connection_s)
            end.append(server.end)
            started.set()
            await server.serve(sockets=[bound])

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert started.wait(60)
        yield "http://{}:{}".format(*bound.getsockname()[:2])
    finally:
        for stop in end:
            stop()
        thread.join(30)
        bound.close()
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def nano_url() -> Iterator[str]:
    settings = load_config(None, ())
    with serving(InProcessExecutor(lambda: Worker.load(settings), threaded=False)) as url:
        yield url


@pytest.fixture(scope="session")
def nano() -> Iterator[LLM]:
    llm = LLM("nano")
    yield llm
    llm.close()
