"""The assignments of tokens to experts in order of experts, as *rows*, and each expert's rows cut into tiles; all on
the device, in one launch for few assignments and three for many, whatever the routing.

Letters beside those of :mod:`glm5ray.kernels.interface`: X assignments or rows, W widths of tiles, B blocks of
assignments."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportReturnType=false
# (Triton's annotations say nothing of how a kernel is launched)
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from glm5ray.kernels.triton.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

MAX_ONE_LAUNCH = 512
"""Assignments that one program sorts by comparing all with all."""
BLOCK = tl.constexpr(256)
"""Assignments of a program otherwise."""
STEP = tl.constexpr(32)
"""Assignments that are compared with all of a program at once."""


# --- sorting ----------------------------------------------------------------------------------------------------------


@triton.jit
def _expert_of(ids_X, x, stop, first_expert, E):
    """int32: the expert's number on this rank; E for another rank's, E + 1 from ``stop`` on."""
    local = tl.load(ids_X + x, mask=x < stop, other=0) - first_expert
    local = tl.where((local >= 0) & (local < E), local, E).to(tl.int32)
    return tl.where(x < stop, local, E + 1)


@triton.jit
def _count(ids_X, start, stop, first_expert, E, E2: tl.constexpr):
    """int32 [E2]: how many of assignments start .. stop each expert has."""
    e = tl.arange(0, E2)
    count = tl.zeros((E2,), tl.int32)
    for j0 in range(start, stop, STEP):
        other = _expert_of(ids_X, j0 + tl.arange(0, STEP), stop, first_expert, E)
        count += tl.sum((other[None, :] == e[:, None]).to(tl.int32), 1)
    return tl.where(e < E, count, 0)


@triton.jit
def _rank(ids_X, x, expert, start, stop, first_expert, E, SMALLER: tl.constexpr):
    """Of each x, how many of assignments start .. stop with the same expert stand before it; SMALLER: and of smaller
    experts anywhere."""
    rank = tl.zeros(x.shape, tl.int32)
    for j0 in range(start, stop, STEP):
        j = j0 + tl.arange(0, STEP)
        other = _expert_of(ids_X, j, stop, first_expert, E)
        is_before = (other[None, :] == expert[:, None]) & (j[None, :] < x[:, None])
        if SMALLER:
            is_before = is_before | (other[None, :] < expert[:, None])
        rank += tl.sum(is_before.to(tl.int32), 1)
    return rank


@triton.jit(do_not_specialize=["X", "first_expert"])
def sort_kernel(
    ids_X,
    assignment_X,
    row_X,
    row_start_E1,
    cumulative_WE,
    start_WE,
    X,
    first_expert,
    E,
    E2: tl.constexpr,
    X2: tl.constexpr,
    WIDEST: tl.constexpr,
    NUM_WIDTHS: tl.constexpr,
):
    """Everything, in one program. X2: X, rounded up."""
    x = tl.arange(0, X2)
    expert = _expert_of(ids_X, x, X, first_expert, E)
    row = _rank(ids_X, x, expert, 0, X, first_expert, E, True)
    tl.store(row_X + x, row, mask=x < X)
    tl.store(assignment_X + row, x, mask=x < X)
    count = _count(ids_X, 0, X, first_expert, E, E2)
    _plan(count, row_start_E1, cumulative_WE, start_WE, E, E2, WIDEST, NUM_WIDTHS)


@triton.jit(do_not_specialize=["X", "first_expert"])
def count_kernel(ids_X, count_BE, X, first_expert, E, E2: tl.constexpr):
    """count_BE: [B, E2] int32, the assignments of each block to each expert."""
    block = tl.program_id(0)
    count = _count(ids_X, block * BLOCK, min(X, (block + 1) * BLOCK), first_expert, E, E2)
    tl.store(count_BE + block * E2 + tl.arange(0, E2), count)


@triton.jit(do_not_specialize=["B"])
def offsets_kernel(
    count_BE,
    row_start_E1,
    cumulative_WE,
    start_WE,
    B,
    E,
    E2: tl.constexpr,
    WIDEST: tl.constexpr,
    NUM_WIDTHS: tl.constexpr,
):
    """count_BE: in place, how many assignments to the expert stand in the blocks before."""
    e = tl.arange(0, E2)
    total = tl.zeros((E2,), tl.int32)
    for b0 in range(0, B, 16):
        b = b0 + tl.arange(0, 16)
        at = count_BE + b[:, None] * E2 + e[None, :]
        count = tl.load(at, mask=(b < B)[:, None], other=0)
        tl.store(at, total[None, :] + tl.cumsum(count, 0) - count, mask=(b < B)[:, None])
        total += tl.sum(count, 0)
    _plan(total, row_start_E1, cumulative_WE, start_WE, E, E2, WIDEST, NUM_WIDTHS)


@triton.jit(do_not_specialize=["X", "first_expert"])
def place_kernel(ids_X, before_BE, row_start_E1, assignment_X, row_X, X, first_expert, E, E2: tl.constexpr):
    block = tl.program_id(0)
    x = block * BLOCK + tl.arange(0, BLOCK)
    stop = min(X, (block + 1) * BLOCK)
    expert = _expert_of(ids_X, x, stop, first_expert, E)
    is_here = expert < E
    rank = _rank(ids_X, x, expert, block * BLOCK, stop, first_expert, E, False)
    before_here = tl.load(before_BE + block * E2 + expert, mask=is_here, other=0)
    before_elsewhere = block * BLOCK - tl.sum(tl.load(before_BE + block * E2 + tl.arange(0, E2)), 0)
    row = tl.load(row_start_E1 + tl.minimum(expert, E)) + rank + tl.where(is_here, before_here, before_elsewhere)
    tl.store(row_X + x, row, mask=x < X)
    tl.store(assignment_X + row, x, mask=x < X)


# --- tiles ------------------------------------------------------------------------------------------------------------


@triton.jit
def _plan(
    count,
    row_start_E1,
    cumulative_WE,
    start_WE,
    E,
    E2: tl.constexpr,
    WIDEST: tl.constexpr,
    NUM_WIDTHS: tl.constexpr,
):
    """Each expert's first row, and the cut of its n rows: n // WIDEST tiles of that width; of what remains (r), if it
    is at most 3/4 of WIDEST but more than half, a tile of half of it and the narrowest that holds the rest, else the
    narrowest that holds r.

    cumulative_WE: tiles of this width up to this expert, its own included. start_WE: its first row of this width.
    """
    e = tl.arange(0, E2)
    stop = tl.cumsum(count, 0)
    first = stop - count
    tl.store(row_start_E1 + e, first, mask=e < E)
    tl.store(row_start_E1 + e + 1, stop, mask=e == E - 1)
    if NUM_WIDTHS > 0:
        rest = count % WIDEST
        is_cut = (rest > WIDEST // 2) & (rest <= WIDEST // 2 + WIDEST // 4)
        narrow = tl.where(is_cut, rest - WIDEST // 2, rest)
        start = first + count - rest
        widest = count // WIDEST
        for w in tl.static_range(NUM_WIDTHS):
            is_here = narrow > 0
            if w + 1 < NUM_WIDTHS:
                is_here = is_here & (narrow > (WIDEST >> w) // 2)
            is_here = is_here & (narrow <= (WIDEST >> w))
            tiles, where = is_here.to(tl.int32), tl.where(is_cut, start + WIDEST // 2, start)
            if w == 0:
                tiles, where = widest + tiles, first
            if w == 1:
                tiles, where = tl.where(is_cut, 1, tiles), start
            tl.store(cumulative_WE + w * E + e, tl.cumsum(tiles, 0), mask=e < E)
            tl.store(start_WE + w * E + e, where, mask=e < E)


@triton.jit
def find_tile(tile, cumulative_E, start_E, row_start_E1, E, E2: tl.constexpr, WIDTH: tl.constexpr):
    """(expert, first row, rows) of a tile; no rows: there are fewer tiles."""
    e = tl.arange(0, E2)
    cumulative = tl.load(cumulative_E + e, mask=e < E, other=2147483647)
    expert = tl.sum((cumulative <= tile).to(tl.int32), 0)
    is_tile = expert < E
    expert = tl.minimum(expert, E - 1)
    before = tl.load(cumulative_E + expert - 1, mask=expert > 0, other=0)
    row = tl.load(start_E + expert) + (tile - before) * WIDTH
    rows = tl.load(row_start_E1 + expert + 1) - row
    return expert, row, tl.where(is_tile, tl.minimum(rows, WIDTH), 0)


@triton.jit
def combine_kernel(rows_XM, row_TA, weights_TA, num_rows_here, out_TM, M, A: tl.constexpr, COLUMNS: tl.constexpr):
    """out[t] = sum of weights[t, a] * rows[row[t, a]] by order of a, in fp32; rows from num_rows_here on count as 0."""
    t = tl.program_id(0)
    m = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    last = tl.load(num_rows_here)
    total = tl.zeros((COLUMNS,), tl.float32)
    for a in tl.static_range(A):
        row = tl.load(row_TA + t * A + a)
        weight = tl.load(weights_TA + t * A + a)
        here = tl.load(rows_XM + row.to(tl.int64) * M + m, mask=(m < M) & (row < last), other=0)
        total += tl.where(row < last, weight, 0.0) * here.to(tl.float32)
    tl.store(out_TM + t.to(tl.int64) * M + m, total.to(out_TM.dtype.element_ty), mask=m < M)


# --- launches ---------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Assignments in order of experts, and their tiles, all on the device."""

    assignment_X: Tensor
    """int32: row -> token * A + choice. Those of other ranks' experts stand last."""
    row_TA: Tensor
    """int32: its inverse"""
    row_start_E1: Tensor
    """int32 [E + 1]: first row of each expert; the last is the number of rows of this rank."""
    cumulative_WE: Tensor
    start_WE: Tensor
    """int32, of :func:`_plan`"""


