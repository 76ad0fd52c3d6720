"""Greedy tokens, and whether what they came from is finite: two launches that read the logits once, in their own type.

The first finds the best of each part of a row, so that few rows too are enough work for a GPU. A part's best is one
number: the logit's bits, made to order as integers do, above the inverted column, so that of equal logits the lowest
column wins; a logit that is not finite beats all. Shape suffixes in :mod:`glm5ray.kernels.interface`; B: parts."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportReturnType=false
# (Triton's annotations say nothing of how a kernel is launched)
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from glm5ray.kernels.triton.device import num_processors
from glm5ray.kernels.triton.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

COLUMNS = 2048
"""Of a row, read at once by one program."""
NUM_WARPS = 4
MAX_PARTS = 128
LAST = tl.constexpr(0x7FFFFFFFFFFFFFFF)
"""Above the number of any logit."""


@triton.jit
def _is_finite(x):
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@triton.jit(do_not_specialize=["num_parts"])
def _best_of_part(logits_ptr, best_ptr, W, row_stride, part_size, num_parts, BW: tl.constexpr):
    """``best[row, part]``, int64."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full([BW], -LAST, tl.int64)
    for start in range(part * part_size, min((part + 1) * part_size, W), BW):
        column = start + tl.arange(0, BW)
        x = tl.load(logits_ptr + row * row_stride + column, mask=column < W, other=0.0).to(tl.float32)
        bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: -0.0 becomes 0.0, its equal
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
        key = tl.where(_is_finite(x), key, LAST)
        best = tl.where((column < W) & (key > best), key, best)
    tl.store(best_ptr + row * num_parts + part, tl.max(best, axis=0))


@triton.jit(do_not_specialize=["L", "num_parts"])
def _pick(best_ptr, hidden_ptr, out_ptr, L, M, hidden_stride, num_parts, BB: tl.constexpr, BM: tl.constexpr):
    """Token and flags of one row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BB)
    keys = tl.load(best_ptr + row * num_parts + part, mask=part < num_parts, other=-LAST)
    key = tl.max(keys, axis=0)
    finite = tl.full([BM], 1, tl.int32)
    for start in range(0, M, BM):
        column = start + tl.arange(0, BM)
        x = tl.load(hidden_ptr + row * hidden_stride + column, mask=column < M, other=0.0).to(tl.float32)
        finite = tl.where(_is_finite(x), finite, 0)
    is_finite = key != LAST
    tl.store(out_ptr + row, tl.where(is_finite, 0x7FFFFFFF - (key & 0xFFFFFFFF), 0))
    tl.store(out_ptr + L + row, tl.min(finite, axis=0).to(tl.int64))
    tl.store(out_ptr + 2 * L + row, is_finite.to(tl.int64))


def pick_tokens(hidden_LM: Tensor, logits_LW: Tensor) -> Tensor:
    """:class:`glm5ray.kernels.interface.PickTokens`; rows may be strided."""
    rows, width = logits_LW.shape
    out_3L = torch.empty(3, rows, dtype=torch.int64, device=logits_LW.device)
    if rows == 0:
        return out_3L
    wanted = max(1, min(MAX_PARTS, 4 * num_processors(logits_LW) // rows))
    part_size = triton.cdiv(triton.cdiv(width, wanted), COLUMNS) * COLUMNS
    num_parts = triton.cdiv(width, part_size)
    best_LB = torch.empty(rows, num_parts, dtype=torch.int64, device=logits_LW.device)
    _best_of_part[(rows, num_parts)](
        logits_LW, best_LB, width, logits_LW.stride(0), part_size, num_parts, COLUMNS, num_warps=NUM_WARPS
    )
    hidden = hidden_LM.shape[1]
    columns = min(COLUMNS, triton.next_power_of_2(hidden))
    _pick[(rows,)](
        best_LB,
        hidden_LM,
        out_3L,
        rows,
        hidden,
        hidden_LM.stride(0),
        num_parts,
        MAX_PARTS,
        columns,
        num_warps=NUM_WARPS,
    )
    return out_3L


def variants() -> Iterator[Variant]:
    for name in ("*bf16", "*fp32"):
        yield Variant(
            name=f"best-{name[1:]}",
            fn=_best_of_part,
            signature={"logits_ptr": name, "best_ptr": "*i64"}
            | dict.fromkeys(("W", "row_stride", "part_size", "num_parts"), "i32"),
            constants={"BW": COLUMNS},
            num_warps=NUM_WARPS,
            unaligned=frozenset({"num_parts"}),
        )
        yield Variant(
            name=f"pick-{name[1:]}",
            fn=_pick,
            signature={"best_ptr": "*i64", "hidden_ptr": name, "out_ptr": "*i64"}
            | dict.fromkeys(("L", "M", "hidden_stride", "num_parts"), "i32"),
            constants={"BB": MAX_PARTS, "BM": COLUMNS},
            num_warps=NUM_WARPS,
            unaligned=frozenset({"L", "num_parts"}),
        )
