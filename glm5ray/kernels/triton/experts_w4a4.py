"""Routed experts with weights and activations in NVFP4 (W4A4), for many tokens on GPUs whose matrix units multiply FP4.

Another function than the reference's: activations are rounded to four bits, about 10 % of a product's norm. So it is
the provider ``triton_w4a4``, which only ``kernels.experts: triton_w4a4`` chooses. On sm_120 ``tl.dot_scaled`` becomes
``mma.sync ... kind::mxf4nvf4.block_scale`` (the gate looks for it); elsewhere, and in Triton's interpreter, the same
numbers are decoded and multiplied, which serves to look at accuracy, not at speed.

Weights stay in the order of :class:`~glm5ray.kernels.interface.Nvfp4ExpertWeights`. Rows, X, are assignments sorted by
expert, as in :mod:`glm5ray.kernels.triton.experts_nvfp4`; a row of activations has an fp32 factor of its own, so that
its largest group has E4M3's largest scale, whatever the token's magnitude."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportReturnType=false
# (Triton's annotations say nothing of how a kernel is launched)
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from glm5ray.kernels.interface import Nvfp4ExpertWeights
from glm5ray.kernels.triton.device import capability
from glm5ray.kernels.triton.expert_rows import combine_kernel, find_tile, sort_rows
from glm5ray.kernels.triton.experts_nvfp4 import MAX_TOKENS
from glm5ray.kernels.triton.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from glm5ray.kernels.triton.expert_rows import Rows

ROWS, COLUMNS, DEPTH = 128, 128, 128
"""Of a program's tile: rows of activations, rows of weights, and what is multiplied at once."""


