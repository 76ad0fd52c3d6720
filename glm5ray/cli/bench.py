"""``glm5ray bench``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from glm5ray.cli import options

app = typer.Typer(
    help="Measure the scheduler, the way to the ranks, single kernels, or the whole engine in this process.",
    no_args_is_help=True,
)


def _numbers(text: str, name: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers above 0, as 1,8,32", param_hint=name)
    return numbers


def _print_row(row: dict[str, Any]) -> None:
    typer.echo("  ".join(f"{name} {value}" for name, value in row.items()), err=True)


@app.command("scheduler")
def scheduler_command(
    num_seqs: Annotated[str, typer.Option("--num-seqs", help="Numbers of sequences.")] = "64,256,1024,2048",
    json_output: options.Json = False,
) -> None:
    """Cost of schedule() and update() with many sequences decoding, without a model.

    \b
    Example:
      glm5ray bench scheduler --json
    """
    from glm5ray.bench.scheduler import run_scheduler_bench

    report = run_scheduler_bench(_numbers(num_seqs, "--num-seqs"), progress=lambda line: typer.echo(line, err=True))
    for row in report["results"]:
        _print_row(row)
    if json_output:
        options.print_json(report)


@app.command("channel")
def channel_command(
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Number of actors.")] = 2,
    sequences: Annotated[int, typer.Option("--sequences", min=1, help="That decode in each step.")] = 256,
    steps: Annotated[int, typer.Option("--steps", min=2, help="That are timed.")] = 1000,
    json_output: options.Json = False,
) -> None:
    """Cost of a step's way to Ray actors and back, without a model, beside the same loop in one process.

    \b
    Example:
      glm5ray bench channel --ranks 2 --sequences 256 --json
    """
    from glm5ray.actors.channel_bench import fixed_token_ranks
    from glm5ray.bench.channel import run_channel_bench

    with fixed_token_ranks(ranks) as executor:
        report = run_channel_bench(executor, num_ranks=ranks, num_seqs=sequences, steps=steps)
    for name in ("actors", "in_process"):
        _print_row({"": name, **report[name]})
    _print_row({"overhead_us": report["overhead_us"]})
    if json_output:
        options.print_json(report)


@app.command("kernels")
def kernels_command(
    model: options.Model = None,
    config: options.Config = None,
    overrides: options.Set = None,
    tokens: Annotated[str, typer.Option("--tokens", help="Numbers of sequences that decode.")] = "1,64",
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of each, its own among them.")] = 4096,
    ops: Annotated[str, typer.Option("--ops", help="Some operations alone: experts,mla_attention.")] = "",
    repetitions: Annotated[int, typer.Option("--repetitions", min=1, help="Of each call; medians count.")] = 10,
    json_output: options.Json = False,
) -> None:
    """Each operation at the model's sizes against its floor: bytes at the rate of a copy, arithmetic at that of a large
    product.

    \b
    Examples:
      glm5ray bench kernels
      glm5ray bench kernels --model nano --tokens 1,8 --context 512 --json
    """
    settings = options.engine_config(model, config, overrides)

    from glm5ray.bench.kernels import run_kernels_bench
    from glm5ray.kernels.select import OPS

    wanted = tuple(name.strip() for name in ops.split(",")) if ops else OPS
    if unknown := set(wanted) - set(OPS):
        raise typer.BadParameter(f"{sorted(unknown)[0]!r} is none of {', '.join(OPS)}", param_hint="--ops")
    report = run_kernels_bench(
        settings,
        tokens=_numbers(tokens, "--tokens"),
        context=context,
        ops=wanted,
        repetitions=repetitions,
        on_row=_print_row,
    )
    _print_row({name: report[name] for name in ("device", "copy_gb_per_s", "product_gflops")})
    if json_output:
        options.print_json(report)


@app.command("offline")
def offline_command(
    model: options.Model = None,
    config: options.Config = None,
    overrides: options.Set = None,
    concurrency: Annotated[str, typer.Option("--concurrency", help="Numbers of prompts at once.")] = "1,8,32,64",
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1)] = 64,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1)] = 64,
    repetitions: Annotated[int, typer.Option("--repetitions", min=1, help="Of each point; medians count.")] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Of the prompts.")] = 0,
    breakdown: Annotated[bool, typer.Option("--breakdown", help="A decode step by operation, too.")] = False,
    json_output: options.Json = False,
) -> None:
    """Throughput of the whole engine by concurrency: random prompts, greedy, all at once.

    \b
    Examples:
      glm5ray bench offline
      glm5ray bench offline --model runs/tiny --concurrency 1,8,32,64 --json
    """
    settings = options.engine_config(model, config, overrides)

    from glm5ray.bench.offline import run_offline_bench

    report = run_offline_bench(
        settings,
        concurrency=_numbers(concurrency, "--concurrency"),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repetitions=repetitions,
        seed=seed,
        on_row=_print_row,
        breakdown=breakdown,
    )
    for row in report.get("breakdown", []):
        _print_row({name: row[name] for name in ("conc", "context", "step_ms")})
        for op in row["ops"]:
            typer.echo(f"  {op['op']:22s} {op['calls']:7.1f} x {op['ms']:10.3f} ms  {op['share']:6.1%}", err=True)
    if json_output:
        options.print_json(report)
