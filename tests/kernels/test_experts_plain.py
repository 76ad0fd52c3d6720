"""Unquantised experts in Triton, in its interpreter, by the checks that all providers pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from glm5ray.kernels.select import select_kernels
from glm5ray.kernels.triton import experts_plain
from tests.kernels import test_experts
from tests.kernels.shapes import DIMS, DTYPES

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, kernels are compiled: test_gpu.py")

KERNELS = replace(select_kernels({}, "cpu"), experts=experts_plain.experts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("part", ["all experts", "a part"])
@pytest.mark.parametrize(
    ("dims", "tokens", "routing"),
    [
        ("odd", 0, "random"),
        ("odd", 1, "random"),
        ("odd", 7, "uneven"),
        ("one", 2, "random"),
        ("odd", 129, "one expert"),
        ("odd", 9, "all elsewhere"),
        ("even", 33, "random"),
    ],
)
def test_against_the_reference(dims: str, dtype: torch.dtype, routing: str, tokens: int, part: str) -> None:
    test_experts.test_experts(KERNELS, DIMS[dims], dtype, routing, tokens, part)


def test_wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = experts_plain.choose_tile(2**16, 6, torch.float32)
    monkeypatch.setattr(experts_plain, "choose_tile", lambda *_: tile)
    test_experts.test_experts(KERNELS, DIMS["odd"], torch.float32, "uneven", 129, "all experts")


def test_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_plain, "MAX_TOKENS", 4)
    test_experts.test_experts(KERNELS, DIMS["odd"], torch.float32, "random", 7, "all experts")
