"""``glm5ray run-batch``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glm5ray.cli import options, signals

if TYPE_CHECKING:
    from glm5ray.jobs.batch_file import BatchSummary


def run_batch_command(
    source: Annotated[
        str, typer.Argument(metavar="INPUT", help="Batch file, one request a line; - for standard input.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the answers, one line for each request.")],
    model: options.Model = None,
    config: options.Config = None,
    overrides: options.Set = None,
    address: options.Address = None,
    engine: options.Engine = "default",
    tp: options.Tp = None,
    ep: options.Ep = None,
    dp: options.Dp = None,
    error_file: Annotated[
        Path | None, typer.Option("--error-file", help="Write failed lines here instead of among the answers.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option("--served-model-name", help="A further name that requests may call the model.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier run stopped.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Like --resume, and run the lines that failed once more.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
    json_output: options.Json = False,
) -> None:
    """Answer every line of a batch file in OpenAI's format.

    Lines of /v1/chat/completions and /v1/completions are answered in the order in which they finish. A line that
    cannot be served becomes an error line; the others go on. After Ctrl-C the same command with --resume does the rest.

    \b
    Examples:
      glm5ray run-batch examples/prompts.jsonl -o answers.jsonl
      glm5ray run-batch in.jsonl -o out.jsonl --model /models/GLM-5.2 --set scheduler.max_num_seqs=256
      glm5ray run-batch in.jsonl -o out.jsonl --address auto --engine default
      cat in.jsonl | glm5ray run-batch - -o out.jsonl --error-file errors.jsonl
    """
    settings = options.engine_config(model, config, [*options.layout(tp, ep, dp), *(overrides or ())])

    from glm5ray.cli.loading import load_engine
    from glm5ray.cli.progress import ProgressBar, batch_progress
    from glm5ray.jobs.batch_file import BatchInterrupted, run_batch
    from glm5ray.jobs.lines import count_lines
    from glm5ray.jobs.paths import STANDARD_INPUT, check_paths, empty_file, same_file

    if source == "-" and sys.stdin is None:
        raise empty_file(STANDARD_INPUT)
    stream = sys.stdin.buffer if source == "-" else Path(source)
    outputs = [output, *([error_file] if error_file else [])]
    check_paths(stream, outputs, resume=resume or retry_failed, overwrite=overwrite)
    total = count_lines(stream) if isinstance(stream, Path) and stream.is_file() else None
    is_stdout_taken = sys.stdout is not None and any(same_file(path, sys.stdout.buffer) for path in outputs)
    llm = load_engine(settings, address=address, engine=engine)

    from glm5ray.engine.core import collect_garbage_rarely

    collect_garbage_rarely()
    try:
        with llm, ProgressBar("run-batch", total, "lines") as bar:
            summary = run_batch(
                stream,
                output,
                llm,
                model_names=options.model_names(llm.config, served_model_name),
                error_file=error_file,
                resume=resume,
                retry_failed=retry_failed,
                overwrite=overwrite,
                max_logprobs=llm.config.scheduler.max_logprobs,
                progress=batch_progress(bar),
            )
    except BatchInterrupted as interrupt:
        done = interrupt.summary.total
        signals.explain(f"interrupted: {done} lines are done in {output}; --resume does the others")
        raise
    _print_summary(summary, output, err=json_output or is_stdout_taken)
    if summary.failed:
        typer.echo(f"the failed lines say why in {error_file or output}", err=True)
    if json_output:
        options.print_json(_to_dict(summary, output), err=is_stdout_taken)


def _print_summary(summary: BatchSummary, output: Path, *, err: bool) -> None:
    typer.echo(
        f"{output}: {summary.completed} answered, {summary.failed} failed"
        + (f", {summary.resumed} done before" if summary.resumed else "")
        + (f" ({summary.resumed_failures} of them failed: --retry-failed)" if summary.resumed_failures else "")
        + f"; {summary.prompt_tokens} prompt and {summary.output_tokens} output tokens in {summary.seconds:.1f} s"
        f" ({summary.output_tokens_per_s:.1f} output tokens/s)",
        err=err,
    )


def _to_dict(summary: BatchSummary, output: Path) -> dict[str, Any]:
    return {
        "output": str(output),
        "total": summary.total,
        "completed": summary.completed,
        "failed": summary.failed,
        "resumed": summary.resumed,
        "resumed_failures": summary.resumed_failures,
        "prompt_tokens": summary.prompt_tokens,
        "output_tokens": summary.output_tokens,
        "seconds": round(summary.seconds, 3),
        "output_tokens_per_s": round(summary.output_tokens_per_s, 2),
    }
