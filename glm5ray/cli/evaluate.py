"""``glm5ray eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from glm5ray.cli import options

app = typer.Typer(help="Measure how good answers are.", no_args_is_help=True)


@app.command("nano")
def nano_command(
    config: options.Config = None,
    overrides: options.Set = None,
    examples: Annotated[int, typer.Option("--examples", min=1, help="Generations for each case.")] = 40,
    seed: Annotated[int, typer.Option("--seed", help="Of the examples.")] = 0,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="Also perplexity, the selection right and wrong, MTP acceptance; some ten minutes."
        ),
    ] = False,
    forced_examples: Annotated[
        int, typer.Option("--forced-examples", min=1, help="With --full: examples whose every token is checked.")
    ] = 32,
    bf16: Annotated[
        Path | None, typer.Option("--bf16", help="With --full: the training's bf16.safetensors to compare with.")
    ] = None,
    json_output: options.Json = False,
) -> None:
    """Share of right answers of the embedded model, through this engine, on tasks that it was not trained on.

    \b
    Examples:
      glm5ray eval nano
      glm5ray eval nano --examples 10 --set kernels.default=reference --json
      glm5ray eval nano --full --examples 10 --json
    """
    settings = options.engine_config("nano", config, overrides)

    from glm5ray.engine.llm import LLM
    from glm5ray.model.checkpoint_folder import resolve_checkpoint
    from glm5ray.nano.engine_backend import EngineBackend
    from glm5ray.nano.evaluate import generation_table, load_tokenizer, main

    folder = resolve_checkpoint("nano")
    with LLM(config=settings) as llm:
        backend = EngineBackend(llm)
        if full:
            table: dict[str, Any] = main(
                folder, backend=backend, examples=examples, forced_examples=forced_examples, bf16=bf16, seed=seed
            )
        else:
            table = generation_table(backend, load_tokenizer(folder), examples, seed)
    _print_table(table, err=json_output)
    if json_output:
        options.print_json({"model": "nano", "examples": examples, "seed": seed, "results": table})


def _print_table(table: dict[str, Any], *, err: bool, prefix: str = "") -> None:
    for name, value in table.items():
        if isinstance(value, dict):
            _print_table(value, err=err, prefix=f"{prefix}{name}.")
        else:
            typer.echo(f"{prefix + name:44} {value}", err=err)
