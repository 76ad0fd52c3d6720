"""Routed experts in NVFP4 for many tokens: weights are decoded to BF16 inside the matrix products (W4A16).

Rows are the assignments of tokens to experts, sorted by expert. Each expert's rows are cut into tiles of a few widths
(:mod:`glm5ray.kernels.triton.expert_rows`), and one launch a width computes all tiles of it: a weight is decoded once a
tile, so wide tiles decode least, and narrow ones waste little on an expert's last rows. Products are computed
transposed, ``[weights' rows, tokens]``, because ``wgmma`` takes only its first operand from registers.

Letters beside those of :mod:`glm5ray.kernels.interface`: X rows, W widths of tiles."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportReturnType=false
# (Triton's annotations say nothing of how a kernel is launched)
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from glm5ray.kernels.interface import Nvfp4ExpertWeights
from glm5ray.kernels.nvfp4_fragments import TILE_COLUMNS, pack_experts
from glm5ray.kernels.triton.device import capability
from glm5ray.kernels.triton.expert_rows import combine_kernel, find_tile, max_tiles, sort_rows
from glm5ray.kernels.triton.nvfp4_decode import await_product, columns_by_lane, decode_tile
from glm5ray.kernels.triton.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from glm5ray.kernels.nvfp4_fragments import FragmentExperts

MAX_TOKENS = 8192
"""At once; more go one part after another, so that memory between the products is bounded."""

WIDTHS = {90: (256, 128, 64, 32, 16), 120: (128, 64, 32, 16)}
"""Capability -> tokens of a tile, each half of the one before. Others take sm_120's."""


class Tile(NamedTuple):
    """How one width is compiled."""

    ROW_TILES: int
    """Fragment tiles of a program, 16 weight rows each."""
    BY_LANE: bool
    """For ``mma.sync``; otherwise for ``wgmma``, which takes 64 rows and four warps."""
    num_warps: int
    num_stages: int


def tile_of(width: int, arch: int) -> Tile:
    """On sm_90 as measured best (docs/experiments/0005); on sm_120 within its shared memory, unmeasured."""
    if arch != 90:
        return Tile(8, True, 8, 3)
    if width <= 32:
        return Tile(4, True, 1, 4)
    if width == 64:
        return Tile(8, False, 8, 3)
    if width == 128:
        # One warpgroup: with two, and more than two stages, results differed from run to run and were not always finite
        # (Triton 3.6, seen at 2,560 tokens; docs/experiments/0008).
        return Tile(8, False, 4, 4)
    return Tile(8, False, 8, 4)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _product(
    x_pointers,
    is_row,
    words_E,
    scales_E,
    expert,
    first_tile,
    num_tiles,
    K,
    ROW_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    BY_LANE: tl.constexpr,
    EVEN: tl.constexpr,
    ASM: tl.constexpr,
):
    """fp32 [16 ROW_TILES, WIDTH]: an expert's weight rows times rows of x, without the global scale.

    x_pointers: [WIDTH], to the first of each row's columns, which are K, filled up to whole tiles, in
    ``matrix_order()``. EVEN: the weights' rows are whole programs of tiles.
    """
    column_tiles = tl.cdiv(K, 64)
    k = tl.arange(0, 64)
    tile = first_tile + tl.arange(0, ROW_TILES)
    at = (expert.to(tl.int64) * num_tiles + tile) * column_tiles
    lane, s = tl.arange(0, 32), tl.arange(0, 4)
    word_pointers = words_E + at[:, None, None, None] * 128 + lane[None, None, :, None] * 4 + s[None, None, None, :]
    scale_pointers = scales_E + at[:, None, None] * 32 + lane[None, None, :]
    x_pointers = x_pointers[None, :] + k[:, None]
    is_tile = tile < num_tiles
    sums = tl.zeros((16 * ROW_TILES, WIDTH), tl.float32)
    # two bytes a lane are too few for an asynchronous copy: scales are fetched a step ahead into registers
    scales = tl.load(scale_pointers, mask=is_tile[:, None, None], other=0)
    for step in range(column_tiles):
        scale_pointers += 32
        is_next = is_tile & (step + 1 < column_tiles)
        next_scales = tl.load(scale_pointers, mask=is_next[:, None, None], other=0)
        if EVEN:
            words, x = tl.load(word_pointers), tl.load(x_pointers)
        else:
            words = tl.load(word_pointers, mask=is_tile[:, None, None, None], other=0)
            x = tl.load(x_pointers, mask=is_row[None, :], other=0)
        weights = decode_tile(words, scales, ROW_TILES, 1, BY_LANE, ASM)
        if BY_LANE:
            x = columns_by_lane(x, 64, WIDTH)
        if not ASM:  # for the interpreter, which multiplies no bf16
            weights, x = weights.to(tl.float32), x.to(tl.float32)
        sums = tl.dot(weights, x, sums)
        if ASM and not BY_LANE:
            sums = await_product(sums)
        scales = next_scales
        word_pointers += 128
        x_pointers += 64
    return sums


