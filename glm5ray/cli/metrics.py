"""``glm5ray metrics``: what there is for whoever watches an engine."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from glm5ray.cli import options
from glm5ray.cli.weights import table
from glm5ray.metrics import METRICS, ray_name

app = typer.Typer(no_args_is_help=True, help="Metrics, and a dashboard for them.")


@app.command("grafana")
def grafana_command(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it there, not on standard output.")
    ] = None,
) -> None:
    """Print the Grafana dashboard as JSON: for a server's /metrics, and for Ray's.

    \b
    Examples:
      glm5ray metrics grafana -o glm5ray.json
      glm5ray metrics grafana -o /tmp/ray/session_latest/metrics/grafana/dashboards/glm5ray.json
    """
    text = (resources.files("glm5ray") / "dashboards" / "grafana.json").read_text("utf-8")
    if output is None:
        typer.echo(text, nl=False)
        return
    output.write_text(text, "utf-8")
    typer.echo(f"wrote {output}", err=True)


@app.command("list")
def list_command(json_output: options.Json = False) -> None:
    """Print every metric: its names at /metrics and in Ray, its kind, labels and meaning."""
    header = ("at /metrics", "in Ray", "kind", "labels", "meaning")
    rows = [
        (
            metric.series if metric.of != "rank" else "",
            f"ray_{ray_name(metric.series)}" if metric.in_ray else "",
            metric.kind,
            ", ".join(("model_name", *metric.labels)),
            metric.help,
        )
        for metric in METRICS.values()
    ]
    if json_output:
        options.print_json({"metrics": [dict(zip(header, row, strict=True)) for row in rows]})
        return
    typer.echo(table([header, *rows]))
