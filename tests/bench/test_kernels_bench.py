"""The kernels benchmark: its report, and that its cases are what the operations take."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from glm5ray.bench.kernel_cases import CaseMaker
from glm5ray.bench.kernels import run_kernels_bench
from glm5ray.config import load_config
from glm5ray.kernels.select import OPS, select_kernels
from glm5ray.model.tiny import write_tiny
from glm5ray.model_config import ModelConfig
from tests.kernels.case_results import assert_same

if TYPE_CHECKING:
    from pathlib import Path

DECODE_OPS = tuple(op for op in OPS if op != "mla_prompts")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_tiny(tmp_path / "tiny", format="nvfp4")
    return tmp_path / "tiny"


def test_report(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5ray.bench.kernels.PRODUCT_SIZE", {"cpu": 64})
    monkeypatch.setattr("glm5ray.bench.kernels.COPIED_BYTES", {"cpu": 2**20})
    monkeypatch.setattr("glm5ray.bench.kernels.FLUSHED_BYTES", {"cpu": 2**16})
    config = load_config(None, [f"model.path={tiny}", "kernels.rope=reference"])
    report = run_kernels_bench(config, tokens=(1, 3), context=40, repetitions=2)
    assert [(row["tokens"], row["op"]) for row in report["results"]] == [(n, op) for n in (1, 3) for op in DECODE_OPS]
    assert {row["provider"] for row in report["results"] if row["op"] == "rope"} == {"reference"}
    for row in report["results"]:
        assert row["us"] > 0
        assert row["floor_us"] >= 0
    short = run_kernels_bench(config, tokens=(1,), context=8, repetitions=1)
    assert {row["op"] for row in short["results"]} == set(DECODE_OPS) - {"select_tokens"}
    assert json.loads(json.dumps(report)) == report


@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize("packs_experts", [False, True])
def test_cases_are_what_the_operations_take(tiny: Path, fp8_cache: bool, packs_experts: bool) -> None:
    """Two providers agree on them; and the same case gives the same in a second call."""
    maker = CaseMaker(
        ModelConfig.from_checkpoint(tiny),
        tokens=5,
        context=70,
        device="cpu",
        dtype=torch.float32,
        packs_experts=packs_experts,
        fp8_cache=fp8_cache,
    )
    nvfp4 = frozenset({"experts"} if packs_experts else ())
    ours, reference = select_kernels({}, "cpu", nvfp4), select_kernels({"default": "reference"}, "cpu", nvfp4)
    for op in DECODE_OPS:
        case = maker.make(op)
        assert case is not None
        assert_same(case, case.prepare(ours)(), case.prepare(reference)(), maker)


def test_bytes_and_operations(tiny: Path) -> None:
    """By hand, for operations whose floor matters."""
    config = ModelConfig.from_checkpoint(tiny)
    maker = CaseMaker(
        config, tokens=3, context=70, device="cpu", dtype=torch.bfloat16, packs_experts=True, fp8_cache=False
    )
    experts = maker.make("experts")
    assert experts is not None
    one = (3 * 64 * 32 // 2) + (3 * 64 * 32 // 16) + 12  # codes, scales, global scales
    chosen = (experts.num_bytes - 2 * 3 * 64 * 2 - 3 * 2 * (8 + 4)) / one
    assert chosen == int(chosen)
    assert 2 <= chosen <= 6  # two each for three tokens
    assert experts.flops == 2 * 3 * 2 * 3 * 64 * 32
    attention = maker.make("mla_attention")
    assert attention is not None
    width = config.kv_lora_rank + config.qk_rope_head_dim
    assert attention.num_bytes == 3 * 2 * (4 * width + 16 * width + 4 * config.kv_lora_rank)
    wide = replace(config, index_topk=70)
    maker = CaseMaker(wide, tokens=3, context=70, device="cpu", dtype=torch.bfloat16, packs_experts=True)
    assert maker.make("select_tokens") is None
