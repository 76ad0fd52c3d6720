"""Rows of the offline benchmark: its fields, a row that fails, and uniform routing of dummy weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from glm5ray.bench.offline import attempt_row, run_offline_bench
from glm5ray.config import load_config
from glm5ray.engine.llm import LLM
from glm5ray.errors import ConfigError
from glm5ray.kernels.select import OPS
from glm5ray.model.glm5 import MoE
from glm5ray.model.tiny import write_tiny
from glm5ray.worker.worker import Worker

if TYPE_CHECKING:
    from pathlib import Path

PEER_FIELDS = {"conc", "prefill_s", "total_s", "tpot_ms", "decode_tok_s", "out_tok_s"}
"""Of a row of the peer's figures."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    write_tiny(folder, format="nvfp4", sizes={"num_nextn_predict_layers": 0})
    return [f"model.path={folder}", "model.load_format=dummy", "cache.num_pages=64", "cache.page_size=16"]


def test_rows_have_the_peers_fields(settings: list[str]) -> None:
    report = run_offline_bench(
        load_config(None, settings), concurrency=(1, 3), prompt_tokens=5, new_tokens=2, repetitions=1
    )
    assert [row["conc"] for row in report["results"]] == [1, 3]
    assert all(set(row) == PEER_FIELDS for row in report["results"])


def test_breakdown_accounts_for_the_step(settings: list[str]) -> None:
    report = run_offline_bench(
        load_config(None, settings), concurrency=(1, 3), prompt_tokens=20, new_tokens=1, repetitions=1, breakdown=True
    )
    rows = report["breakdown"]
    assert [(row["conc"], row["context"]) for row in rows] == [(1, 23), (3, 23)]
    for row in rows:
        ops = {op["op"]: op for op in row["ops"]}
        assert set(OPS) - set(ops) == {"mla_prompts"}, "an operation of the table that no decode called"
        assert ops["experts"]["calls"] == 1  # of the two layers one has experts
        assert ops["mla_attention"]["calls"] == ops["append_latent"]["calls"] == 2
        assert ops["mla_attention.plan"]["calls"] == 1
        assert sum(op["ms"] for op in row["ops"]) == pytest.approx(row["step_ms"], abs=0.01)
        assert all(op["ms"] >= 0 for op in row["ops"])
    assert json.loads(json.dumps(report)) == report


def test_a_row_that_fails_leaves_the_next_one(settings: list[str]) -> None:
    with LLM(config=load_config(None, [*settings, "scheduler.max_model_len=32"])) as llm:
        failed = attempt_row(llm, 2, 40, 4, 1)  # longer than a sequence may be
        assert failed["conc"] == 2
        assert "40" in failed["error"]
        row = attempt_row(llm, 2, 8, 4, 3)
    assert set(row) == PEER_FIELDS | {"first_tpot_ms", "tpot_ms_runs"}
    assert len(row["tpot_ms_runs"]) == 3


def test_no_request_is_lost_at_2048(settings: list[str]) -> None:
    with LLM(config=load_config(None, [*settings, "cache.num_pages=1024"])) as llm:
        row = attempt_row(llm, 2048, 3, 1, 1)
    assert set(row) > PEER_FIELDS, row


def test_uniform_routing(settings: list[str]) -> None:
    """Every expert as often as the others, no expert twice for a token; the same in each run."""

    def tables() -> list[torch.Tensor]:
        config = load_config(None, [*settings, "model.dummy_routing=uniform", "scheduler.max_num_batched_tokens=4096"])
        worker = Worker.load(config)
        moes = [module for module in worker.model.modules() if isinstance(module, MoE)]
        return [moe.dummy_ids_TA for moe in moes if moe.dummy_ids_TA is not None]

    first = tables()
    assert len(first) == 1
    ids = first[0]
    assert ids.shape == (4096, 2)
    assert bool((ids[:, 0] != ids[:, 1]).all())
    counts = torch.bincount(ids.flatten(), minlength=8)
    assert counts.min() > 900  # of 1,024 expected; a fair draw is below 900 once in 10,000
    assert torch.equal(ids, tables()[0])


def test_real_weights_are_not_routed_uniformly(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model.dummy_routing is 'uniform', which would change what a real model says"
    ):
        load_config(None, ["model.dummy_routing=uniform"])
