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
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from glm5ray.kernels.cache_rows import quantise_index, split_keys
from glm5ray.kernels.triton.device import dot_precision
from glm5ray.kernels.triton.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from glm5ray.kernels.cache_rows import IndexKeys
    from glm5ray.kernels.interface import ForwardBatch

STRETCH = 8192
"""Scores of which one program selects."""
MAX_SCORES = 2**26
"""Scores in memory at once: 256 MB."""
LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _score(
    q_ptr,
    w_ptr,
    keys_ptr,
    key_scales_ptr,
    positions_ptr,
    slice_ptr,
    table_ptr,
    out_ptr,
    first_token,
    T,
    W,
    token_stride,
    head_stride,
    w_stride,
    page_stride,
    scales_stride,
    table_stride,
    keys_page_size,
    J: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    PAGE: tl.constexpr,
    BT: tl.constexpr,
    BJ: tl.constexpr,
    BI: tl.constexpr,
    BS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores of BT tokens for BS positions. Tokens of one slice share its keys; those of another slice in between are
    computed in a turn of their own."""
    tile = tl.program_id(1) * BT
    own = tl.arange(0, BT)
    token = first_token + tile + own
    is_token = token < T
    visible = tl.load(positions_ptr + token, mask=is_token, other=-1).to(tl.int32) + 1
    owner = tl.load(slice_ptr + token, mask=is_token, other=-1)
    position = tl.program_id(0) * BS + tl.arange(0, BS)
    if tl.program_id(0) * BS < tl.max(visible, axis=0):
        row = tl.arange(0, BT * BJ)
        q_token, head, col = (first_token + tile + row // BJ).to(tl.int64), row % BJ, tl.arange(0, BI)
        is_row = (q_token < T) & (head < J)
        q_at = q_ptr + q_token[None, :] * token_stride + head[None, :] * head_stride + col[:, None]
        q = tl.load(q_at, mask=is_row[None, :] & (col < I)[:, None], other=0.0)
        w = tl.load(w_ptr + q_token * w_stride + head, mask=is_row, other=0.0).to(tl.float32)
        done = own < 0
        while tl.min(done.to(tl.int32), axis=0) == 0:
            current = tl.max(tl.where(done, -1, owner), axis=0)
            turn = owner == current
            longest = tl.max(tl.where(turn, visible, 0), axis=0)
            seen = position < longest
            table_at = table_ptr + tl.maximum(current, 0).to(tl.int64) * table_stride + position // PAGE
            slot = tl.load(table_at, mask=seen, other=0).to(tl.int64) * PAGE + position % PAGE
            page, offset = slot // keys_page_size, slot % keys_page_size
            key_at = keys_ptr + (page * page_stride + offset * I)[:, None] + col[None, :]
            keys = tl.load(key_at, mask=seen[:, None] & (col < I)[None, :], other=0.0)
            if key_scales_ptr is not None:  # every e4m3 number is an fp16 number
                score = tl.dot(keys.to(tl.float16), q.to(tl.float16), input_precision=PRECISION)
            elif PRECISION == "ieee":
                score = tl.dot(keys.to(tl.float32), q.to(tl.float32), input_precision=PRECISION)
            else:
                score = tl.dot(keys, q, input_precision=PRECISION)
            score = tl.maximum(score, 0.0) * w[None, :]
            total = tl.sum(tl.reshape(score, [BS, BT, BJ]), axis=2)
            if key_scales_ptr is not None:
                total *= tl.load(key_scales_ptr + page * scales_stride + offset, mask=seen, other=0.0)[:, None]
            out_at = out_ptr + (tile + own)[None, :].to(tl.int64) * W + position[:, None]
            tl.store(out_at, total, mask=turn[None, :] & is_token[None, :] & (position[:, None] < visible[None, :]))
            done = done | turn


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
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
    tokens_together: int
    """Tokens that a program scores: those of a prompt share the reading of keys."""


class SelectTokens:
    """:class:`glm5ray.kernels.interface.SelectTokens`"""

    def plan(self, batch: ForwardBatch, index_topk: int) -> SelectPlan | None:
        if batch.max_visible <= index_topk:
            return None
        has_prompts = max(batch.num_tokens, default=1) >= 8
        return SelectPlan(batch, index_topk, 4 if has_prompts else 1)

    def run(self, plan: SelectPlan, q_TJI: Tensor, w_TJ: Tensor, keys_NI: Tensor) -> Tensor:
        tokens = q_TJI.shape[0]
        selected_TK = torch.empty(tokens, plan.index_topk, dtype=torch.int32, device=q_TJI.device)
        keys = split_keys(keys_NI, q_TJI.shape[-1])
        if keys.scales_Ps is not None:
            q_TJI, scale_TJ = quantise_index(q_TJI)
            w_TJ = w_TJ.float() * scale_TJ
        width = plan.batch.max_visible
        together = max(1, MAX_SCORES // width)
        for first in range(0, tokens, together):
            count = min(together, tokens - first)
            scores_TW = torch.empty(count, width, dtype=torch.float32, device=q_TJI.device)
            _launch_score(plan, q_TJI, w_TJ, keys, scores_TW, first)
            _launch_select(plan, scores_TW, first, selected_TK)
        return selected_TK


class Tile(NamedTuple):
    tokens: int
    positions: int
    num_warps: int


def score_tile(tokens_together: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return Tile(1, 16, 8)
    return Tile(tokens_together, 128, 4) if tokens_together == 1 else Tile(tokens_together, 128, 8)


def _launch_score(
    plan: SelectPlan, q_TJI: Tensor, w_TJ: Tensor, keys: IndexKeys, scores_TW: Tensor, first: int
) -> None:
    batch, (count, width) = plan.batch, scores_TW.shape
    num_heads, head_dim = q_TJI.shape[1:]
    tile = score_tile(plan.tokens_together, q_TJI.dtype)
    _score[(triton.cdiv(width, tile.positions), triton.cdiv(count, tile.tokens))](
        q_TJI,
        w_TJ,
        keys.keys_PsI,
        keys.scales_Ps,
        batch.positions_T,
        batch.slice_T,
        batch.page_table_SP,
        scores_TW,
        first,
        first + count,
        width,
        q_TJI.stride(0),
        q_TJI.stride(1),
        w_TJ.stride(0),
        keys.keys_PsI.stride(0),
        0 if keys.scales_Ps is None else keys.scales_Ps.stride(0),
        batch.page_table_SP.stride(0),
        keys.keys_PsI.shape[1],
        num_heads,
        head_dim,
        batch.page_size,
        tile.tokens,
        triton.next_power_of_2(num_heads),
        max(16, triton.next_power_of_2(head_dim)),
        tile.positions,
        dot_precision(q_TJI),
        num_warps=tile.num_warps,
    )


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
    integers = ("first_token", "T", "W", "token_stride", "head_stride", "w_stride", "page_stride", "scales_stride")
    for name, keys in (("bf16", "bf16"), ("fp32", "fp32"), ("fp8e4nv", "fp8e4nv")):
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        for tile in sorted({score_tile(together, dtype) for together in (1, 4)}):
            yield Variant(
                name=f"score-{name}-{tile.tokens}x{tile.positions}",
                fn=_score,
                signature={"q_ptr": f"*{name}", "w_ptr": "*fp32", "keys_ptr": f"*{keys}", "out_ptr": "*fp32"}
                | {"positions_ptr": "*i64", "slice_ptr": "*i32", "table_ptr": "*i32"}
                | dict.fromkeys((*integers, "table_stride", "keys_page_size"), "i32")
                | ({"key_scales_ptr": "*fp32"} if keys == "fp8e4nv" else {}),
                constants={"J": 32, "I": 128, "PAGE": 64, "BT": tile.tokens, "BJ": 32, "BI": 128, "BS": tile.positions}
                | {"PRECISION": "ieee" if name == "fp32" else "tf32"}
                | ({} if keys == "fp8e4nv" else {"key_scales_ptr": None}),
                num_warps=tile.num_warps,
                unaligned=frozenset({"first_token", "T", "W", "table_stride"}),
            )
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
