"""How a rank shares out its memory: planned before weights are read, and held afterwards."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

import torch

from glm5ray.errors import ConfigError
from glm5ray.model.load_plan import kv_bytes_per_token, plan_pages, plan_weights
from glm5ray.model.workspace import TAKEN_EARLY, StepLimits, plan_workspace
from glm5ray.protocol import Capacity

if TYPE_CHECKING:
    from glm5ray.config import EngineConfig, SchedulerSection
    from glm5ray.model.load_plan import IndexRow, LatentRow, MemoryPlan
    from glm5ray.model.name_table import ShardSpec
    from glm5ray.model_config import ModelConfig

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""How long a rank waits for others to give memory of its GPU back."""
MOSTLY_FREE = 0.9
"""Share of a GPU's memory that others leave when none of them is an engine."""
GPU_REMEDY = (
    "lower scheduler.max_num_batched_tokens, scheduler.max_num_seqs or runner.max_graph_seqs, "
    "raise cache.memory_fraction, or use more ranks"
)
CPU_REMEDY = "raise cache.cpu_memory_gib, or lower cache.page_size"


def plan_rank(
    config: EngineConfig,
    model: ModelConfig,
    shard: ShardSpec,
    *,
    device: str,
    dtype: str,
    packed_experts: bool,
    memory_bytes: int,
) -> MemoryPlan:
    """What a rank will hold; loads nothing. ``memory_bytes``: see :func:`usable_bytes`.

    Raises :class:`ConfigError` if it does not fit, with the setting and the remedy."""
    cache, scheduler = config.cache, config.scheduler
    on_gpu = device.startswith("cuda")
    longest = longest_wanted(model, scheduler)
    limits = StepLimits(
        max_num_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=longest,
        max_graph_rows=_graph_rows(config) if on_gpu else 0,
    )
    workspace = plan_workspace(model, shard, limits, dtype=dtype, dp_size=config.parallel.dp_size, on_gpu=on_gpu)
    weights = plan_weights(model, shard, dtype=dtype, packed_experts=packed_experts)
    latent, index = kv_rows(cache.kv_dtype, dtype)
    return plan_pages(
        weights,
        workspace,
        memory_bytes=memory_bytes if on_gpu else memory_bytes + weights.total_bytes + sum(workspace.values()),
        kv_bytes_per_token=kv_bytes_per_token(model, latent=latent, index=index),
        page_size=cache.page_size,
        num_pages=None if cache.num_pages == "auto" else cache.num_pages,
        # no more than all sequences at their longest could ever use
        max_num_pages=scheduler.max_num_seqs * -(-longest // cache.page_size),
        remedy=GPU_REMEDY if on_gpu else CPU_REMEDY,
    )


def usable_bytes(config: EngineConfig, device: str) -> int:
    """On a GPU what this rank may use of it, beside what others have of it now: within ``cache.memory_fraction``, or,
    if a number of pages was asked for, all that is free. On a CPU what its pages may take: the rest lies in the
    machine's memory like that of any program."""
    asks_for_pages = config.cache.num_pages != "auto"
    if device == "cpu":
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return machine if asks_for_pages else min(int(config.cache.cpu_memory_gib * 2**30), machine)
    share = config.parallel.ranks_per_gpu
    free, total = _device_memory(patience_s=0.0 if share > 1 else PATIENCE_S)
    if asks_for_pages:
        return min(free, total // share)
    # what the others hold of a shared GPU is theirs, however far they are with loading
    taken = total - free if share == 1 else 0
    return max(0, min(int(total * config.cache.memory_fraction / share) - taken, free))


def _device_memory(patience_s: float) -> tuple[int, int]:
    """Free and total bytes of the GPU. If others hold much of it, it is looked at again for a while: the memory of a
    process that was killed, such as this rank's predecessor, comes back after some seconds."""
    torch.cuda.empty_cache()
    until_s = time.monotonic() + patience_s
    while True:
        free, total = torch.cuda.mem_get_info()
        is_free = free + torch.cuda.memory_reserved() > MOSTLY_FREE * total
        if is_free or time.monotonic() >= until_s:
            return free, total
        time.sleep(0.2)


def capacity_of(plan: MemoryPlan, model: ModelConfig, scheduler: SchedulerSection) -> Capacity:
    """What the scheduler may hand out. Raises :class:`ConfigError` if a length that was asked for cannot be held."""
    wanted = longest_wanted(model, scheduler)
    if scheduler.max_model_len != "auto" and plan.num_tokens < wanted:
        raise ConfigError(
            f"scheduler.max_model_len is {wanted}, but the cache holds {plan.num_tokens} tokens ({plan.num_pages} "
            f"pages of {plan.page_size}); lower it or raise cache.num_pages"
        )
    return Capacity(
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        max_model_len=min(wanted, plan.num_tokens),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )


def log_plan(plan: MemoryPlan, memory_bytes: int) -> None:
    """A line for each part."""
    for name, num_bytes in plan.lines():
        logger.info("memory %-28s %9.3f GiB", name, num_bytes / 2**30)
    logger.info("memory %-28s %9.3f GiB of %.3f", "all", plan.total_bytes / 2**30, memory_bytes / 2**30)


def require_room(plan: MemoryPlan) -> None:
    """After loading on a GPU, before pages are allocated: what was planned is there. Raises :class:`ConfigError`."""
    held, free = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    logger.info(
        "memory held after loading      %9.3f GiB, planned %.3f", held / 2**30, plan.weights.total_bytes / 2**30
    )
    wanted = plan.kv_bytes + sum(size for name, size in plan.workspace.items() if name not in TAKEN_EARLY)
    if wanted > free:
        raise ConfigError(
            f"after loading, {free / 2**30:.2f} GiB of the GPU are free, and pages and steps are to take "
            f"{wanted / 2**30:.2f} GiB: another process took memory meanwhile; end it, or lower cache.memory_fraction"
        )


def longest_wanted(model: ModelConfig, scheduler: SchedulerSection) -> int:
    """Tokens of the longest sequence, if pages suffice. Raises :class:`ConfigError`."""
    longest = model.max_position_embeddings
    if scheduler.max_model_len == "auto":
        return longest
    if scheduler.max_model_len > longest:
        raise ConfigError(
            f"scheduler.max_model_len is {scheduler.max_model_len}; this model was trained for at most {longest} tokens"
        )
    return scheduler.max_model_len


def kv_rows(kv_dtype: str, dtype: str) -> tuple[LatentRow, IndexRow]:
    """How ``cache.kv_dtype`` keeps a token's latent and index key, of a model in ``dtype``."""
    if kv_dtype == "fp8":
        return "fp8_ds", "fp8"
    return ("float32", "float32") if dtype == "float32" else ("bfloat16", "bfloat16")


def _graph_rows(config: EngineConfig) -> int:
    if config.runner.cuda_graphs in (False, "emulate") or config.parallel.world_size > 1:
        return 0
    return min(config.runner.max_graph_seqs, config.scheduler.max_num_seqs)
