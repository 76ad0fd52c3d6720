"""The order in which NVFP4 experts lie in GPU memory: that in which a thread feeds them to the matrix units.

A matrix ``[rows, K]`` is cut into tiles of 16 rows x 64 columns. A tile is 32 lanes x 4 words of 32 bits: word s of
lane l holds the eight weights that lane l contributes to the A operand of ``mma.m16n8k16`` (of ``wgmma``: the same)
in step s of four. Which columns a step takes is free, as long as the other operand's rows follow: with g = l // 4 and
t = l % 4, lane l takes 16t to 16t + 15, which is one group of scales, so that it needs two scales a tile; and of a
token it wants 32 bytes that lie side by side. Word s has, as pairs of neighbouring columns,

    pair 0: row g,     columns 16t + 4s, 16t + 4s + 1          pair 2: row g,     columns 16t + 4s + 2, 16t + 4s + 3
    pair 1: row g + 8, columns 16t + 4s, 16t + 4s + 1          pair 3: row g + 8, columns 16t + 4s + 2, 16t + 4s + 3

The lower half of a word holds the first weight of each pair, the upper half the second. In a half, sign and magnitude
(the three lower bits of E2M1) of a pair's weight stand where two shifts at most bring them to a BF16's sign (bit 15)
and the lowest bits of its exponent with the highest of its mantissa (8 to 6); that BF16 is the weight times 2^-126:

    pair 0: sign 15, magnitude 8..6                pair 2: sign 13, magnitude 2..0
    pair 1: sign 12, magnitude 5..3                pair 3: sign 14, magnitude 11..9

Scales keep their E4M3 bytes: a tile has two for each lane, row g's in the lower byte and row g + 8's in the upper.
Rows of gate and up are interleaved: a tile has eight rows of the gate and the same eight of up behind them, so that a
thread has both factors of a hidden unit. Rows are filled up to 16 and columns to 64 with zeros.

A matrix unit takes columns ``matrix_order()`` of a tile as its own 0 to 63: whoever stages tokens for it in memory puts
their columns into that order (:func:`permute_columns`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from glm5ray.kernels.interface import Nvfp4ExpertWeights

TILE_ROWS, TILE_COLUMNS, GROUP = 16, 64, 16

_SIGN_AND_MAGNITUDE = ((15, 6), (12, 3), (13, 0), (14, 9))
"""Of each pair: where the sign and the lowest bit of the magnitude stand in a half word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentExperts:
    """:class:`~glm5ray.kernels.interface.Nvfp4ExpertWeights` in this order. Letters as there; ``ceil`` to whole
    tiles."""

    gate_up_words: Tensor
    """int32 [E, ceil(F / 8), ceil(M / 64), 32, 4]"""
    gate_up_scales: Tensor
    """int16 [E, ceil(F / 8), ceil(M / 64), 32]: two E4M3 bytes each"""
    gate_up_global: Tensor
    """fp32 [E, 2]: of the gate, of up"""
    down_words: Tensor
    """int32 [E, ceil(M / 16), ceil(F / 64), 32, 4]"""
    down_scales: Tensor
    """int16 [E, ceil(M / 16), ceil(F / 64), 32]"""
    down_global: Tensor
    """fp32 [E]"""
    first_expert: int
    hidden_size: int
    """M"""
    moe_intermediate_size: int
    """F"""


def pack_experts(experts: Nvfp4ExpertWeights) -> FragmentExperts:
    """The same numbers in fragment order. Works one expert at a time, so that beside both copies only one expert's
    is unpacked."""
    num_experts, hidden_size, half_intermediate = experts.down_packed.shape
    gate_up_words, gate_up_scales = _pack_each(
        num_experts,
        lambda e: (interleave_gate_up(experts.gate_up_packed[e]), interleave_gate_up(experts.gate_up_scales[e])),
    )
    down_words, down_scales = _pack_each(num_experts, lambda e: (experts.down_packed[e], experts.down_scales[e]))
    return FragmentExperts(
        gate_up_words=gate_up_words,
        gate_up_scales=gate_up_scales,
        gate_up_global=experts.gate_up_global.float().contiguous(),
        down_words=down_words,
        down_scales=down_scales,
        down_global=experts.down_global.float().contiguous(),
        first_expert=experts.first_expert,
        hidden_size=hidden_size,
        moe_intermediate_size=2 * half_intermediate,
    )


