# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportReturnType=false
# (Triton's annotations say nothing of how a kernel is launched)
"""Scores of index keys, for :mod:`glm5ray.kernels.triton.indexer`.

Shape suffixes in :mod:`glm5ray.kernels.interface`; W: positions of a row of scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from glm5ray.kernels.triton.device import dot_precision
from glm5ray.kernels.triton.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from glm5ray.kernels.cache_rows import IndexKeys
    from glm5ray.kernels.interface import ForwardBatch


@triton.jit
def _score_tile(
    q,
    w,
    position,
    longest,
    keys_ptr,
    key_scales_ptr,
    pages_ptr,
    page_stride,
    scales_stride,
    keys_page_size,
    I: tl.constexpr,  # noqa: E741
    PAGE: tl.constexpr,
    BT: tl.constexpr,
    BJ: tl.constexpr,
    BI: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores fp32 [positions, BT] for queries [BI, BT * BJ] and their weights."""
    col = tl.arange(0, BI)
    seen = position < longest
    slot = tl.load(pages_ptr + position // PAGE, mask=seen, other=0).to(tl.int64) * PAGE + position % PAGE
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
    total = tl.sum(tl.reshape(score, [position.shape[0], BT, BJ]), axis=2)
    if key_scales_ptr is not None:
        total *= tl.load(key_scales_ptr + page * scales_stride + offset, mask=seen, other=0.0)[:, None]
    return total


@triton.jit(do_not_specialize=["first_token", "T", "table_stride"])
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
            pages = table_ptr + tl.maximum(current, 0).to(tl.int64) * table_stride
            total = _score_tile(
                q,
                w,
                position,
                longest,
                keys_ptr,
                key_scales_ptr,
                pages,
                page_stride,
                scales_stride,
                keys_page_size,
                I,
                PAGE,
                BT,
                BJ,
                BI,
                PRECISION,
            )
            out_at = out_ptr + (tile + own)[None, :].to(tl.int64) * W + position[:, None]
            tl.store(out_at, total, mask=turn[None, :] & is_token[None, :] & (position[:, None] < visible[None, :]))
            done = done | turn


@triton.jit(do_not_specialize=["first_token", "T", "table_stride"])
def _score_span(
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
    SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As :func:`_score`, for SPAN tiles of positions one after the other, with the queries kept."""
    tile = tl.program_id(1) * BT
    own = tl.arange(0, BT)
    token = first_token + tile + own
    is_token = token < T
    visible = tl.load(positions_ptr + token, mask=is_token, other=-1).to(tl.int32) + 1
    owner = tl.load(slice_ptr + token, mask=is_token, other=-1)
    begin = tl.program_id(0) * BS * SPAN
    if begin < tl.max(visible, axis=0):
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
            pages = table_ptr + tl.maximum(current, 0).to(tl.int64) * table_stride
            for start in range(begin, tl.minimum(begin + BS * SPAN, longest), BS):
                position = start + tl.arange(0, BS)
                total = _score_tile(
                    q,
                    w,
                    position,
                    longest,
                    keys_ptr,
                    key_scales_ptr,
                    pages,
                    page_stride,
                    scales_stride,
                    keys_page_size,
                    I,
                    PAGE,
                    BT,
                    BJ,
                    BI,
                    PRECISION,
                )
                out_at = out_ptr + (tile + own)[None, :].to(tl.int64) * W + position[:, None]
                tl.store(out_at, total, mask=turn[None, :] & is_token[None, :] & (position[:, None] < visible[None, :]))
            done = done | turn


class Tile(NamedTuple):
    tokens: int
    positions: int
    num_warps: int
    num_stages: int = 3
    span: int = 1
    """Tiles of positions that a program computes one after the other."""


def score_tile(has_prompts: bool, dtype: torch.dtype) -> Tile:
    """Programs of prompts score 2,048 positions for eight tokens, which share the reading of keys; a decode's, of which
    there are few, one tile. Measured on an H200: docs/experiments/0017-prompts.md."""
    if dtype == torch.float32:
        return Tile(1, 16, 8)
    return Tile(8, 64, 8, 2, 32) if has_prompts else Tile(1, 128, 4)


def launch_score(
    batch: ForwardBatch, tile: Tile, q_TJI: Tensor, w_TJ: Tensor, keys: IndexKeys, scores_TW: Tensor, first: int
) -> None:
    """Writes ``scores_TW``, whose row i is the step's token ``first + i``, as far as that token sees."""
    count, width = scores_TW.shape
    num_heads, head_dim = q_TJI.shape[1:]
    kernel, spans = (_score, ()) if tile.span == 1 else (_score_span, (tile.span,))
    kernel[(triton.cdiv(width, tile.positions * tile.span), triton.cdiv(count, tile.tokens))](
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
        *spans,
        dot_precision(q_TJI),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def variants() -> Iterator[Variant]:
    """At GLM-5's sizes."""
    integers = ("first_token", "T", "W", "token_stride", "head_stride", "w_stride", "page_stride", "scales_stride")
    for name, keys in (("bf16", "bf16"), ("fp32", "fp32"), ("fp8e4nv", "fp8e4nv")):
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        for tile in sorted({score_tile(has_prompts, dtype) for has_prompts in (False, True)}):
            yield Variant(
                name=f"score-{name}-{tile.tokens}x{tile.positions}{f'x{tile.span}' if tile.span > 1 else ''}",
                fn=_score if tile.span == 1 else _score_span,
                signature={"q_ptr": f"*{name}", "w_ptr": "*fp32", "keys_ptr": f"*{keys}", "out_ptr": "*fp32"}
                | {"positions_ptr": "*i64", "slice_ptr": "*i32", "table_ptr": "*i32"}
                | dict.fromkeys((*integers, "table_stride", "keys_page_size"), "i32")
                | ({"key_scales_ptr": "*fp32"} if keys == "fp8e4nv" else {}),
                constants={"J": 32, "I": 128, "PAGE": 64, "BT": tile.tokens, "BJ": 32, "BI": 128, "BS": tile.positions}
                | {"PRECISION": "ieee" if name == "fp32" else "tf32"}
                | ({} if keys == "fp8e4nv" else {"key_scales_ptr": None})
                | ({} if tile.span == 1 else {"SPAN": tile.span}),
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                unaligned=frozenset({"first_token", "T", "W", "table_stride"}),
            )
