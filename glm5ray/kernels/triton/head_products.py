"""The products with each head's own matrix: queries into latent space, latent results out of it.

Shape suffixes in :mod:`glm5ray.kernels.interface`."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportReturnType=false
# (Triton's annotations say nothing of how a kernel is launched)
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from glm5ray.kernels.triton.device import dot_precision
from glm5ray.kernels.triton.norm_rope import turned
from glm5ray.kernels.triton.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@triton.jit(do_not_specialize=["T"])
def _head_product(
    x_ptr,
    weight_ptr,
    out_ptr,
    rope_ptr,
    T,
    x_token_stride,
    x_head_stride,
    weight_head_stride,
    out_token_stride,
    out_head_stride,
    X: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    R: tl.constexpr,
    INNER_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BT: tl.constexpr,
    BO: tl.constexpr,
    BX: tl.constexpr,
    BR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``out[t, h, :O] = x[t, h, :X] @ weight[h]`` for a tile; with ``rope_ptr`` also ``out[t, h, O:] = rope(x[t, h,
    X:])``."""
    head = tl.program_id(1)
    token = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    col = tl.program_id(2) * BO + tl.arange(0, BO)
    inner = tl.arange(0, BX)
    is_token, is_col = token < T, col < O
    x_at = x_ptr + token[:, None] * x_token_stride + head * x_head_stride
    weight_at = weight_ptr + head.to(tl.int64) * weight_head_stride + col[None, :] * OUT_STRIDE
    total = tl.zeros([BT, BO], tl.float32)
    for start in range(0, X, BX):
        k = start + inner
        x = tl.load(x_at + k[None, :], mask=is_token[:, None] & (k < X)[None, :], other=0.0)
        weight = tl.load(weight_at + k[:, None] * INNER_STRIDE, mask=(k < X)[:, None] & is_col[None, :], other=0.0)
        if PRECISION == "ieee":
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
    out_at = out_ptr + token[:, None] * out_token_stride + head * out_head_stride
    tl.store(out_at + col[None, :], total.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & is_col[None, :])
    if rope_ptr is not None:  # noqa: SIM102 - the first is decided when it is compiled
        if tl.program_id(2) == 0:
            key = tl.arange(0, BR)[None, :]
            mask = is_token[:, None] & (key < R)
            x = tl.load(x_at + X + key, mask=mask, other=0.0).to(tl.float32)
            angle = tl.load(rope_ptr + token[:, None] * R + key, mask=mask, other=0.0)
            tl.store(out_at + O + key, turned(x, angle).to(out_ptr.dtype.element_ty), mask=mask)


class Tile(NamedTuple):
    tokens: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def choose_tile(tokens: int, dtype: torch.dtype) -> Tile:
    """Few tokens: small tiles, so that many programs read the weights. Many: as much of them as fits is used again."""
    if dtype == torch.float32:
        return Tile(16, 32, 32, 4, 2)
    if tokens <= 16:
        return Tile(16, 64, 64, 4, 4)
    return Tile(64, 64, 64, 4, 4) if tokens <= 256 else Tile(128, 128, 64, 8, 3)


def mla_query(q_THD: Tensor, w_uk_HUC: Tensor, rope_TR: Tensor) -> Tensor:
    tokens, num_heads = q_THD.shape[:2]
    nope, latent, key = w_uk_HUC.shape[1], w_uk_HUC.shape[2], rope_TR.shape[-1]
    q_THL = torch.empty(tokens, num_heads, latent + key, dtype=q_THD.dtype, device=q_THD.device)
    _launch(q_THD, w_uk_HUC, q_THL, rope_TR, (nope, latent, key), (w_uk_HUC.stride(1), w_uk_HUC.stride(2)))
    return q_THL


def mla_output(o_THC: Tensor, w_uv_HVC: Tensor) -> Tensor:
    tokens, num_heads, latent = o_THC.shape
    value = w_uv_HVC.shape[1]
    out_THV = torch.empty(tokens, num_heads, value, dtype=o_THC.dtype, device=o_THC.device)
    _launch(o_THC, w_uv_HVC, out_THV, None, (latent, value, 0), (w_uv_HVC.stride(2), w_uv_HVC.stride(1)))
    return out_THV.flatten(1)


def _launch(
    x_THX: Tensor,
    weight: Tensor,
    out_THO: Tensor,
    rope_TR: Tensor | None,
    widths: tuple[int, int, int],
    strides: tuple[int, int],
) -> None:
    """widths: (X, O, R) of the kernel; strides: of the weight, along X and along O."""
    tokens, num_heads = x_THX.shape[:2]
    if tokens == 0:
        return
    tile = choose_tile(tokens, x_THX.dtype)
    _head_product[(triton.cdiv(tokens, tile.tokens), num_heads, triton.cdiv(widths[1], tile.outputs))](
        x_THX,
        weight,
        out_THO,
        rope_TR,
        tokens,
        x_THX.stride(0),
        x_THX.stride(1),
        weight.stride(0),
        out_THO.stride(0),
        out_THO.stride(1),
        *widths,
        *strides,
        tile.tokens,
        tile.outputs,
        tile.inputs,
        triton.next_power_of_2(max(widths[2], 2)),
        dot_precision(x_THX),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def variants() -> Iterator[Variant]:
    integers = ("T", "x_token_stride", "x_head_stride", "weight_head_stride", "out_token_stride", "out_head_stride")
    for dtype, name in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        for what, (inner, outputs, key), strides in (
            ("query", (192, 512, 64), (512, 1)),
            ("output", (512, 256, 0), (1, 512)),
        ):
            for tile in sorted({choose_tile(tokens, dtype) for tokens in (1, 64, 4096)}):
                constants = {"X": inner, "O": outputs, "R": key, "INNER_STRIDE": strides[0], "OUT_STRIDE": strides[1]}
                constants |= {"BT": tile.tokens, "BO": tile.outputs, "BX": tile.inputs, "BR": max(key, 2)}
                constants |= {"PRECISION": "ieee" if dtype == torch.float32 else "tf32"}
                pointers = {"x_ptr": name, "weight_ptr": name, "out_ptr": name}
                if key:
                    pointers["rope_ptr"] = "*fp32"
                yield Variant(
                    name=f"{what}-{name[1:]}-{tile.tokens}x{tile.outputs}",
                    fn=_head_product,
                    signature=pointers | dict.fromkeys(integers, "i32"),
                    constants=constants | ({} if key else {"rope_ptr": None}),
                    num_warps=tile.num_warps,
                    num_stages=tile.num_stages,
                    unaligned=frozenset({"T"}),
                )
