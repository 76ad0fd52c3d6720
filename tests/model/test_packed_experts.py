"""NVFP4 experts that stay packed, and random weights from ``config.json`` alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from glm5ray.config import config_from_dict
from glm5ray.engine.llm import LLM
from glm5ray.engine.results import RequestResult
from glm5ray.errors import ConfigError
from glm5ray.model.load_plan import plan_weights
from glm5ray.model.name_table import ModelPart
from glm5ray.model.packed import packs_experts
from glm5ray.model.tiny import write_tiny
from glm5ray.model.weights import ShardSpec, load_shard
from glm5ray.model_config import ModelConfig
from glm5ray.protocol import GenerateRequest, SamplingParams
from glm5ray.quantization.nvfp4 import dequantize_nvfp4

if TYPE_CHECKING:
    from pathlib import Path


def greedy(folder: Path, **model: str) -> tuple[int, ...]:
    config = config_from_dict({"model": {"path": str(folder), "device": "cpu", **model}, "cache": {"num_pages": 8}})
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    with LLM(config=config) as llm:
        request = GenerateRequest(request_id="a", prompt_token_ids=tuple(range(3, 90)), sampling=sampling)
        (result,) = llm.run([request])
    assert isinstance(result, RequestResult), result
    return result.choices[0].token_ids


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4-all", "nvfp4-ct"])
def test_packed_answers_as_dequantized(tmp_path: Path, format: Any) -> None:
    write_tiny(tmp_path / "tiny", format=format, seed=1)
    assert greedy(tmp_path / "tiny", weights="packed") == greedy(tmp_path / "tiny", weights="dequantized")


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4-ct"])
@pytest.mark.parametrize("shard", [ShardSpec(), ShardSpec(1, 2, 1, 2), ShardSpec(1, 2)])
def test_packed_parts_are_the_dequantized_values(tmp_path: Path, format: Any, shard: ShardSpec) -> None:
    write_tiny(tmp_path / "tiny", format=format, seed=2)
    config = ModelConfig.from_checkpoint(tmp_path / "tiny")
    plain = load_shard(tmp_path / "tiny", config, shard, dtype=torch.float32)
    packed = load_shard(tmp_path / "tiny", config, shard, dtype=torch.float32, packed_experts=True)
    stacks = [name for name in plain if ".mlp.experts." in name]
    assert stacks
    assert all(torch.equal(packed[name], plain[name]) for name in plain if name not in stacks)
    for name in stacks:
        for e, expected in enumerate(plain[name]):
            codes, scales, factors = (packed[f"{name}_{part}"][e] for part in ("packed", "scales", "global"))
            parts = factors.numel()
            halves = zip(codes.chunk(parts), scales.chunk(parts), factors.reshape(-1), strict=True)
            torch.testing.assert_close(torch.cat([dequantize_nvfp4(*half) for half in halves]), expected)
    plan = plan_weights(config, shard, dtype="float32", packed_experts=True)
    held = sum(t.nbytes for name, t in packed.items() if ".mlp.experts." in name)
    assert plan.bytes_by_part[ModelPart.ROUTED_EXPERTS] == held


def test_what_is_not_nvfp4_cannot_stay_packed(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", format="fp8")
    with pytest.raises(ConfigError, match=r"model\.weights is 'packed'.*fp8-block"):
        greedy(tmp_path / "tiny", weights="packed")


@pytest.mark.parametrize("weights", ["packed", "dequantized"])
def test_dummy_needs_only_the_config(tmp_path: Path, weights: str) -> None:
    write_tiny(tmp_path / "tiny", format="nvfp4")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((tmp_path / "tiny" / "config.json").read_bytes())
    tokens = greedy(tmp_path / "bare", weights=weights, load_format="dummy")
    assert len(tokens) == 16
    assert tokens == greedy(tmp_path / "bare", weights=weights, load_format="dummy")


@pytest.mark.parametrize(
    ("choice", "device", "dtype", "kept"),
    [
        ("auto", "cpu", "float32", False),
        ("auto", "cuda", "float32", False),
        ("auto", "cuda:1", "bfloat16", True),
        ("packed", "cpu", "float32", True),
        ("packed", "cuda", "bfloat16", True),
        ("packed", "cuda", "float32", None),
        ("dequantized", "cuda", "bfloat16", False),
    ],
)
def test_who_keeps_nvfp4(tmp_path: Path, choice: Any, device: str, dtype: str, kept: bool | None) -> None:
    write_tiny(tmp_path / "tiny", format="nvfp4")
    config = ModelConfig.from_checkpoint(tmp_path / "tiny")
    if kept is None:
        with pytest.raises(ConfigError, match=r"float32 on cuda.*set model.dtype to bfloat16, or model.weights to deq"):
            packs_experts(choice, config, device, dtype)
    else:
        assert packs_experts(choice, config, device, dtype) is kept
