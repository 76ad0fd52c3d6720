"""From words in fragment order (:mod:`glm5ray.kernels.nvfp4_fragments`) to the BF16 operand of a matrix product.

The result's elements are computed by the threads that feed them to the matrix units: on sm_90 they go from registers
into ``wgmma`` without passing shared memory (seen in the compiled code: no ``STS`` in the loop). About 2.5 integer
operations a weight, the scales included, which are spread over the four words that share them."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportReturnType=false
# (Triton's annotations say nothing of how a kernel is launched)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_tile(
    words,
    scales_g,
    scales_g8,
    ROW_TILES: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    BY_LANE: tl.constexpr,
    ASM: tl.constexpr,
):
    """bf16 [16 ROW_TILES, 64 COLUMN_TILES]: weight x group scale / 256, exactly.

    words: int32 [ROW_TILES, COLUMN_TILES, 32, 4]; scales_g, scales_g8: int32 [ROW_TILES, COLUMN_TILES, 32], the four
    E4M3 bytes of row g and of row g + 8. ASM: with PTX; without it, in Triton's own operations, for its interpreter.
    BY_LANE: of each 16 columns a lane's four stand side by side, which is how Triton wants operands of ``mma.sync``
    that were joined from parts; :func:`columns_by_lane` puts the other operand into that order. Otherwise columns
    stand in their own order, ``wgmma``'s.
    """
    by_word = _spread_scales(scales_g, ASM), _spread_scales(scales_g8, ASM)
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
            [words, by_word[0], by_word[1]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        q0, q1, q2, q3 = _two_bf16(p0), _two_bf16(p1), _two_bf16(p2), _two_bf16(p3)
    else:
        q0, q1 = _slow_pair(words, by_word[0], 15, 6), _slow_pair(words, by_word[1], 12, 3)
        q2, q3 = _slow_pair(words, by_word[0], 13, 0), _slow_pair(words, by_word[1], 14, 9)
    pairs = tl.join(tl.join(q0, q1), tl.join(q2, q3))  # [.., 32, 4, pair, half of rows, half of columns]
    pairs = pairs.reshape(ROW_TILES, COLUMN_TILES, 8, 4, 4, 2, 2, 2)
    pairs = pairs.permute(0, 6, 2, 1, 4, 3, 7, 5) if BY_LANE else pairs.permute(0, 6, 2, 1, 4, 7, 3, 5)
    return pairs.reshape(16 * ROW_TILES, 64 * COLUMN_TILES)


@triton.jit
def columns_by_lane(x, K: tl.constexpr, N: tl.constexpr):
    """[K, N] in the order of ``BY_LANE``."""
    return x.reshape(K // 16, 2, 4, 2, N).permute(0, 2, 1, 3, 4).reshape(K, N)


@triton.jit
def _spread_scales(scales, ASM: tl.constexpr):
    """[.., 4]: the scale of each word; as two equal BF16 in an int32, times 2^118 (ASM), or as fp32.

    E4M3 becomes FP16 by instruction. FP16's bits, moved by three, are a BF16's with another exponent bias, and the
    seven bits that fall out are zero: 0x7300 puts the bias right by 112 and the exponent up by 118."""
    if ASM:
        s0, s1, s2, s3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            .reg .b32 a, b;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 a, low;
            cvt.rn.f16x2.e4m3x2 b, high;
            shr.b32 a, a, 3;
            shr.b32 b, b, 3;
            add.u32 a, a, 0x73007300;
            add.u32 b, b, 0x73007300;
            prmt.b32 $0, a, a, 0x1010;
            prmt.b32 $1, a, a, 0x3232;
            prmt.b32 $2, b, b, 0x1010;
            prmt.b32 $3, b, b, 0x3232;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [scales],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        s0, s1, s2, s3 = _slow_e4m3(scales), _slow_e4m3(scales >> 8), _slow_e4m3(scales >> 16), _slow_e4m3(scales >> 24)
    four = tl.join(tl.join(s0, s2), tl.join(s1, s3))
    return four.reshape(scales.shape[0], scales.shape[1], scales.shape[2], 4)


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
