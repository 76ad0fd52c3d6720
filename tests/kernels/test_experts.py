"""The router and the routed experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from glm5ray.kernels import reference
from glm5ray.kernels.interface import ExpertWeights, RouterSettings
from glm5ray.kernels.tolerances import assert_close
from tests.kernels.shapes import DIMS, DTYPES, TOKENS, Tensors

if TYPE_CHECKING:
    from glm5ray.kernels.interface import Kernels


def in_order(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A token's experts by number: the order of assignments means nothing."""
    ids, order = ids.sort(dim=-1)
    return ids, weights.gather(1, order)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "chosen", "n_group", "topk_group"), [(1, 1, 1, 1), (6, 3, 1, 1), (12, 4, 4, 2), (4, 2, 4, 3)]
)
def test_route(kernels: Kernels, num_experts, chosen, n_group, topk_group, norm_topk_prob, dtype, tokens) -> None:
    make = Tensors(dtype)
    x = make.normal(tokens, 23)
    gate, bias = (
        make.normal(num_experts, 23, dtype=torch.float32, scale=0.3),
        make.normal(num_experts, dtype=torch.float32),
    )
    settings = RouterSettings(
        num_experts_per_tok=chosen,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=2.5,
    )
    ids, weights = in_order(*kernels.route(x, gate, bias, settings))
    expected_ids, expected_weights = in_order(*reference.route(x, gate, bias, settings))
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    assert torch.equal(ids, expected_ids)
    assert_close("route", weights, expected_weights, dtype)


def test_route_keeps_the_bias_in_fp32(kernels: Kernels) -> None:
    """GLM-5.2's biases lie around 7 and differ by less than bf16 can tell (2^-5): the choice must follow them all the
    same."""
    x, gate = torch.zeros(1, 8, dtype=torch.bfloat16), torch.zeros(4, 8)
    bias = torch.tensor([6.9000, 6.9004, 6.9001, 6.9003])
    settings = RouterSettings(
        num_experts_per_tok=2, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0
    )
    ids, weights = in_order(*kernels.route(x, gate, bias, settings))
    assert ids.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


ROUTINGS = ("random", "one expert", "uneven", "all elsewhere")


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
@pytest.mark.parametrize("part", ["all experts", "a part"])
def test_experts(kernels: Kernels, dims, dtype, routing, tokens, part) -> None:
    make = Tensors(dtype)
    gate_up = make.normal(dims.E, 2 * dims.F, dims.M, scale=dims.M**-0.5)
    down = make.normal(dims.E, dims.M, dims.F, scale=dims.F**-0.5)
    weights = make.normal(tokens, dims.A, dtype=torch.float32).abs()
    first = 2 if part == "a part" else 0
    total = dims.E + (5 if part == "a part" else 0)
    odds = torch.ones(total) if routing == "random" else torch.arange(total).float() ** 3 + 1e-3
    ids = torch.multinomial(odds.expand(max(tokens, 1), -1), dims.A, generator=make.generator)[:tokens]
    if routing == "one expert":
        ids = torch.full_like(ids, first + dims.E - 1)
    elif routing == "all elsewhere":
        ids = torch.full_like(ids, first + dims.E)
    experts = ExpertWeights(gate_up_EFM=gate_up, down_EMF=down, first_expert=first)
    x = make.normal(tokens, dims.M)
    actual = kernels.experts.run(x, ids, weights, kernels.experts.pack(experts))
    assert actual.dtype == dtype
    assert_close("experts", actual, reference.experts.run(x, ids, weights, experts), dtype)


@pytest.mark.parametrize("tokens", [5, 64])
def test_a_token_with_nan_spoils_no_other(kernels: Kernels, tokens: int) -> None:
    make, dims = Tensors(torch.float32), DIMS["even"]
    experts = ExpertWeights(
        gate_up_EFM=make.normal(dims.E, 2 * dims.F, dims.M),
        down_EMF=make.normal(dims.E, dims.M, dims.F),
        first_expert=1,
    )
    ids = torch.rand(tokens, dims.E + 2, generator=make.generator).topk(dims.A).indices
    x, weights = make.normal(tokens, dims.M), make.normal(tokens, dims.A)
    clean = kernels.experts.run(x, ids, weights, experts)
    x[0] = float("nan")
    dirty = kernels.experts.run(x, ids, weights, experts)
    torch.testing.assert_close(dirty[1:], clean[1:], rtol=1e-5, atol=1e-4)
