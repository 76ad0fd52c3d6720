"""Two processes over gloo: tensor parallel, expert parallel and both give the logits of one, which are
transformers'."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm5ray.errors import ConfigError
from glm5ray.kernels.select import select_kernels
from glm5ray.model.glm5 import Glm5
from glm5ray.parallel import ParallelContext
from tests.hf_reference import INDEX_SHARE, hf_config, hf_model, model_config, our_state

ROOT = Path(__file__).parents[2]


def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    theirs = hf_model(8, **INDEX_SHARE)
    sequences = [torch.randint(0, 96, (length,)).tolist() for length in (40, 9)]
    with torch.no_grad():
        logits = [theirs(torch.tensor([tokens])).logits[0] for tokens in sequences]
    task = {
        "config": model_config(theirs.config),
        "state": our_state(theirs),
        "sequences": sequences,
        "steps": [[(0, 30), (1, 8)], [(1, 1), (0, 9)], [(0, 1)]],
        "logits": logits,
    }
    torch.save(task, tmp_path / "task.pt")
    command = [sys.executable, "-m", "tests.model.sharded_rank", str(tmp_path)]
    ranks = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (stdout, stderr) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, stderr
        differences = dict(line.split() for line in stdout.splitlines())
        assert set(differences) == {"tp2", "ep2", "tp2+ep2"}
        assert all(float(difference) < 1e-4 for difference in differences.values()), stdout


@pytest.mark.parametrize(
    ("changes", "parallel", "field"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, ParallelContext(tp_size=2), "num_attention_heads is 3"),
        ({"vocab_size": 97}, ParallelContext(tp_size=2), "vocab_size is 97"),
        ({"n_routed_experts": 9}, ParallelContext(ep_size=2), "n_routed_experts is 9"),
        ({"moe_intermediate_size": 15}, ParallelContext(tp_size=2), "moe_intermediate_size is 15"),
    ],
)
def test_sizes_that_cannot_be_shared(changes: dict[str, int], parallel: ParallelContext, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Glm5(model_config(hf_config(**changes)), select_kernels({}, "cpu"), parallel, dtype=torch.float32)


def test_layouts() -> None:
    ranks = [ParallelContext.of_rank(rank, tp_size=2, ep_size=4) for rank in range(4)]
    assert [(p.tp_rank, p.ep_rank) for p in ranks] == [(0, 0), (1, 1), (0, 2), (1, 3)]
    assert {p.world_size for p in ranks} == {4}
    assert {p.expert_tp_size for p in ranks} == {1}
    assert ParallelContext(tp_size=8).expert_tp_size == 8
    with pytest.raises(ConfigError, match="ep_size must be 1 or a multiple of tp_size"):
        ParallelContext(tp_size=4, ep_size=2)
    with pytest.raises(ConfigError, match="outside"):
        ParallelContext(tp_rank=2, tp_size=2)


def test_one_rank_needs_no_groups() -> None:
    x = torch.arange(6.0).view(2, 3)
    alone = ParallelContext()
    for result in (
        alone.all_reduce(x),
        alone.gather_rows(x, 2),
        alone.all_gather(x, 1),
        alone.all_to_all(x, [2], [2]),
    ):
        assert result is x
