"""``glm5ray check``: what an engine would be, without starting it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from glm5ray.cli import options
from glm5ray.cli.weights import size, table

if TYPE_CHECKING:
    from glm5ray.config import EngineConfig
    from glm5ray.model.name_table import ShardSpec
    from glm5ray.model_config import ModelConfig


def check_command(
    model: options.Model = None,
    config: options.Config = None,
    overrides: options.Set = None,
    memory_gib: Annotated[
        float | None,
        typer.Option("--memory-gib", min=0.1, help="Plan for a GPU with this memory, which need not be here."),
    ] = None,
    json_output: options.Json = False,
) -> None:
    """Print the resolved settings, who serves each operation, and how the memory would be used. Loads no weights.

    \b
    Examples:
      glm5ray check
      glm5ray check --config cpu-nano --set cache.page_size=32
      glm5ray check --model /models/GLM-5.2-NVFP4 --config rtx-pro-6000-x8 --memory-gib 96
    """
    settings = options.engine_config(model, config, overrides)
    report = _report(settings, memory_gib)
    if json_output:
        options.print_json(report)
        return
    typer.echo(yaml.safe_dump(report["config"], sort_keys=False, allow_unicode=True))
    rows = [("operation", "provider", "why")]
    rows += [(entry["op"], entry["provider"], entry["why"]) for entry in report["kernels"]]
    typer.echo(table(rows))
    memory = report["memory"]
    rows = [("memory of one rank", "GiB")]
    rows += [(name, f"{num_bytes / 2**30:10.3f}") for name, num_bytes in memory["lines"].items()]
    rows += [("all", f"{sum(memory['lines'].values()) / 2**30:10.3f}")]
    typer.echo(table(rows))
    typer.echo(
        f"{memory['num_pages']} pages of {memory['page_size']} tokens, {size(memory['kv_bytes_per_token'])} a token; "
        f"sequences of up to {memory['max_model_len']} tokens"
    )
    if memory["usable_bytes"] is not None:
        typer.echo(f"planned for {size(memory['usable_bytes'])} that a rank may use (cache.memory_fraction)")


def _report(settings: EngineConfig, memory_gib: float | None) -> dict[str, Any]:
    import torch

    from glm5ray.errors import ConfigError
    from glm5ray.kernels.select import kernel_table
    from glm5ray.model.checkpoint_folder import resolve_checkpoint
    from glm5ray.model.name_table import ShardSpec
    from glm5ray.model.packed import packs_experts
    from glm5ray.model_config import ModelConfig
    from glm5ray.worker.worker import pick_device, pick_dtype

    model = ModelConfig.from_checkpoint(resolve_checkpoint(settings.model.path))
    if memory_gib is None and settings.model.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "model.device is 'cuda', but PyTorch finds no CUDA device here; plan for one with --memory-gib, "
            "the memory of one GPU in GiB (95 for an RTX PRO 6000)"
        )
    device = "cuda" if memory_gib is not None else pick_device(settings.model.device)
    dtype = str(pick_dtype(settings.model.dtype, model, device)).removeprefix("torch.")
    shard = ShardSpec(tp_size=settings.parallel.tp_size, ep_size=settings.parallel.ep_size)
    packed = packs_experts(settings.model.weights, model, device, dtype)
    nvfp4_ops = frozenset({"experts"} if packed else ())
    return {
        "config": settings.to_dict(),
        "device": device,
        "dtype": dtype,
        "kernels": [entry._asdict() for entry in kernel_table(settings.kernels, device, nvfp4_ops)],
        "memory": _memory(settings, model, shard, device, dtype, memory_gib, packed),
    }


def _memory(
    settings: EngineConfig,
    model: ModelConfig,
    shard: ShardSpec,
    device: str,
    dtype: str,
    memory_gib: float | None,
    packed_experts: bool,
) -> dict[str, Any]:
    """What a worker would plan."""
    from glm5ray.worker.memory import capacity_of, plan_rank, usable_bytes

    if memory_gib is None:
        usable = usable_bytes(settings, device)
    else:
        usable = int(memory_gib * 2**30 * settings.cache.memory_fraction / settings.parallel.ranks_per_gpu)
    plan = plan_rank(
        settings, model, shard, device=device, dtype=dtype, packed_experts=packed_experts, memory_bytes=usable
    )
    capacity = capacity_of(plan, model, settings.scheduler)
    return {
        "lines": dict(plan.lines()),
        "usable_bytes": usable if device == "cuda" else None,
        "weights_bytes": {str(part): num_bytes for part, num_bytes in plan.weights.bytes_by_part.items()},
        "kv_bytes": plan.kv_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "num_pages": capacity.num_pages,
        "page_size": capacity.page_size,
        "max_model_len": capacity.max_model_len,
    }
