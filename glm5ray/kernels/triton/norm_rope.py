"""Norms, activation, rotation, and what is written to the cache: one program a token (and, where rows are wide, a part
of its columns). Arithmetic in fp32, roundings where :mod:`glm5ray.kernels.interface` has them.

Shape suffixes in :mod:`glm5ray.kernels.interface`."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportReturnType=false
# (Triton's annotations say nothing of how a kernel is launched)
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from glm5ray.kernels.cache_rows import LATENT_GROUP, split_keys, split_rows
from glm5ray.kernels.triton.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

E4M3_MAX = tl.constexpr(448.0)
LEAST_AMAX = tl.constexpr(1e-4)


@triton.jit
def _rms_norm(x_ptr, weight_ptr, out_ptr, residual_ptr, x_stride, eps, X: tl.constexpr, BLOCK: tl.constexpr):
    """A row. With ``residual_ptr`` the sum of both is written there, and normed."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < X
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0)
    if residual_ptr is not None:
        old = tl.load(residual_ptr + row * X + cols, mask=mask, other=0.0)
        x = (old.to(tl.float32) + x.to(tl.float32)).to(old.dtype)
        tl.store(residual_ptr + row * X + cols, x, mask=mask)
    wide = x.to(tl.float32)
    rms = tl.sqrt(tl.sum(wide * wide, axis=0) / X + eps)
    normed = (wide / rms).to(x.dtype)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    out = (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    tl.store(out_ptr + row * X + cols, out, mask=mask)


def rms_norm(x_TX: Tensor, weight_X: Tensor, eps: float) -> Tensor:
    out_TX = torch.empty(x_TX.shape, dtype=x_TX.dtype, device=x_TX.device)
    _launch_norm(x_TX, weight_X, out_TX, None, eps)
    return out_TX


def add_rms_norm(residual_TX: Tensor, x_TX: Tensor, weight_X: Tensor, eps: float) -> Tensor:
    assert residual_TX.is_contiguous(), "the residual is written in place, row behind row"
    out_TX = torch.empty_like(residual_TX)
    _launch_norm(x_TX, weight_X, out_TX, residual_TX, eps)
    return out_TX


def _launch_norm(x_TX: Tensor, weight_X: Tensor, out_TX: Tensor, residual_TX: Tensor | None, eps: float) -> None:
    tokens, width = x_TX.shape
    if tokens:
        block = triton.next_power_of_2(width)
        _rms_norm[(tokens,)](
            x_TX, weight_X, out_TX, residual_TX, x_TX.stride(0), eps, width, block, num_warps=_warps(block)
        )


def _warps(block: int) -> int:
    """So that a thread has up to 16 numbers of a row."""
    return min(max(block // 512, 1), 16)


@triton.jit
def _silu_and_mul(x_ptr, out_ptr, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    gate = tl.load(x_ptr + row * 2 * F + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + cols, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * F + cols, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up_TX: Tensor) -> Tensor:
    gate_up_TX = gate_up_TX.contiguous()
    tokens, width = gate_up_TX.shape[0], gate_up_TX.shape[1] // 2
    out_TF = torch.empty(tokens, width, dtype=gate_up_TX.dtype, device=gate_up_TX.device)
    if tokens:
        block = min(triton.next_power_of_2(width), 1024)
        _silu_and_mul[(tokens, triton.cdiv(width, block))](gate_up_TX, out_TF, width, block)
    return out_TF


@triton.jit
def turn(even, odd, rope_ptr, row, pair, mask, R: tl.constexpr):
    """The pairs (even, odd) of token ``row``, turned by the angles of its position."""
    cos = tl.load(rope_ptr + row * R + 2 * pair, mask=mask, other=0.0)
    sin = tl.load(rope_ptr + row * R + 2 * pair + 1, mask=mask, other=0.0)
    return even * cos - odd * sin, odd * cos + even * sin


@triton.jit
def turned(x, angle):
    """x [.., 2P] in fp32, its pairs turned; angle [.., 2P]: cos and sin of each pair, side by side. Whole vectors are
    read and written where even and odd numbers by themselves would be scattered."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    cos, sin = tl.split(tl.reshape(angle, [angle.shape[0], angle.shape[1] // 2, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), x.shape)


@triton.jit
def _rope(x_ptr, rope_ptr, token_stride, head_stride, J, R: tl.constexpr, BJ: tl.constexpr, BR: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BJ + tl.arange(0, BJ)[:, None]
    col = tl.arange(0, BR)[None, :]
    mask = (head < J) & (col < R)
    at = x_ptr + row * token_stride + head * head_stride + col
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    angle = tl.load(rope_ptr + row * R + col, mask=col < R, other=0.0)
    tl.store(at, turned(x, angle).to(x_ptr.dtype.element_ty), mask=mask)


def rope(x_TJX: Tensor, rope_TR: Tensor) -> None:
    tokens, heads = x_TJX.shape[:2]
    width = rope_TR.shape[-1]
    if tokens:
        cols = triton.next_power_of_2(max(width, 2))
        block = min(triton.next_power_of_2(heads), max(1, 2048 // cols))
        _rope[(tokens, triton.cdiv(heads, block))](
            x_TJX, rope_TR, x_TJX.stride(0), x_TJX.stride(1), heads, width, block, cols
        )


@triton.jit
def finite(x):
    """As :func:`glm5ray.kernels.cache_rows.finite`."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def _append_latent(
    kv_ptr,
    weight_ptr,
    rope_ptr,
    slots_ptr,
    latent_ptr,
    scales_ptr,
    key_ptr,
    kv_stride,
    latent_stride,
    scales_stride,
    key_stride,
    eps,
    C: tl.constexpr,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BP: tl.constexpr,
):
    """The row of one token. ``scales_ptr`` is None where latents are kept in the model's own type; else they are e4m3
    with a scale for ``GROUP`` columns."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        group = tl.arange(0, BLOCK_GROUPS)
        cols = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        mask = cols < C
        x = tl.load(kv_ptr + row * kv_stride + cols, mask=mask, other=0.0)
        wide = x.to(tl.float32)
        rms = tl.sqrt(tl.sum(tl.sum(wide * wide, axis=1), axis=0) / C + eps)
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
        latent = finite(((wide / rms).to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype))
        at = latent_ptr + slot * latent_stride + cols
        if scales_ptr is None:
            tl.store(at, latent, mask=mask)
        else:
            latent = latent.to(tl.float32)
            scale = tl.maximum(tl.max(tl.abs(latent), axis=1), LEAST_AMAX) / E4M3_MAX
            tl.store(scales_ptr + slot * scales_stride + group, scale, mask=group < NUM_GROUPS)
            scaled = tl.minimum(tl.maximum(latent / scale[:, None], -E4M3_MAX), E4M3_MAX)
            tl.store(at, scaled.to(tl.float8e4nv), mask=mask)
        pair = tl.arange(0, BP)
        in_pairs = pair < R // 2
        even = tl.load(kv_ptr + row * kv_stride + C + 2 * pair, mask=in_pairs, other=0.0).to(tl.float32)
        odd = tl.load(kv_ptr + row * kv_stride + C + 2 * pair + 1, mask=in_pairs, other=0.0).to(tl.float32)
        even, odd = turn(even, odd, rope_ptr, row, pair, in_pairs, R)
        at = key_ptr + slot * key_stride + 2 * pair
        tl.store(at, finite(even.to(key_ptr.dtype.element_ty)), mask=in_pairs)
        tl.store(at + 1, finite(odd.to(key_ptr.dtype.element_ty)), mask=in_pairs)


def append_latent(
    kv_TL: Tensor, weight_C: Tensor, eps: float, rope_TR: Tensor, slots_T: Tensor, rows_NL: Tensor
) -> None:
    tokens, latent, key = kv_TL.shape[0], weight_C.shape[0], rope_TR.shape[-1]
    if tokens == 0:
        return
    rows = split_rows(rows_NL, latent, key)
    groups = triton.cdiv(latent, LATENT_GROUP)
    _append_latent[(tokens,)](
        kv_TL,
        weight_C,
        rope_TR,
        slots_T,
        rows.latent_NC,
        rows.scales_NG,
        rows.key_NR,
        kv_TL.stride(0),
        rows.latent_NC.stride(0),
        0 if rows.scales_NG is None else rows.scales_NG.stride(0),
        rows.key_NR.stride(0),
        eps,
        latent,
        key,
        LATENT_GROUP,
        groups,
        triton.next_power_of_2(groups),
        triton.next_power_of_2(max(key // 2, 1)),
    )


@triton.jit
def _append_index_key(
    k_ptr,
    weight_ptr,
    bias_ptr,
    rope_ptr,
    slots_ptr,
    keys_ptr,
    scales_ptr,
    k_stride,
    page_stride,
    scales_stride,
    page_size,
    eps,
    I: tl.constexpr,  # noqa: E741
    R: tl.constexpr,
    BP: tl.constexpr,
):
    """The index key of one token, as pairs of columns; ``scales_ptr`` is None where keys are not quantised. An odd last
    column stands in a pair of its own."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        pair = tl.arange(0, BP)
        has_even, has_odd = 2 * pair < I, 2 * pair + 1 < I
        at = k_ptr + row * k_stride + 2 * pair
        even = tl.load(at, mask=has_even, other=0.0).to(tl.float32)
        odd = tl.load(at + 1, mask=has_odd, other=0.0).to(tl.float32)
        mean = (tl.sum(even, axis=0) + tl.sum(odd, axis=0)) / I
        even = tl.where(has_even, even - mean, 0.0)
        odd = tl.where(has_odd, odd - mean, 0.0)
        deviation = tl.sqrt((tl.sum(even * even, axis=0) + tl.sum(odd * odd, axis=0)) / I + eps)
        weight = tl.load(weight_ptr + 2 * pair, mask=has_even, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + 2 * pair, mask=has_even, other=0.0).to(tl.float32)
        even = (even / deviation * weight + bias).to(k_ptr.dtype.element_ty).to(tl.float32)
        weight = tl.load(weight_ptr + 2 * pair + 1, mask=has_odd, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + 2 * pair + 1, mask=has_odd, other=0.0).to(tl.float32)
        odd = (odd / deviation * weight + bias).to(k_ptr.dtype.element_ty).to(tl.float32)

        turns = pair < R // 2
        turned_even, turned_odd = turn(even, odd, rope_ptr, row, pair, turns, R)
        even = finite(tl.where(turns, turned_even, even).to(k_ptr.dtype.element_ty))
        odd = finite(tl.where(turns, turned_odd, odd).to(k_ptr.dtype.element_ty))
        page, offset = slot // page_size, slot % page_size
        at = keys_ptr + page * page_stride + offset * I + 2 * pair
        if scales_ptr is None:
            tl.store(at, even, mask=has_even)
            tl.store(at + 1, odd, mask=has_odd)
        else:
            even, odd = even.to(tl.float32), odd.to(tl.float32)
            amax = tl.maximum(tl.max(tl.abs(even), axis=0), tl.max(tl.abs(odd), axis=0))
            scale = tl.exp2(tl.ceil(tl.log2(tl.maximum(amax, LEAST_AMAX) / E4M3_MAX)))
            tl.store(scales_ptr + page * scales_stride + offset, scale)
            tl.store(at, (even / scale).to(tl.float8e4nv), mask=has_even)
            tl.store(at + 1, (odd / scale).to(tl.float8e4nv), mask=has_odd)


def append_index_keys(
    k_TI: Tensor, weight_I: Tensor, bias_I: Tensor, eps: float, rope_TR: Tensor, slots_T: Tensor, keys_NI: Tensor
) -> None:
    tokens, width = k_TI.shape
    if tokens == 0:
        return
    keys = split_keys(keys_NI, width)
    _append_index_key[(tokens,)](
        k_TI,
        weight_I,
        bias_I,
        rope_TR,
        slots_T,
        keys.keys_PsI,
        keys.scales_Ps,
        k_TI.stride(0),
        keys.keys_PsI.stride(0),
        0 if keys.scales_Ps is None else keys.scales_Ps.stride(0),
        keys.keys_PsI.shape[1],
        eps,
        width,
        rope_TR.shape[-1],
        triton.next_power_of_2(max(-(-width // 2), 1)),
    )


def variants() -> Iterator[Variant]:
    """At GLM-5's sizes, in bf16 and fp32, with and without FP8 rows."""
    for dtype in ("bf16", "fp32"):
        yield from _dense_variants(f"*{dtype}", dtype)
        for row in (dtype, "fp8e4nv"):
            yield from _append_variants(f"*{dtype}", f"*{row}", f"{dtype}-{row}")


def _dense_variants(pointer: str, name: str) -> Iterator[Variant]:
    for residual in (True, False):
        for width in (2048, 6144):
            block = triton.next_power_of_2(width)
            yield Variant(
                name=f"norm-{name}-{width}-{residual}",
                fn=_rms_norm,
                signature={"x_ptr": pointer, "weight_ptr": pointer, "out_ptr": pointer, "x_stride": "i32"}
                | {"eps": "fp32"}
                | ({"residual_ptr": pointer} if residual else {}),
                constants={"X": width, "BLOCK": block} | ({} if residual else {"residual_ptr": None}),
                num_warps=_warps(block),
            )
    yield Variant(
        name=f"silu-{name}",
        fn=_silu_and_mul,
        signature={"x_ptr": pointer, "out_ptr": pointer, "F": "i32"},
        constants={"BLOCK": 1024},
    )
    yield Variant(
        name=f"rope-{name}",
        fn=_rope,
        signature={"x_ptr": pointer, "rope_ptr": "*fp32", "token_stride": "i32", "head_stride": "i32", "J": "i32"},
        constants={"R": 64, "BJ": 32, "BR": 64},
    )


def _append_variants(pointer: str, row: str, name: str) -> Iterator[Variant]:
    is_fp8 = row == "*fp8e4nv"
    yield Variant(
        name=f"latent-{name}",
        fn=_append_latent,
        signature={"kv_ptr": pointer, "weight_ptr": pointer, "rope_ptr": "*fp32", "slots_ptr": "*i64"}
        | {"latent_ptr": row, "key_ptr": "*bf16" if is_fp8 else row, "eps": "fp32"}
        | dict.fromkeys(("kv_stride", "latent_stride", "scales_stride", "key_stride"), "i32")
        | ({"scales_ptr": "*fp32"} if is_fp8 else {}),
        constants={"C": 512, "R": 64, "GROUP": LATENT_GROUP, "NUM_GROUPS": 4, "BLOCK_GROUPS": 4, "BP": 32}
        | ({} if is_fp8 else {"scales_ptr": None}),
        unaligned=frozenset({"scales_stride", "key_stride"}),
    )
    yield Variant(
        name=f"index-{name}",
        fn=_append_index_key,
        signature={"k_ptr": pointer, "weight_ptr": pointer, "bias_ptr": pointer, "rope_ptr": "*fp32"}
        | {"slots_ptr": "*i64", "keys_ptr": row, "page_size": "i32", "eps": "fp32"}
        | dict.fromkeys(("k_stride", "page_stride", "scales_stride"), "i32")
        | ({"scales_ptr": "*fp32"} if is_fp8 else {}),
        constants={"I": 128, "R": 64, "BP": 64} | ({} if is_fp8 else {"scales_ptr": None}),
    )
