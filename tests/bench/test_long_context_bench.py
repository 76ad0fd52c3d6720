"""The benchmark of long contexts: its floor against counts made by hand, and that its steps read what it filled."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
import torch

from glm5ray.bench.long_context import CachedContexts, Case, fill_cache, run_long_context_bench, weight_bytes
from glm5ray.config import load_config
from glm5ray.errors import ConfigError
from glm5ray.kernels.select import select_kernels
from glm5ray.model.glm5 import Glm5
from glm5ray.model.tiny import write_tiny
from glm5ray.model_config import ModelConfig
from glm5ray.parallel import ParallelContext
from glm5ray.worker.worker import Worker

FIXED = ["kernels.default=reference", "runner.cuda_graphs=emulate"]
SLICE = Path(str(resources.files("glm5ray"))) / "bench" / "slices" / "glm5-12l-nvfp4"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_tiny(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_weights_of_the_slice_by_hand() -> None:
    config = ModelConfig.from_checkpoint(SLICE)
    kernels = select_kernels({"default": "reference"}, "cpu")
    model = Glm5(config, kernels, ParallelContext(), dtype=torch.bfloat16, packed_experts=True)
    hidden, heads, latent, query, topk = 6144, 64, 512, 2048, 8
    attention = hidden * query + query * heads * 256 + hidden * (latent + 64) + latent * heads * (192 + 256)
    attention += heads * 256 * hidden + query * 32 * 128 + hidden * 128
    moe = 3 * hidden * 2048 * 2 + 256 * hidden * 4  # the shared expert, and the router in fp32
    fixed = 12 * (2 * attention + 4 * 32 * hidden) + 3 * 3 * hidden * 12288 * 2 + 9 * moe + 154880 * hidden * 2
    for count in (1, 64):
        hit = 256 * (1 - (1 - topk / 256) ** count)
        by_hand = fixed + 9 * hit * 3 * hidden * 2048 * 9 / 16
        assert weight_bytes(model, count) == pytest.approx(by_hand, rel=1e-4)  # norms are left out by hand


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_report(tiny: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: str) -> None:
    monkeypatch.setattr("glm5ray.bench.kernels.COPIED_BYTES", {"cpu": 2**20})
    monkeypatch.setattr("glm5ray.bench.kernels.FLUSHED_BYTES", {"cpu": 2**16})
    monkeypatch.setattr("glm5ray.bench.long_context.FILLED_TOGETHER", 50)
    config = load_config(None, [f"model.path={tiny}", f"cache.kv_dtype={kv_dtype}", *FIXED])
    cases = [Case(150, 3), Case(90, 1), Case(120, 2, 30)]
    *_, report = run_long_context_bench(config, cases, 2)
    model = ModelConfig.from_checkpoint(tiny)
    assert [(row["context"], row["conc"], row["tokens"]) for row in report["rows"]] == [
        (150, 3, 1),
        (90, 1, 1),
        (120, 2, 30),
    ]
    decode = report["rows"][0]
    assert decode["from_graph"]
    read = decode["weights_mb"] + decode["latent_mb"] + decode["index_mb"]
    assert decode["floor_ms"] == pytest.approx(read / report["copy_tb_per_s"] / 1e3, rel=0.2)
    row_bytes = 4 * (model.kv_lora_rank + model.qk_rope_head_dim)
    key_bytes = 4 * model.index_head_dim
    if kv_dtype == "auto":
        selected = min(150, model.index_topk)
        assert decode["latent_mb"] == pytest.approx(3 * selected * row_bytes * model.num_hidden_layers / 1e6, abs=1e-3)
        full = sum(kind == "full" for kind in model.indexer_types)
        assert decode["index_mb"] == pytest.approx(3 * 150 * key_bytes * full / 1e6, abs=1e-3)
    for row in report["rows"]:
        assert row["step_ms"] > 0
        ops = {op["op"]: op for op in row["ops"]}
        assert ops["mla_attention"]["calls"] >= 1
        assert sum(op["ms"] for op in row["ops"]) == pytest.approx(row["eager_ms"], rel=0.01)


def test_every_row_is_filled_and_adding_a_context_computes_nothing(tiny: Path) -> None:
    worker = Worker.load(load_config(None, [f"model.path={tiny}", "cache.num_pages=2", "scheduler.max_model_len=100"]))
    fill_cache(worker)
    layers = [*worker.cache.latent, *(keys for keys in worker.cache.index_keys if keys is not None)]
    for layer in layers:
        assert torch.isfinite(layer).all()
        assert (layer.std(dim=-1) > 0).all(), "a row that was not filled"
    before = [layer.clone() for layer in layers]
    sequences = CachedContexts(worker, Case(100, 1), 0)
    sequences.add(80)
    assert all(torch.equal(a, b) for a, b in zip(layers, before, strict=True))
    sequences.run(5)
    changed = (layers[0] != before[0]).any(-1)
    assert int(changed.sum()) == 5, "the step wrote its own tokens and no others"


@pytest.mark.parametrize("text", ["", "8", "8x", "8x0", "8x1:9", "8x1:0", "axb"])
def test_cases(text: str) -> None:
    """What is not a case is refused; a number alone is one sequence."""
    if text in ("8", "8x"):
        assert Case.parse(text) == Case(8, 1, 1)
        return
    with pytest.raises(ConfigError, match="case"):
        Case.parse(text)


@pytest.mark.parametrize("cases", [[], [Case(5, 1)]])
def test_contexts_too_short_to_time_are_refused(tiny: Path, cases: list[Case]) -> None:
    with pytest.raises(ConfigError, match="context"):
        next(run_long_context_bench(load_config(None, [f"model.path={tiny}"]), cases, 8))
