"""Greedy tokens and flags: the reference, and Triton's in its interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from glm5ray.kernels import reference
from tests.kernels.shapes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@pytest.fixture(params=["reference", "triton"])
def pick(request: pytest.FixtureRequest) -> Callable[[Tensor, Tensor], Tensor]:
    if request.param == "reference":
        return reference.pick_tokens
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("with a GPU, kernels are compiled: test_gpu.py")
    from glm5ray.kernels import triton_ops

    return triton_ops.pick_tokens


def made(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(rows, width).normal_(generator=torch.Generator().manual_seed(width)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(0, 9), (1, 1), (1, 5000), (3, 2048), (2, 2049), (9, 300)])
def test_the_highest_of_each_row(pick, dtype: torch.dtype, rows: int, width: int) -> None:
    hidden, logits = made(rows, 70, dtype), made(rows, width, dtype)
    found = pick(hidden, logits)
    assert found.dtype == torch.int64
    assert found.shape == (3, rows)
    assert torch.equal(found[0], logits.float().argmax(-1))
    assert bool((found[1:] == 1).all())


def test_of_equal_logits_the_lowest_column(pick) -> None:
    """In other parts of the row, too; zero equals minus zero; all below zero."""
    logits = torch.full((4, 9000), -3.0)
    logits[0, [4097, 17, 8999]] = 2.0
    logits[1] = 0.0
    logits[1, 0] = -0.0
    logits[2, [5000, 6000]] = -1e-38
    logits[3, 4100] = torch.finfo(torch.float32).max
    assert pick(made(4, 8, torch.float32), logits)[0].tolist() == [17, 0, 5000, 4100]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_told_for_its_row_alone(pick, broken: float) -> None:
    hidden, logits = made(4, 5000, torch.bfloat16), made(4, 6000, torch.bfloat16)
    hidden[1, 4999], logits[2, 5999] = broken, broken
    found = pick(hidden, logits)
    assert found[1].tolist() == [1, 0, 1, 1]
    assert found[2].tolist() == [1, 1, 0, 1]
    whole = [0, 1, 3]
    assert torch.equal(found[0, whole], logits[whole].float().argmax(-1))
    assert 0 <= found[0, 2] < 6000


def test_rows_may_be_strided(pick) -> None:
    hidden, logits = made(3, 40, torch.float32)[:, 4:20], made(3, 70, torch.float32)[:, 3:60]
    assert torch.equal(pick(hidden, logits)[0], logits.argmax(-1))
