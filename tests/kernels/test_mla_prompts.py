"""Attention of prompts that is not absorbed, in Triton's interpreter, against the absorbed form's definition."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from glm5ray.kernels import reference
from glm5ray.kernels.cache_rows import latent_row_bytes, write_latent
from glm5ray.kernels.tolerances import assert_close
from glm5ray.kernels.triton import mla_prompts
from tests.kernels.shapes import DIMS, Tensors, make_batch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, kernels are compiled")


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_prompts, "LEAST_TOKENS", 32)


STEPS = {
    "prompt": ((0, 37),),
    "chunk of two tiles of keys": ((70, 33),),
    "with decodes around": ((50, 1), (0, 40), (20, 3), (64, 32), (7, 1)),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("index_topk", [16, 1000])
@pytest.mark.parametrize(("dims", "page_size", "dtype"), [("odd", 16, torch.float32), ("even", 1, torch.bfloat16)])
def test_equals_the_absorbed_form(dims, page_size, dtype, index_topk, step, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the reference's selection, a few heads at a time. Slots that no token of the step may see hold NaN."""
    dims, make = DIMS[dims], Tensors(dtype)
    batch, num_slots = make_batch(STEPS[step], page_size)
    tokens = len(batch.slots_T)
    rows = make.normal(num_slots, dims.L)
    seen = {slot for _, slots in reference._tokens(batch) for slot in slots.tolist()}
    rows[[slot for slot in range(num_slots) if slot not in seen]] = float("nan")
    q, angles = make.normal(tokens, dims.H, dims.D + 3)[..., : dims.D], make.rope(tokens, dims.R)
    w_kv = make.normal(dims.H, dims.U + dims.V, dims.C, scale=dims.C**-0.5)
    w_uk, w_uv = w_kv.split([dims.U, dims.V], dim=1)
    selected = None
    if index_topk == 16:
        select_plan = reference.select_tokens.plan(batch, index_topk)
        assert select_plan is not None
        index_q, index_w = make.normal(tokens, dims.J, dims.I), make.normal(tokens, dims.J, dtype=torch.float32)
        selected = reference.select_tokens.run(select_plan, index_q, index_w, make.normal(num_slots, dims.I))
    expected = reference.mla_prompts.run(batch, q.clone(), rows, selected, w_uk, w_uv, angles, 0.3)
    monkeypatch.setattr(mla_prompts, "_gains", lambda start, count, *_: count >= mla_prompts.LEAST_TOKENS)
    monkeypatch.setattr(mla_prompts, "heads_together", lambda *_: 2)
    plan = mla_prompts.mla_prompts.plan(batch, index_topk)
    assert plan is not None
    actual = mla_prompts.mla_prompts.run(plan, q, rows, selected, w_uk, w_uv, angles, 0.3)
    assert actual.dtype == dtype
    assert_close("mla_prompts", actual, expected, dtype)


def test_over_fp8_rows() -> None:
    dims, make = DIMS["even"], Tensors(torch.float32)
    batch, num_slots = make_batch(((0, 40),), 16)
    rows = torch.zeros(num_slots, latent_row_bytes(dims.C, dims.R), dtype=torch.uint8)
    write_latent(rows, torch.arange(num_slots), make.normal(num_slots, dims.C), make.normal(num_slots, dims.R))
    q, angles = make.normal(40, dims.H, dims.D), make.rope(40, dims.R)
    w_uk, w_uv = make.normal(dims.H, dims.U, dims.C, scale=0.1), make.normal(dims.H, dims.V, dims.C, scale=0.1)
    expected = reference.mla_prompts.run(batch, q.clone(), rows, None, w_uk, w_uv, angles, 0.3)
    plan = mla_prompts.mla_prompts.plan(batch, 1000)
    assert plan is not None
    actual = mla_prompts.mla_prompts.run(plan, q, rows, None, w_uk, w_uv, angles, 0.3)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_which_slices_are_expanded() -> None:
    """Prompts are, a decode and a chunk that sees many times what it selects are not; nor is a step of a graph."""
    batch, _ = make_batch(((0, 300), (500, 1), (30_000, 64)), 64)
    plan = mla_prompts.mla_prompts.plan(batch, 2048)
    assert plan is not None
    assert plan.expanded == (0,)
    assert plan.rest_T is not None
    assert plan.rest_T.tolist() == list(range(300, 365))
    decodes, _ = make_batch(((500, 1), (3, 2)), 64)
    assert mla_prompts.mla_prompts.plan(decodes, 2048) is None
