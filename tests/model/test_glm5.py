"""The model against transformers' GlmMoeDsaForCausalLM: same weights, same logits, however the tokens are cut into
steps and pages."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from glm5ray.model.glm5 import MoE
from tests.hf_reference import INDEX_SHARE, SelectionGaps, hf_model, our_model, to_dtype
from tests.model.paged_run import PagedRun

TOLERANCE = 1e-4
"""On fp32 logits of a scale of 6; measured differences are about 1.5e-5."""

MODELS: dict[str, dict[str, Any]] = {
    "glm5": {},
    "glm5-dense": {"index_topk": 200},
    "glm52": INDEX_SHARE,
    "glm52-dense": {**INDEX_SHARE, "index_topk": 200},
    "one-selected": {"num_hidden_layers": 2, "index_topk": 1},
    "one-head": {"num_attention_heads": 1, "num_key_value_heads": 1, "index_n_heads": 7},
    "seven-heads": {"num_attention_heads": 7, "num_key_value_heads": 7, "qk_nope_head_dim": 9, "v_head_dim": 5},
    "two-experts": {"n_routed_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": False},
    "many-experts": {"n_routed_experts": 40, "num_experts_per_tok": 8, "moe_intermediate_size": 12},
    "expert-groups": {"n_routed_experts": 12, "n_group": 4, "topk_group": 2},
    "all-dense": {"first_k_dense_replace": 4},
    "all-sparse": {"first_k_dense_replace": 0, "n_shared_experts": 2},
    "rope-only-index": {"index_head_dim": 8},
}


@cache
def models(name: str, seed: int = 0) -> tuple[Any, Any]:
    """(transformers' model, ours)"""
    theirs = hf_model(seed, **MODELS[name])
    return theirs, our_model(theirs)


def random_tokens(length: int, seed: int, vocab_size: int = 96) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(length)]


@torch.no_grad()
def hf_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].float()


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_whole_prefill(name: str, seed: int) -> None:
    theirs, ours = models(name, seed)
    tokens = random_tokens(70, seed)
    run = PagedRun(ours, [tokens], page_size=16)
    assert_same(run.all_logits([[(0, 70)]])[0], hf_logits(theirs, tokens))


@pytest.mark.parametrize("provider", ["reference", "cpu"])
def test_each_provider(provider: str) -> None:
    theirs = hf_model(3, **INDEX_SHARE)
    tokens = random_tokens(45, 3)
    run = PagedRun(our_model(theirs, kernels={"default": provider}), [tokens], page_size=8)
    assert_same(run.all_logits([[(0, 30)], [(0, 14)], [(0, 1)]])[0], hf_logits(theirs, tokens))


@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("name", ["glm5", "glm52"])
def test_token_by_token(name: str, page_size: int) -> None:
    theirs, ours = models(name)
    tokens = random_tokens(60, 5)
    run = PagedRun(ours, [tokens], page_size)
    assert_same(run.all_logits([[(0, 1)]] * 60)[0], hf_logits(theirs, tokens))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["glm5", "glm52", "glm52-dense"]),
    page_size=st.sampled_from([1, 3, 16, 64]),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    seed=st.integers(0, 2**16),
)
def test_any_steps(name: str, page_size: int, lengths: list[int], seed: int) -> None:
    """Several sequences on interleaved pages, each cut into any chunks, in steps that mix prefill and decode in any
    order."""
    theirs, ours = models(name)
    generator = random.Random(seed)
    sequences = [random_tokens(length, seed + i) for i, length in enumerate(lengths)]
    left = list(lengths)
    steps = []
    while any(left):
        slices = []
        for seq in generator.sample(range(len(left)), len(left)):
            if left[seq] and generator.random() < 0.8:
                count = min(left[seq], generator.choice([1, 1, 2, 7, 25, 60]))
                left[seq] -= count
                slices.append((seq, count))
        if slices:
            steps.append(slices)
    with SelectionGaps(theirs.config.index_topk) as gaps:
        expected = [hf_logits(theirs, tokens) for tokens in sequences]
    assume(gaps.smallest > 1e-5)
    logits = PagedRun(ours, sequences, page_size, seed=seed).all_logits(steps)
    for ours_logits, theirs_logits in zip(logits, expected, strict=True):
        assert_same(ours_logits, theirs_logits)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["glm5", "glm52"])
def test_greedy_tokens(name: str, seed: int) -> None:
    """64 tokens of three prompts decoded together, as transformers generates them one by one."""
    theirs, ours = models(name, seed)
    prompts = [random_tokens(length, seed + length) for length in (3, 20, 41)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    run = PagedRun(ours, [list(prompt) for prompt in prompts], page_size=16, room=64)
    assert run.greedy(64) == expected


def bf16_errors(changes: dict[str, Any], seeds: range) -> tuple[torch.Tensor, torch.Tensor]:
    """|bf16 - fp32| of all logits over the same weights: (ours, transformers')."""
    ours_off, theirs_off = [], []
    for seed in seeds:
        theirs = to_dtype(hf_model(seed, **changes), torch.bfloat16)
        tokens = random_tokens(60, seed)
        exact = hf_logits(to_dtype(theirs, torch.float32), tokens)
        run = PagedRun(our_model(theirs, dtype=torch.bfloat16), [tokens], page_size=16)
        ours_off.append((run.all_logits([[(0, 41)], [(0, 18)], [(0, 1)]])[0] - exact).abs())
        theirs_off.append((hf_logits(theirs, tokens) - exact).abs())
    return torch.cat(ours_off), torch.cat(theirs_off)


def test_bf16_arithmetic() -> None:
    """Where nothing is chosen (all experts, all tokens), our bf16 is as close to fp32 as transformers' own, or
    closer."""
    ours, theirs = bf16_errors({**INDEX_SHARE, "index_topk": 200, "n_routed_experts": 3}, range(4))
    assert ours.mean() <= theirs.mean()
    assert ours.quantile(0.99) <= theirs.quantile(0.99)


@pytest.mark.parametrize("name", ["glm5", "glm52"])
def test_bf16_with_choices(name: str) -> None:
    """Now and then bf16 makes either model choose another expert or token than fp32; such errors are large, and
    equally so in both."""
    ours, theirs = bf16_errors(MODELS[name], range(8))
    assert ours.mean() <= 1.25 * theirs.mean()
    assert ours.median() <= 1.25 * theirs.median()


def test_padded_rows_read_no_experts() -> None:
    """... so that no weights are read for their sake; what they get is the shared experts' part alone."""
    _, ours = models("many-experts")
    moe = next(module for module in ours.modules() if isinstance(module, MoE))
    x = torch.randn(6, ours.config.hidden_size, generator=torch.Generator().manual_seed(0))
    padded = torch.tensor([False, True, False, False, True, True])
    with torch.inference_mode():
        result, full, shared = moe(x, padded[:, None]), moe(x), moe.shared_experts(x)
    torch.testing.assert_close(result[~padded], full[~padded])
    torch.testing.assert_close(result[padded], shared[padded])
    assert (full - shared).abs().max() > 1e-3
