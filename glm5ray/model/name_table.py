"""Which tensors a GLM-5 checkpoint must hold, and which part of each belongs to a rank.

:func:`checkpoint_weights` lists every weight of an unquantised checkpoint, by the checkpoint's own name, with its
shape and how tensor parallelism splits it. The model's parameters have the same names, but for the routed experts,
which are stacked as in Hugging Face's model: ``mlp.experts.gate_up_proj [E, 2 I, H]`` (gate rows first) and
``mlp.experts.down_proj [E, H, I]``.

No torch here: planning memory (:mod:`glm5ray.model.load_plan`) starts without it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from glm5ray.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from glm5ray.model_config import ModelConfig


class ModelPart(StrEnum):
    """What a weight is for; the rows of a memory plan."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    INDEXER = "indexer"
    DENSE_MLP = "dense_mlp"
    ROUTER = "router"
    ROUTED_EXPERTS = "routed_experts"
    SHARED_EXPERTS = "shared_experts"
    NORM = "norm"
    HEAD = "head"
    MTP = "mtp"


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Which part of the weights a rank holds.

    ``tp`` splits heads, vocabulary and the columns of MLPs. ``ep`` hands out whole routed experts; with ``ep_size``
    above 1 they are not split any further, whatever ``tp_size`` is, so that the ranks of one machine can be ``tp``
    ranks for attention and ``ep`` ranks for experts at once.
    """

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def __post_init__(self) -> None:
        for name, rank, size in (("tp", self.tp_rank, self.tp_size), ("ep", self.ep_rank, self.ep_size)):
            if size < 1:
                raise ConfigError(f"{name}_size is {size}; it must be above 0")
            if not 0 <= rank < size:
                raise ConfigError(f"{name}_rank is {rank}; with {name}_size {size} it must be from 0 to {size - 1}")


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight of an unquantised checkpoint."""

    name: str
    shape: tuple[int, ...]
    part: ModelPart
    split: Literal["rows", "columns"] | None = None
    """What ``tp`` splits; None: every rank has all of it."""
    is_linear: bool = False
    """May be stored quantised."""
    keep_float32: bool = False
    """Held in float32 whatever the model's type: router and indexer select by differences that bfloat16 does not
    have."""
    is_mtp: bool = False
    expert: int | None = None
    """Index among the layer's routed experts."""
    target: str = ""
    """The parameter that it goes into, if that has another name."""
    half: int | None = None
    """0 (gate) or 1 (up) of a parameter that holds both, one above the other."""

    @property
    def module(self) -> str:
        """The name without its last part."""
        return self.name.rpartition(".")[0]

    @property
    def parameter(self) -> str:
        """Name of the model's parameter."""
        return self.target or self.name


@dataclass(frozen=True, slots=True)
class Placement:
    """What a rank takes of one weight, and where it puts it."""

    rows: range
    columns: range | None
    """None for vectors."""
    parameter_shape: tuple[int, ...]
    expert_index: int | None
    """Place in a stack of experts."""
    row_offset: int
    """First row within the parameter (or within its expert)."""


def checkpoint_weights(config: ModelConfig, *, with_mtp: bool, experts: range | None = None) -> Iterator[WeightSpec]:
    """Every weight that the checkpoint of ``config`` must hold, in the order of the forward pass; of the routed
    experts those in ``experts``, None for all."""
    experts = range(config.n_routed_experts) if experts is None else experts
    vocabulary = (config.vocab_size, config.hidden_size)
    yield WeightSpec("model.embed_tokens.weight", vocabulary, ModelPart.EMBEDDING, "rows")
    for layer in range(config.num_hidden_layers):
        has_indexer = config.indexer_types[layer] == "full"
        routed = experts if config.mlp_layer_types[layer] == "sparse" else None
        yield from _decoder_layer(config, layer, has_indexer, routed)
    yield WeightSpec("model.norm.weight", (config.hidden_size,), ModelPart.NORM)
    yield WeightSpec("lm_head.weight", vocabulary, ModelPart.HEAD, "rows")
    if with_mtp:
        yield from mtp_weights(config, experts=experts)


