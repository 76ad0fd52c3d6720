"""The faults that other engines have had, made on purpose: the comparison with transformers must notice each of
them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from glm5ray.kernels import cpu
from glm5ray.kernels.select import select_kernels
from glm5ray.model.glm5 import Glm5
from glm5ray.parallel import ParallelContext
from tests.hf_reference import INDEX_SHARE, hf_model, model_config, our_model, our_state
from tests.model.paged_run import PagedRun

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from glm5ray.kernels.interface import Kernels

NOTICED = 1e-2
"""A hundred times the tolerance of the comparison."""


@pytest.fixture(scope="module")
def theirs() -> Any:
    return hf_model(11, **INDEX_SHARE)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(0, 96, (60,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def expected(theirs: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return theirs(torch.tensor([tokens])).logits[0]


def logits_of(model: Glm5, tokens: list[int]) -> Tensor:
    return PagedRun(model, [tokens], page_size=16).all_logits([[(0, 40)], [(0, 20)]])[0]


def half_split(x_TJX: Tensor, rope_TR: Tensor) -> None:
    """Pairs (i, i + R/2), as DeepSeek-V3.2's indexer has them."""
    half = rope_TR.shape[-1] // 2
    first, second = x_TJX[..., :half].clone(), x_TJX[..., half : 2 * half].clone()
    cos, sin = rope_TR[:, None, 0::2], rope_TR[:, None, 1::2]
    x_TJX[..., :half] = first * cos - second * sin
    x_TJX[..., half : 2 * half] = second * cos + first * sin


def half_split_mla_query(q_THD: Tensor, w_uk_HUC: Tensor, rope_TR: Tensor) -> Tensor:
    q_THL = cpu.mla_query(q_THD, w_uk_HUC, torch.tensor([1.0, 0.0]).repeat(len(q_THD), rope_TR.shape[-1] // 2))
    half_split(q_THL[..., -rope_TR.shape[-1] :], rope_TR)
    return q_THL


def half_split_append_latent(
    kv_TL: Tensor, weight_C: Tensor, eps: float, rope_TR: Tensor, slots_T: Tensor, rows_NL: Tensor
) -> None:
    still_TR = torch.tensor([1.0, 0.0]).repeat(len(kv_TL), rope_TR.shape[-1] // 2)
    cpu.append_latent(kv_TL, weight_C, eps, still_TR, slots_T, rows_NL)
    rows_TL = rows_NL[slots_T]
    half_split(rows_TL[:, None, -rope_TR.shape[-1] :], rope_TR)
    rows_NL[slots_T] = rows_TL


def rope_on_last_part(x_TJX: Tensor, rope_TR: Tensor) -> None:
    """The indexer rotates the first part of its heads, attention the last part of its."""
    cpu.rope(x_TJX[..., -rope_TR.shape[-1] :], rope_TR)


class Unselective(cpu.SelectTokens):
    """Dense attention past index_topk."""

    def plan(self, batch: Any, index_topk: int) -> None:
        return None


class AttendAll(cpu.MlaAttention):
    def plan(self, batch: Any, index_topk: int) -> Any:
        return super().plan(batch, 1 << 30)


class LowestScores(cpu.SelectTokens):
    def run(self, plan: Any, q_TJI: Tensor, w_TJ: Tensor, keys_NI: Tensor) -> Tensor:
        return super().run(plan, q_TJI, -w_TJ, keys_NI)


def biased_weights(x_TM: Tensor, gate_EM: Tensor, bias_E: Tensor, settings: Any) -> tuple[Tensor, Tensor]:
    """The selection bias in the weights too."""
    ids_TA, _ = cpu.route(x_TM, gate_EM, bias_E, settings)
    weights_TA = (torch.sigmoid(x_TM @ gate_EM.T) + bias_E).gather(1, ids_TA)
    return ids_TA, weights_TA / weights_TA.sum(-1, keepdim=True) * settings.routed_scaling_factor


KERNEL_FAULTS: dict[str, Callable[[Kernels], Kernels]] = {
    "indexer rope half-split": lambda k: replace(k, rope=half_split),
    "indexer rope on the wrong part": lambda k: replace(k, rope=rope_on_last_part),
    "indexer query not rotated": lambda k: replace(k, rope=lambda x, angles: None),
    "attention rope half-split": lambda k: replace(
        k, mla_query=half_split_mla_query, append_latent=half_split_append_latent
    ),
    "dense past index_topk": lambda k: replace(k, select_tokens=Unselective(), mla_attention=AttendAll()),
    "sign of the index weights": lambda k: replace(k, select_tokens=LowestScores()),
    "bias in the routing weights": lambda k: replace(k, route=biased_weights),
    "routing weights not scaled": lambda k: replace(
        k, route=lambda x, g, b, s: cpu.route(x, g, b, replace(s, routed_scaling_factor=1.0))
    ),
    "gate and up exchanged": lambda k: replace(
        k, silu_and_mul=lambda x: cpu.silu_and_mul(torch.cat(x.chunk(2, -1)[::-1], dim=-1))
    ),
}


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_kernel_fault_is_noticed(fault: str, theirs: Any, tokens: list[int], expected: Tensor) -> None:
    kernels = KERNEL_FAULTS[fault](select_kernels({}, "cpu"))
    model = Glm5(model_config(theirs.config), kernels, ParallelContext(), dtype=torch.float32, norm_eps="huggingface")
    model.load_state_dict(our_state(theirs), strict=True, assign=True)
    model.prepare()
    assert (logits_of(model, tokens) - expected).abs().max() > NOTICED


@pytest.mark.parametrize(
    "dropped",
    [
        "e_score_correction_bias",
        "indexer.k_norm.bias",
        "indexer.weights_proj.weight",
        "shared_experts.down_proj.weight",
    ],
)
def test_dropped_weight_is_noticed(dropped: str, theirs: Any, tokens: list[int], expected: Tensor) -> None:
    model = our_model(theirs)
    for name, parameter in model.named_parameters():
        if name.endswith(dropped):
            parameter.data.zero_()
    assert (logits_of(model, tokens) - expected).abs().max() > NOTICED


def test_no_fault(theirs: Any, tokens: list[int], expected: Tensor) -> None:
    torch.testing.assert_close(logits_of(our_model(theirs), tokens), expected, rtol=0, atol=1e-4)


def test_epsilon_of_the_latent_norms(theirs: Any) -> None:
    """``checkpoint`` and ``huggingface`` are different functions, if only just (GLM-5's own engines use the former)."""
    kernels = select_kernels({}, "cpu")
    model = Glm5(model_config(theirs.config), kernels, ParallelContext(), dtype=torch.float32)
    assert model.model.layers[0].self_attn.kv_a_layernorm.eps == 1e-5
    assert our_model(theirs).model.layers[0].self_attn.kv_a_layernorm.eps == 1e-6
