"""Rows go to the ranks that hold their experts and come back as the sum that one rank would have computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from glm5ray.model.expert_parallel import plan_sending
from glm5ray.parallel import ParallelContext
from tests.parallel.expert_rank import ROWS
from tests.parallel.processes import run_ranks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("size", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_all_ranks_experts_are_as_one(tmp_path: Path, size: int) -> None:
    for stdout in run_ranks("tests.parallel.expert_rank", tmp_path, size):
        assert stdout.splitlines() == list(ROWS)


def test_a_row_is_sent_once_to_a_rank() -> None:
    ids_YA = torch.tensor([[0, 1, 2], [7, 0, 4], [5, 4, 6]])
    sending = plan_sending(ids_YA, 4, 2)
    assert sending.counts == [2, 1, 2, 2]
    assert sending.token_X.tolist() == [0, 1, 0, 1, 2, 1, 2]
    nothing = plan_sending(torch.empty(0, 3, dtype=torch.int64), 4, 2)
    assert nothing.counts == [0] * 4
    assert nothing.token_X.tolist() == []


@pytest.mark.parametrize(("num_rows", "sizes"), [(8, [2, 2, 2, 2]), (5, [2, 2, 1, 0]), (1, [1, 0, 0, 0])])
def test_shares_of_rows_are_all_rows_once(num_rows: int, sizes: list[int]) -> None:
    shares = [ParallelContext.of_rank(rank, 1, 4).own_rows(num_rows) for rank in range(4)]
    assert [share.stop - share.start for share in shares] == sizes
    assert [row for share in shares for row in range(share.start, share.stop)] == list(range(num_rows))
