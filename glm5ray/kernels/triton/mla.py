"""Attention in absorbed form over pages or over selected slots, for prompts and decodes alike.

One program computes one token's heads (a tile of them are the rows of its matrix products) over one part of what the
token sees: a tile of latent rows is loaded once, and is keys and values to all of these heads. Long contexts are split
into parts whose results a second kernel joins in order, so the sum is the same in every run. How many parts follows
from what the host knows: tokens of the step, and the bound of what one of them sees.

Shape suffixes in :mod:`glm5ray.kernels.interface`; B: parts of a context."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportReturnType=false
# (Triton's annotations say nothing of how a kernel is launched)
from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from glm5ray.kernels.cache_rows import LATENT_GROUP, split_rows
from glm5ray.kernels.triton.device import capability, dot_precision, num_processors
from glm5ray.kernels.triton.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from glm5ray.kernels.interface import ForwardBatch

LOG2_E = 1.4426950408889634
MAX_PARTS, FEW_PARTS = 64, 8
SMALL_STEP = 64 * 512
"""Tokens times positions that one of them sees at most."""
PROMPT_TOKENS = 512
LEAST_PART = 64
"""Positions: a shorter part costs more to join than it saves."""


@triton.jit
def dot(a, b, sum_, PRECISION: tl.constexpr):
    """``a @ b``, added to ``sum_`` if that is not None."""
    if PRECISION == "ieee":
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sum_, input_precision=PRECISION)


@triton.jit
def _load_places(selected_ptr, table_ptr, at, end, PAGE: tl.constexpr):
    """What :func:`_slots` makes slots of: selected slots, or pages."""
    if selected_ptr is not None:
        return tl.load(selected_ptr + at, mask=at < end, other=-1)
    return tl.load(table_ptr + at // PAGE, mask=at < end, other=-1)


@triton.jit
def _slots(places, selected_ptr, at, end, PAGE: tl.constexpr):
    """Slots of the positions (or of the places in the selection) ``at``; -1 from ``end`` on."""
    if selected_ptr is not None:
        return tl.where(at < end, places, -1).to(tl.int64)
    return tl.where(at < end, places.to(tl.int64) * PAGE + at % PAGE, -1)


@triton.jit
def _load_latent(
    latent_ptr, scales_ptr, slots, stride, scales_stride, dtype, C: tl.constexpr, BC: tl.constexpr, GROUP: tl.constexpr
):
    """Latent rows [slots, BC] in ``dtype``; zeros for slots below 0."""
    seen = slots >= 0
    cols = tl.arange(0, BC)
    mask = seen[:, None] & (cols < C)[None, :]
    latent = tl.load(latent_ptr + slots[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    if scales_ptr is not None:
        num_groups: tl.constexpr = (BC + GROUP - 1) // GROUP
        group = tl.arange(0, num_groups)
        at = scales_ptr + slots[:, None] * scales_stride + group[None, :]
        scale = tl.load(at, mask=seen[:, None] & (group * GROUP < C)[None, :], other=0.0)
        latent = tl.reshape(latent.to(tl.float32), [slots.shape[0], num_groups, BC // num_groups])
        latent = tl.reshape(latent * scale[:, :, None], [slots.shape[0], BC]).to(dtype)
    return latent


@triton.jit(do_not_specialize=["num_parts", "table_stride"])
def _attend(
    q_ptr,
    latent_ptr,
    scales_ptr,
    key_ptr,
    selected_ptr,
    positions_ptr,
    slice_ptr,
    table_ptr,
    out_ptr,
    lse_ptr,
    token_stride,
    head_stride,
    latent_stride,
    scales_stride,
    key_stride,
    selected_stride,
    table_stride,
    H,
    num_parts,
    scale_log2,
    C: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    BH: tl.constexpr,
    BS: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The program's heads of one token over one part of its context. ``lse_ptr`` is None if there is one part only:
    then ``out`` is the result, else an fp32 partial result [T, B, H, C] with its log2-sum-exp [T, B, H]."""
    head_tiles = tl.cdiv(H, BH)
    head_tile = tl.program_id(0) % head_tiles
    part = tl.program_id(0) // head_tiles % num_parts
    token = (tl.program_id(0) // head_tiles // num_parts).to(tl.int64)

    visible = tl.load(positions_ptr + token).to(tl.int32) + 1
    table_ptr += tl.load(slice_ptr + token).to(tl.int64) * table_stride
    if selected_ptr is not None:
        selected_ptr += token * selected_stride
        visible = tl.minimum(visible, K)
    tiles = tl.cdiv(tl.cdiv(visible, BS), num_parts)
    first = part * tiles * BS
    end = tl.minimum(first + tiles * BS, visible)

    head = head_tile * BH + tl.arange(0, BH)
    is_head = head < H
    cols, key_cols = tl.arange(0, BC), tl.arange(0, BR)
    q_at = q_ptr + token * token_stride + head[:, None] * head_stride
    q_latent = tl.load(q_at + cols[None, :], mask=is_head[:, None] & (cols < C)[None, :], other=0.0)
    q_key = tl.load(q_at + C + key_cols[None, :], mask=is_head[:, None] & (key_cols < R)[None, :], other=0.0)
    dtype = q_ptr.dtype.element_ty

    top = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    out = tl.zeros([BH, BC], tl.float32)
    step = tl.arange(0, BS)
    if AHEAD:  # two tiles: the copies of the next tile then wait for no other load
        places = _load_places(selected_ptr, table_ptr, first + step, end, PAGE)
        slots = _slots(places, selected_ptr, first + step, end, PAGE)
        places = _load_places(selected_ptr, table_ptr, first + BS + step, end, PAGE)
    for start in range(first, end, BS):
        if not AHEAD:
            found = _load_places(selected_ptr, table_ptr, start + step, end, PAGE)
            slots = _slots(found, selected_ptr, start + step, end, PAGE)
        latent = _load_latent(latent_ptr, scales_ptr, slots, latent_stride, scales_stride, dtype, C, BC, GROUP)
        seen = slots >= 0
        key_at = key_ptr + slots[:, None] * key_stride + key_cols[None, :]
        key = tl.load(key_at, mask=seen[:, None] & (key_cols < R)[None, :], other=0.0).to(dtype)
        if AHEAD:
            slots = _slots(places, selected_ptr, start + BS + step, end, PAGE)
            places = _load_places(selected_ptr, table_ptr, start + 2 * BS + step, end, PAGE)
        score = dot(q_latent, tl.trans(latent), None, PRECISION)
        score = dot(q_key, tl.trans(key), score, PRECISION)
        score = tl.where(seen[None, :], score * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, axis=1)
        out = dot(p.to(dtype), latent, out * shrink[:, None], PRECISION)
        top = new_top

    out = out / tl.where(total > 0.0, total, 1.0)[:, None]
    mask = is_head[:, None] & (cols < C)[None, :]
    row = (token * num_parts + part) * H + head
    tl.store(out_ptr + row[:, None] * C + cols[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, tl.where(total > 0.0, top + tl.log2(total), float("-inf")), mask=is_head)


@triton.jit(do_not_specialize=["num_parts"])
def _join(
    part_ptr,
    lse_ptr,
    out_ptr,
    H,
    num_parts,
    C: tl.constexpr,
    BC: tl.constexpr,
    BB: tl.constexpr,
):
    """One head of one token: its parts, weighted by their shares of the whole sum."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.program_id(2) * BC + tl.arange(0, BC)
    part = tl.arange(0, BB)
    lse = tl.load(lse_ptr + (token * num_parts + part) * H + head, mask=part < num_parts, other=float("-inf"))
    top = tl.max(lse, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    share = tl.exp2(lse - top)
    total = tl.sum(share, axis=0)
    at = part_ptr + ((token * num_parts + part[:, None]) * H + head) * C + cols[None, :]
    # a part that saw nothing was written all the same, as zeros
    parts = tl.load(at, mask=(part < num_parts)[:, None] & (cols < C)[None, :], other=0.0)
    out = tl.sum(parts * share[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + (token * H + head) * C + cols, out.to(out_ptr.dtype.element_ty), mask=cols < C)


class Tile(NamedTuple):
    """How the kernel is compiled."""

    heads: int
    positions: int
    num_warps: int
    num_stages: int
    looks_ahead: bool = True
    """Whether slots are found two tiles before they are read."""


@cache
def choose_tile(capability: int, dtype: torch.dtype, is_fp8: bool, num_heads: int, latent_dim: int, step: str) -> Tile:
    """By what fits: the accumulator [heads, C] in registers, the stages of latent tiles in shared memory.

    step: ``small`` (few tokens and short contexts: more programs do better than fewer that read less), ``prompt``
    (many tokens over selected slots, which the L2 holds: the largest tile) or ``other``; measured on an H200 in
    docs/experiments/0006-attention-kernels.md."""
    heads = max(16, triton.next_power_of_2(num_heads))
    if latent_dim <= 256:  # small models
        return Tile(16, 16 if dtype == torch.float32 else 32, 8 if dtype == torch.float32 else 4, 2)
    if dtype == torch.float32:
        return Tile(16, 16, 4, 1)
    if capability >= 100:
        return Tile(16, 16, 8, 3) if is_fp8 else Tile(min(heads, 32), 16, 8, 3)
    if step == "prompt" and heads >= 64 and not is_fp8:
        return Tile(64, 64, 8, 3, looks_ahead=False)
    if step == "small":
        return Tile(16, 32, 8 if is_fp8 else 4, 3)
    return Tile(16 if heads < 64 and is_fp8 else min(heads, 64), 32, 8, 3)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    batch: ForwardBatch
    index_topk: int


class MlaAttention:
    """:class:`glm5ray.kernels.interface.MlaAttention`"""

    def plan(self, batch: ForwardBatch, index_topk: int) -> AttentionPlan:
        return AttentionPlan(batch, index_topk)

    def run(
        self,
        plan: AttentionPlan,
        q_THL: Tensor,
        rows_NL: Tensor,
        selected_TK: Tensor | None,
        scale: float,
        value_dim: int,
    ) -> Tensor:
        batch = plan.batch
        tokens, num_heads, width = q_THL.shape
        o_THC = torch.empty(tokens, num_heads, value_dim, dtype=q_THL.dtype, device=q_THL.device)
        if tokens == 0:
            return o_THC
        rows = split_rows(rows_NL, value_dim, width - value_dim)
        longest = batch.max_visible if selected_TK is None else min(batch.max_visible, selected_TK.shape[1])
        step = kind_of_step(tokens, longest, selected_TK is not None)
        tile = choose_tile(capability(q_THL), q_THL.dtype, rows.scales_NG is not None, num_heads, value_dim, step)
        head_tiles = triton.cdiv(num_heads, tile.heads)
        parts = count_parts(tokens * head_tiles, longest, tile.positions, num_processors(q_THL))
        partial, lse = o_THC, None
        if parts > 1:
            partial = torch.empty(tokens, parts, num_heads, value_dim, dtype=torch.float32, device=q_THL.device)
            lse = torch.empty(tokens, parts, num_heads, dtype=torch.float32, device=q_THL.device)
        _attend[(tokens * parts * head_tiles,)](
            q_THL,
            rows.latent_NC,
            rows.scales_NG,
            rows.key_NR,
            selected_TK,
            batch.positions_T,
            batch.slice_T,
            batch.page_table_SP,
            partial,
            lse,
            q_THL.stride(0),
            q_THL.stride(1),
            rows.latent_NC.stride(0),
            0 if rows.scales_NG is None else rows.scales_NG.stride(0),
            rows.key_NR.stride(0),
            0 if selected_TK is None else selected_TK.stride(0),
            batch.page_table_SP.stride(0),
            num_heads,
            parts,
            scale * LOG2_E,
            value_dim,
            width - value_dim,
            0 if selected_TK is None else selected_TK.shape[1],
            batch.page_size,
            LATENT_GROUP,
            tile.heads,
            tile.positions,
            *_blocks(value_dim, width - value_dim),
            tile.looks_ahead,
            dot_precision(q_THL),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if lse is not None:
            join_parts(partial, lse, o_THC)
        return o_THC


def kind_of_step(tokens: int, longest: int, selects: bool) -> str:
    """Of :func:`choose_tile`."""
    if selects:
        return "prompt" if tokens >= PROMPT_TOKENS else "other"
    return "small" if tokens * longest <= SMALL_STEP else "other"


def _blocks(latent_dim: int, key_dim: int) -> tuple[int, int]:
    return max(16, triton.next_power_of_2(latent_dim)), max(16, triton.next_power_of_2(key_dim))


def join_parts(partial_TBHC: Tensor, lse_TBH: Tensor, o_THC: Tensor) -> None:
    """Writes ``o_THC``, of fp32 results of parts and their log-sum-exps to base 2; -inf of a part that saw nothing."""
    tokens, num_heads, width = o_THC.shape
    parts = lse_TBH.shape[1]
    block = min(triton.next_power_of_2(width), 256)
    together = FEW_PARTS if parts <= FEW_PARTS else MAX_PARTS  # not one kernel for each power of two
    _join[(tokens, num_heads, triton.cdiv(width, block))](
        partial_TBHC, lse_TBH, o_THC, num_heads, parts, width, block, together
    )


def count_parts(programs: int, longest: int, tile: int, processors: int) -> int:
    """Into how many parts each context is split: the number that takes the least time by a simple model, in tiles.

    programs: those there are without splitting. ``processors`` of them run at once. Costs are counted in positions: a
    program has its own, rounded up to tiles, and its queries and result are worth as many as 128; joining is a launch,
    and partial results are written and read."""
    most = min(MAX_PARTS, max(1, longest // LEAST_PART))

    def cost(parts: int) -> float:
        waves = -(-programs * parts // processors)
        joining = 0.0 if parts == 1 else 100.0 + 227.0 * programs * parts / processors
        return waves * (-(-longest // (tile * parts)) * tile + 128) + joining

    return min(range(1, most + 1), key=cost)


mla_attention = MlaAttention()


def variants() -> Iterator[Variant]:
    """At GLM-5's sizes and at nano's, for all shares of the heads under tensor parallelism."""
    models = ((512, 64, (64, 32, 16)), (128, 16, (8,)))
    rows = ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False), (torch.float32, True))
    for (latent_dim, key_dim, heads), capability_, (dtype, is_fp8) in product(models, (90, 120), rows):
        for selects in (False, True):
            sizes = product(heads, ("other", "prompt" if selects else "small"))
            tiles = {choose_tile(capability_, dtype, is_fp8, count, latent_dim, step) for count, step in sizes}
            for tile in sorted(tiles):
                yield _variant(tile, latent_dim, key_dim, dtype, is_fp8, selects, capability_)
    for together in (FEW_PARTS, MAX_PARTS):
        yield Variant(
            name=f"join-{together}",
            fn=_join,
            signature={"part_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*bf16", "H": "i32", "num_parts": "i32"},
            constants={"C": 512, "BC": 256, "BB": together},
            unaligned=frozenset({"num_parts"}),
        )


def _variant(
    tile: Tile, latent_dim: int, key_dim: int, dtype: torch.dtype, is_fp8: bool, selects: bool, capability_: int
) -> Variant:
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    pointers = {"q_ptr": f"*{name}", "latent_ptr": "*fp8e4nv" if is_fp8 else f"*{name}", "out_ptr": "*fp32"}
    pointers |= {"key_ptr": "*bf16" if is_fp8 else f"*{name}", "positions_ptr": "*i64", "slice_ptr": "*i32"}
    pointers |= {"table_ptr": "*i32", "lse_ptr": "*fp32", "scale_log2": "fp32"}
    block_latent, block_key = _blocks(latent_dim, key_dim)
    constants = {"C": latent_dim, "R": key_dim, "K": 2048 if selects else 0, "PAGE": 64, "GROUP": LATENT_GROUP}
    constants |= {"BH": tile.heads, "BS": tile.positions, "BC": block_latent, "BR": block_key}
    constants |= {"AHEAD": tile.looks_ahead, "PRECISION": "ieee" if dtype == torch.float32 else "tf32"}
    for pointer, kind, is_given in (("scales_ptr", "*fp32", is_fp8), ("selected_ptr", "*i32", selects)):
        (pointers if is_given else constants)[pointer] = kind if is_given else None
    integers = ("token_stride", "head_stride", "latent_stride", "scales_stride", "key_stride", "selected_stride")
    return Variant(
        name=f"attend-{latent_dim}-{tile.heads}x{tile.positions}-{name}{'-fp8' * is_fp8}{'-selected' * selects}"
        f"-sm{capability_}",
        fn=_attend,
        signature=pointers | dict.fromkeys((*integers, "table_stride", "H", "num_parts"), "i32"),
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        unaligned=frozenset({"scales_stride", "table_stride", "num_parts"}),
        capabilities=(capability_,),
        is_slow_to_compile=dtype == torch.float32 or selects,
    )
