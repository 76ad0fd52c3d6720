"""Options that several commands share, and how they become settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glm5ray.config import load_config

if TYPE_CHECKING:
    from glm5ray.config import EngineConfig

Model = Annotated[
    str | None, typer.Option("--model", "-m", help="Checkpoint folder, or nano, the model inside the package.")
]
Config = Annotated[
    str | None,
    typer.Option("--config", "-c", help="A YAML file, or a preset: cpu-nano, h200-x1 ... (see docs/batch.md)."),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", "-s", metavar="SECTION.FIELD=VALUE", help="Change one setting; repeatable.")
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address", metavar="ADDRESS", help="Run in the Ray cluster at this address; auto: the one on this machine."
    ),
]
Engine = Annotated[
    str,
    typer.Option("--engine", metavar="NAME", help="With --address: this engine, or a new one if none is called so."),
]
Tp = Annotated[int | None, typer.Option("--tp", metavar="N", help="Short for --set parallel.tp_size=N.")]
Ep = Annotated[int | None, typer.Option("--ep", metavar="N", help="Short for --set parallel.ep_size=N.")]
Dp = Annotated[int | None, typer.Option("--dp", metavar="N", help="Short for --set parallel.dp_size=N.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]


def engine_config(model: str | None, config: str | None, overrides: list[str] | None) -> EngineConfig:
    """Defaults, then ``--config``, then ``--set``, then ``--model``."""
    settings = load_config(config, overrides or ())
    if model is None:
        return settings
    return replace(settings, model=replace(settings.model, path=model))


def layout(tp: int | None, ep: int | None, dp: int | None) -> list[str]:
    """``--tp``, ``--ep`` and ``--dp`` as overrides."""
    sizes = {"tp": tp, "ep": ep, "dp": dp}
    return [f"parallel.{name}_size={size}" for name, size in sizes.items() if size is not None]


def model_names(config: EngineConfig, more: list[str] | None = None) -> tuple[str, ...]:
    """What requests may call the model: its path, the folder's name, and ``--served-model-name``."""
    path = config.model.path
    return tuple(dict.fromkeys([*(more or ()), path, Path(path).name]))


def print_json(values: dict[str, Any], *, err: bool = False) -> None:
    """One line on standard output (or error), in ASCII: names of files may be no text in any encoding."""
    typer.echo(json.dumps(values), err=err)