def mtp_weights(config: ModelConfig, *, experts: range | None = None) -> Iterator[WeightSpec]:
    """The MTP layers' weights: a sparse decoder layer with an indexer of its own, and what joins it to the model."""
    experts = range(config.n_routed_experts) if experts is None else experts
    hidden = config.hidden_size
    for layer in mtp_layers(config):
        prefix = f"model.layers.{layer}"
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield WeightSpec(f"{prefix}.{name}.weight", (hidden,), ModelPart.NORM, is_mtp=True)
        shape = (hidden, 2 * hidden)
        yield WeightSpec(f"{prefix}.eh_proj.weight", shape, ModelPart.MTP, is_linear=True, is_mtp=True)
        yield from _decoder_layer(config, layer, has_indexer=True, experts=experts)


def mtp_layers(config: ModelConfig) -> range:
    """Their numbers in the checkpoint."""
    return range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)


def parameter_shapes(
    config: ModelConfig, shard: ShardSpec, *, with_mtp: bool
) -> dict[str, tuple[tuple[int, ...], bool]]:
    """``{parameter: (shape, keep_float32)}`` of everything that a rank holds, in the order of the forward pass."""
    shapes = {}
    first_expert = local_experts(config, shard)[:1]
    for spec in checkpoint_weights(config, with_mtp=with_mtp, experts=first_expert):
        place = place_weight(spec, config, shard)
        assert place is not None, f"{spec.name} is not of the rank {shard}"
        shapes.setdefault(spec.parameter, (place.parameter_shape, spec.keep_float32))
    return shapes


def local_experts(config: ModelConfig, shard: ShardSpec) -> range:
    """The routed experts that a rank holds, or holds columns of."""
    return _share(config.n_routed_experts, shard.ep_rank, shard.ep_size)


def place_weight(spec: WeightSpec, config: ModelConfig, shard: ShardSpec) -> Placement | None:
    """What the rank takes of ``spec``; None for an expert of another rank. ``check_shard`` has to hold."""
    tp_rank, tp_size = shard.tp_rank, shard.tp_size
    expert_index, num_local_experts = None, 0
    if spec.expert is not None:
        experts = local_experts(config, shard)
        if spec.expert not in experts:
            return None
        expert_index, num_local_experts = experts.index(spec.expert), len(experts)
        if shard.ep_size > 1:
            tp_rank, tp_size = 0, 1
    rows = _share(spec.shape[0], tp_rank, tp_size) if spec.split == "rows" else range(spec.shape[0])
    if len(spec.shape) == 1:
        return Placement(rows, None, (len(rows),), None, 0)
    columns = _share(spec.shape[1], tp_rank, tp_size) if spec.split == "columns" else range(spec.shape[1])
    shape: tuple[int, ...] = (len(rows) if spec.half is None else 2 * len(rows), len(columns))
    if expert_index is not None:
        shape = (num_local_experts, *shape)
    return Placement(rows, columns, shape, expert_index, (spec.half or 0) * len(rows))


def check_shard(config: ModelConfig, shard: ShardSpec) -> None:
    """Raises :class:`ConfigError` if the model's sizes do not divide by the shard's. Nothing is padded."""
    divided = {
        "num_attention_heads": config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
    }
    for name, size in divided.items():
        if size % shard.tp_size:
            raise ConfigError(f"tp_size is {shard.tp_size}; it must divide the model's {name}, which is {size}")
    if config.n_routed_experts % shard.ep_size:
        experts = config.n_routed_experts
        raise ConfigError(
            f"ep_size is {shard.ep_size}; it must divide the model's n_routed_experts, which is {experts}"
        )


def _share(size: int, rank: int, num_ranks: int) -> range:
    share = size // num_ranks
    return range(rank * share, (rank + 1) * share)


