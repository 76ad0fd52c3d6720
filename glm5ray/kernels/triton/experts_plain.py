"""Routed experts in the model's own type, bf16 or fp32: nano's, and those of checkpoints that are not quantised.

Rows are the assignments of tokens to experts, sorted by expert, each expert's cut into tiles of one width
(:mod:`glm5ray.kernels.triton.expert_rows`). Nothing waits for the host and grids are bounds, so that a CUDA graph
captured once serves every routing. Letters beside those of :mod:`glm5ray.kernels.interface`: X rows."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportReturnType=false
# (Triton's annotations say nothing of how a kernel is launched)
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from glm5ray.kernels.interface import ExpertWeights
from glm5ray.kernels.triton.device import dot_precision
from glm5ray.kernels.triton.expert_rows import combine_kernel, find_tile, sort_rows
from glm5ray.kernels.triton.mla import dot
from glm5ray.kernels.triton.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

MAX_TOKENS = 8192
"""At once; more go one part after another, so that memory between the products is bounded."""


class Tile(NamedTuple):
    rows: int
    """Of an expert."""
    outputs: int
    """Hidden units, or columns of the result."""
    inputs: int
    """Of the sum, at once."""
    num_warps: int
    num_stages: int


def choose_tile(assignments: int, num_experts: int, dtype: torch.dtype) -> Tile:
    """Wide tiles where experts have many rows. Within sm_120's shared memory; not tuned."""
    rows = 64 if assignments > 32 * num_experts else 16
    return Tile(rows, 64, 64 if dtype == torch.bfloat16 else 32, 4, 3)


