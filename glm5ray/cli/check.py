"""``glm5ray check``: what an engine would be, without starting it."""

from __future__ import annotations

from dataclasses import replace
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
    rows = [("memory of one rank", "size")]
    rows += [(part, size(num_bytes)) for part, num_bytes in memory["weights_bytes"].items()]
    rows += [("pages of KV cache", size(memory["kv_bytes"]))]
    typer.echo(table(rows))
    typer.echo(
        f"{memory['num_pages']} pages of {memory['page_size']} tokens, {size(memory['kv_bytes_per_token'])} a token; "
        f"sequences of up to {memory['max_model_len']} tokens"
    )


def _report(settings: EngineConfig, memory_gib: float | None) -> dict[str, Any]:
    import torch

    from glm5ray.errors import ConfigError
    from glm5ray.kernels.select import kernel_table
    from glm5ray.model.checkpoint_folder import resolve_checkpoint
    from glm5ray.model.load_plan import plan_weights
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
    weights = plan_weights(model, shard, dtype=dtype, packed_experts=packed)
    nvfp4_ops = frozenset({"experts"} if packed else ())
    return {
        "config": settings.to_dict(),
        "device": device,
        "dtype": dtype,
        "kernels": [entry._asdict() for entry in kernel_table(settings.kernels, device, nvfp4_ops)],
        "memory": {
            "weights_bytes": {str(part): num_bytes for part, num_bytes in weights.bytes_by_part.items()},
            **_pages(settings, model, shard, device, dtype, memory_gib, packed),
        },
    }


def _pages(
    settings: EngineConfig,
    model: ModelConfig,
    shard: ShardSpec,
    device: str,
    dtype: str,
    memory_gib: float | None,
    packed_experts: bool,
) -> dict[str, int]:
    """The pages that the worker would allocate. On a GPU they share its memory with the weights."""
    import torch

    from glm5ray.model.load_plan import kv_bytes_per_token, plan_memory
    from glm5ray.worker.worker import plan_capacity

    cache = settings.cache
    row: Any = "bfloat16" if dtype == "float16" else dtype
    latent, index = ("fp8_ds", "fp8") if cache.kv_dtype == "fp8" else (row, row)
    if device == "cuda" and cache.num_pages == "auto":
        total = memory_gib * 2**30 if memory_gib is not None else torch.cuda.mem_get_info()[1]
        plan = plan_memory(
            model,
            shard,
            memory_bytes=int(total * cache.memory_fraction),
            page_size=cache.page_size,
            dtype=dtype,
            latent=latent,
            index=index,
            packed_experts=packed_experts,
        )
        cache = replace(cache, num_pages=plan.num_pages)
    capacity = plan_capacity(model, cache, settings.scheduler, getattr(torch, dtype), device)
    per_token = kv_bytes_per_token(model, latent=latent, index=index)
    return {
        "kv_bytes": capacity.num_pages * capacity.page_size * per_token,
        "kv_bytes_per_token": per_token,
        "num_pages": capacity.num_pages,
        "page_size": capacity.page_size,
        "max_model_len": capacity.max_model_len,
    }
