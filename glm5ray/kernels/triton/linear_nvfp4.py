"""``x @ weight.T`` for a weight in NVFP4, as checkpoints that quantise dense layers hold it; decoded to BF16 in the
kernel (W4A16).

A byte holds two neighbouring columns, so the product is taken as one of the even columns with the low nibbles and one
of the odd columns with the high ones, and nibbles never need to be put in order."""

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

    from glm5ray.kernels.interface import Nvfp4Weight


class Tile(NamedTuple):
    ROWS: int
    COLUMNS: int
    DEPTH: int
    num_warps: int
    num_stages: int


TILES = (Tile(16, 32, 256, 4, 3), Tile(64, 64, 64, 4, 3), Tile(128, 64, 64, 8, 3))
FP32_TILE = Tile(16, 16, 64, 4, 2)


def tile_of(num_tokens: int, dtype: torch.dtype) -> Tile:
    """The smallest that takes all tokens at once, else the largest."""
    if dtype == torch.float32:
        return FP32_TILE
    return next((tile for tile in TILES if num_tokens <= tile.ROWS), TILES[-1])


@triton.jit
def _value(code, scales):
    """bf16: E2M1 times scale, exactly. The code's bits at fp32's sign and lowest exponent bits are 2^-126 of it."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * scales).to(tl.bfloat16)


@triton.jit(do_not_specialize=["T"])
def linear_nvfp4_kernel(
    x_TX,
    packed_OX,
    scales_OG,
    global_scale,
    out_TO,
    T,
    X,
    O,  # noqa: E741
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BF16: tl.constexpr,
):
    """A tile of ROWS tokens and COLUMNS outputs. BF16: multiply in bf16; otherwise in fp32."""
    t, o = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k, b, g = tl.arange(0, DEPTH), tl.arange(0, DEPTH // 2), tl.arange(0, DEPTH // 16)
    is_t, is_o = (t < T)[:, None], (o < O)[:, None]
    x_pointers = x_TX + t.to(tl.int64)[:, None] * X + k[None, :]
    packed_pointers = packed_OX + o.to(tl.int64)[:, None] * (X // 2) + b[None, :]
    scale_pointers = scales_OG + o.to(tl.int64)[:, None] * (X // 16) + g[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k0 in range(0, X, DEPTH):
        x = tl.load(x_pointers, mask=is_t & (k0 + k < X)[None, :], other=0.0)
        codes = tl.load(packed_pointers, mask=is_o & (k0 // 2 + b < X // 2)[None, :], other=0).to(tl.int32)
        scales = tl.load(scale_pointers, mask=is_o & (k0 // 16 + g < X // 16)[None, :], other=0.0).to(tl.float32)
        scales = tl.broadcast_to(scales[:, :, None], (COLUMNS, DEPTH // 16, 8)).reshape(COLUMNS, DEPTH // 2)
        low, high = _value(codes, scales), _value(codes >> 4, scales)
        even, odd = tl.split(x.reshape(ROWS, DEPTH // 2, 2))
        if BF16:
            sums = tl.dot(even, low.trans(1, 0), sums)
            sums = tl.dot(odd, high.trans(1, 0), sums)
        else:
            sums = tl.dot(even.to(tl.float32), low.to(tl.float32).trans(1, 0), sums, input_precision="ieee")
            sums = tl.dot(odd.to(tl.float32), high.to(tl.float32).trans(1, 0), sums, input_precision="ieee")
        x_pointers += DEPTH
        packed_pointers += DEPTH // 2
        scale_pointers += DEPTH // 16
    sums *= tl.load(global_scale)
    out = out_TO + t.to(tl.int64)[:, None] * O + o[None, :]
    tl.store(out, sums.to(out_TO.dtype.element_ty), mask=is_t & (o < O)[None, :])


def linear_nvfp4(x_TX: Tensor, weight: Nvfp4Weight) -> Tensor:
    """[T, O] in x's dtype. fp32 activations are multiplied in fp32."""
    x_TX = x_TX.contiguous()
    (T, X), O = x_TX.shape, len(weight.packed_OX)  # noqa: E741
    out_TO = x_TX.new_empty(T, O)
    if T:
        tile = tile_of(T, x_TX.dtype)
        linear_nvfp4_kernel[(triton.cdiv(O, tile.COLUMNS), triton.cdiv(T, tile.ROWS))](
            x_TX,
            weight.packed_OX,
            weight.scales_OG,
            weight.global_scale,
            out_TO,
            T,
            X,
            O,
            BF16=x_TX.is_cuda and x_TX.dtype == torch.bfloat16,
            **tile._asdict(),
        )
    return out_TO


def variants() -> Iterator[Variant]:
    for dtype, bf16 in (("bf16", True), ("fp32", False)):
        for tile in TILES if bf16 else (FP32_TILE,):
            yield Variant(
                name=f"linear_{dtype}_{tile.ROWS}",
                fn=linear_nvfp4_kernel,
                signature={
                    "x_TX": f"*{dtype}",
                    "packed_OX": "*u8",
                    "scales_OG": "*fp8e4nv",
                    "global_scale": "*fp32",
                    "out_TO": f"*{dtype}",
                    "T": "i32",
                    "X": "i32",
                    "O": "i32",
                },
                constants={"ROWS": tile.ROWS, "COLUMNS": tile.COLUMNS, "DEPTH": tile.DEPTH, "BF16": bf16},
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                unaligned=frozenset({"T"}),
            )