def sort_rows(ids_TA: Tensor, first_expert: int, num_experts: int, widths: tuple[int, ...]) -> Rows:
    """Rows by expert, in order of tokens within one; whatever number is not one of this rank's experts is left out.

    ids_TA: int64. widths: of tiles, each half of the one before; none: no tiles are planned. Waits for nothing."""
    ids_X, num_rows = ids_TA.contiguous(), ids_TA.numel()

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids_TA.device)

    rows = Rows(
        new(num_rows),
        new(*ids_TA.shape),
        new(num_experts + 1),
        new(len(widths), num_experts),
        new(len(widths), num_experts),
    )
    sizes = {"first_expert": first_expert, "E": num_experts, "E2": max(16, triton.next_power_of_2(num_experts))}
    tiles = {"WIDEST": widths[0] if widths else 1, "NUM_WIDTHS": len(widths)}
    if num_rows <= MAX_ONE_LAUNCH:
        X2 = max(16, triton.next_power_of_2(num_rows))
        sort_kernel[(1,)](ids_X, *rows, num_rows, **sizes, **tiles, X2=X2, num_warps=8)
        return rows
    blocks = triton.cdiv(num_rows, BLOCK.value)
    count_BE = new(blocks, sizes["E2"])
    count_kernel[(blocks,)](ids_X, count_BE, num_rows, **sizes)
    planned = rows.row_start_E1, rows.cumulative_WE, rows.start_WE
    offsets_kernel[(1,)](count_BE, *planned, blocks, num_experts, sizes["E2"], **tiles, num_warps=8)
    place_kernel[(blocks,)](ids_X, count_BE, rows.row_start_E1, rows.assignment_X, rows.row_TA, num_rows, **sizes)
    return rows


