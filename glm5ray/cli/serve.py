"""``glm5ray serve``."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Annotated

import typer

from glm5ray.cli import options, signals
from glm5ray.cli.progress import ProgressBar, load_progress
from glm5ray.errors import ConfigError

if TYPE_CHECKING:
    import socket

    from glm5ray.actors.client import RayEngineClient
    from glm5ray.config import EngineConfig
    from glm5ray.engine.core import EngineCore
    from glm5ray.engine.local_client import LocalClient

SHUTDOWN_S = 30.0
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
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", help="Engine and server as Ray actors that go on after this command, until glm5ray down."
        ),
    ] = False,
) -> None:
    """Serve OpenAI's API over HTTP until Ctrl-C; the engine runs in this process, or in Ray with --address.

    If the environment has GLM5RAY_API_KEY, requests must bring that key.

    \b
    Examples:
      glm5ray serve
      glm5ray serve /models/GLM-5.2 --address auto --engine prod
      glm5ray serve /models/GLM-5.2 --tp 8 --detach
    """
    settings = options.engine_config(model, config, [*options.layout(tp, ep, dp), *(overrides or ())])
    if address is None and not detach and settings.parallel.world_size > 1:
        raise ConfigError("this layout has several ranks; serve it in Ray, with --detach or --address auto")
    with signals.held():
        import uvicorn  # noqa: F401

        from glm5ray.server.listening import bind

        if not detach:
            import glm5ray.worker.worker  # noqa: F401 - torch
    names = tuple(served_model_name or ())
    with bind(host, port) as bound:  # before any weights are loaded
        if detach:
            port = bound.getsockname()[1]
        elif address is None:
            asyncio.run(_serve_here(settings, bound, names))
        else:
            _serve_from_ray(settings, address, engine, bound, names)
    if detach:  # the port is free again, for the actor
        _serve_detached(settings, address or "auto", engine, host, port, names)


async def _serve_here(settings: EngineConfig, bound: socket.socket, names: tuple[str, ...]) -> None:
    with ProgressBar(f"loading {settings.model.path}", None, "MiB") as bar:
        client = _local_client(settings, bar)
        await client.start()
    try:
        await _serve(client, bound, names)
    finally:
        await client.close()


def _local_client(settings: EngineConfig, bar: ProgressBar) -> LocalClient:
    from glm5ray.engine.core import EngineCore
    from glm5ray.engine.executor import InProcessExecutor
    from glm5ray.engine.local_client import LocalClient
    from glm5ray.worker.worker import Worker, pick_device

    overlap = settings.scheduler.overlap
    is_overlapped = pick_device(settings.model.device) == "cuda" if overlap == "auto" else overlap

    def make_core() -> EngineCore:
        executor = InProcessExecutor(lambda: Worker.load(settings, progress=load_progress(bar)), threaded=is_overlapped)
        return EngineCore(executor, settings.scheduler, settings.cache, overlap=is_overlapped)

    return LocalClient(
        make_core,
        model_path=settings.model.path,
        load_format=settings.model.load_format,
        max_logprobs=settings.scheduler.max_logprobs,
        stalled_after_s=settings.recovery.stalled_after_s,
    )


def _serve_from_ray(
    settings: EngineConfig, address: str, engine: str, bound: socket.socket, names: tuple[str, ...]
) -> None:
    from glm5ray.actors.launch import connect, list_engines, start_engine

    started = None
    if engine not in list_engines(address):
        started = start_engine(settings, engine=engine, address=address, detached=False, progress=_tell)

    async def run() -> None:
        async with connect(engine, address=address) as client:
            await _serve(client, bound, names)

    try:
        asyncio.run(run())
    finally:
        if started is not None:
            started.stop()


def _serve_detached(
    settings: EngineConfig, address: str, engine: str, host: str, port: int, names: tuple[str, ...]
) -> None:
    with signals.held():
        from glm5ray.actors.launch import serve_detached
        from glm5ray.actors.server_actor import HttpSpec
    spec = HttpSpec(engine=engine, host=host, port=port, names=names, api_key=_api_key())
    status = serve_detached(settings, spec, address=address, progress=_tell)
    _tell_how_to_ask(status.names[0], status.url)
    where = "" if address == "auto" else f" --address {address}"
    _tell(f"It goes on after this command. See it with: glm5ray status{where}")
    _tell(f"End it with: glm5ray down --engine {engine}{where}")


async def _serve(client: LocalClient | RayEngineClient, bound: socket.socket, names: tuple[str, ...]) -> None:
    from glm5ray.server.http_server import HttpServer
    from glm5ray.server.listening import url_of
    from glm5ray.server.served import app_over, served_names
    from glm5ray.server.state_watch import watch_state

    info = await client.info()
    app = app_over(client, info, names=names, api_key=_api_key())
    _tell_how_to_ask(served_names(info.model_path, names)[0], url_of(*bound.getsockname()[:2]))
    watch = asyncio.create_task(watch_state(client, _tell, engine=info.engine))
    try:
        await HttpServer(app, drain_s=SHUTDOWN_S, give_up=client.close).serve(sockets=[bound])
    finally:
        watch.cancel()


def _tell_how_to_ask(name: str, url: str) -> None:
    _tell(f"serving {name} at {url}/v1")
    body = f'{{"model": "{name}", "prompt": "The sky is", "max_tokens": 8}}'
    _tell(f"  curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'")


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _api_key() -> str | None:
    return os.environ.get("GLM5RAY_API_KEY") or None
