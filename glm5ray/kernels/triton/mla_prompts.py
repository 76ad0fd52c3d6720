"""Attention of prompts, not absorbed: keys and values of each head are made once for all tokens of a slice.

In absorbed form a token's product with a position takes C + R and C numbers a head, here D and V: at GLM-5's sizes
1,088 against 512, and tokens share the keys that they read, which selected slots do not. So a prompt is computed this
way as long as the positions that its tokens see are not many times those that they select; what was not selected is
masked, by a bit for each token and position. :func:`_gains` has the count.

Keys and values are made for as many heads at a time as take no more room than absorbed queries and results would.
Shape suffixes in :mod:`glm5ray.kernels.interface`; Y: rows of the slices' keys, each slice's rounded up to
:data:`ROUND`; G: heads at a time; W: words of 32 bits."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportReturnType=false
# (Triton's annotations say nothing of how a kernel is launched)
from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from glm5ray.kernels.cache_rows import split_rows
from glm5ray.kernels.triton.device import capability, dot_precision
from glm5ray.kernels.triton.head_products import mla_output, mla_query
from glm5ray.kernels.triton.mla import LOG2_E, AttentionPlan, dot, mla_attention
from glm5ray.kernels.triton.norm_rope import rope
from glm5ray.kernels.triton.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from glm5ray.kernels.interface import ForwardBatch

ROUND = 64
"""Rows: a multiple of every tile of positions."""
LEAST_TOKENS = 512
"""Of a slice: with 256 the absorbed form takes less time, with 1,024 this (docs/experiments/0017-prompts.md)."""
MOST_POSITIONS = 32_768
"""Of a slice: bounds the bits of what is selected, 4 KB a token."""


@triton.jit
def _attend_prompt(
    q_ptr,
    key_ptr,
    value_ptr,
    bits_ptr,
    tiles_ptr,
    out_ptr,
    q_token_stride,
    q_head_stride,
    row_stride,
    value_row_stride,
    head_stride,
    value_head_stride,
    bits_stride,
    out_token_stride,
    out_head_stride,
    scale_log2,
    D: tl.constexpr,
    V: tl.constexpr,
    BQ: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One head of BQ tokens of one slice over all that they see. ``tiles_ptr`` [tiles, 4]: first token, tokens,
    position of the first, first row of the slice's keys. ``bits_ptr`` None: nothing is selected, each token sees what
    is not behind it."""
    head = tl.program_id(0)
    tile = tiles_ptr + tl.program_id(1) * 4
    first, count = tl.load(tile).to(tl.int64), tl.load(tile + 1)
    position, row = tl.load(tile + 2), tl.load(tile + 3).to(tl.int64)
    own, cols, value_cols = tl.arange(0, BQ), tl.arange(0, BD), tl.arange(0, BV)
    is_token = own < count
    last = tl.where(is_token, position + own, -1)

    q_at = q_ptr + (first + own)[:, None] * q_token_stride + head * q_head_stride + cols[None, :]
    q = tl.load(q_at, mask=is_token[:, None] & (cols < D)[None, :], other=0.0)
    step = tl.arange(0, BS)
    key_at = key_ptr + (row + step)[None, :] * row_stride + head * head_stride + cols[:, None]
    value_at = value_ptr + (row + step)[:, None] * value_row_stride + head * value_head_stride + value_cols[None, :]
    if bits_ptr is not None:
        bits_ptr += (first + own) * bits_stride
        if BS > 32:
            low = tl.load(bits_ptr, mask=is_token, other=0)
            high = tl.load(bits_ptr + 1, mask=is_token, other=0)

    top = tl.full([BQ], float("-inf"), tl.float32)
    total = tl.zeros([BQ], tl.float32)
    out = tl.zeros([BQ, BV], tl.float32)
    for start in range(0, position + count, BS):
        # rows behind a slice's last are zeros
        key = tl.load(key_at) if D == BD else tl.load(key_at, mask=(cols < D)[:, None], other=0.0)
        score = dot(q, key, None, PRECISION)
        if bits_ptr is None:
            seen = (start + step)[None, :] <= last[:, None]
        else:  # the bit of each position, shifted to where it is the sign
            if BS > 32:  # words were loaded a tile ahead
                word = tl.where((step < 32)[None, :], low[:, None], high[:, None])
                bits_ptr += BS // 32
                low = tl.load(bits_ptr, mask=is_token, other=0)
                high = tl.load(bits_ptr + 1, mask=is_token, other=0)
            else:
                word = tl.load(bits_ptr + start // 32, mask=is_token, other=0)[:, None]
            seen = (word << (31 - (start + step) % 32)[None, :]) < 0
        score = tl.where(seen, score * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, axis=1)
        value = tl.load(value_at) if V == BV else tl.load(value_at, mask=(value_cols < V)[None, :], other=0.0)
        out = dot(p.to(value.dtype), value, out * shrink[:, None], PRECISION)
        top = new_top
        key_at += BS * row_stride
        value_at += BS * value_row_stride

    out = out / tl.where(total > 0.0, total, 1.0)[:, None]
    out_at = out_ptr + (first + own)[:, None] * out_token_stride + head * out_head_stride + value_cols[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & (value_cols < V)[None, :])


@triton.jit
def _mark(
    selected_ptr, slice_ptr, place_ptr, bits_ptr, selected_stride, place_stride, bits_stride, K, PAGE: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Sets the bit of each position that a token selected. ``place_ptr`` [S, pages]: where in a slice's row of the page
    table a page stands. Bits are set one by one, whose order changes nothing."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BK + tl.arange(0, BK)
    slot = tl.load(selected_ptr + token * selected_stride + at, mask=at < K, other=-1)
    is_there = slot >= 0
    place_ptr += tl.load(slice_ptr + token).to(tl.int64) * place_stride
    position = tl.load(place_ptr + slot // PAGE, mask=is_there, other=0) * PAGE + slot % PAGE
    bit = tl.full([BK], 1, tl.int32) << (position % 32)
    tl.atomic_or(bits_ptr + token * bits_stride + position // 32, bit, mask=is_there, sem="relaxed")


class Tile(NamedTuple):
    """How the kernel is compiled."""

    tokens: int
    positions: int
    num_warps: int
    num_stages: int


def choose_tile(capability: int, dtype: torch.dtype, head_dim: int) -> Tile:
    """By what fits: the accumulator [tokens, V] in registers, queries and the stages of keys and values in shared
    memory."""
    if dtype == torch.float32 or head_dim <= 64:
        return Tile(16, 32, 8, 1)
    if capability >= 100:
        return Tile(64, 32, 4, 2)
    return Tile(128, 64, 8, 2)


@dataclass(frozen=True, slots=True)
class PromptPlan:
    batch: ForwardBatch
    expanded: tuple[int, ...]
    """Slices that are computed here."""
    rows_Y: Tensor
    """int64, the cache's slot of each row of keys; -1: zeros."""
    longest: int
    """Positions that one of their tokens sees at most."""
    rest_T: Tensor | None
    """int64, rows of all other tokens; ``None``: there are none."""
    rest: AttentionPlan | None

    tiles_of: dict[int, Tensor] = field(default_factory=dict)
    """Tokens of a tile -> what :meth:`tiles` made: once a step, since it waits for the device."""

    def tiles(self, tokens: int) -> Tensor:
        """int32 [tiles, 4] for ``_attend_prompt``, those that see most first: none is begun late that takes long."""
        if tokens not in self.tiles_of:
            batch, row, tiles = self.batch, 0, []
            first = [0, *accumulate(batch.num_tokens)]
            for i in self.expanded:
                start, count = batch.starts[i], batch.num_tokens[i]
                tiles += [(first[i] + at, min(tokens, count - at), start + at, row) for at in range(0, count, tokens)]
                row += _rounded(start + count)
            tiles.sort(key=lambda tile: -tile[2])
            self.tiles_of[tokens] = torch.tensor(tiles, dtype=torch.int32, device=self.rows_Y.device)
        return self.tiles_of[tokens]


class MlaPrompts:
    """:class:`glm5ray.kernels.interface.MlaPrompts`"""

    def plan(self, batch: ForwardBatch, index_topk: int) -> PromptPlan | None:
        if batch.has_padding or max(batch.num_tokens, default=0) < LEAST_TOKENS:
            return None
        selects = batch.max_visible > index_topk
        slices = list(zip(batch.starts, batch.num_tokens, strict=True))
        expanded = tuple(i for i, (start, count) in enumerate(slices) if _gains(start, count, index_topk, selects))
        if not expanded:
            return None
        rest_T, rest = _rest(batch, expanded, index_topk)
        longest = max(sum(slices[i]) for i in expanded)
        return PromptPlan(batch, expanded, _rows_of(batch, expanded), longest, rest_T, rest)

    def run(
        self,
        plan: PromptPlan,
        q_THD: Tensor,
        rows_NL: Tensor,
        selected_TK: Tensor | None,
        w_uk_HUC: Tensor,
        w_uv_HVC: Tensor,
        rope_TR: Tensor,
        scale: float,
    ) -> Tensor:
        tokens, num_heads, head_dim = q_THD.shape
        value_dim = w_uv_HVC.shape[1]
        out_THV = torch.empty(tokens, num_heads, value_dim, dtype=q_THD.dtype, device=q_THD.device)
        if plan.rest_T is not None:
            q_RHL = mla_query(q_THD[plan.rest_T], w_uk_HUC, rope_TR[plan.rest_T])
            selected_RK = None if selected_TK is None else selected_TK[plan.rest_T]
            o_RHC = mla_attention.run(plan.rest, q_RHL, rows_NL, selected_RK, scale, w_uk_HUC.shape[2])
            out_THV[plan.rest_T] = mla_output(o_RHC, w_uv_HVC).unflatten(1, (num_heads, value_dim))
        rope(q_THD[..., w_uk_HUC.shape[1] :], rope_TR)
        latent_YL = _gather(rows_NL, plan.rows_Y, w_uk_HUC.shape[2], rope_TR.shape[1], q_THD.dtype)
        bits_TW = None if selected_TK is None else _bits(plan, selected_TK, rows_NL)
        tile = choose_tile(capability(q_THD), q_THD.dtype, head_dim)
        tiles = plan.tiles(tile.tokens)
        together = heads_together(plan, num_heads, w_uk_HUC.shape[2] + latent_YL.shape[1], head_dim + value_dim)
        for first in range(0, num_heads, together):
            heads = slice(first, first + together)
            key_YGD, value_YGV = _expand(latent_YL, w_uk_HUC[heads], w_uv_HVC[heads])
            _launch(q_THD[:, heads], key_YGD, value_YGV, bits_TW, tiles, out_THV[:, heads], scale, tile)
        return out_THV.flatten(1)


def _rounded(rows: int) -> int:
    return -(-rows // ROUND) * ROUND


def _gains(start: int, count: int, index_topk: int, selects: bool) -> bool:
    """Whether the slice takes less time here than in absorbed form.

    Counted in products of one number of one head, at GLM-5's sizes; absorbed ones, of slots that tokens do not share,
    are worth twice as many (docs/experiments/0006-attention-kernels.md)."""
    if count < LEAST_TOKENS or start + count > MOST_POSITIONS:
        return False
    seen = count * (2 * start + count + 1) / 2
    read = seen
    if selects:
        below = max(0, min(count, index_topk - start))  # tokens that see no more than they select
        read = below * (2 * start + below + 1) / 2 + (count - below) * index_topk
    absorbed = 2 * 1088 * read + count * (192 + 256) * 512
    return 512 * seen + (start + count) * (192 + 256) * 512 < absorbed


def _rows_of(batch: ForwardBatch, expanded: Sequence[int]) -> Tensor:
    """``PromptPlan.rows_Y``"""
    seen = torch.tensor([batch.starts[i] + batch.num_tokens[i] for i in expanded])
    position_Y = torch.cat([torch.arange(_rounded(count)) for count in seen.tolist()])
    owner_Y = torch.repeat_interleave(torch.tensor(expanded), (seen + ROUND - 1) // ROUND * ROUND)
    is_padding_Y = position_Y >= torch.repeat_interleave(seen, (seen + ROUND - 1) // ROUND * ROUND)
    numbers = torch.stack([owner_Y, position_Y.masked_fill(is_padding_Y, 0), is_padding_Y.long()])
    owner_Y, position_Y, padding_Y = numbers.to(batch.page_table_SP.device)
    page_Y = batch.page_table_SP[owner_Y, position_Y // batch.page_size].long()
    return torch.where(padding_Y > 0, -1, page_Y * batch.page_size + position_Y % batch.page_size)


def _rest(
    batch: ForwardBatch, expanded: Sequence[int], index_topk: int
) -> tuple[Tensor, AttentionPlan] | tuple[None, None]:
    """The step of the slices that are not expanded, with its rows in the whole step."""
    others = [i for i in range(len(batch.num_tokens)) if i not in set(expanded)]
    if not others:
        return None, None
    first = [0, *accumulate(batch.num_tokens)]
    rows = [row for i in others for row in range(first[i], first[i + 1])]
    rest_T = torch.tensor(rows, dtype=torch.int64, device=batch.positions_T.device)
    step = replace(
        batch,
        token_ids_T=batch.token_ids_T[rest_T],
        positions_T=batch.positions_T[rest_T],
        slots_T=batch.slots_T[rest_T],
        slice_T=batch.slice_T[rest_T],
        starts=tuple(batch.starts[i] for i in others),
        num_tokens=tuple(batch.num_tokens[i] for i in others),
        max_visible=max(batch.starts[i] + batch.num_tokens[i] for i in others),
    )
    return rest_T, AttentionPlan(step, index_topk)


def heads_together(plan: PromptPlan, num_heads: int, absorbed: int, expanded: int) -> int:
    """Of how many heads keys and values are made at a time.

    absorbed, expanded: numbers a head that a token's absorbed query and result, and a position's key and value have."""
    tokens = sum(plan.batch.num_tokens[i] for i in plan.expanded)
    fit = tokens * num_heads * absorbed // (len(plan.rows_Y) * expanded)
    return max(1, min(num_heads, fit))


def _gather(rows_NL: Tensor, rows_Y: Tensor, latent_dim: int, rope_dim: int, dtype: torch.dtype) -> Tensor:
    """[Y, C + R] of the cache in ``dtype``; zeros where there is no slot."""
    if rows_NL.dtype == torch.uint8:
        latent_YL = split_rows(rows_NL, latent_dim, rope_dim).gather(rows_Y.clamp(min=0)).to(dtype)
    else:
        latent_YL = rows_NL[rows_Y.clamp(min=0)]
    return latent_YL.masked_fill_(rows_Y[:, None] < 0, 0.0)


def _expand(latent_YL: Tensor, w_uk_GUC: Tensor, w_uv_GVC: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [Y, G, D] and values [Y, G, V] of the heads."""
    num_heads, nope, latent_dim = w_uk_GUC.shape
    latent_GYC = latent_YL[:, :latent_dim].expand(num_heads, -1, -1)
    key_YGD = latent_YL.new_empty(len(latent_YL), num_heads, nope + latent_YL.shape[1] - latent_dim)
    value_YGV = latent_YL.new_empty(len(latent_YL), num_heads, w_uv_GVC.shape[1])
    torch.bmm(latent_GYC, w_uk_GUC.mT, out=key_YGD.transpose(0, 1)[..., :nope])
    torch.bmm(latent_GYC, w_uv_GVC.mT, out=value_YGV.transpose(0, 1))
    key_YGD[..., nope:] = latent_YL[:, None, latent_dim:]
    return key_YGD, value_YGV


def _bits(plan: PromptPlan, selected_TK: Tensor, rows_NL: Tensor) -> Tensor:
    """int32 [T, W]: of each token the positions that it selected; two words more than the longest slice needs, which
    the kernel reads ahead."""
    batch = plan.batch
    tokens, topk = selected_TK.shape
    bits_TW = selected_TK.new_zeros(tokens, _rounded(max(batch.max_visible, plan.longest)) // 32 + 2)
    slices, pages = batch.page_table_SP.shape
    # pages of the cache that a slice does not have are never looked up; the -1 of its row go to one more
    num_pages = len(rows_NL) // batch.page_size
    place = selected_TK.new_empty(slices, num_pages + 1)
    where = torch.where(batch.page_table_SP < 0, num_pages, batch.page_table_SP).long()
    place.scatter_(1, where, torch.arange(pages, dtype=torch.int32, device=place.device).expand(slices, -1))
    block = min(1024, triton.next_power_of_2(topk))
    _mark[(tokens, triton.cdiv(topk, block))](
        selected_TK,
        batch.slice_T,
        place,
        bits_TW,
        selected_TK.stride(0),
        place.stride(0),
        bits_TW.stride(0),
        topk,
        batch.page_size,
        block,
    )
    return bits_TW


def _launch(
    q_TGD: Tensor,
    key_YGD: Tensor,
    value_YGV: Tensor,
    bits_TW: Tensor | None,
    tiles: Tensor,
    out_TGV: Tensor,
    scale: float,
    tile: Tile,
) -> None:
    head_dim, value_dim = q_TGD.shape[2], value_YGV.shape[2]
    _attend_prompt[(q_TGD.shape[1], len(tiles))](
        q_TGD,
        key_YGD,
        value_YGV,
        bits_TW,
        tiles,
        out_TGV,
        q_TGD.stride(0),
        q_TGD.stride(1),
        key_YGD.stride(0),
        value_YGV.stride(0),
        key_YGD.stride(1),
        value_YGV.stride(1),
        0 if bits_TW is None else bits_TW.stride(0),
        out_TGV.stride(0),
        out_TGV.stride(1),
        scale * LOG2_E,
        head_dim,
        value_dim,
        tile.tokens,
        tile.positions,
        max(16, triton.next_power_of_2(head_dim)),
        max(16, triton.next_power_of_2(value_dim)),
        dot_precision(q_TGD),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


mla_prompts = MlaPrompts()


def variants() -> Iterator[Variant]:
    """At GLM-5's sizes."""
    strides = ("q_token_stride", "q_head_stride", "row_stride", "value_row_stride", "head_stride", "value_head_stride")
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for capability_ in (90, 120):
            tile = choose_tile(capability_, dtype, 256)
            for selects in (False, True):
                pointers = dict.fromkeys(("q_ptr", "key_ptr", "value_ptr", "out_ptr"), f"*{name}")
                pointers |= {"tiles_ptr": "*i32", "scale_log2": "fp32"} | ({"bits_ptr": "*i32"} if selects else {})
                constants = {"D": 256, "V": 256, "BQ": tile.tokens, "BS": tile.positions, "BD": 256, "BV": 256}
                constants |= {"PRECISION": "ieee" if dtype == torch.float32 else "tf32"}
                yield Variant(
                    name=f"prompt-{tile.tokens}x{tile.positions}-{name}{'-selected' * selects}-sm{capability_}",
                    fn=_attend_prompt,
                    signature=pointers
                    | dict.fromkeys((*strides, "bits_stride", "out_token_stride", "out_head_stride"), "i32"),
                    constants=constants | ({} if selects else {"bits_ptr": None}),
                    num_warps=tile.num_warps,
                    num_stages=tile.num_stages,
                    unaligned=frozenset({"bits_stride"}),
                    capabilities=(capability_,),
                    is_slow_to_compile=dtype == torch.float32,
                )
    yield Variant(
        name="mark",
        fn=_mark,
        signature=dict.fromkeys(("selected_ptr", "slice_ptr", "place_ptr", "bits_ptr"), "*i32")
        | dict.fromkeys(("selected_stride", "place_stride", "bits_stride", "K"), "i32"),
        constants={"PAGE": 64, "BK": 1024},
        unaligned=frozenset({"place_stride", "bits_stride"}),
    )