def max_tiles(width_index: int, widths: tuple[int, ...], num_rows: int, num_experts: int) -> int:
    """How many tiles of a width there can be, whatever the routing."""
    if width_index == 0:
        return num_rows // (3 * widths[0] // 4)
    if width_index == 1:
        return min(num_experts, num_rows // (widths[0] // 4))
    return min(num_experts, num_rows)


# --- the gate ---------------------------------------------------------------------------------------------------------


def variants() -> Iterator[Variant]:
    """For GLM-5's sizes: 256 experts, 8 of a token."""

    def variant(name: str, fn: triton.JITFunction, constants: dict[str, object], num_warps: int = 4) -> Variant:
        types = {"ids_X": "*i64", "rows_XM": "*bf16", "out_TM": "*bf16", "weights_TA": "*fp32"}
        pointers = {arg: types.get(arg, "*i32") for arg in fn.arg_names if "_" in arg}
        pointers |= {arg: "i32" for arg in fn.arg_names if arg in ("X", "B", "E", "M", "first_expert")}
        signature = {arg: kind for arg, kind in pointers.items() if arg not in constants}
        unaligned = frozenset({"X", "B", "first_expert", "num_rows_here"} & set(signature))
        return Variant(
            name=name, fn=fn, signature=signature, constants=constants, num_warps=num_warps, unaligned=unaligned
        )

    for widest, widths in ((256, 5), (128, 4), (1, 0)):
        plan = {"E2": 256, "WIDEST": widest, "NUM_WIDTHS": widths}
        for few in (16, MAX_ONE_LAUNCH):
            yield variant(f"sort_{few}_{widest}", sort_kernel, plan | {"X2": few}, 8)
        yield variant(f"offsets_{widest}", offsets_kernel, plan, 8)
    yield variant("count", count_kernel, {"E2": 256})
    yield variant("place", place_kernel, {"E2": 256})
    yield variant("combine", combine_kernel, {"A": 8, "COLUMNS": 1024})
