"""``glm5ray ranks``: how the ranks of a running engine are, and profiles of their steps."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from glm5ray.cli import options, signals

if TYPE_CHECKING:
    from glm5ray.actors.rank_control import RankStats


def ranks_command(
    address: options.Address = "auto",
    engine: options.Engine = "default",
    profile: Annotated[
        int,
        typer.Option(
            "--profile",
            min=0,
            metavar="STEPS",
            help="Record so many steps on every rank with PyTorch's profiler; requests must be running.",
        ),
    ] = 0,
    json_output: options.Json = False,
) -> None:
    """Show each rank of a running engine: its process, device, step and memory; also while a step hangs.

    \b
    Examples:
      glm5ray ranks --engine prod
      glm5ray ranks --profile 10
    """
    with signals.held():
        from glm5ray.actors.launch import join_ray
        from glm5ray.actors.ranks import profile_ranks, rank_stats
    join_ray(address or "auto")
    traces = profile_ranks(engine, profile) if profile else []
    stats = rank_stats(engine)
    if json_output:
        options.print_json({"engine": engine, "ranks": [asdict(one) for one in stats], "traces": traces})
        return
    for one in stats:
        typer.echo(_line(one))
    for one, trace in zip(stats, traces, strict=False):
        typer.echo(f"trace of rank {one.rank}, on {one.host}: {trace}")


def _line(one: RankStats) -> str:
    step = f"step {one.step_id} for {one.seconds_in_step:.1f} s" if one.seconds_in_step else "idle"
    memory = f"{one.memory_bytes / 2**30:.2f} GiB"
    if one.device != "cpu":
        memory += (
            f", on the GPU {one.device_memory_bytes / 2**30:.2f} (peak {one.device_memory_peak_bytes / 2**30:.2f})"
        )
    return (
        f"rank {one.rank}: {one.device}, process {one.pid} on {one.host}, epoch {one.epoch}, {step}, "
        f"{one.num_steps} done, {one.num_waiting} waiting, memory {memory}"
    )
