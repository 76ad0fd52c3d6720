"""``glm5ray up``, ``status`` and ``down``: Ray on this machine or on those of a cluster file, and what runs on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from glm5ray.cli import options, signals

ClusterFile = Annotated[
    Path | None, typer.Argument(help="Ray's cluster file, such as cluster.yaml; without it: this machine alone.")
]


def up_command(
    file: ClusterFile = None,
    check: Annotated[bool, typer.Option("--check", help="Only read and check the file.")] = False,
    node_ip: Annotated[
        str | None, typer.Option("--node-ip", metavar="IP", help="Address for other machines to join by.")
    ] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Of Ray's head.")] = 6379,
    dashboard_host: Annotated[
        str, typer.Option("--dashboard-host", help="0.0.0.0 shows it to other machines; it asks for the token.")
    ] = "127.0.0.1",
    dashboard_port: Annotated[int, typer.Option("--dashboard-port", min=1, max=65535)] = 8265,
    num_cpus: Annotated[int | None, typer.Option("--num-cpus", min=1, help="Default: as many as there are.")] = None,
    num_gpus: Annotated[int | None, typer.Option("--num-gpus", min=0, help="Default: as many as there are.")] = None,
) -> None:
    """Start Ray: here, or on the machines of a cluster file.

    It goes on until glm5ray down. Every process needs the token of ~/.ray/auth_token, which is made if there is none.

    \b
    Examples:
      glm5ray up
      glm5ray up cluster.yaml --check
      glm5ray up cluster.yaml
    """
    with signals.held():
        from glm5ray.actors import cluster_file, local_head
    if file is not None:
        cluster_file.read_cluster_file(file)
        if check:
            typer.echo(f"{file} is valid")
            return
        cluster_file.ray_up(file)
        typer.echo(f"Next, on the head: ray attach {file}, then glm5ray status and glm5ray serve MODEL --detach")
        return
    if check:
        raise typer.BadParameter("names no file to check", param_hint="--check")
    head = local_head.start_head(
        node_ip=node_ip,
        port=port,
        dashboard_host=dashboard_host,
        dashboard_port=dashboard_port,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        progress=lambda text: typer.echo(f"{text} ...", err=True),
    )
    typer.echo(f"Ray runs at {head.address} (process {head.pid}, log {head.log})")
    typer.echo(f"Dashboard: {head.dashboard_url} (it asks for the token: ray get-auth-token)")
    typer.echo("Next: glm5ray serve --detach; end all with glm5ray down")


def status_command(address: options.Address = "auto", as_json: options.Json = False) -> None:
    """Show the machines of the Ray cluster, what is free, and the engines that run on it.

    \b
    Examples:
      glm5ray status
      glm5ray status --json
    """
    with signals.held():
        from glm5ray.actors.cluster_status import cluster_status
    status = cluster_status(address or "auto")
    if as_json:
        options.print_json(status)
        return
    typer.echo(f"Ray at {status['address']}")
    for node in status["nodes"]:
        state = "" if node["is_alive"] else "  (gone)"
        typer.echo(f"  {node['address']:<16} {node['num_cpus']:g} CPUs, {node['num_gpus']:g} GPUs{state}")
    typer.echo(f"  free: {status['free']['CPU']:g} CPUs, {status['free']['GPU']:g} GPUs")
    if not status["engines"]:
        typer.echo("No engine runs.")
    for engine in status["engines"]:
        typer.echo(_engine_line(engine))
        if engine["http"] is not None:
            typer.echo(_http_line(engine["http"]))


def _engine_line(engine: dict[str, Any]) -> str:
    line = f"{engine['engine']}: {engine['state']}"
    if "scheduler" in engine:
        counts = engine["scheduler"]
        line += (
            f", {engine['model']}, {engine['layout']}, {counts['num_running']} running, "
            f"{counts['num_waiting']} waiting, {engine['steps_per_second']:.1f} steps/s, "
            f"{engine['num_restarts']} restarts"
        )
    return f"{line} ({engine['detail']})" if engine["detail"] else line


def _http_line(http: dict[str, Any]) -> str:
    if http["is_open"]:
        return f"  {http['url']}/v1 serves {http['names'][0]}"
    return f"  {http['url'] or 'HTTP'}: {http['detail']}"


def down_command(
    file: ClusterFile = None,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="NAME", help="End this engine alone; Ray stays.")
    ] = None,
    address: options.Address = "auto",
) -> None:
    """End one engine, or all of them and the Ray that glm5ray up started; HTTP servers first.

    A Ray that something else started is left alone: only its engines of ours end.

    \b
    Examples:
      glm5ray down --engine default
      glm5ray down
      glm5ray down cluster.yaml
    """
    with signals.held():
        from glm5ray.actors import cluster_file, launch, local_head
        from glm5ray.errors import ConfigError, EngineUnavailable
    if engine is not None:
        if file is not None:
            raise typer.BadParameter("ends an engine, and a cluster file all machines; give one", param_hint="--engine")
        if not launch.stop_engine(engine, address=address or "auto"):
            running = ", ".join(launch.list_all(address or "auto")) or "none"
            raise ConfigError(f"no engine called {engine!r} runs here; running: {running}")
        typer.echo(f"engine {engine} has ended")
        return
    if file is not None:
        cluster_file.read_cluster_file(file)
        cluster_file.ray_down(file)
        return
    try:
        for name in launch.list_all(address or "auto"):
            launch.stop_engine(name, address=address or "auto")
            typer.echo(f"engine {name} has ended")
    except EngineUnavailable as error:
        typer.echo(f"{error}", err=True)
    launch.leave_ray()
    if local_head.stop_head():
        typer.echo("Ray has ended")
    else:
        typer.echo("No Ray of glm5ray up runs here.")
