"""Triton's kernels, in its interpreter, by the checks that all providers pass: on fewer cases, since each program of a
launch is interpreted after the other."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

pytest.importorskip("triton")

from glm5ray.kernels import reference, triton_ops
from glm5ray.kernels.interface import ForwardBatch, Kernels
from glm5ray.kernels.triton import index_scores, indexer, mla
from tests.kernels import test_attention, test_experts, test_pointwise, test_selection_extremes
from tests.kernels.shapes import DIMS, DTYPES, Tensors, make_batch

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, kernels are compiled: test_triton_gpu.py"
)

KERNELS = Kernels(
    **{field.name: getattr(triton_ops, field.name, getattr(reference, field.name)) for field in fields(Kernels)}
)
POINTWISE = [
    test_pointwise.test_rms_norm,
    test_pointwise.test_add_rms_norm,
    test_pointwise.test_silu_and_mul,
    test_pointwise.test_rope,
    test_pointwise.test_append_latent,
    test_pointwise.test_append_index_keys,
    test_pointwise.test_mla_query,
    test_pointwise.test_mla_output,
]


@pytest.mark.parametrize("check", POINTWISE, ids=lambda check: check.__name__[5:])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dims", "tokens"), [("odd", 0), ("odd", 1), ("odd", 7), ("one", 2), ("even", 17)])
def test_pointwise_ops(check, dtype, dims, tokens) -> None:
    if check is test_pointwise.test_add_rms_norm:
        dtype = torch.float32  # it wants an exact sum, and the interpreter rounds to bf16 towards zero
    check(KERNELS, DIMS[dims], dtype, tokens)


@pytest.mark.parametrize("step", ["empty", "first token", "page edges", "decodes"])
@pytest.mark.parametrize("index_topk", [16, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dims", "page_size"), [("odd", 16), ("even", 1)])
def test_mla_attention(dims, page_size, dtype, index_topk, step) -> None:
    test_attention.test_mla_attention(KERNELS, DIMS[dims], dtype, step, page_size, index_topk)


@pytest.mark.parametrize("index_topk", [16, 1000])
def test_attention_that_does_not_look_ahead(monkeypatch: pytest.MonkeyPatch, index_topk: int) -> None:
    """As for long prompts: slots are found where they are read."""
    monkeypatch.setattr(mla, "choose_tile", lambda *_: mla.Tile(16, 16, 4, 2, looks_ahead=False))
    test_attention.test_mla_attention(KERNELS, DIMS["odd"], torch.float32, "page edges", 16, index_topk)


@pytest.mark.parametrize("step", ["empty", "page edges", "decodes"])
@pytest.mark.parametrize("index_topk", [1, 16, 17])
@pytest.mark.parametrize(("dims", "page_size", "spread"), [("odd", 16, 2), ("even", 1, 100)])
def test_select_tokens(dims, page_size, spread, index_topk, step) -> None:
    test_attention.test_select_tokens(KERNELS, DIMS[dims], step, page_size, index_topk, spread)


@pytest.mark.parametrize("step", ["decodes", "chunk"])
def test_selection_in_levels(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """As contexts longer than a stretch are selected from, a few tokens at a time."""
    monkeypatch.setattr(indexer, "STRETCH", 32)
    monkeypatch.setattr(indexer, "MAX_SCORES", 700)
    test_attention.test_select_tokens(KERNELS, DIMS["odd"], step, 16, 16, 2)


@pytest.mark.parametrize("step", ["decodes", "chunk"])
def test_scores_in_spans(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Several tiles of positions by one program, and several programs."""
    tile = index_scores.Tile(4, 16, 4, 2, span=2)
    spans = replace(KERNELS, select_tokens=indexer.SelectTokens(lambda *_: tile))
    test_attention.test_select_tokens(spans, DIMS["odd"], step, 16, 16, 2)


@pytest.mark.parametrize("exponent", [-140, 100])
def test_hidden_positions_lose_to_any_score(exponent: int) -> None:
    test_selection_extremes.test_hidden_positions_lose_to_any_score(KERNELS, "decodes", exponent)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_broken_scores_select_slots_of_their_own_sequence(broken: float) -> None:
    test_selection_extremes.test_broken_scores_select_slots_of_their_own_sequence(KERNELS, "decodes", broken)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize(
    ("num_experts", "chosen", "n_group", "topk_group"), [(1, 1, 1, 1), (6, 3, 1, 1), (12, 4, 4, 2), (4, 2, 4, 3)]
)
def test_route(num_experts, chosen, n_group, topk_group, tokens, dtype) -> None:
    test_experts.test_route(KERNELS, num_experts, chosen, n_group, topk_group, True, dtype, tokens)


def test_route_keeps_the_bias_in_fp32() -> None:
    test_experts.test_route_keeps_the_bias_in_fp32(KERNELS)


def test_a_token_with_nan_gets_different_experts() -> None:
    settings = test_experts.RouterSettings(
        num_experts_per_tok=3, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0
    )
    x = torch.full((1, 8), float("nan"))
    ids, _ = triton_ops.route(x, torch.zeros(6, 8), torch.zeros(6), settings)
    assert sorted(set(ids[0].tolist())) == sorted(ids[0].tolist())
    assert all(0 <= number < 6 for number in ids[0].tolist())


def padded(batch: ForwardBatch, rows: int) -> ForwardBatch:
    """With ``rows`` padded rows behind the others."""

    def pad(x: torch.Tensor, value: int) -> torch.Tensor:
        return torch.cat([x, torch.full((rows,), value, dtype=x.dtype)])

    return replace(
        batch,
        token_ids_T=pad(batch.token_ids_T, 0),
        positions_T=pad(batch.positions_T, -1),
        slots_T=pad(batch.slots_T, -1),
        slice_T=pad(batch.slice_T, 0),
    )


@pytest.mark.parametrize("index_topk", [16, 1000])
def test_padded_rows_see_nothing_and_are_written_nowhere(index_topk: int) -> None:
    """And a bound of what tokens see that is more than any of them does changes nothing but the number of parts."""
    make, dims = Tensors(torch.float32), DIMS["odd"]
    batch, num_slots = make_batch(((40, 1), (3, 1)), 16)
    wide = replace(padded(batch, 3), max_visible=700)
    q, rows = make.normal(5, dims.H, dims.L), make.normal(num_slots, dims.L)
    selected = None
    if index_topk == 16:
        plan = reference.select_tokens.plan(batch, index_topk)
        index_q, index_w = make.normal(5, dims.J, dims.I), make.normal(5, dims.J)
        selected = reference.select_tokens.run(plan, index_q, index_w, make.normal(num_slots, dims.I))
    attention = triton_ops.mla_attention
    result = attention.run(attention.plan(wide, index_topk), q, rows, selected, 0.3, dims.C)
    expected = reference.mla_attention.run(batch, q, rows, selected, 0.3, dims.C)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert (result[2:] == 0).all()
    before = rows.clone()
    angles = make.rope(5, dims.R)
    kv, weight = make.normal(5, dims.L), make.normal(dims.C)
    triton_ops.append_latent(kv, weight, 1e-5, angles, wide.slots_T, rows)
    untouched = [slot for slot in range(num_slots) if slot not in batch.slots_T.tolist()]
    assert torch.equal(rows[untouched], before[untouched])
    assert not torch.equal(rows[batch.slots_T], before[batch.slots_T])
