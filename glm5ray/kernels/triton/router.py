"""The router: scores of all experts in fp32, then the choice, in two launches.

The first splits the product over the hidden size, so that few tokens too are enough work for a GPU; the second adds the
parts in order, and chooses. Shape suffixes in :mod:`glm5ray.kernels.interface`; B: parts of the sum."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportReturnType=false
# (Triton's annotations say nothing of how a kernel is launched)
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from glm5ray.kernels.triton.device import num_processors
from glm5ray.kernels.triton.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from glm5ray.kernels.interface import RouterSettings


MAX_PARTS = 32


@triton.jit(do_not_specialize=["T"])
def _gate(
    x_ptr,
    gate_ptr,
    part_ptr,
    T,
    E,
    x_stride,
    part_size,
    M: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of ``part[b, t, e] = x @ gate.T`` over the columns of part b."""
    expert = tl.program_id(0) * BE + tl.arange(0, BE)
    part = tl.program_id(1)
    token = (tl.program_id(2) * BT + tl.arange(0, BT)).to(tl.int64)
    total = tl.zeros([BE, BT], tl.float32)
    for start in range(part * part_size, min((part + 1) * part_size, M), BM):
        col = start + tl.arange(0, BM)
        gate_at = gate_ptr + expert[:, None] * M + col[None, :]
        gate = tl.load(gate_at, mask=(expert < E)[:, None] & (col < M)[None, :], other=0.0)
        x_at = x_ptr + token[None, :] * x_stride + col[:, None]
        x = tl.load(x_at, mask=(token < T)[None, :] & (col < M)[:, None], other=0.0).to(tl.float32)
        total = tl.dot(gate, x, total, input_precision=PRECISION)
    out_at = part_ptr + (part * T + token[None, :]) * E + expert[:, None]
    tl.store(out_at, total, mask=(token < T)[None, :] & (expert < E)[:, None])


