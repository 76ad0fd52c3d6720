"""The memory plan with packed experts: what it counts is what loading holds, and dummy weights have the same layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from glm5ray.kernels.select import select_kernels
from glm5ray.model.dummy import dummy_state
from glm5ray.model.glm5 import Glm5
from glm5ray.model.load_plan import plan_weights
from glm5ray.model.tiny import write_tiny
from glm5ray.model.weights import ShardSpec, load_shard
from glm5ray.model_config import ModelConfig
from glm5ray.parallel import ParallelContext

if TYPE_CHECKING:
    from pathlib import Path


def layout(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}


@pytest.mark.parametrize("shard", [ShardSpec(), ShardSpec(1, 2), ShardSpec(1, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4-all", "nvfp4-ct"])
def test_the_plan_counts_what_is_held(tmp_path: Path, format: Any, shard: ShardSpec) -> None:
    write_tiny(tmp_path / "tiny", format=format, sizes={"moe_intermediate_size": 64})
    config = ModelConfig.from_checkpoint(tmp_path / "tiny")
    state = load_shard(tmp_path / "tiny", config, shard, dtype=torch.bfloat16, packed_experts=True)
    held = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert held == plan_weights(config, shard, packed_experts=True).total_bytes
    assert held < plan_weights(config, shard).total_bytes


def test_dummy_weights_have_the_layout_of_loaded_ones(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", format="nvfp4")
    config = ModelConfig.from_checkpoint(tmp_path / "tiny")
    kernels = select_kernels({}, "cpu", frozenset({"experts"}))
    model = Glm5(config, kernels, ParallelContext(), dtype=torch.bfloat16, packed_experts=True)
    dummy = dummy_state(model, "cpu")
    loaded = load_shard(tmp_path / "tiny", config, ShardSpec(), dtype=torch.bfloat16, packed_experts=True)
    assert layout(dummy) == layout(loaded)
    assert all(bool(torch.isfinite(values.float()).all()) for values in dummy.values())
