"""What each rank will hold, in bytes, before anything is allocated. From ``config.json`` alone: no weights, no torch.

    plan = plan_memory(config, ShardSpec(tp_size=8), memory_bytes=int(0.93 * 97_887 * 2**20), latent="fp8_ds",
    index="fp8", ...) plan.num_tokens

All ranks of a layout hold the same number of bytes, since what is split divides evenly. The latent KV has one head,
so every ``tp`` rank holds all of it. What a step needs beside them is planned by :mod:`glm5ray.model.workspace`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from glm5ray.errors import ConfigError
from glm5ray.model.name_table import ModelPart, ShardSpec, check_shard, checkpoint_weights, local_experts, place_weight
from glm5ray.quantization.formats import PLAIN, parse_claim

if TYPE_CHECKING:
    from collections.abc import Mapping

    from glm5ray.model_config import ModelConfig

DTYPE_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}

LatentRow = Literal["float32", "bfloat16", "fp8", "fp8_ds"]
"""How the latent and rope key of a token are kept. fp8: one byte a value, one scale for all. fp8_ds: the layout of
DeepSeek's kernels, latent in FP8 with a float32 scale for each 128 values, rope key in bfloat16."""
IndexRow = Literal["float32", "bfloat16", "fp8"]
"""How the index key of a token is kept. fp8: one byte a value and a float32 scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """The weights of one rank."""

    parameters_by_part: Mapping[ModelPart, int]
    bytes_by_part: Mapping[ModelPart, int]

    @property
    def num_parameters(self) -> int:
        return sum(self.parameters_by_part.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_part.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory of one rank: weights, what a step needs, and pages in what they leave."""

    weights: WeightPlan
    workspace: Mapping[str, int]
    """What a step needs, line by line."""
    kv_bytes_per_token: int
    page_size: int
    num_pages: int

    @property
    def num_tokens(self) -> int:
        """That the pages hold."""
        return self.num_pages * self.page_size

    @property
    def kv_bytes(self) -> int:
        return self.num_tokens * self.kv_bytes_per_token

    @property
    def total_bytes(self) -> int:
        return self.weights.total_bytes + sum(self.workspace.values()) + self.kv_bytes

    def lines(self) -> list[tuple[str, int]]:
        """What is held for what, in bytes."""
        lines = [(f"weights: {str(part).replace('_', ' ')}", size) for part, size in self.weights.bytes_by_part.items()]
        lines += [(f"step: {name}", size) for name, size in self.workspace.items()]
        return [*lines, ("pages of KV cache", self.kv_bytes)]


def plan_weights(
    config: ModelConfig,
    shard: ShardSpec | None = None,
    *,
    dtype: str = "bfloat16",
    with_mtp: bool = False,
    keep_quantized: bool = False,
    packed_experts: bool = False,
) -> WeightPlan:
    """The weights of one rank, part by part; the MTP layer is a part of its own.

    They are counted as :func:`glm5ray.model.weights.load_shard` holds them, dequantised to ``dtype``; or, with
    ``keep_quantized``, as they lie in the files, by what ``config.json`` says is quantised
    (:class:`glm5ray.quantization.formats.QuantizationClaim`); ``packed_experts``: of the routed experts only.
    """
    shard = shard or ShardSpec()
    check_shard(config, shard)
    claim = parse_claim(config.quantization)
    parameters: Counter[ModelPart] = Counter()
    num_bytes: Counter[ModelPart] = Counter()
    experts = local_experts(config, shard)
    for spec in checkpoint_weights(config, with_mtp=with_mtp, experts=experts[:1]):
        place = place_weight(spec, config, shard)
        assert place is not None, f"{spec.name} is not of the rank {shard}"
        count = len(experts) if spec.expert is not None else 1
        part = ModelPart.MTP if spec.is_mtp else spec.part
        rows, columns = len(place.rows), 1 if place.columns is None else len(place.columns)
        keep = keep_quantized or (packed_experts and spec.expert is not None)
        form = claim.format_of(spec.module) if keep and spec.is_linear else PLAIN
        size = DTYPE_SIZES["float32" if spec.keep_float32 else dtype]
        parameters[part] += count * rows * columns
        num_bytes[part] += count * form.stored_bytes(rows, columns, plain_bytes=size)
    return WeightPlan(parameters_by_part=parameters, bytes_by_part=num_bytes)