@triton.jit
def gate_up_kernel(
    x_TM,
    assignment_X,
    hidden_XF,
    gate_up_EFM,
    row_start_E1,
    cumulative_E,
    start_E,
    x_stride,
    E,
    M,
    F,
    A,
    E2: tl.constexpr,
    BX: tl.constexpr,
    BF: tl.constexpr,
    BM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """hidden[row] = silu(gate(x[token])) * up(x[token]), for BX rows of an expert and BF hidden units."""
    expert, first_row, rows = find_tile(tl.program_id(0), cumulative_E, start_E, row_start_E1, E, E2, BX)
    if rows > 0:
        n, f, k = tl.arange(0, BX), tl.program_id(1) * BF + tl.arange(0, BF), tl.arange(0, BM)
        token = tl.load(assignment_X + first_row + n, mask=n < rows, other=0) // A
        x_at = x_TM + token.to(tl.int64)[:, None] * x_stride + k[None, :]
        gate_at = gate_up_EFM + (expert.to(tl.int64) * 2 * F + f)[None, :] * M + k[:, None]
        up_at = gate_up_EFM + (expert.to(tl.int64) * 2 * F + F + f)[None, :] * M + k[:, None]
        gate, up = tl.zeros((BX, BF), tl.float32), tl.zeros((BX, BF), tl.float32)
        for start in range(0, M, BM):
            is_column = start + k < M
            x = tl.load(x_at + start, mask=(n < rows)[:, None] & is_column[None, :], other=0.0)
            is_weight = is_column[:, None] & (f < F)[None, :]
            gate = dot(x, tl.load(gate_at + start, mask=is_weight, other=0.0), gate, PRECISION)
            up = dot(x, tl.load(up_at + start, mask=is_weight, other=0.0), up, PRECISION)
        hidden = gate / (1.0 + tl.exp(-gate)) * up
        out = hidden_XF + (first_row + n).to(tl.int64)[:, None] * F + f[None, :]
        tl.store(out, hidden.to(hidden_XF.dtype.element_ty), mask=(n < rows)[:, None] & (f < F)[None, :])


@triton.jit
def down_kernel(
    hidden_XF,
    out_XM,
    down_EMF,
    row_start_E1,
    cumulative_E,
    start_E,
    E,
    M,
    F,
    E2: tl.constexpr,
    BX: tl.constexpr,
    BM: tl.constexpr,
    BF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[row] = down(hidden[row]), for BX rows of an expert and BM columns."""
    expert, first_row, rows = find_tile(tl.program_id(0), cumulative_E, start_E, row_start_E1, E, E2, BX)
    if rows > 0:
        n, m, k = tl.arange(0, BX), tl.program_id(1) * BM + tl.arange(0, BM), tl.arange(0, BF)
        hidden_at = hidden_XF + (first_row + n).to(tl.int64)[:, None] * F + k[None, :]
        down_at = down_EMF + (expert.to(tl.int64) * M + m)[None, :] * F + k[:, None]
        total = tl.zeros((BX, BM), tl.float32)
        for start in range(0, F, BF):
            is_column = start + k < F
            hidden = tl.load(hidden_at + start, mask=(n < rows)[:, None] & is_column[None, :], other=0.0)
            down = tl.load(down_at + start, mask=is_column[:, None] & (m < M)[None, :], other=0.0)
            total = dot(hidden, down, total, PRECISION)
        out = out_XM + (first_row + n).to(tl.int64)[:, None] * M + m[None, :]
        tl.store(out, total.to(out_XM.dtype.element_ty), mask=(n < rows)[:, None] & (m < M)[None, :])


def _run_part(x_TM: Tensor, ids_TA: Tensor, weights_TA: Tensor, experts: ExpertWeights, out_TM: Tensor) -> None:
    num_experts, M, F = experts.down_EMF.shape
    num_tokens, num_choices = ids_TA.shape
    tile = choose_tile(ids_TA.numel(), num_experts, x_TM.dtype)
    rows = sort_rows(ids_TA, experts.first_expert, num_experts, (tile.rows,))
    planned = rows.row_start_E1, rows.cumulative_WE[0], rows.start_WE[0]
    hidden_XF, rows_XM = x_TM.new_empty(ids_TA.numel(), F), x_TM.new_empty(ids_TA.numel(), M)
    tiles = ids_TA.numel() // tile.rows + min(num_experts, ids_TA.numel())
    sizes = {"E": num_experts, "M": M, "F": F, "E2": max(16, triton.next_power_of_2(num_experts)), "BX": tile.rows}
    options = {"PRECISION": dot_precision(x_TM), "num_warps": tile.num_warps, "num_stages": tile.num_stages}
    gate_up_kernel[(tiles, triton.cdiv(F, tile.outputs))](
        x_TM,
        rows.assignment_X,
        hidden_XF,
        experts.gate_up_EFM,
        *planned,
        x_TM.stride(0),
        A=num_choices,
        BF=tile.outputs,
        BM=tile.inputs,
        **sizes,
        **options,
    )
    down_kernel[(tiles, triton.cdiv(M, tile.outputs))](
        hidden_XF, rows_XM, experts.down_EMF, *planned, BM=tile.outputs, BF=tile.inputs, **sizes, **options
    )
    block = min(1024, triton.next_power_of_2(M))
    combine_kernel[(num_tokens, triton.cdiv(M, block))](
        rows_XM, rows.row_TA, weights_TA, rows.row_start_E1[-1:], out_TM, M, A=num_choices, COLUMNS=block
    )


class PlainExperts:
    """:class:`~glm5ray.kernels.interface.Experts`, unquantised."""

    def pack(self, experts: ExpertWeights) -> ExpertWeights:
        if not isinstance(experts, ExpertWeights):
            raise TypeError(f"these experts are unquantised; {type(experts).__name__} are not")
        return experts

    def run(self, x_TM: Tensor, ids_TA: Tensor, weights_TA: Tensor, experts: ExpertWeights) -> Tensor:
        out_TM = x_TM.new_empty(x_TM.shape)
        ids_TA, weights_TA = ids_TA.contiguous(), weights_TA.contiguous()
        for t in range(0, len(x_TM), MAX_TOKENS):
            part = slice(t, t + MAX_TOKENS)
            _run_part(x_TM[part], ids_TA[part], weights_TA[part], experts, out_TM[part])
        return out_TM


experts = PlainExperts()


def variants() -> Iterator[Variant]:
    """For GLM-5's sizes; ``A`` is 8."""
    indexes = dict.fromkeys(("assignment_X", "row_start_E1", "cumulative_E", "start_E"), "*i32")
    sizes = dict.fromkeys(("x_stride", "E", "M", "F", "A"), "i32")
    for dtype, precision in ((torch.bfloat16, "tf32"), (torch.float32, "ieee")):
        kind = "*bf16" if dtype == torch.bfloat16 else "*fp32"
        pointers = dict.fromkeys(("x_TM", "hidden_XF", "out_XM", "gate_up_EFM", "down_EMF"), kind)
        for assignments in (8, 2**16):
            tile = choose_tile(assignments, 256, dtype)
            for fn, blocks in (
                (gate_up_kernel, {"BF": tile.outputs, "BM": tile.inputs}),
                (down_kernel, {"BM": tile.outputs, "BF": tile.inputs}),
            ):
                constants = {"E2": 256, "BX": tile.rows, "PRECISION": precision, **blocks}
                types = {**pointers, **indexes, **sizes}
                yield Variant(
                    name=f"{fn.fn.__name__.removesuffix('_kernel')}-{kind[1:]}-{tile.rows}",
                    fn=fn,
                    signature={name: types[name] for name in fn.arg_names if name not in constants},
                    constants=constants,
                    num_warps=tile.num_warps,
                    num_stages=tile.num_stages,
                    unaligned=frozenset({"A"} & set(fn.arg_names)),
                )
