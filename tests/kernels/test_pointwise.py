"""Projections, norms, activation, rotation and what is written to the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from glm5ray.kernels import reference
from glm5ray.kernels.tolerances import assert_close
from tests.kernels.shapes import DIMS, DTYPES, TOKENS, Tensors

if TYPE_CHECKING:
    from glm5ray.kernels.interface import Kernels

pytestmark = [
    pytest.mark.parametrize("tokens", TOKENS),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS),
]


def test_linear(kernels: Kernels, dims, dtype, tokens) -> None:
    make = Tensors(dtype)
    x, weight = make.normal(tokens, dims.M), make.normal(dims.D, dims.M, scale=dims.M**-0.5)
    assert_close("linear", kernels.linear(x, weight), reference.linear(x, weight), dtype)


def test_rms_norm(kernels: Kernels, dims, dtype, tokens) -> None:
    make = Tensors(dtype)
    wide, weight = make.normal(tokens, dims.M + 3), make.normal(dims.M)
    for x in (wide[:, : dims.M].contiguous(), wide[:, 2 : dims.M + 2]):  # rows behind one another, and strided ones
        for eps in (1e-6, 1.0):
            assert_close("rms_norm", kernels.rms_norm(x, weight, eps), reference.rms_norm(x, weight, eps), dtype)
    zero = torch.zeros(tokens, dims.M, dtype=dtype)
    assert (kernels.rms_norm(zero, weight, 1e-5) == 0).all()


def test_add_rms_norm(kernels: Kernels, dims, dtype, tokens) -> None:
    make = Tensors(dtype)
    residual, x, weight = make.normal(tokens, dims.M), make.normal(tokens, dims.M), make.normal(dims.M)
    sums = [residual.clone(), residual.clone()]
    actual = kernels.add_rms_norm(sums[0], x, weight, 1e-5)
    expected = reference.add_rms_norm(sums[1], x, weight, 1e-5)
    assert_close("add_rms_norm", actual, expected, dtype)
    torch.testing.assert_close(sums[0], residual + x, rtol=0, atol=0)


def test_silu_and_mul(kernels: Kernels, dims, dtype, tokens) -> None:
    x = Tensors(dtype).normal(tokens, 2 * dims.F)
    assert_close("silu_and_mul", kernels.silu_and_mul(x), reference.silu_and_mul(x), dtype)


def test_rope(kernels: Kernels, dims, dtype, tokens) -> None:
    make = Tensors(dtype)
    angles = make.rope(tokens, dims.R)
    flat = make.normal(tokens, dims.J * dims.I + 3)
    actual, expected = flat.clone(), flat.clone()
    for rotate, x in ((kernels.rope, actual), (reference.rope, expected)):
        rotate(x[:, 1 : dims.J * dims.I + 1].unflatten(-1, (dims.J, dims.I))[..., : dims.R], angles)
    assert_close("rope", actual, expected, dtype)
    assert torch.equal(actual[:, 0], flat[:, 0])


def test_append_latent(kernels: Kernels, dims, dtype, tokens) -> None:
    make = Tensors(dtype)
    angles, slots = make.rope(tokens, dims.R), make.slots(tokens, 150)
    kv, weight = make.normal(tokens, dims.L + 3)[:, 1 : dims.L + 1], make.normal(dims.C)
    before = make.normal(150, dims.L)
    actual, expected = before.clone(), before.clone()
    kernels.append_latent(kv, weight, 1e-5, angles, slots, actual)
    reference.append_latent(kv, weight, 1e-5, angles, slots, expected)
    assert_close("append_latent", actual, expected, dtype)
    others = torch.ones(150, dtype=torch.bool).index_fill(0, slots, False)
    assert torch.equal(actual[others], before[others])


def test_append_index_keys(kernels: Kernels, dims, dtype, tokens) -> None:
    make = Tensors(dtype)
    angles, slots = make.rope(tokens, min(dims.R, dims.I // 2 * 2)), make.slots(tokens, 150)
    k, weight, bias = make.normal(tokens, dims.I + 3)[:, 1 : dims.I + 1], make.normal(dims.I), make.normal(dims.I)
    before = make.normal(150, dims.I)
    actual, expected = before.clone(), before.clone()
    kernels.append_index_keys(k, weight, bias, 1e-6, angles, slots, actual)
    reference.append_index_keys(k, weight, bias, 1e-6, angles, slots, expected)
    assert_close("append_index_keys", actual, expected, dtype)


def test_mla_query(kernels: Kernels, dims, dtype, tokens) -> None:
    make = Tensors(dtype)
    angles = make.rope(tokens, dims.R)
    q = make.normal(tokens, dims.H * dims.D + 3)[:, 1 : dims.H * dims.D + 1].unflatten(-1, (dims.H, dims.D))
    w_uk = make.normal(dims.H, dims.U + dims.V, dims.C, scale=dims.U**-0.5)[:, : dims.U]
    expected = reference.mla_query(q.clone(), w_uk, angles)
    assert_close("mla_query", kernels.mla_query(q, w_uk, angles), expected, dtype)


def test_mla_output(kernels: Kernels, dims, dtype, tokens) -> None:
    make = Tensors(dtype)
    o = make.normal(tokens, dims.H, dims.C)
    w_uv = make.normal(dims.H, dims.U + dims.V, dims.C, scale=dims.C**-0.5)[:, dims.U :]
    assert_close("mla_output", kernels.mla_output(o, w_uv), reference.mla_output(o, w_uv), dtype)