def _pack_each(num_experts: int, matrix: Callable[[int], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    words, scales = pack_matrix(*matrix(0))
    all_words, all_scales = (x.new_empty(num_experts, *x.shape) for x in (words, scales))
    for e in range(num_experts):
        all_words[e], all_scales[e] = pack_matrix(*matrix(e))
    return all_words, all_scales


def interleave_gate_up(rows_2FX: Tensor) -> Tensor:
    """[2 ceil8(F), X]: eight rows of the gate, the same eight of up, and so on; zeros fill up the last."""
    gate_FX, up_FX = rows_2FX.view(torch.uint8).chunk(2)
    fill = -len(gate_FX) % 8
    gate_FX, up_FX = (functional.pad(half, (0, 0, 0, fill)) for half in (gate_FX, up_FX))
    return torch.stack([gate_FX.unflatten(0, (-1, 8)), up_FX.unflatten(0, (-1, 8))], dim=1).flatten(0, 2)


def pack_matrix(packed_OX: Tensor, scales_OG: Tensor) -> tuple[Tensor, Tensor]:
    """(words int32 [ceil(O / 16), ceil(K / 64), 32, 4], scales int16 [ceil(O / 16), ceil(K / 64), 32]).

    packed_OX: uint8 [O, K / 2], lower column in the low nibble; scales_OG: E4M3 [O, K / 16]."""
    scales_OG = scales_OG.view(torch.uint8)
    # a kernel need not know zero among scales: the weights of such a group are set to zero instead
    is_dead_OX = (scales_OG == 0).repeat_interleave(GROUP // 2, dim=1)
    packed_OX = packed_OX.masked_fill(is_dead_OX, 0)
    fill_rows, fill_bytes = -packed_OX.shape[0] % TILE_ROWS, -packed_OX.shape[1] % (TILE_COLUMNS // 2)
    packed_OX = functional.pad(packed_OX, (0, fill_bytes, 0, fill_rows))
    scales_OG = functional.pad(scales_OG, (0, fill_bytes * 2 // GROUP, 0, fill_rows))
    codes = torch.stack([packed_OX & 15, packed_OX >> 4], dim=-1).to(torch.int32)
    # [tile, half of rows, g, tile of columns, t, s, first or second two columns, first or second of the pair]
    codes = codes.view(len(packed_OX) // TILE_ROWS, 2, 8, -1, 4, 4, 2, 2)
    halves = torch.zeros(codes.shape[0], codes.shape[3], 8, 4, 4, 2, dtype=torch.int32, device=codes.device)
    for pair, (sign, magnitude) in enumerate(_SIGN_AND_MAGNITUDE):
        code = codes[:, pair % 2, :, :, :, :, pair // 2].transpose(1, 2)  # [tile, tile, g, t, s, 2]
        halves |= (code >> 3) << sign | (code & 7) << magnitude
    words = (halves[..., 0] | halves[..., 1] << 16).flatten(2, 3)
    scales = scales_OG.view(-1, 2, 8, scales_OG.shape[1] // 4, 4).permute(0, 3, 2, 4, 1).contiguous()
    return words, scales.view(torch.int16).flatten(2)


def unpack_matrix(words: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`pack_matrix`: (packed uint8, scales E4M3), with the rows and columns that fill up."""
    words = words.unflatten(2, (8, 4))
    tiles, column_tiles = words.shape[:2]
    codes = torch.empty(tiles, 2, 8, column_tiles, 4, 4, 2, 2, dtype=torch.int32, device=words.device)
    for pair, (sign, magnitude) in enumerate(_SIGN_AND_MAGNITUDE):
        for half in range(2):
            bits = words >> 16 * half
            code = (bits >> sign & 1) << 3 | bits >> magnitude & 7  # [tile, tile, g, t, s]
            codes[:, pair % 2, :, :, :, :, pair // 2, half] = code.transpose(1, 2)
    packed = (codes[..., 0] | codes[..., 1] << 4).to(torch.uint8).view(tiles * TILE_ROWS, -1)
    by_byte = scales.contiguous().view(torch.uint8).view(tiles, column_tiles, 8, 4, 2)  # [tile, tile, g, t, half]
    unpacked = by_byte.permute(0, 4, 2, 1, 3).reshape(tiles * TILE_ROWS, -1)
    return packed, unpacked.view(torch.float8_e4m3fn)


def matrix_order() -> Tensor:
    """int64 [64]: the column of a tile that the matrix unit takes as its k-th: k is (step s, half h, lane t, e)."""
    return torch.arange(TILE_COLUMNS).view(4, 4, 2, 2).permute(1, 2, 0, 3).flatten()


def permute_columns(x_TX: Tensor) -> Tensor:
    """[T, ceil64(X)]: the columns of each tile in :func:`matrix_order`, zeros behind the last column."""
    x_TX = functional.pad(x_TX, (0, -x_TX.shape[1] % TILE_COLUMNS))
    return x_TX.unflatten(1, (-1, TILE_COLUMNS))[..., matrix_order().to(x_TX.device)].flatten(1)
