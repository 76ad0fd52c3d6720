"""Selection of tokens and attention, over pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5ray.kernels import reference, slice_groups
from glm5ray.kernels.tolerances import assert_close
from tests.kernels.shapes import DIMS, DTYPES, STEPS, Tensors, make_batch

if TYPE_CHECKING:
    from glm5ray.kernels.interface import Kernels

TOPKS = (1, 16, 17, 64, 1000)


def as_sets(selected_TK: torch.Tensor) -> list[list[int]]:
    return [sorted(slot for slot in row if slot >= 0) for row in selected_TK.tolist()]


@pytest.mark.parametrize("index_topk", TOPKS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
@pytest.mark.parametrize("spread", [2, 100])
def test_select_tokens(kernels: Kernels, dims, step, page_size, index_topk, spread) -> None:
    """Scores are small whole numbers, hence exact and, with little spread, mostly tied: the lower positions must
    win."""
    make = Tensors(torch.float32)
    batch, num_slots = make_batch(STEPS[step], page_size)
    tokens = len(batch.slots_T)
    q, w = make.integers(-spread, spread, tokens, dims.J, dims.I), make.integers(-2, 3, tokens, dims.J)
    keys = make.integers(-1, 2, num_slots, dims.I)
    expected_plan = reference.select_tokens.plan(batch, index_topk)
    plan = kernels.select_tokens.plan(batch, index_topk)
    assert (plan is None) == (expected_plan is None)
    if plan is None:
        return
    selected = kernels.select_tokens.run(plan, q, w, keys)
    expected = reference.select_tokens.run(expected_plan, q, w, keys)
    assert selected.dtype == torch.int32
    assert selected.shape[0] == tokens
    assert as_sets(selected) == as_sets(expected)
    assert ((selected < 0).int().diff(dim=1) >= 0).all(), "padding stands last"


@pytest.mark.parametrize("index_topk", TOPKS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
def test_mla_attention(kernels: Kernels, dims, dtype, step, page_size, index_topk) -> None:
    """Over the reference's selection. Slots that no token of the step may see hold NaN."""
    make = Tensors(dtype)
    batch, num_slots = make_batch(STEPS[step], page_size)
    tokens = len(batch.slots_T)
    q, rows = make.normal(tokens, dims.H, dims.L), make.normal(num_slots, dims.L)
    seen = {slot for _, slots in reference._tokens(batch) for slot in slots.tolist()}
    rows[[slot for slot in range(num_slots) if slot not in seen]] = float("nan")
    select_plan = reference.select_tokens.plan(batch, index_topk)
    selected = None
    if select_plan is not None:
        index_q, index_w = make.normal(tokens, dims.J, dims.I), make.normal(tokens, dims.J, dtype=torch.float32)
        selected = reference.select_tokens.run(select_plan, index_q, index_w, make.normal(num_slots, dims.I))
    scale = dims.D**-0.5
    actual = kernels.mla_attention.run(kernels.mla_attention.plan(batch, index_topk), q, rows, selected, scale, dims.C)
    expected = reference.mla_attention.run(batch, q, rows, selected, scale, dims.C)
    assert actual.dtype == dtype
    assert_close("mla_attention", actual, expected, dtype)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    slices=st.lists(st.tuples(st.integers(0, 300), st.one_of(st.just(1), st.integers(1, 40))), max_size=30),
    page_size=st.sampled_from([1, 4, 64]),
    max_rows=st.sampled_from([1, 100, 2**15]),
    max_scores=st.sampled_from([1, 1000, 2**19]),
)
def test_groups_cover_each_token_once(slices, page_size, max_rows, max_scores) -> None:
    """And stay within their bounds, unless a single piece already exceeds them."""
    batch, _ = make_batch(tuple(slices), page_size)
    seen = {row: slots.tolist() for row, slots in reference._tokens(batch)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slice_groups, "MAX_GATHERED_ROWS", max_rows)
        patch.setattr(slice_groups, "MAX_SCORES", max_scores)
        groups = slice_groups.group_pieces(batch, slice_groups.split_slices(batch))
    covered = []
    for group in groups:
        num_tokens, longest = group.positions_Gn.shape[1], group.slots_Gs.shape[1]
        rows = range(len(batch.slots_T)) if group.rows_B is None else group.rows_B.tolist()
        covered += rows
        assert len(group.slots_Gs) == 1 or group.slots_Gs.numel() <= max_rows
        assert num_tokens <= slice_groups.MIN_PIECE or num_tokens * longest <= max_scores
        assert len(group.slots_Gs) == 1 or num_tokens * group.slots_Gs.numel() <= max_scores
        for i, row in enumerate(rows):
            piece, offset = divmod(i, num_tokens)
            position = int(group.positions_Gn[piece, offset])
            assert position == int(batch.positions_T[row])
            visible = (
                torch.ones(longest, dtype=torch.bool) if group.hidden_Gns is None else ~group.hidden_Gns[piece, offset]
            )
            assert group.slots_Gs[piece][visible].tolist() == seen[row]
    assert sorted(covered) == list(range(len(batch.slots_T)))