@triton.jit
def gate_up_kernel(
    x_TM,
    assignment_X,
    hidden_XF,
    words_E,
    scales_E,
    global_E2,
    row_start_E1,
    cumulative_E,
    start_E,
    E,
    M,
    F,
    A,
    E2: tl.constexpr,
    ROW_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    BY_LANE: tl.constexpr,
    EVEN: tl.constexpr,
    ASM: tl.constexpr,
):
    """hidden[row] = silu(gate(x[token])) * up(x[token]), for tiles of WIDTH rows and 8 ROW_TILES hidden units.

    Rows of x and of hidden are filled up to whole tiles of columns, in ``matrix_order()``."""
    filled = tl.cdiv(F, 64) * 64
    parts = tl.cdiv(filled, 8 * ROW_TILES)
    expert, first_row, rows = find_tile(tl.program_id(0) // parts, cumulative_E, start_E, row_start_E1, E, E2, WIDTH)
    if rows > 0:
        part = tl.program_id(0) % parts
        n = tl.arange(0, WIDTH)
        token = tl.load(assignment_X + first_row + n, mask=n < rows, other=0) // A
        x_pointers = x_TM + token.to(tl.int64) * (tl.cdiv(M, 64) * 64)
        num_tiles = tl.cdiv(F, 8)
        sums = _product(
            x_pointers,
            n < rows,
            words_E,
            scales_E,
            expert,
            part * ROW_TILES,
            num_tiles,
            M,
            ROW_TILES,
            WIDTH,
            BY_LANE,
            EVEN,
            ASM,
        )
        halves = sums.reshape(ROW_TILES, 2, 8, WIDTH).permute(0, 2, 3, 1)
        gate, up = tl.split(halves)
        gate *= tl.load(global_E2 + expert * 2) * 256
        up *= tl.load(global_E2 + expert * 2 + 1) * 256
        hidden = (gate / (1 + tl.exp(-gate)) * up).to(hidden_XF.dtype.element_ty)
        # in matrix order a program's columns are runs of RUN; a tile of 64 columns is one program, or two
        RUN: tl.constexpr = ROW_TILES
        hidden = hidden.reshape(RUN // 2, 4, 2, 2, WIDTH).permute(1, 2, 0, 3, 4).reshape(8 * RUN, WIDTH)
        i = tl.arange(0, 8 * RUN)
        f = part * (8 * RUN) // 64 * 64 + i // RUN * 8 + i % RUN + part * (8 * RUN) % 64 // 8
        out = hidden_XF + (first_row + n).to(tl.int64)[None, :] * filled + f[:, None]
        tl.store(out, hidden, mask=(n < rows)[None, :])


@triton.jit
def down_kernel(
    hidden_XF,
    out_XM,
    words_E,
    scales_E,
    global_E,
    row_start_E1,
    cumulative_E,
    start_E,
    E,
    M,
    F,
    E2: tl.constexpr,
    ROW_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    BY_LANE: tl.constexpr,
    EVEN: tl.constexpr,
    ASM: tl.constexpr,
):
    """out[row] = down(hidden[row]), for tiles of WIDTH rows and 16 ROW_TILES columns of M."""
    parts = tl.cdiv(M, 16 * ROW_TILES)
    expert, first_row, rows = find_tile(tl.program_id(0) // parts, cumulative_E, start_E, row_start_E1, E, E2, WIDTH)
    if rows > 0:
        part = tl.program_id(0) % parts
        n = tl.arange(0, WIDTH)
        x_pointers = hidden_XF + (first_row + tl.minimum(n, rows - 1)).to(tl.int64) * (tl.cdiv(F, 64) * 64)
        num_tiles = tl.cdiv(M, 16)
        sums = _product(
            x_pointers,
            n < rows,
            words_E,
            scales_E,
            expert,
            part * ROW_TILES,
            num_tiles,
            F,
            ROW_TILES,
            WIDTH,
            BY_LANE,
            EVEN,
            ASM,
        )
        sums *= tl.load(global_E + expert) * 256
        m = part * (16 * ROW_TILES) + tl.arange(0, 16 * ROW_TILES)
        out = out_XM + (first_row + n).to(tl.int64)[None, :] * M + m[:, None]
        tl.store(out, sums.to(out_XM.dtype.element_ty), mask=(n < rows)[None, :] & (m < M)[:, None])


@triton.jit
def permute_columns_kernel(x_TM, out_TM, M, filled, x_stride, COLUMNS: tl.constexpr):
    """As :func:`glm5ray.kernels.nvfp4_fragments.permute_columns`, COLUMNS of a token's row."""
    t = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(x_TM + t * x_stride + m, mask=m < M, other=0.0)
    x = x.reshape(COLUMNS // 64, 4, 4, 2, 2).permute(0, 2, 3, 1, 4).reshape(COLUMNS)
    tl.store(out_TM + t * filled + m, x, mask=m < filled)


# --- launches ---------------------------------------------------------------------------------------------------------


def run_experts(
    x_TM: Tensor, ids_TA: Tensor, weights_TA: Tensor, experts: FragmentExperts, *, arch: int, asm: bool = True
) -> Tensor:
    """As :class:`~glm5ray.kernels.interface.Experts`'s ``run``; x is bf16. Without ``asm`` in Triton's own operations.

    Takes no host synchronisation: grids are bounds, and programs without a tile end at once."""
    out_TM = torch.empty_like(x_TM)
    for t in range(0, len(x_TM), MAX_TOKENS):
        part = slice(t, t + MAX_TOKENS)
        _run_part(x_TM[part], ids_TA[part], weights_TA[part], experts, out_TM[part], arch, asm)
    return out_TM


def _run_part(
    x_TM: Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    experts: FragmentExperts,
    out_TM: Tensor,
    arch: int,
    asm: bool,
) -> None:
    widths = WIDTHS.get(arch, WIDTHS[120])
    num_experts, num_tokens, num_choices = len(experts.down_global), *ids_TA.shape
    M, F = experts.hidden_size, experts.moe_intermediate_size
    rows = sort_rows(ids_TA, experts.first_expert, num_experts, widths)
    x_TM = permute_columns(x_TM)
    hidden_XF = x_TM.new_empty(ids_TA.numel(), fill_columns(F))
    rows_XM = x_TM.new_empty(ids_TA.numel(), M)
    sizes = {"E": num_experts, "M": M, "F": F, "E2": triton.next_power_of_2(num_experts)}
    row_start = rows.row_start_E1
    for i, width in enumerate(widths):
        tiles = max_tiles(i, widths, ids_TA.numel(), num_experts)
        if tiles == 0:
            continue
        tile = tile_of(width, arch)
        rest = {"WIDTH": width, "EVEN": is_even(tile, M, F), "ASM": asm, **tile._asdict()}
        gate_up_kernel[(tiles * triton.cdiv(fill_columns(F), 8 * tile.ROW_TILES),)](
            x_TM,
            rows.assignment_X,
            hidden_XF,
            experts.gate_up_words,
            experts.gate_up_scales,
            experts.gate_up_global,
            row_start,
            rows.cumulative_WE[i],
            rows.start_WE[i],
            A=num_choices,
            **sizes,
            **rest,
        )
        down_kernel[(tiles * triton.cdiv(M, 16 * tile.ROW_TILES),)](
            hidden_XF,
            rows_XM,
            experts.down_words,
            experts.down_scales,
            experts.down_global,
            row_start,
            rows.cumulative_WE[i],
            rows.start_WE[i],
            **sizes,
            **rest,
        )
    block = min(1024, triton.next_power_of_2(M))
    combine_kernel[(num_tokens, triton.cdiv(M, block))](
        rows_XM, rows.row_TA, weights_TA, row_start[-1:], out_TM, M, A=num_choices, COLUMNS=block
    )


def fill_columns(columns: int) -> int:
    return triton.cdiv(columns, TILE_COLUMNS) * TILE_COLUMNS


def permute_columns(x_TM: Tensor) -> Tensor:
    tokens, width = x_TM.shape
    out_TM = x_TM.new_empty(tokens, fill_columns(width))
    grid = (tokens, triton.cdiv(out_TM.shape[1], 1024))
    permute_columns_kernel[grid](x_TM, out_TM, width, out_TM.shape[1], x_TM.stride(0), COLUMNS=1024)
    return out_TM


def is_even(tile: Tile, hidden_size: int, moe_intermediate_size: int) -> bool:
    """Whether programs need no masks: GLM-5's sizes."""
    rows = 16 * tile.ROW_TILES
    return hidden_size % rows == 0 and moe_intermediate_size % max(rows // 2, 64) == 0


class Nvfp4Experts:
    """:class:`~glm5ray.kernels.interface.Experts` in NVFP4."""

    def pack(self, experts: Nvfp4ExpertWeights) -> FragmentExperts:
        if not isinstance(experts, Nvfp4ExpertWeights):
            raise TypeError(f"triton's experts are NVFP4; these are {type(experts).__name__}")
        return pack_experts(experts)

    def run(self, x_TM: Tensor, ids_TA: Tensor, weights_TA: Tensor, experts: FragmentExperts) -> Tensor:
        return run_experts(x_TM, ids_TA, weights_TA, experts, arch=capability(x_TM), asm=x_TM.is_cuda)


experts = Nvfp4Experts()


# --- the gate ---------------------------------------------------------------------------------------------------------

_TYPES = {
    "x_TM": "*bf16",
    "assignment_X": "*i32",
    "hidden_XF": "*bf16",
    "out_XM": "*bf16",
    "words_E": "*i32",
    "scales_E": "*i16",
    "global_E2": "*fp32",
    "global_E": "*fp32",
    "row_start_E1": "*i32",
    "cumulative_E": "*i32",
    "start_E": "*i32",
    "out_TM": "*bf16",
    **dict.fromkeys(("E", "M", "F", "A", "filled", "x_stride"), "i32"),
}


def variants() -> Iterator[Variant]:
    """For GLM-5's sizes; ``A`` is 8."""

    def variant(name: str, fn: triton.JITFunction, constants: dict[str, object], **options: object) -> Variant:
        signature = {arg: _TYPES[arg] for arg in fn.arg_names if arg not in constants}
        unaligned = frozenset({"A"} & set(signature))
        return Variant(name=name, fn=fn, signature=signature, constants=constants, unaligned=unaligned, **options)

    for arch, widths in WIDTHS.items():
        on: dict[str, object] = {"capabilities": (arch,)}
        for width in widths:
            tile = tile_of(width, arch)
            constants = {"E2": 256, "ROW_TILES": tile.ROW_TILES, "BY_LANE": tile.BY_LANE, "WIDTH": width}
            constants |= {"EVEN": True, "ASM": True}
            on |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            slow = {"is_slow_to_compile": width not in (widths[0], widths[-1])}
            yield variant(f"gate_up_{width}", gate_up_kernel, constants, **on, **slow)
            yield variant(f"down_{width}", down_kernel, constants, **on, **slow)
            uneven = constants | {"EVEN": False}
            yield variant(f"gate_up_{width}_uneven", gate_up_kernel, uneven, **on, is_slow_to_compile=True)
            yield variant(f"down_{width}_uneven", down_kernel, uneven, **on, is_slow_to_compile=True)
    yield variant("permute_columns", permute_columns_kernel, {"COLUMNS": 1024})