@triton.jit
def quantize_kernel(
    x_TX, assignment_X, packed_XB, scales_XG, factor_X, num_rows_here, A, K, BLOCK: tl.constexpr, GATED: tl.constexpr
):
    """A row of activations in NVFP4: ``value = e2m1 * scale * factor``, codes rounded half to even.

    Not GATED: row x[assignment // A] of [T, K]. GATED: silu(first half) * second half of row x[row] of [X, 2K]."""
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(num_rows_here):  # rows behind are other ranks'
        k = tl.arange(0, BLOCK)
        if GATED:
            gate = tl.load(x_TX + row * 2 * K + k, mask=k < K, other=0).to(tl.float32)
            up = tl.load(x_TX + row * 2 * K + K + k, mask=k < K, other=0).to(tl.float32)
            x = gate / (1 + tl.exp(-gate)) * up
        else:
            token = (tl.load(assignment_X + row) // A).to(tl.int64)
            x = tl.load(x_TX + token * K + k, mask=k < K, other=0).to(tl.float32)
        largest = tl.max(tl.abs(x), 0)
        factor = tl.where(largest > 0, largest / (6.0 * 448.0), 1.0)
        groups = x.reshape(BLOCK // 16, 16)
        amax = tl.max(tl.abs(groups), 1)
        raw = tl.where(amax == 0, 1.0, amax / (6.0 * factor))
        scale = tl.minimum(tl.maximum(raw, 0.001953125), 448.0).to(tl.float8e4nv)
        y = groups / (scale.to(tl.float32) * factor)[:, None]
        a = tl.abs(y)
        code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
        code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
        code += tl.where(y < 0, 8, 0)
        low, high = tl.split(code.reshape(BLOCK // 2, 2))
        b, g = tl.arange(0, BLOCK // 2), tl.arange(0, BLOCK // 16)
        tl.store(packed_XB + row * (K // 2) + b, (low | high << 4).to(tl.uint8), mask=b < K // 2)
        tl.store(scales_XG + row * (K // 16) + g, scale, mask=g < K // 16)
        tl.store(factor_X + row, factor)


@triton.jit
def _decode(packed, scales, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """(lower, upper) codes of [ROWS, BYTES] times their scales, fp32."""
    by_byte = tl.broadcast_to(scales.to(tl.float32)[:, :, None], (ROWS, BYTES // 8, 8)).reshape(ROWS, BYTES)
    return _e2m1(packed.to(tl.int32)) * by_byte, _e2m1(packed.to(tl.int32) >> 4) * by_byte


@triton.jit
def _e2m1(code):
    exponent, mantissa = (code >> 1) & 3, (code & 1).to(tl.float32)
    value = tl.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * tl.exp2((exponent - 1).to(tl.float32)))
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def product_w4a4_kernel(
    packed_XB,
    scales_XG,
    factor_X,
    weights_EOB,
    weight_scales_EOG,
    global_EP,
    out_XO,
    row_start_E1,
    cumulative_E,
    start_E,
    E,
    K,
    O,  # noqa: E741
    P: tl.constexpr,
    E2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """out[row] = the row's activations times its expert's weight rows [O, K]; P global scales share O equally."""
    parts = tl.cdiv(O, COLUMNS)
    expert, first_row, rows = find_tile(tl.program_id(0) // parts, cumulative_E, start_E, row_start_E1, E, E2, ROWS)
    if rows > 0:
        n, o = tl.arange(0, ROWS), tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
        row = (first_row + n).to(tl.int64)
        b, g = tl.arange(0, DEPTH // 2), tl.arange(0, DEPTH // 16)
        weight = expert.to(tl.int64) * O + o
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, K, DEPTH):
            is_byte, is_group = (k // 2 + b < K // 2)[None, :], (k // 16 + g < K // 16)[None, :]
            is_row, is_weight = (n < rows)[:, None], (o < O)[:, None]
            x = tl.load(packed_XB + row[:, None] * (K // 2) + (k // 2 + b)[None, :], mask=is_row & is_byte, other=0)
            xs = tl.load(
                scales_XG + row[:, None] * (K // 16) + (k // 16 + g)[None, :], mask=is_row & is_group, other=0.0
            )
            w = tl.load(
                weights_EOB + weight[:, None] * (K // 2) + (k // 2 + b)[None, :], mask=is_weight & is_byte, other=0
            )
            ws = tl.load(
                weight_scales_EOG + weight[:, None] * (K // 16) + (k // 16 + g)[None, :],
                mask=is_weight & is_group,
                other=0.0,
            )
            if NATIVE:
                sums = tl.dot_scaled(x, xs, "e2m1", w.trans(1, 0), ws, "e2m1", acc=sums)
            else:
                x_low, x_high = _decode(x, xs, ROWS, DEPTH // 2)
                w_low, w_high = _decode(w, ws, COLUMNS, DEPTH // 2)
                sums = tl.dot(x_low, w_low.trans(1, 0), sums, input_precision="tf32")  # exact: few bits each
                sums = tl.dot(x_high, w_high.trans(1, 0), sums, input_precision="tf32")
        scale = tl.load(global_EP + expert * P + o // (O // P), mask=o < O, other=0)
        sums *= tl.load(factor_X + row, mask=n < rows, other=0)[:, None] * scale[None, :]
        out = out_XO + row[:, None] * O + o[None, :]
        tl.store(out, sums.to(out_XO.dtype.element_ty), mask=(n < rows)[:, None] & (o < O)[None, :])


class W4a4Experts:
    """:class:`~glm5ray.kernels.interface.Experts`; weights as in the checkpoint."""

    def pack(self, experts: Nvfp4ExpertWeights) -> Nvfp4ExpertWeights:
        if not isinstance(experts, Nvfp4ExpertWeights):
            raise TypeError(f"triton_w4a4's experts are NVFP4; these are {type(experts).__name__}")
        return experts

    def run(self, x_TM: Tensor, ids_TA: Tensor, weights_TA: Tensor, experts: Nvfp4ExpertWeights) -> Tensor:
        out_TM = torch.empty_like(x_TM)
        for t in range(0, len(x_TM), MAX_TOKENS):
            part = slice(t, t + MAX_TOKENS)
            _run_part(x_TM[part], ids_TA[part], weights_TA[part], experts, out_TM[part])
        return out_TM


def _run_part(x_TM: Tensor, ids_TA: Tensor, weights_TA: Tensor, experts: Nvfp4ExpertWeights, out_TM: Tensor) -> None:
    (num_experts, M, _), F = experts.down_packed.shape, 2 * experts.down_packed.shape[2]
    X, A, native = ids_TA.numel(), ids_TA.shape[1], capability(x_TM) >= 120
    rows = sort_rows(ids_TA, experts.first_expert, num_experts, (ROWS,))
    tiles = min(X, X // ROWS + num_experts)

    def product(inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...], width: int, per_expert: int) -> Tensor:
        out_XO = x_TM.new_empty(X, width)
        product_w4a4_kernel[(tiles * triton.cdiv(width, COLUMNS),)](
            *inputs,
            *weights,
            out_XO,
            rows.row_start_E1,
            rows.cumulative_WE[0],
            rows.start_WE[0],
            num_experts,
            weights[0].shape[-1] * 2,
            width,
            P=per_expert,
            E2=triton.next_power_of_2(num_experts),
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            DEPTH=DEPTH,
            NATIVE=native,
            num_warps=8,
            num_stages=3 if native else 1,
        )
        return out_XO

    gate_up = experts.gate_up_packed, experts.gate_up_scales, experts.gate_up_global
    down = experts.down_packed, experts.down_scales, experts.down_global
    gate_up_XF = product(_quantize(x_TM.contiguous(), rows, A, M, gated=False), gate_up, 2 * F, 2)
    rows_XM = product(_quantize(gate_up_XF, rows, A, F, gated=True), down, M, 1)
    block = min(1024, triton.next_power_of_2(M))
    combine_kernel[(len(x_TM), triton.cdiv(M, block))](
        rows_XM, rows.row_TA, weights_TA, rows.row_start_E1[-1:], out_TM, M, A=A, COLUMNS=block
    )


def _quantize(x_TX: Tensor, rows: Rows, A: int, K: int, *, gated: bool) -> tuple[Tensor, Tensor, Tensor]:
    X = len(rows.assignment_X)
    packed_XB = torch.empty(X, K // 2, dtype=torch.uint8, device=x_TX.device)
    scales_XG = torch.empty(X, K // 16, dtype=torch.float8_e4m3fn, device=x_TX.device)
    factor_X = torch.empty(X, dtype=torch.float32, device=x_TX.device)
    quantize_kernel[(X,)](
        x_TX,
        rows.assignment_X,
        packed_XB,
        scales_XG,
        factor_X,
        rows.row_start_E1[-1:],
        A,
        K,
        BLOCK=triton.next_power_of_2(K),
        GATED=gated,
    )
    return packed_XB, scales_XG, factor_X


experts = W4a4Experts()

_TYPES = {
    "x_TX": "*bf16",
    "assignment_X": "*i32",
    "packed_XB": "*u8",
    "scales_XG": "*fp8e4nv",
    "factor_X": "*fp32",
    "num_rows_here": "*i32",
    "weights_EOB": "*u8",
    "weight_scales_EOG": "*fp8e4nv",
    "global_EP": "*fp32",
    "out_XO": "*bf16",
    "row_start_E1": "*i32",
    "cumulative_E": "*i32",
    "start_E": "*i32",
    **dict.fromkeys("AEKO", "i32"),
}


def variants() -> Iterator[Variant]:
    def types(fn: triton.JITFunction, constants: dict[str, object]) -> dict[str, str]:
        return {name: _TYPES[name] for name in fn.arg_names if name not in constants}

    for block, gated in ((8192, False), (2048, True)):
        constants: dict[str, object] = {"BLOCK": block, "GATED": gated}
        signature = types(quantize_kernel, constants)
        yield Variant(
            name=f"quantize_{block}",
            fn=quantize_kernel,
            signature=signature,
            constants=constants,
            unaligned=frozenset({"A", "num_rows_here"}),
        )
    for arch, native in ((90, False), (120, True)):
        for per_expert in (1, 2):
            constants = {"P": per_expert, "E2": 256, "ROWS": ROWS, "COLUMNS": COLUMNS, "DEPTH": DEPTH, "NATIVE": native}
            yield Variant(
                name=f"product_{'w4a4' if native else 'emulated'}_{per_expert}",
                fn=product_w4a4_kernel,
                signature=types(product_w4a4_kernel, constants),
                constants=constants,
                num_warps=8,
                num_stages=3 if native else 1,
                capabilities=(arch,),
            )
