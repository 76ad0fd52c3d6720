"""The ``glm5ray`` command: parses, builds and calls; what it does lies in the packages below.

Everything heavy is imported inside the commands, so that ``glm5ray --help`` stays quick.
"""

from __future__ import annotations

import io
import logging
import sys
from typing import Annotated

import typer

from glm5ray import __version__
from glm5ray.cli import bench, check, cluster, evaluate, generate, metrics, ranks, run_batch, serve, signals, weights
from glm5ray.errors import Glm5RayError

app = typer.Typer(
    name="glm5ray",
    help='Inference for the GLM-5 family. Start with: glm5ray generate "Hello"',
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("run-batch")(run_batch.run_batch_command)
app.command("serve")(serve.serve_command)
app.command("generate")(generate.generate_command)
app.command("check")(check.check_command)
app.command("up")(cluster.up_command)
app.command("status")(cluster.status_command)
app.command("ranks")(ranks.ranks_command)
app.command("down")(cluster.down_command)
app.add_typer(weights.app, name="weights")
app.add_typer(bench.app, name="bench")
app.add_typer(evaluate.app, name="eval")
app.add_typer(metrics.app, name="metrics")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _settings(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    log_level: Annotated[
        str, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
    ] = "warning",
) -> None:
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise typer.BadParameter(f"{log_level!r} is not one of debug, info, warning, error", param_hint="--log-level")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)


@app.command("version")
def version_command() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Entry point. Our own errors are one line on standard error and exit status 1, wrong usage 2, Ctrl-C 130,
    SIGTERM 143.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a locale may lack what a model or a path says
    with signals.handled():
        try:
            app()
        except Glm5RayError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)
        except OSError as error:  # what no part below knows better: a full disk under standard output, for one
            logging.getLogger(__name__).debug("", exc_info=True)
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)
        finally:
            if (status := signals.exit_status()) is not None:
                print(signals.message(), file=sys.stderr)
                sys.exit(status)  # also in place of what an interrupted import made of it
