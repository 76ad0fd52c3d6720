"""Selection where scores are as large, as small or as broken as fp32 allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from glm5ray.kernels import reference
from tests.kernels.shapes import DIMS, STEPS, Tensors, make_batch

if TYPE_CHECKING:
    from glm5ray.kernels.interface import Kernels


@pytest.mark.parametrize("exponent", [-140, -60, 60, 100])
@pytest.mark.parametrize("step", STEPS)
def test_hidden_positions_lose_to_any_score(kernels: Kernels, step: str, exponent: int) -> None:
    """Powers of two keep sums exact. Half of the scores are negative; positions behind a token's own are below all."""
    dims = next(iter(DIMS.values()))
    make = Tensors(torch.float32)
    batch, num_slots = make_batch(STEPS[step], 16)
    tokens, topk = len(batch.slots_T), 16
    q, keys = make.integers(-9, 10, tokens, dims.J, dims.I), make.integers(-1, 2, num_slots, dims.I)
    w = make.integers(-2, 3, tokens, dims.J) * 2.0**exponent
    plan = kernels.select_tokens.plan(batch, topk)
    if plan is None:
        return
    selected = kernels.select_tokens.run(plan, q, w, keys)
    expected = reference.select_tokens.run(reference.select_tokens.plan(batch, topk), q, w, keys)
    for row, wanted in zip(selected.tolist(), expected.tolist(), strict=True):
        assert sorted(s for s in row if s >= 0) == sorted(s for s in wanted if s >= 0)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("step", STEPS)
def test_broken_scores_select_slots_of_their_own_sequence(kernels: Kernels, step: str, broken: float) -> None:
    """A token whose numbers went wrong fails alone: what is selected for it must still be slots that it may read."""
    dims = next(iter(DIMS.values()))
    make = Tensors(torch.float32)
    batch, num_slots = make_batch(STEPS[step], 16)
    tokens, topk = len(batch.slots_T), 16
    q, keys = make.normal(tokens, dims.J, dims.I), make.normal(num_slots, dims.I)
    w = make.normal(tokens, dims.J)
    w[tokens // 2 :] = broken
    plan = kernels.select_tokens.plan(batch, topk)
    if plan is None:
        return
    selected = kernels.select_tokens.run(plan, q, w, keys)
    for row, (_, visible) in zip(selected.tolist(), reference._tokens(batch), strict=True):
        chosen = [slot for slot in row if slot >= 0]
        assert len(chosen) == min(topk, len(visible))
        assert set(chosen) <= set(visible.tolist())
