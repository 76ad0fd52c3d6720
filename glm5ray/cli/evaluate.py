"""``glm5ray eval``."""

from __future__ import annotations

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
    json_output: options.Json = False,
) -> None:
    """Share of right answers of the embedded model, through this engine, on tasks that it was not trained on.

    \b
    Examples:
      glm5ray eval nano
      glm5ray eval nano --examples 10 --set kernels.default=reference --json
    """
    settings = options.engine_config("nano", config, overrides)

    from glm5ray.engine.llm import LLM
    from glm5ray.model.weights import resolve_checkpoint
    from glm5ray.nano.engine_backend import EngineBackend
    from glm5ray.nano.evaluate import generation_table, load_tokenizer

    tokenizer = load_tokenizer(resolve_checkpoint("nano"))
    with LLM(config=settings) as llm:
        table: dict[str, Any] = generation_table(EngineBackend(llm), tokenizer, examples, seed)
    for name, value in table.items():
        typer.echo(f"{name:24} {value}", err=json_output)
    if json_output:
        options.print_json({"model": "nano", "examples": examples, "seed": seed, "results": table})
