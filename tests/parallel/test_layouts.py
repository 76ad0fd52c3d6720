"""Every layout gives the tokens of one rank: through real schedulers and workers, with prompts in chunks, contexts on
both sides of index_topk, sequences that are preempted, and data-parallel groups that run out of work."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from glm5ray.model.tiny import write_tiny
from glm5ray.parallel import ParallelContext
from tests.parallel.layout_rank import LAYOUTS, PROMPT_LENGTHS, generate, name_of, settings
from tests.parallel.processes import run_ranks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_tokens_of_all_layouts_are_those_of_one_rank(tmp_path: Path, size: int) -> None:
    sizes = {"n_routed_experts": 8, "num_attention_heads": 8, "num_key_value_heads": 8}  # one for each of 8 ranks
    write_tiny(tmp_path / "model", format="fp32", style="glm5.2", seed=3, with_mtp=False, sizes=sizes)
    expected = generate(settings(tmp_path, (1, 1, 1)), ParallelContext())
    assert [len(tokens) for tokens in expected.values()] == [12 + i for i in range(len(PROMPT_LENGTHS))]
    for stdout in run_ranks("tests.parallel.layout_rank", tmp_path, size, timeout_s=300.0):
        assert json.loads(stdout.splitlines()[-1]) == {name_of(layout): expected for layout in LAYOUTS[size]}