def _decoder_layer(config: ModelConfig, layer: int, has_indexer: bool, experts: range | None) -> Iterator[WeightSpec]:
    """``experts`` is None for a dense layer."""
    prefix, is_mtp = f"model.layers.{layer}", layer >= config.num_hidden_layers
    hidden = (config.hidden_size,)
    yield WeightSpec(f"{prefix}.input_layernorm.weight", hidden, ModelPart.NORM, is_mtp=is_mtp)
    yield from _attention(config, f"{prefix}.self_attn", is_mtp)
    if has_indexer:
        yield from _indexer(config, f"{prefix}.self_attn.indexer", is_mtp)
    yield WeightSpec(f"{prefix}.post_attention_layernorm.weight", hidden, ModelPart.NORM, is_mtp=is_mtp)
    if experts is None:
        yield from _mlp(config, f"{prefix}.mlp", config.intermediate_size, ModelPart.DENSE_MLP, is_mtp)
    else:
        yield from _moe(config, f"{prefix}.mlp", experts, is_mtp)


def _attention(config: ModelConfig, prefix: str, is_mtp: bool) -> Iterator[WeightSpec]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
    linears: tuple[tuple[str, tuple[int, int], Literal["rows", "columns"] | None], ...] = (
        ("q_a_proj", (q_rank, hidden), None),
        ("q_b_proj", (heads * config.qk_head_dim, q_rank), "rows"),
        ("kv_a_proj_with_mqa", (kv_rank + config.qk_rope_head_dim, hidden), None),
        ("kv_b_proj", (heads * (config.qk_nope_head_dim + config.v_head_dim), kv_rank), "rows"),
        ("o_proj", (hidden, heads * config.v_head_dim), "columns"),
    )
    for name, shape, split in linears:
        yield WeightSpec(f"{prefix}.{name}.weight", shape, ModelPart.ATTENTION, split, is_linear=True, is_mtp=is_mtp)
    for name, size in (("q_a_layernorm", q_rank), ("kv_a_layernorm", kv_rank)):
        yield WeightSpec(f"{prefix}.{name}.weight", (size,), ModelPart.ATTENTION, is_mtp=is_mtp)


def _indexer(config: ModelConfig, prefix: str, is_mtp: bool) -> Iterator[WeightSpec]:
    heads, dim, hidden = config.index_n_heads, config.index_head_dim, config.hidden_size
    linears = {"wq_b": (heads * dim, config.q_lora_rank), "wk": (dim, hidden), "weights_proj": (heads, hidden)}
    for name, shape in linears.items():
        keep_float32 = name == "weights_proj"
        yield WeightSpec(
            f"{prefix}.{name}.weight",
            shape,
            ModelPart.INDEXER,
            is_linear=True,
            keep_float32=keep_float32,
            is_mtp=is_mtp,
        )
    for name in ("weight", "bias"):
        yield WeightSpec(f"{prefix}.k_norm.{name}", (dim,), ModelPart.INDEXER, is_mtp=is_mtp)


def _mlp(config: ModelConfig, prefix: str, width: int, part: ModelPart, is_mtp: bool) -> Iterator[WeightSpec]:
    up, down = (width, config.hidden_size), (config.hidden_size, width)
    yield WeightSpec(f"{prefix}.gate_proj.weight", up, part, "rows", is_linear=True, is_mtp=is_mtp)
    yield WeightSpec(f"{prefix}.up_proj.weight", up, part, "rows", is_linear=True, is_mtp=is_mtp)
    yield WeightSpec(f"{prefix}.down_proj.weight", down, part, "columns", is_linear=True, is_mtp=is_mtp)


def _moe(config: ModelConfig, prefix: str, experts: range, is_mtp: bool) -> Iterator[WeightSpec]:
    num_experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    for name, shape in (("weight", (num_experts, hidden)), ("e_score_correction_bias", (num_experts,))):
        yield WeightSpec(f"{prefix}.gate.{name}", shape, ModelPart.ROUTER, keep_float32=True, is_mtp=is_mtp)
    if config.n_shared_experts:
        shared_width = width * config.n_shared_experts
        yield from _mlp(config, f"{prefix}.shared_experts", shared_width, ModelPart.SHARED_EXPERTS, is_mtp)
    gate_up, down = f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"
    for expert in experts:
        for spec in _mlp(config, f"{prefix}.experts.{expert}", width, ModelPart.ROUTED_EXPERTS, is_mtp):
            if spec.split == "rows":
                half = 0 if spec.name.endswith("gate_proj.weight") else 1
                yield replace(spec, expert=expert, target=gate_up, half=half)
            else:
                yield replace(spec, expert=expert, target=down)
