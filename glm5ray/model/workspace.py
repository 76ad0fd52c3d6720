"""What a step of one rank needs beside weights and pages, in bytes, before anything is allocated: no torch.

Each line is an upper bound of what its part holds at once, for the largest step that the settings allow. The lines are
added though the parts do not all run at once: an allocator in use does not hand out the memory of one part to another
without gaps. ``tests/model/test_workspace.py`` counts what the model really allocates.

Letters as in :mod:`glm5ray.kernels.interface`; N: rows that are sampled, V: vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from glm5ray.model.load_plan import DTYPE_SIZES

if TYPE_CHECKING:
    from glm5ray.model.name_table import ShardSpec
    from glm5ray.model_config import ModelConfig

EXPERT_TOKENS = 8192
"""Tokens that the experts' kernels take at once."""
MAX_SCORES = 2**26
"""Index scores in memory at once; a few less than one token's, if a context is longer."""
SAMPLED_NUMBERS = 2**24
"""Logits that are sorted at once (:mod:`glm5ray.worker.sampler`)."""
SPLIT_BYTES = 128 * 2**20
"""Partial results of attention over split contexts: as many parts as keep the processors of a GPU busy. What a token
reads has at most index_topk positions."""
LIBRARY_BYTES = 768 * 2**20
"""Workspaces of cuBLAS, and the code of kernels, which the driver loads as they are first called."""
COLLECTIVE_BYTES = 1024 * 2**20
"""Buffers of NCCL's communicators, where there are several ranks."""
GRAPH_BYTES = 512 * 2**20
"""CUDA's own records of the captured graphs, with their inputs."""


TAKEN_EARLY = frozenset({"libraries", "collectives"})
"""Lines of which some is taken before the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step of a rank."""

    max_num_tokens: int
    max_num_seqs: int
    max_model_len: int
    max_graph_rows: int = 0
    """Rows of the largest CUDA graph; 0: none are captured."""

    @property
    def num_sampled(self) -> int:
        return min(self.max_num_seqs, self.max_num_tokens)


def plan_workspace(
    config: ModelConfig, shard: ShardSpec, limits: StepLimits, *, dtype: str, dp_size: int = 1, on_gpu: bool = True
) -> dict[str, int]:
    """Line -> bytes, in the order in which a step needs them.

    dtype: of activations. dp_size: data-parallel groups, whose tokens meet at the experts. on_gpu: with what libraries
    and graphs take there."""
    size, tokens = DTYPE_SIZES[dtype], limits.max_num_tokens
    lines = {
        "hidden states": _hidden_bytes(config, tokens, size),
        "attention": _attention_bytes(config, shard, limits, tokens, size),
        "experts": _moe_bytes(config, shard, tokens, dp_size, size),
        "dense MLP": _dense_bytes(config, shard, tokens, size),
        "logits and sampling": _sampling_bytes(config, shard, limits.num_sampled, size),
        "penalty counts": 5 * limits.max_num_seqs * config.vocab_size,
    }
    if not on_gpu:
        return lines
    lines["libraries"] = LIBRARY_BYTES
    if max(shard.tp_size, shard.ep_size, dp_size) > 1:
        lines["collectives"] = COLLECTIVE_BYTES
    if rows := limits.max_graph_rows:
        lines["CUDA graphs"] = (
            GRAPH_BYTES
            + _hidden_bytes(config, rows, size)
            + _attention_bytes(config, shard, limits, rows, size)
            + _moe_bytes(config, shard, rows, dp_size, size)
            + _sampling_bytes(config, shard, rows, size)
            + size * rows * (config.vocab_size + config.hidden_size)  # what outlives its graph
        )
    return lines


def _hidden_bytes(config: ModelConfig, tokens: int, size: int) -> int:
    """Residual, update, what a norm makes of them, the next update; positions, slots and rotations."""
    inputs = 8 * 8 + 4 * 4 * config.qk_rope_head_dim
    return tokens * (5 * size * config.hidden_size + inputs)


def _attention_bytes(config: ModelConfig, shard: ShardSpec, limits: StepLimits, tokens: int, size: int) -> int:
    heads = config.num_attention_heads // shard.tp_size
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    index_width = config.index_n_heads * config.index_head_dim
    from_hidden = config.q_lora_rank + latent + config.index_head_dim + config.index_n_heads
    row = size * (from_hidden + config.q_lora_rank)  # the projections of x, the normed query latent
    row += size * (heads * config.qk_head_dim + 2 * index_width)  # queries, those of the index twice
    row += size * heads * (latent + config.kv_lora_rank + config.v_head_dim)  # absorbed, attended, unabsorbed
    row += 4 * (config.hidden_size + 3 * config.index_n_heads)  # x and weights of index heads in fp32
    row += size * 2 * config.hidden_size
    row += 2 * 4 * config.index_topk  # this selection and the one before
    scores = max(limits.max_model_len, min(MAX_SCORES, tokens * limits.max_model_len))
    scores_bytes = 4 * 3 * scores if limits.max_model_len > config.index_topk else 0
    return tokens * row + scores_bytes + min(SPLIT_BYTES, tokens * heads * 64 * 4 * (config.kv_lora_rank + 1))


def _moe_bytes(config: ModelConfig, shard: ShardSpec, tokens: int, dp_size: int, size: int) -> int:
    if "sparse" not in config.mlp_layer_types:
        return 0
    hidden, chosen, num_experts = config.hidden_size, config.num_experts_per_tok, config.n_routed_experts
    width = config.moe_intermediate_size // (shard.tp_size if shard.ep_size == 1 else 1)
    shared = config.n_shared_experts * config.moe_intermediate_size // shard.tp_size
    total = tokens * (3 * size * shared + size * hidden)
    total += tokens * (4 * num_experts + 12 * chosen)  # scores of the router, ids, weights
    total += 8 * 2**20  # the same in parts, where there are few tokens
    received = tokens * dp_size
    at_once = min(received, EXPERT_TOKENS)
    total += at_once * chosen * (size * (hidden + width) + 64)  # rows of both products; their order
    total += received * 2 * size * hidden  # what comes in (with one rank: what the experts give), and goes out
    if max(shard.ep_size, dp_size) > 1:
        mine = tokens if dp_size > 1 else -(-tokens // shard.ep_size)
        sent = mine * min(chosen, shard.ep_size)
        total += sent * 2 * size * hidden + mine * (8 + size) * hidden + 2 * tokens * size * hidden
    return total


def _dense_bytes(config: ModelConfig, shard: ShardSpec, tokens: int, size: int) -> int:
    if "dense" not in config.mlp_layer_types:
        return 0
    return tokens * size * (3 * config.intermediate_size // shard.tp_size + config.hidden_size)


def _sampling_bytes(config: ModelConfig, shard: ShardSpec, rows: int, size: int) -> int:
    """fp32 logits, a copy with what was asked for, one of the drawn rows; then sorting, in parts."""
    gathered = 2 * size if shard.tp_size > 1 else size
    logits = rows * config.vocab_size * (gathered + 3 * 4) + rows * size * config.hidden_size
    sorted_at_once = min(rows * config.vocab_size, max(SAMPLED_NUMBERS, config.vocab_size))
    return logits + 64 * sorted_at_once
