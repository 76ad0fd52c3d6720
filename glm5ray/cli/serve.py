"""``glm5ray serve``."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from glm5ray.cli import options, signals
from glm5ray.cli.progress import ProgressBar, load_progress
from glm5ray.errors import ConfigError

if TYPE_CHECKING:
    from glm5ray.config import EngineConfig
    from glm5ray.engine.client import EngineClient
    from glm5ray.engine.core import EngineCore
    from glm5ray.engine.local_client import LocalClient

SHUTDOWN_S = 30
"""After a signal, requests in flight have so long to end."""


def serve_command(
    model: Annotated[str | None, typer.Argument(help="Checkpoint folder; default: the settings' model, nano.")] = None,
    config: options.Config = None,
    overrides: options.Set = None,
    address: options.Address = None,
    engine: options.Engine = "default",
    tp: options.Tp = None,
    ep: options.Ep = None,
    dp: options.Dp = None,
    host: Annotated[str, typer.Option("--host", help="0.0.0.0 to be reached from other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 for any free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option("--served-model-name", metavar="NAME", help="Instead of the folder's name.")
    ] = None,
) -> None:
    """Serve OpenAI's API over HTTP until Ctrl-C; the engine runs in this process, or in Ray with --address.

    If the environment has GLM5RAY_API_KEY, requests must bring that key.

    \b
    Examples:
      glm5ray serve
      glm5ray serve /models/GLM-5.2 --address auto --engine prod
    """
    settings = options.engine_config(model, config, [*options.layout(tp, ep, dp), *(overrides or ())])
    bound = _bind(host, port)  # before any weights are loaded
    with signals.held():
        import uvicorn  # noqa: F401

        import glm5ray.server.app
        import glm5ray.worker.worker  # noqa: F401 - torch
    with bound:
        if address is None:
            if settings.parallel.world_size > 1:
                raise ConfigError("this layout has several ranks; serve it in Ray, with --address auto")
            asyncio.run(_serve_here(settings, bound, served_model_name))
        else:
            _serve_from_ray(settings, address, engine, bound, served_model_name)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
        ) from error
    return bound


async def _serve_here(settings: EngineConfig, bound: socket.socket, names: list[str] | None) -> None:
    with ProgressBar(f"loading {settings.model.path}", None, "MiB") as bar:
        client = _local_client(settings, bar)
        await client.start()
    try:
        await _serve(client, settings, bound, names)
    finally:
        await client.close()


def _local_client(settings: EngineConfig, bar: ProgressBar) -> LocalClient:
    from glm5ray.engine.core import EngineCore
    from glm5ray.engine.executor import InProcessExecutor
    from glm5ray.engine.local_client import LocalClient
    from glm5ray.worker.worker import Worker, pick_device

    on_gpu = pick_device(settings.model.device) == "cuda"
    is_overlapped = on_gpu if settings.scheduler.overlap == "auto" else settings.scheduler.overlap

    def make_core() -> EngineCore:
        executor = InProcessExecutor(
            lambda: Worker.load(settings, progress=load_progress(bar)), threaded=is_overlapped and not on_gpu
        )
        return EngineCore(executor, settings.scheduler, settings.cache, overlap=is_overlapped)

    return LocalClient(
        make_core,
        model_path=settings.model.path,
        max_logprobs=settings.scheduler.max_logprobs,
        stalled_after_s=settings.recovery.stalled_after_s,
    )


def _serve_from_ray(
    settings: EngineConfig, address: str, engine: str, bound: socket.socket, names: list[str] | None
) -> None:
    from glm5ray.actors.launch import connect, list_engines, start_engine

    started = None
    if engine not in list_engines(address):
        started = start_engine(
            settings, engine=engine, address=address, detached=False, progress=lambda phase: typer.echo(phase, err=True)
        )

    async def run() -> None:
        await _serve(connect(engine, address=address), settings, bound, names)

    try:
        asyncio.run(run())
    finally:
        if started is not None:
            started.stop()


async def _serve(client: EngineClient, settings: EngineConfig, bound: socket.socket, names: list[str] | None) -> None:
    from dataclasses import replace

    import uvicorn

    from glm5ray.model.checkpoint_folder import resolve_checkpoint
    from glm5ray.openai_api.requests import ServedModel
    from glm5ray.server.app import create_app
    from glm5ray.server.state_watch import watch_state
    from glm5ray.tokenizer import Tokenizer

    info = await client.info()
    settings = replace(settings, model=replace(settings.model, path=info.model_path))
    known = options.model_names(settings, names)
    if not names:
        known = tuple(dict.fromkeys((known[-1], *known)))  # the folder's name first: what /v1/models begins with
    served = ServedModel(
        tokenizer=Tokenizer.from_checkpoint(resolve_checkpoint(info.model_path)),
        names=known,
        vocab_size=info.capacity.vocab_size,
        max_logprobs=info.max_logprobs,
    )
    key = os.environ.get("GLM5RAY_API_KEY") or None
    app = create_app(client, served, max_model_len=info.capacity.max_model_len, api_key=key)
    host, port = bound.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    typer.echo(f"serving {known[0]} at {url}/v1", err=True)
    typer.echo(
        f"  curl {url}/v1/completions -H 'Content-Type: application/json' -d '"
        f'{{"model": "{known[0]}", "prompt": "The sky is", "max_tokens": 8}}\'',
        err=True,
    )
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=SHUTDOWN_S)
    )
    watch = asyncio.create_task(watch_state(client, lambda line: typer.echo(line, err=True), engine=info.engine))
    try:
        await server.serve(sockets=[bound])
    finally:
        watch.cancel()
