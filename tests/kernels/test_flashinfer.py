"""The FlashInfer provider against the reference, through the Python of the real package; its compiled code is stood in
for by :mod:`tests.kernels.flashinfer_machine`."""

from __future__ import annotations

import sys

import pytest
import torch

pytest.importorskip("flashinfer")

from flashinfer.fused_moe.prepare import _nvfp4_swizzled_scale_shape, _swizzle_cutile_fp4_scales
from flashinfer.trace.templates.gemm import _unswizzle_batched_sf_128x4

from glm5ray.errors import ConfigError
from glm5ray.kernels import flashinfer_ops, reference
from glm5ray.kernels.cache_rows import latent_row_bytes, write_latent
from glm5ray.kernels.select import PROVIDERS, kernel_table, select_kernels
from glm5ray.kernels.tolerances import BF16_INTERMEDIATE
from tests.kernels.flashinfer_machine import pretend_sm90, pretend_sm120
from tests.kernels.nvfp4_experts import make_nvfp4_experts, unquantized
from tests.kernels.shapes import STEPS, Tensors, make_batch

HEADS, LATENT, ROPE = 16, 512, 64
"""fa3's planner takes numbers of heads that divide its tiles."""
SCALE = 256**-0.5


def queries_and_rows(tokens: int, slots: int, *, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    make = Tensors(torch.bfloat16, seed=tokens)
    rows = make.normal(slots, LATENT + ROPE)
    if fp8:
        quantised = torch.zeros(slots, latent_row_bytes(LATENT, ROPE), dtype=torch.uint8)
        write_latent(quantised, torch.arange(slots), rows[:, :LATENT], rows[:, LATENT:])
        rows = quantised
    return make.normal(tokens, HEADS, LATENT + ROPE), rows


def select_some(batch, width: int, seed: int) -> torch.Tensor:
    """[T, width] of each token's slots, at random, -1 behind the last."""
    slots_TK, counts_T = flashinfer_ops.visible_slots(batch)
    chosen = torch.full((len(slots_TK), width), -1, dtype=torch.int32)
    for t, count in enumerate(counts_T.tolist()):
        few = slots_TK[t, torch.randperm(count, generator=torch.Generator().manual_seed(1000 * seed + t))[:width]]
        chosen[t, : len(few)] = few
    return chosen


@pytest.mark.parametrize("capability", [90, 120])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("selects", [False, True])
def test_attention(monkeypatch: pytest.MonkeyPatch, capability: int, step: str, selects: bool) -> None:
    (pretend_sm120 if capability == 120 else pretend_sm90)(monkeypatch)
    monkeypatch.setattr(flashinfer_ops, "PLANNED_TOKENS", 40)
    monkeypatch.setattr(flashinfer_ops, "WORKSPACE_BYTES", 32 * 2**20)
    batch, slots = make_batch(STEPS[step], page_size=16)
    q, rows = queries_and_rows(len(batch.positions_T), slots, fp8=capability == 120)
    op = flashinfer_ops.mla_attention
    plan = op.plan(batch, 64)
    for layer in range(2):  # the second layer uses the plan of the first, with a selection of its own
        selected = select_some(batch, 64, seed=layer) if selects else None
        actual = op.run(plan, q, rows, selected, SCALE, LATENT)
        expected = reference.mla_attention.run(batch, q, rows, selected, SCALE, LATENT)
        torch.testing.assert_close(actual, expected, rtol=BF16_INTERMEDIATE.rtol, atol=BF16_INTERMEDIATE.atol)


@pytest.mark.parametrize("rows", [1, 32, 128, 130, 384])
@pytest.mark.parametrize("groups", [4, 5, 12])
def test_swizzle_is_flashinfers(rows: int, groups: int) -> None:
    scales = torch.randint(0, 256, (3, rows, groups), dtype=torch.uint8)
    ours = flashinfer_ops.swizzle_scales(scales.view(torch.float8_e4m3fn))
    assert tuple(ours.shape[1:]) == _nvfp4_swizzled_scale_shape(rows, groups * 16)
    assert torch.equal(ours.flatten(), _swizzle_cutile_fp4_scales(scales, scale_block_size=16).flatten())
    assert torch.equal(_unswizzle_batched_sf_128x4(ours.flatten(), 3, rows, groups), scales)


def run_experts(x, ids, weights, first_expert: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    made = make_nvfp4_experts(4, 128, 64, first_expert=first_expert)
    actual = flashinfer_ops.experts.run(x, ids, weights, flashinfer_ops.experts.pack(made))
    return actual, reference.experts.run(x, ids, weights, unquantized(made))


def routing(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of eight experts, of which this rank holds four."""
    make = Tensors(torch.bfloat16, seed=tokens)
    ids = torch.rand(tokens, 8, generator=make.generator).argsort(1)[:, :3]
    return make.normal(tokens, 128), ids, torch.rand(tokens, 3, generator=make.generator)


@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
def test_experts_mean_the_same_to_flashinfer(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """With activations that are not rounded, all that is left is which tensor means what: order of gate and up, which
    scale goes where, factors, experts of other ranks."""
    pretend_sm120(monkeypatch)
    actual, expected = run_experts(*routing(tokens))
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-3)


def test_experts_with_rounded_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """About 10 % of the norm, for tokens from 1/30 to 8 times a norm's usual output."""
    pretend_sm120(monkeypatch, rounds_activations=True)
    x, ids, weights = routing(64)
    for magnitude in (1 / 30, 1, 8):
        actual, expected = run_experts(x * magnitude, ids, weights)
        here = expected.float().norm(dim=1) > 0
        errors = ((actual - expected).float().norm(dim=1) / expected.float().norm(dim=1))[here]
        assert 0.02 < float(errors.median()) < 0.2, f"at {magnitude}"


def test_a_gate_whose_factor_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_sm120(monkeypatch)
    made = make_nvfp4_experts(4, 128, 64)
    made.gate_up_global[1, 0] = 0
    x, ids, weights = routing(9)
    actual = flashinfer_ops.experts.run(x, ids, weights, flashinfer_ops.experts.pack(made))
    torch.testing.assert_close(actual, reference.experts.run(x, ids, weights, unquantized(made)), rtol=2**-7, atol=1e-3)


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="hidden_size of a multiple of 128 and 64 columns"):
        flashinfer_ops.experts.pack(make_nvfp4_experts(1, 128, 32))
    pretend_sm120(monkeypatch)
    batch, slots = make_batch(STEPS["chunk"], page_size=16)
    q, rows = queries_and_rows(33, slots, fp8=False)
    op = flashinfer_ops.mla_attention
    with pytest.raises(ConfigError, match=r"on sm_120 needs cache\.kv_dtype=fp8"):
        op.run(op.plan(batch, 64), q, rows, None, SCALE, LATENT)
    with pytest.raises(ConfigError, match=r"takes bfloat16 and latents of 512 \+ 64; this model has torch\.float32"):
        op.run(op.plan(batch, 64), q.float(), rows, None, SCALE, LATENT)


def test_padded_rows_see_nothing() -> None:
    batch, _ = make_batch(((3, 1), (70, 1)), page_size=16)
    batch.positions_T[0] = -1
    slots, counts = flashinfer_ops.visible_slots(batch)
    assert counts.tolist() == [0, 71]
    assert bool((slots[0] == -1).all())
    assert slots.shape[1] == 128
    assert bool((slots[1, :71] >= 0).all())


def test_it_is_chosen_by_name_only() -> None:
    nvfp4 = frozenset({"experts"})
    assert "flashinfer" not in {row.provider for row in kernel_table({}, "cuda", nvfp4)}
    chosen = {row.op: row.provider for row in kernel_table({"default": "flashinfer"}, "cuda", nvfp4)}
    assert {op for op, name in chosen.items() if name == "flashinfer"} == {"mla_attention", "experts"}
    provider = next(p for p in PROVIDERS if p.name == "flashinfer")
    assert set(provider.ops) == set(flashinfer_ops.CAPABILITIES)
    with pytest.raises(ConfigError, match="it takes weights in NVFP4 only"):
        kernel_table({"experts": "flashinfer"}, "cuda")


def test_the_wrong_device_is_found_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(ConfigError, match=r"kernels.experts is 'flashinfer', which needs compute capability 12.x"):
        select_kernels({"experts": "flashinfer"}, "cuda", frozenset({"experts"}))


def test_a_missing_package_is_an_error_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"needs the package flashinfer \(.*\); install glm5ray\[gpu\]"):
        select_kernels({"mla_attention": "flashinfer"}, "cuda")
