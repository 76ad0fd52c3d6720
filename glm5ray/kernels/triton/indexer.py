# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportReturnType=false
# (Triton's annotations say nothing of how a kernel is launched)
"""Which cached tokens each token attends to: scores over the index keys, then the highest of them, exactly.

Scores of a bounded number of tokens at a time are written to memory. Of each stretch of :data:`STRETCH` positions the
highest ``index_topk`` are kept (its scores are held in registers while the lowest that stays is found bit by bit);
what the stretches kept is again such a row, until one stretch is left. Equal scores go to the lower position at each
level, hence in the end.

Shape suffixes in :mod:`glm5ray.kernels.interface`; W: positions of a row of scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from glm5ray.kernels.cache_rows import quantise_index, split_keys
from glm5ray.kernels.triton.index_scores import Tile, launch_score, score_tile
from glm5ray.kernels.triton.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from glm5ray.kernels.interface import ForwardBatch

LEAST_PROMPT = 8
"""Tokens of a slice from which on a step counts as one with prompts."""
STRETCH = 8192
"""Scores of which one program selects."""
MAX_SCORES = 2**26
"""Scores in memory at once: 256 MB."""
LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _add(a, b):
    return a + b


@triton.jit(do_not_specialize=["first_token", "table_stride"])
def _select(
    scores_ptr,
    places_ptr,
    positions_ptr,
    slice_ptr,
    table_ptr,
    out_scores_ptr,
    out_ptr,
    first_token,
    W,
    table_stride,
    out_stride,
    K: tl.constexpr,
    PAGE: tl.constexpr,
    BS: tl.constexpr,
    IS_LAST: tl.constexpr,
):
    """The K highest of one stretch of one token's scores, by growing position; -1 behind them. ``places_ptr``: the
    position of each score, -1 for none; None: scores stand at their positions. The last level writes slots, those
    before it positions and scores."""
    stretch, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = first_token + row
    at = stretch * BS + tl.arange(0, BS)
    visible = tl.load(positions_ptr + token).to(tl.int32) + 1
    if places_ptr is None:
        place = at
        is_there = (at < W) & (at < visible)
    else:
        place = tl.load(places_ptr + row * W + at, mask=at < W, other=-1)
        is_there = place >= 0
    score = tl.load(scores_ptr + row * W + at, mask=is_there, other=0.0)
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # + 0.0: -0.0 and 0.0 are equal scores
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # grows as the score does
    # the K-th highest rank, from its highest bit down: the largest number that K ranks reach
    least = tl.full([], LOWEST, tl.int64)
    for bit in tl.static_range(32):
        higher = least + (1 << (31 - bit))
        count = tl.sum((is_there & (rank >= higher.to(tl.int32))).to(tl.int32), axis=0)
        least = tl.where(count >= K, higher, least)
    above = is_there & (rank > least.to(tl.int32))
    equal = is_there & (rank == least.to(tl.int32))
    room = K - tl.sum(above.to(tl.int32), axis=0)
    # both counts of what stands before a place in one number; neither passes 16 bits
    before = tl.associative_scan(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0, _add)
    before -= above.to(tl.int32) + (equal.to(tl.int32) << 16)
    equal_before = before >> 16
    chosen = above | (equal & (equal_before < room))
    target = (before & 0xFFFF) + tl.minimum(equal_before, room)
    count = tl.sum(chosen.to(tl.int32), axis=0)

    out_at = row * out_stride + stretch * K
    if IS_LAST:
        page_at = table_ptr + tl.load(slice_ptr + token).to(tl.int64) * table_stride + place // PAGE
        place = tl.load(page_at, mask=chosen, other=0) * PAGE + place % PAGE
    else:
        tl.store(out_scores_ptr + out_at + target, score, mask=chosen)
    tl.store(out_ptr + out_at + target, place, mask=chosen)
    for start in tl.static_range(0, K, 1024):
        padding = start + tl.arange(0, 1024)
        tl.store(out_ptr + out_at + padding, tl.full([1024], -1, tl.int32), mask=(padding >= count) & (padding < K))


@dataclass(frozen=True, slots=True)
class SelectPlan:
    batch: ForwardBatch
    index_topk: int
    has_prompts: bool


class SelectTokens:
    """:class:`glm5ray.kernels.interface.SelectTokens`

    tile_of: whether the step has prompts, type of the queries -> how scores are computed."""

    def __init__(self, tile_of: Callable[[bool, torch.dtype], Tile] = score_tile) -> None:
        self.tile_of = tile_of

    def plan(self, batch: ForwardBatch, index_topk: int) -> SelectPlan | None:
        if batch.max_visible <= index_topk:
            return None
        return SelectPlan(batch, index_topk, has_prompts=max(batch.num_tokens, default=1) >= LEAST_PROMPT)

    def run(self, plan: SelectPlan, q_TJI: Tensor, w_TJ: Tensor, keys_NI: Tensor) -> Tensor:
        tokens = q_TJI.shape[0]
        selected_TK = torch.empty(tokens, plan.index_topk, dtype=torch.int32, device=q_TJI.device)
        keys = split_keys(keys_NI, q_TJI.shape[-1])
        if keys.scales_Ps is not None:
            q_TJI, scale_TJ = quantise_index(q_TJI)
            w_TJ = w_TJ.float() * scale_TJ
        width = plan.batch.max_visible
        tile = self.tile_of(plan.has_prompts, q_TJI.dtype)
        together = max(1, MAX_SCORES // width)
        for first in range(0, tokens, together):
            count = min(together, tokens - first)
            scores_TW = torch.empty(count, width, dtype=torch.float32, device=q_TJI.device)
            launch_score(plan.batch, tile, q_TJI, w_TJ, keys, scores_TW, first)
            _launch_select(plan, scores_TW, first, selected_TK)
        return selected_TK


def _launch_select(plan: SelectPlan, scores_TW: Tensor, first: int, selected_TK: Tensor) -> None:
    """Level by level, until one stretch holds all that is left."""
    batch, topk = plan.batch, plan.index_topk
    count = scores_TW.shape[0]
    places_TW: Tensor | None = None
    while True:
        width = scores_TW.shape[1]
        block = min(triton.next_power_of_2(width), max(STRETCH, 2 * triton.next_power_of_2(topk)))
        stretches = triton.cdiv(width, block)
        is_last = stretches == 1
        out_scores, out = scores_TW, selected_TK[first : first + count]
        if not is_last:
            out_scores = torch.empty(count, stretches * topk, dtype=torch.float32, device=scores_TW.device)
            out = torch.empty(count, stretches * topk, dtype=torch.int32, device=scores_TW.device)
        _select[(stretches, count)](
            scores_TW,
            places_TW,
            batch.positions_T,
            batch.slice_T,
            batch.page_table_SP,
            out_scores,
            out,
            first,
            width,
            batch.page_table_SP.stride(0),
            out.stride(0),
            topk,
            batch.page_size,
            block,
            is_last,
            num_warps=_select_warps(block),
        )
        if is_last:
            return
        scores_TW, places_TW = out_scores, out


def _select_warps(block: int) -> int:
    """A thread holds up to 16 scores."""
    return min(max(block // 512, 1), 32)


select_tokens = SelectTokens()


def variants() -> Iterator[Variant]:
    """At GLM-5's sizes."""
    for block, is_last in ((4096, True), (STRETCH, True), (STRETCH, False)):
        for is_first in (True, False):
            yield Variant(
                name=f"select-{block}-{'last' if is_last else 'level'}{'-first' * is_first}",
                fn=_select,
                signature={"scores_ptr": "*fp32", "positions_ptr": "*i64", "slice_ptr": "*i32", "table_ptr": "*i32"}
                | {"out_scores_ptr": "*fp32", "out_ptr": "*i32"}
                | dict.fromkeys(("first_token", "W", "table_stride", "out_stride"), "i32")
                | ({} if is_first else {"places_ptr": "*i32"}),
                constants={"K": 2048, "PAGE": 64, "BS": block, "IS_LAST": is_last}
                | ({"places_ptr": None} if is_first else {}),
                num_warps=_select_warps(block),
                unaligned=frozenset({"first_token", "W", "table_stride"}),
                is_slow_to_compile=block != STRETCH or is_first,
            )
