"""Inputs for the tests of kernels, the same for every provider: shapes, steps over pages, and tensors made from
seeds."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5ray.kernels.interface import ForwardBatch

TOKENS = (0, 1, 2, 7, 64, 129)
"""Empty, one, few, odd, a page, past two pages."""

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Dims:
    """Sizes of one model; the letters of :mod:`glm5ray.kernels.interface`."""

    H: int
    U: int
    R: int
    C: int
    V: int
    J: int
    I: int  # noqa: E741
    M: int
    F: int
    E: int
    A: int

    @property
    def D(self) -> int:
        return self.U + self.R

    @property
    def L(self) -> int:
        return self.C + self.R


DIMS = {
    "odd": Dims(H=3, U=5, R=6, C=11, V=7, J=5, I=9, M=23, F=13, E=6, A=3),
    "one": Dims(H=1, U=1, R=2, C=1, V=1, J=1, I=2, M=1, F=1, E=1, A=1),
    "even": Dims(H=8, U=32, R=16, C=64, V=32, J=4, I=32, M=128, F=64, E=16, A=4),
}

STEPS: dict[str, tuple[tuple[int, int], ...]] = {
    "empty": (),
    "first token": ((0, 1),),
    "one prompt": ((0, 23),),
    "page filled": ((0, 16),),
    "page edges": ((15, 1), (16, 1), (17, 1), (31, 2), (32, 16)),
    "decodes": tuple((start, 1) for start in (3, 90, 0, 15, 16, 40, 41, 200, 12)),
    "equal decodes": tuple((20, 1) for _ in range(12)),
    "equal prompts": ((0, 10),) * 5,
    "chunk": ((40, 33),),
    "mixed": ((0, 7), (12, 1), (5, 30), (0, 1), (64, 1), (63, 3), (0, 7), (100, 50)),
}
"""Slices as (start, tokens)."""


def make_batch(slices: tuple[tuple[int, int], ...], page_size: int, seed: int = 0) -> tuple[ForwardBatch, int]:
    """(the step, with its pages scattered over a cache; slots of that cache)"""
    generator = random.Random(seed)
    counts = [-(-(start + tokens) // page_size) for start, tokens in slices]
    num_pages = sum(counts) + 3
    free = generator.sample(range(num_pages), num_pages)
    pages = [[free.pop() for _ in range(count)] for count in counts]
    width = max(counts, default=0) + 1
    positions = [p for start, tokens in slices for p in range(start, start + tokens)]
    owners = [s for s, (_, tokens) in enumerate(slices) for _ in range(tokens)]
    slots = [pages[s][p // page_size] * page_size + p % page_size for s, p in zip(owners, positions, strict=True)]
    table = [row + [-1] * (width - len(row)) for row in pages]
    batch = ForwardBatch(
        token_ids_T=torch.zeros(len(positions), dtype=torch.int64),
        positions_T=torch.tensor(positions, dtype=torch.int64),
        slots_T=torch.tensor(slots, dtype=torch.int64),
        slice_T=torch.tensor(owners, dtype=torch.int32),
        page_table_SP=torch.tensor(table, dtype=torch.int32).view(len(slices), width),
        starts=tuple(start for start, _ in slices),
        num_tokens=tuple(tokens for _, tokens in slices),
        page_size=page_size,
        max_visible=max(positions, default=-1) + 1,
        logits_rows_L=torch.zeros(0, dtype=torch.int64),
    )
    return batch, num_pages * page_size


class Tensors:
    """Seeded random tensors of one dtype."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype or self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Whole numbers as fp32: their sums of products are exact, in any order."""
        return torch.randint(low, high, shape, generator=self.generator).float()

    def rope(self, tokens: int, width: int) -> Tensor:
        angle_TP = torch.rand(tokens, width // 2, generator=self.generator) * 6.28
        return torch.stack([angle_TP.cos(), angle_TP.sin()], dim=-1).flatten(-2)

    def slots(self, tokens: int, num_slots: int) -> Tensor:
        return torch.randperm(num_slots, generator=self.generator)[:tokens]
