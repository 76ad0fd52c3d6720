"""From words in fragment order (:mod:`glm5ray.kernels.nvfp4_fragments`) to the BF16 operand of a matrix product.

The result's elements are computed by the threads that feed them to the matrix units: on sm_90 they go from registers
into ``wgmma`` without passing shared memory (seen in the compiled code: no ``STS`` in the loop). About two operations a
weight, four of them the multiplication by the scale."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportReturnType=false
# (Triton's annotations say nothing of how a kernel is launched)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_tile(
    words,
    scales,
    ROW_TILES: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    BY_LANE: tl.constexpr,
    ASM: tl.constexpr,
):
    """bf16 [16 ROW_TILES, 64 COLUMN_TILES]: weight x group scale / 256, exactly.

    words: int32 [ROW_TILES, COLUMN_TILES, 32, 4]; scales: int16 [ROW_TILES, COLUMN_TILES, 32], the E4M3 bytes of row g
    and of row g + 8. ASM: with PTX; without it, in Triton's own operations, for its interpreter. Columns stand in
    ``matrix_order()``; BY_LANE: of each 16 of these a lane's four stand side by side, which is how Triton wants
    operands of ``mma.sync`` that were joined from parts; :func:`columns_by_lane` puts the other operand into that
    order.
    """
    scale_g, scale_g8 = _spread_scales(scales.to(tl.int32), ASM)
    scale_g = tl.broadcast_to(scale_g[:, :, :, None], words.shape)
    scale_g8 = tl.broadcast_to(scale_g8[:, :, :, None], words.shape)
    if ASM:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high;
            and.b32 low, $4, 0x81C081C0;
            mul.rn.bf16x2 $0, low, $5;
            shl.b32 low, $4, 3;
            and.b32 low, low, 0x81C081C0;
            mul.rn.bf16x2 $1, low, $6;
            shl.b32 low, $4, 6;
            and.b32 low, low, 0x01C001C0;
            shl.b32 high, $4, 2;
            lop3.b32 low, high, 0x80008000, low, 0xEA;
            mul.rn.bf16x2 $2, low, $5;
            shr.b32 low, $4, 3;
            and.b32 low, low, 0x01C001C0;
            shl.b32 high, $4, 1;
            lop3.b32 low, high, 0x80008000, low, 0xEA;
            mul.rn.bf16x2 $3, low, $6;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r,r",
            [words, scale_g, scale_g8],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        q0, q1, q2, q3 = _two_bf16(p0), _two_bf16(p1), _two_bf16(p2), _two_bf16(p3)
    else:
        q0, q1 = _slow_pair(words, scale_g, 15, 6), _slow_pair(words, scale_g8, 12, 3)
        q2, q3 = _slow_pair(words, scale_g, 13, 0), _slow_pair(words, scale_g8, 14, 9)
    pairs = tl.join(tl.join(q0, q1), tl.join(q2, q3))  # [.., 32, 4, pair, half of rows, half of columns]
    pairs = pairs.reshape(ROW_TILES, COLUMN_TILES, 8, 4, 4, 2, 2, 2)
    pairs = pairs.permute(0, 6, 2, 1, 4, 3, 7, 5) if BY_LANE else pairs.permute(0, 6, 2, 1, 4, 7, 3, 5)
    return pairs.reshape(16 * ROW_TILES, 64 * COLUMN_TILES)


@triton.jit
def columns_by_lane(x, K: tl.constexpr, N: tl.constexpr):
    """[K, N] in the order of ``BY_LANE``."""
    return x.reshape(K // 16, 2, 4, 2, N).permute(0, 2, 1, 3, 4).reshape(K, N)


@triton.jit
def await_product(sums):
    """The same sums, but used: Triton then waits for ``wgmma`` before the loop goes on.

    Otherwise it lets a product run on while the next weights are decoded into the registers that ``wgmma`` may still
    read its first operand from (Triton 3.6 and 3.7; results then differ from run to run)."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [sums], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _spread_scales(scales, ASM: tl.constexpr):
    """The scales of the two bytes; as two equal BF16 in an int32, times 2^118 (ASM), or as fp32.

    E4M3 becomes FP16 by instruction. FP16's bits, moved by three, are a BF16's with another exponent bias, and the
    seven bits that fall out are zero: 0x7300 puts the bias right by 112 and the exponent up by 118."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 both, unused;
            .reg .b32 a;
            mov.b32 {both, unused}, $2;
            cvt.rn.f16x2.e4m3x2 a, both;
            shr.b32 a, a, 3;
            add.u32 a, a, 0x73007300;
            prmt.b32 $0, a, a, 0x1010;
            prmt.b32 $1, a, a, 0x3232;
            }
            """,
            "=&r,=&r,r",
            [scales],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        low, high = _slow_e4m3(scales), _slow_e4m3(scales >> 8)
    return low, high


@triton.jit
def _two_bf16(pairs):
    """bf16 [.., 2] of the halves of an int32, the lower first."""
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _slow_e4m3(bits):
    exponent, mantissa = (bits >> 3) & 15, (bits & 7).to(tl.float32)
    normal = (1.0 + mantissa / 8) * tl.exp2((exponent - 7).to(tl.float32))
    return tl.where(exponent == 0, mantissa / 512, normal)


@triton.jit
def _slow_pair(words, scales, SIGN: tl.constexpr, MAGNITUDE: tl.constexpr):
    low = _slow_e2m1(words >> SIGN, words >> MAGNITUDE)
    high = _slow_e2m1(words >> (SIGN + 16), words >> (MAGNITUDE + 16))
    return tl.join((low * scales / 256).to(tl.bfloat16), (high * scales / 256).to(tl.bfloat16))


@triton.jit
def _slow_e2m1(sign, magnitude):
    exponent, mantissa = (magnitude >> 1) & 3, (magnitude & 1).to(tl.float32)
    value = tl.where(exponent == 0, mantissa / 2, (1.0 + mantissa / 2) * tl.exp2((exponent - 1).to(tl.float32)))
    return tl.where((sign & 1) == 1, -value, value)