@triton.jit(do_not_specialize=["T", "num_parts"])
def _choose(
    part_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    T,
    num_parts,
    factor,
    E: tl.constexpr,
    BE: tl.constexpr,
    BB: tl.constexpr,
    A: tl.constexpr,
    BA: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """The experts of one token. A score that is NaN counts as less than any number: every token gets A experts."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BE)
    is_expert = expert < E
    part = tl.arange(0, BB)[:, None]
    at = part_ptr + (part * T + token) * E + expert[None, :]
    logit = tl.sum(tl.load(at, mask=(part < num_parts) & is_expert[None, :], other=0.0), axis=0)
    score = 1.0 / (1.0 + tl.exp(-logit))
    choice = score + tl.load(bias_ptr + expert, mask=is_expert, other=0.0).to(tl.float32)
    choice = tl.where(choice == choice, choice, -1e38)
    if NUM_GROUPS > 1:
        choice = tl.where(is_expert, choice, float("-inf"))
        choice = _best_groups(choice, expert, E, BE, NUM_GROUPS, KEPT_GROUPS)
    choice = tl.where(is_expert, choice, float("-inf"))

    place = tl.arange(0, BA)
    ids = tl.zeros([BA], tl.int32)
    weights = tl.zeros([BA], tl.float32)
    for a in tl.static_range(A):
        best = tl.max(choice, axis=0)
        number = tl.min(tl.where(choice == best, expert, BE), axis=0)
        weight = tl.sum(tl.where(expert == number, score, 0.0), axis=0)
        ids = tl.where(place == a, number, ids)
        weights = tl.where(place == a, weight, weights)
        choice = tl.where(expert == number, float("-inf"), choice)
    if NORMALISE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    tl.store(ids_ptr + token * A + place, ids.to(tl.int64), mask=place < A)
    tl.store(weights_ptr + token * A + place, weights * factor, mask=place < A)


@triton.jit
def _best_groups(
    choice,
    expert,
    E: tl.constexpr,
    BE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
):
    """``choice`` with -inf outside the ``KEPT_GROUPS`` groups whose two highest sum to most."""
    size: tl.constexpr = E // NUM_GROUPS
    group = expert // size
    group_sum = tl.full([BE], float("-inf"), tl.float32)
    for g in tl.static_range(NUM_GROUPS):
        inside = tl.where(group == g, choice, float("-inf"))
        first = tl.max(inside, axis=0)
        at = tl.min(tl.where(inside == first, expert, BE), axis=0)
        second = tl.max(tl.where(expert == at, float("-inf"), inside), axis=0)
        both = first + (second if size > 1 else 0.0)
        group_sum = tl.where(group == g, both, group_sum)
    kept = expert < 0
    for _ in tl.static_range(KEPT_GROUPS):
        best = tl.max(group_sum, axis=0)
        at = tl.min(tl.where(group_sum == best, group, NUM_GROUPS), axis=0)
        kept = kept | (group == at)
        group_sum = tl.where(group == at, float("-inf"), group_sum)
    return tl.where(kept, choice, float("-inf"))


class Tile(NamedTuple):
    tokens: int
    experts: int
    columns: int
    num_warps: int
    num_stages: int


def choose_tile(tokens: int) -> Tile:
    return Tile(16, 32, 64, 4, 3) if tokens <= 16 else Tile(64, 64, 32, 4, 3)


def route(x_TM: Tensor, gate_EM: Tensor, bias_E: Tensor, settings: RouterSettings) -> tuple[Tensor, Tensor]:
    tokens, width = x_TM.shape
    num_experts = gate_EM.shape[0]
    if tokens == 0:
        return choose(x_TM.new_empty(1, 0, num_experts, dtype=torch.float32), bias_E, settings)
    tile = choose_tile(tokens)
    expert_tiles, token_tiles = triton.cdiv(num_experts, tile.experts), triton.cdiv(tokens, tile.tokens)
    wanted = max(1, min(MAX_PARTS, 2 * num_processors(x_TM) // (expert_tiles * token_tiles)))
    part_size = triton.cdiv(triton.cdiv(width, wanted), tile.columns) * tile.columns
    num_parts = triton.cdiv(width, part_size)
    part_BTE = torch.empty(num_parts, tokens, num_experts, dtype=torch.float32, device=x_TM.device)
    _gate[(expert_tiles, num_parts, token_tiles)](
        x_TM,
        gate_EM,
        part_BTE,
        tokens,
        num_experts,
        x_TM.stride(0),
        part_size,
        width,
        tile.tokens,
        tile.experts,
        tile.columns,
        "tf32x3" if x_TM.is_cuda else "ieee",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return choose(part_BTE, bias_E, settings)


def choose(part_BTE: Tensor, bias_E: Tensor, settings: RouterSettings) -> tuple[Tensor, Tensor]:
    """:class:`glm5ray.kernels.interface.Route` of products that are there already, fp32, in parts of their sums."""
    num_parts, tokens, num_experts = part_BTE.shape
    chosen = settings.num_experts_per_tok
    ids_TA = torch.empty(tokens, chosen, dtype=torch.int64, device=part_BTE.device)
    weights_TA = torch.empty(tokens, chosen, dtype=torch.float32, device=part_BTE.device)
    if tokens == 0:
        return ids_TA, weights_TA
    _choose[(tokens,)](
        part_BTE,
        bias_E,
        ids_TA,
        weights_TA,
        tokens,
        num_parts,
        settings.routed_scaling_factor,
        num_experts,
        triton.next_power_of_2(num_experts),
        1 if num_parts == 1 else MAX_PARTS,
        chosen,
        triton.next_power_of_2(chosen),
        settings.n_group,
        settings.topk_group,
        settings.norm_topk_prob,
        num_warps=1 if num_experts <= 64 else 4,
    )
    return ids_TA, weights_TA


def variants() -> Iterator[Variant]:
    for name in ("*bf16", "*fp32"):
        for tile in (choose_tile(1), choose_tile(4096)):
            yield Variant(
                name=f"gate-{name[1:]}-{tile.tokens}x{tile.experts}",
                fn=_gate,
                signature={"x_ptr": name, "gate_ptr": "*fp32", "part_ptr": "*fp32"}
                | dict.fromkeys(("T", "E", "x_stride", "part_size"), "i32"),
                constants={"M": 6144, "BT": tile.tokens, "BE": tile.experts, "BM": tile.columns}
                | {"PRECISION": "tf32x3"},
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                unaligned=frozenset({"T"}),
            )
    for groups, kept, parts in ((1, 1, 1), (1, 1, MAX_PARTS), (8, 4, MAX_PARTS)):
        yield Variant(
            name=f"choose-{groups}-{parts}",
            fn=_choose,
            signature={"part_ptr": "*fp32", "bias_ptr": "*fp32", "ids_ptr": "*i64", "weights_ptr": "*fp32"}
            | {"T": "i32", "num_parts": "i32", "factor": "fp32"},
            constants={"E": 256, "BE": 256, "BB": parts, "A": 8, "BA": 8, "NUM_GROUPS": groups, "KEPT_GROUPS": kept}
            | {"NORMALISE": True},
            num_warps=4,
            unaligned=frozenset({"T", "num_parts"}),
        )
