"""``glm5ray weights``: look at checkpoints, and make small ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from glm5ray.cli import options

if TYPE_CHECKING:
    from glm5ray.model.checkpoint_report import CheckpointReport

app = typer.Typer(help="Look at checkpoints, and make small ones.", no_args_is_help=True)


@app.command("inspect")
def inspect_command(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Checkpoint folder, or nano.")],
    tp: Annotated[int, typer.Option("--tp", min=1, help="Ranks that split heads and columns.")] = 1,
    ep: Annotated[int, typer.Option("--ep", min=1, help="Ranks that hold whole experts.")] = 1,
    json_output: options.Json = False,
) -> None:
    """Show what a checkpoint holds: formats, types, files, and the bytes of one rank. Reads the headers only.

    \b
    Examples:
      glm5ray weights inspect nano
      glm5ray weights inspect /models/GLM-5.2-NVFP4 --tp 8 --ep 8 --json
    """
    from glm5ray.model.checkpoint_folder import resolve_checkpoint
    from glm5ray.model.checkpoint_report import inspect_checkpoint

    report = inspect_checkpoint(resolve_checkpoint(folder), tp=tp, ep=ep)
    if json_output:
        options.print_json(report.to_dict())
    else:
        _print_report(report)


def _print_report(report: CheckpointReport) -> None:
    typer.echo(f"{report.folder}: {report.quantization}, {report.num_parameters:,} parameters")
    if report.has_mtp:
        typer.echo(f"and {report.num_mtp_parameters:,} of the MTP layer")
    typer.echo(f"{report.num_tensors} tensors, {size(report.num_bytes)}, in {len(report.shards)} files\n")
    rows = [("part", "format", "weights", "size")]
    rows += [(f.part, f.format, str(f.num_weights), size(f.num_bytes)) for f in report.formats]
    typer.echo(table(rows))
    rows = [("dtype", "tensors", "size")]
    rows += [(d.dtype, str(d.num_tensors), size(d.num_bytes)) for d in report.dtypes]
    typer.echo(table(rows))
    rows = [("file", "tensors", "size")]
    rows += [(s.name, str(s.num_tensors), size(s.num_bytes)) for s in report.shards]
    typer.echo(table(rows))
    typer.echo(
        f"one rank of tp {report.tp_size}, ep {report.ep_size}: {size(report.rank_bytes_stored)} of the files, "
        f"{size(report.rank_bytes_loaded)} in memory once dequantised"
    )
    for what, names in (
        ("left out", report.skipped),
        ("not in the index, never read", report.unlisted_files),
        ("stored otherwise than config.json says", report.disagreements),
    ):
        if names:
            typer.echo(f"{what}: {len(names)}, as {names[0]}")


def size(num_bytes: int) -> str:
    """Bytes for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} B"


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns, the first row as heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:], ""])


@app.command("tiny")
def tiny_command(
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    format: Annotated[str, typer.Option("--format", help="bf16, fp32, fp8, nvfp4, nvfp4-all or nvfp4-ct.")] = "bf16",
    style: Annotated[str, typer.Option("--style", help="glm5: every layer selects; glm5.2: IndexShare.")] = "glm5",
    seed: Annotated[int, typer.Option("--seed")] = 0,
    shards: Annotated[int, typer.Option("--shards", min=1, help="Number of safetensors files.")] = 2,
) -> None:
    """Write a small random model of the family, with a tokenizer of bytes, for tests and experiments.

    \b
    Example:
      glm5ray weights tiny runs/tiny --format nvfp4 --style glm5.2 --seed 7
    """
    from glm5ray.model.tiny import write_tiny

    choices: dict[str, Any] = {"format": format, "style": style}
    write_tiny(out, seed=seed, num_shards=shards, **cast("dict[str, Any]", choices))
    typer.echo(f"{out}: {format}, {style}, seed {seed}")
