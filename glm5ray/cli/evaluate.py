"""``glm5ray eval``."""

from __future__ import annotations

from typing import Annotated

import typer

from glm5ray.cli import options

app = typer.Typer(help="Measure how good answers are.", no_args_is_help=True)


@app.command("nano")
def nano_command(
    examples: Annotated[int, typer.Option("--examples", min=0, help="Generations a case; 0: none.")] = 40,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    json_output: options.Json = False,
) -> None:
    """Accuracy of the embedded nano model on tasks that it has not seen.

    \b
    Example:
      glm5ray eval nano --examples 10 --json
    """
    from glm5ray.nano.evaluate import main as evaluate

    report = evaluate(examples=examples, seed=seed)
    if json_output:
        options.print_json(report)
    else:
        for name, value in report.items():
            typer.echo(f"{name}: {value}")
