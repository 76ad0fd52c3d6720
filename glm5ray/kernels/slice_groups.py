"""The slices of a step in groups of equal length and similar context: what one batched product can compute.

A prompt of any length and a decode (a slice of one token) are the same thing here. Groups are bounded, so that no
intermediate grows with the whole step: long slices are cut into pieces, and a group takes pieces until it is full.
Shape suffixes in :mod:`glm5ray.kernels.interface`; beside them:

    G  pieces of a group        n  tokens of each of them (a decode is a group with n = 1)
    B  G * n, rows of a group   s  cached positions, padded to the longest context of the group
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from glm5ray.kernels.interface import ForwardBatch

MAX_GATHERED_ROWS = 2**15
"""Cache rows that are copied side by side at once: 75 MB of GLM-5's in fp32."""
MAX_SCORES = 2**17
"""Pairs of query token and cached position at once; times heads, of fp32: 33 MB for GLM-5."""
MIN_PIECE = 8
"""A long slice is cut into pieces of at least this many tokens, however long the context: each piece gathers all of
it."""
SPREAD = 64
"""Contexts in a group are at most twice its shortest and this many more; so padding at most about doubles the work."""


class Piece(NamedTuple):
    """Consecutive tokens of one slice."""

    slice: int
    row: int
    """Of its first token, in T."""
    start: int
    num_tokens: int

    @property
    def context(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces with equally many tokens, whose products with their own cached rows are one batched product."""

    rows_B: Tensor | None
    """Rows of T, piece by piece; ``None``: all of T in order."""
    num_pieces: int
    positions_Gn: Tensor
    slots_Gs: Tensor
    """int64; behind a piece's context its last slot stands again."""
    hidden_Gns: Tensor | None
    """bool, the positions behind each token's own, padding included; ``None``: there are none."""

    def take(self, x_TX: Tensor) -> Tensor:
        """The group's rows [B, ...] of x."""
        return x_TX if self.rows_B is None else x_TX.index_select(0, self.rows_B)

    def gather(self, cache_NX: Tensor) -> Tensor:
        """fp32 [G, s, X], each piece's cached rows."""
        return functional.embedding(self.slots_Gs, cache_NX).float()


def _split(slice_: int, row: int, start: int, num_tokens: int) -> list[Piece]:
    """A slice as pieces of at most :data:`MAX_SCORES` pairs, or of :data:`MIN_PIECE` tokens."""
    pieces = []
    while num_tokens > 0:
        size = num_tokens
        if size * (start + size) > MAX_SCORES:  # the largest n with n * (start + n) pairs
            size = min(max(int(((start * start + 4 * MAX_SCORES) ** 0.5 - start) / 2), MIN_PIECE), num_tokens)
        pieces.append(Piece(slice_, row, start, size))
        row, start, num_tokens = row + size, start + size, num_tokens - size
    return pieces


def split_slices(batch: ForwardBatch) -> list[Piece]:
    """The slices of a step, long ones split."""
    pieces: list[Piece] = []
    row = 0
    for slice_, (start, num_tokens) in enumerate(zip(batch.starts, batch.num_tokens, strict=True)):
        pieces += _split(slice_, row, start, num_tokens)
        row += num_tokens
    return pieces


def group_pieces(batch: ForwardBatch, pieces: list[Piece]) -> list[Group]:
    """Equal lengths together, by growing context, until a group's bounds are reached."""
    groups: list[Group] = []
    members: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: (p.num_tokens, p.context)):
        if members and not _fits(piece, members):
            groups.append(_group(batch, members))
            members = []
        members.append(piece)
    if members:
        groups.append(_group(batch, members))
    return groups


def _fits(piece: Piece, members: list[Piece]) -> bool:
    shortest, count = members[0], len(members) + 1
    return (
        piece.num_tokens == shortest.num_tokens
        and piece.context <= 2 * shortest.context + SPREAD
        and count * piece.context <= MAX_GATHERED_ROWS
        and count * piece.context * piece.num_tokens <= MAX_SCORES
    )


def _group(batch: ForwardBatch, members: list[Piece]) -> Group:
    device = batch.slots_T.device
    num_tokens, longest = members[0].num_tokens, members[-1].context
    total = len(batch.slots_T)

    rows_G = [piece.row for piece in members]
    is_all = rows_G == list(range(0, total, num_tokens)) and len(rows_G) * num_tokens == total
    offset_n = torch.arange(num_tokens, device=device)
    positions_Gn = torch.tensor([piece.start for piece in members], device=device)[:, None] + offset_n
    rows_B = None if is_all else (torch.tensor(rows_G, device=device)[:, None] + offset_n).flatten()

    position_s = torch.arange(longest, device=device)
    position_Gs = torch.minimum(position_s, positions_Gn[:, -1:])
    slices_G = torch.tensor([piece.slice for piece in members], device=device)
    pages_Gs = batch.page_table_SP.index_select(0, slices_G).gather(1, position_Gs // batch.page_size)
    slots_Gs = pages_Gs.long() * batch.page_size + position_Gs % batch.page_size
    sees_all = num_tokens == 1 and members[0].context == longest
    hidden_Gns = None if sees_all else position_s > positions_Gn[..., None]
    return Group(rows_B, len(members), positions_Gn, slots_Gs, hidden_Gns)
