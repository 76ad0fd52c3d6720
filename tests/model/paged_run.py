"""Drives a model over pages as the engine does: sequences grow slice by slice, their pages lie scattered in one
cache."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from glm5ray.kernels.interface import ForwardBatch
from glm5ray.model.cache import PagedCache

if TYPE_CHECKING:
    from torch import Tensor

    from glm5ray.model.glm5 import Glm5


class PagedRun:
    """Known sequences of tokens, of which each step computes some more.

    ``room``: tokens by which each sequence may still grow. ``slices`` of a step: (sequence, number of tokens), in any
    order. Pages are handed out at random, one at a time as they are needed."""

    def __init__(
        self,
        model: Glm5,
        sequences: list[list[int]],
        page_size: int,
        *,
        seed: int = 0,
        room: int = 0,
        with_mtp: bool = False,
    ) -> None:
        self.model, self.sequences, self.page_size = model, sequences, page_size
        self.done = [0] * len(sequences)
        self.pages: list[list[int]] = [[] for _ in sequences]
        num_pages = sum(-(-(len(tokens) + room) // page_size) for tokens in sequences) + 2
        self.free = random.Random(seed).sample(range(num_pages), num_pages)
        dtype = model.lm_head.weight.dtype
        self.cache = PagedCache(model.config, num_pages, page_size, dtype, with_mtp=with_mtp)

    def batch(self, slices: list[tuple[int, int]], shift: int = 0) -> ForwardBatch:
        """The next tokens of some sequences; ``shift``: token ids are taken this much further on (for MTP)."""
        token_ids, positions, slots, starts, owners = [], [], [], [], []
        for at, (seq, num_tokens) in enumerate(slices):
            owners += [at] * num_tokens
            start = self.done[seq]
            starts.append(start)
            self.done[seq] += num_tokens
            while len(self.pages[seq]) * self.page_size < self.done[seq]:
                self.pages[seq].append(self.free.pop())
            for position in range(start, start + num_tokens):
                token_ids.append(self.sequences[seq][position + shift])
                positions.append(position)
                slots.append(self.pages[seq][position // self.page_size] * self.page_size + position % self.page_size)
        width = max((len(self.pages[seq]) for seq, _ in slices), default=0) + 1
        table = [self.pages[seq] + [-1] * (width - len(self.pages[seq])) for seq, _ in slices]
        return ForwardBatch(
            token_ids_T=torch.tensor(token_ids, dtype=torch.int64),
            positions_T=torch.tensor(positions, dtype=torch.int64),
            slots_T=torch.tensor(slots, dtype=torch.int64),
            slice_T=torch.tensor(owners, dtype=torch.int32),
            page_table_SP=torch.tensor(table, dtype=torch.int32).view(len(slices), width),
            starts=tuple(starts),
            num_tokens=tuple(num_tokens for _, num_tokens in slices),
            page_size=self.page_size,
            max_visible=max(positions, default=-1) + 1,
            logits_rows_L=torch.arange(len(token_ids)),
        )

    def step(self, slices: list[tuple[int, int]]) -> list[Tensor]:
        """Logits of every token, per slice."""
        batch = self.batch(slices)
        return list(self.model(batch, self.cache).split(list(batch.num_tokens)))

    def all_logits(self, steps: list[list[tuple[int, int]]]) -> list[Tensor]:
        """Runs the steps; per sequence, the logits of all its tokens that they covered."""
        parts: list[list[Tensor]] = [[] for _ in self.sequences]
        for slices in steps:
            for (seq, _), logits in zip(slices, self.step(slices), strict=True):
                parts[seq].append(logits)
        return [torch.cat(logits) if logits else torch.empty(0) for logits in parts]

    def greedy(self, num_tokens: int) -> list[list[int]]:
        """Prefills all sequences in one step, then decodes them together; returns the new tokens."""
        slices = [(seq, len(tokens)) for seq, tokens in enumerate(self.sequences)]
        start = [len(tokens) for tokens in self.sequences]
        for _ in range(num_tokens):
            for seq, logits in enumerate(self.step(slices)):
                self.sequences[seq].append(int(logits[-1].argmax()))
            slices = [(seq, 1) for seq in range(len(self.sequences))]
        return [tokens[begin:] for tokens, begin in zip(self.sequences, start, strict=True)]