def kv_bytes_per_token(config: ModelConfig, *, latent: LatentRow, index: IndexRow, with_mtp: bool = False) -> int:
    """Bytes that one token takes in the caches of all layers: a latent row in each, an index key in those that select
    for themselves. The MTP layer has both."""
    num_mtp = config.num_nextn_predict_layers if with_mtp else 0
    latent_bytes = (config.num_hidden_layers + num_mtp) * _latent_row_bytes(config, latent)
    size = 1 if index == "fp8" else DTYPE_SIZES[index]
    index_bytes = config.index_head_dim * size + (4 if index == "fp8" else 0)
    return latent_bytes + (config.num_full_index_layers + num_mtp) * index_bytes


def plan_memory(
    config: ModelConfig,
    shard: ShardSpec,
    *,
    memory_bytes: int,
    page_size: int,
    dtype: str = "bfloat16",
    latent: LatentRow = "bfloat16",
    index: IndexRow = "bfloat16",
    with_mtp: bool = False,
    keep_quantized: bool = False,
    packed_experts: bool = False,
) -> MemoryPlan:
    """How many pages there are beside the weights alone in ``memory_bytes`` of one rank.

    Raises :class:`ConfigError` if not even one fits.
    """
    weights = plan_weights(
        config, shard, dtype=dtype, with_mtp=with_mtp, keep_quantized=keep_quantized, packed_experts=packed_experts
    )
    per_token = kv_bytes_per_token(config, latent=latent, index=index, with_mtp=with_mtp)
    return plan_pages(weights, {}, memory_bytes=memory_bytes, kv_bytes_per_token=per_token, page_size=page_size)


def plan_pages(
    weights: WeightPlan,
    workspace: Mapping[str, int],
    *,
    memory_bytes: int,
    kv_bytes_per_token: int,
    page_size: int,
    num_pages: int | None = None,
    max_num_pages: int | None = None,
    remedy: str = "use more ranks",
) -> MemoryPlan:
    """Pages in what weights and the ``workspace`` of a step (:func:`glm5ray.model.workspace.plan_workspace`) leave of
    ``memory_bytes``: as many as fit, but at most ``max_num_pages``; or ``num_pages``, if they fit.

    Raises :class:`ConfigError` if they do not, or if not even one page fits; ``remedy`` ends its sentence.
    """
    plan = MemoryPlan(
        weights=weights, workspace=workspace, kv_bytes_per_token=kv_bytes_per_token, page_size=page_size, num_pages=0
    )
    page_bytes = kv_bytes_per_token * page_size
    room = (memory_bytes - plan.total_bytes) // page_bytes
    needs = f"the weights of a rank take {_gib(weights.total_bytes)}"
    page = f"a page of {page_size} tokens {page_bytes / 2**20:.2f} MiB"
    if weights.total_bytes + page_bytes > memory_bytes:
        raise ConfigError(
            f"{needs} and {page}; the {_gib(memory_bytes)} of memory do not hold both: use more ranks "
            "(parallel.tp_size, parallel.ep_size), or fewer bytes a weight"
        )
    if room < 1:
        name, largest = max(workspace.items(), key=lambda line: line[1])
        raise ConfigError(
            f"{needs}, a step {_gib(sum(workspace.values()))} (most of it, {_gib(largest)}, for {name}) and {page}; "
            f"the {_gib(memory_bytes)} of memory do not hold them: {remedy}"
        )
    if num_pages is not None and num_pages > room:
        raise ConfigError(
            f"cache.num_pages is {num_pages}, which takes {_gib(num_pages * page_bytes)}; there is room for {room} "
            f"pages ({_gib(room * page_bytes)}): lower it, or leave it at auto"
        )
    most = room if max_num_pages is None else min(room, max_num_pages)
    return replace(plan, num_pages=most if num_pages is None else num_pages)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _latent_row_bytes(config: ModelConfig, latent: LatentRow) -> int:
    lora, rope = config.kv_lora_rank, config.qk_rope_head_dim
    if latent == "fp8":
        return lora + rope
    if latent == "fp8_ds":
        size = -(-lora // 4) * 4 + -(-lora // 128) * 4 + 2 * rope
        return -(-size // 16) * 16  # as glm5ray.kernels.cache_rows
    return (lora + rope) * DTYPE_SIZES[latent]
