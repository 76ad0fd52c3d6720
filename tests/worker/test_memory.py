"""The memory plan of a rank: it adds up, pages are what is left, and what does not fit is named."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5ray.config import config_from_dict
from glm5ray.errors import ConfigError
from glm5ray.model.load_plan import MemoryPlan, plan_weights
from glm5ray.model.name_table import ShardSpec
from glm5ray.model_config import ModelConfig
from glm5ray.worker.memory import capacity_of, plan_rank, usable_bytes

GIB = 2**30
SLICE = Path(str(resources.files("glm5ray"))) / "bench" / "slices" / "glm5-12l-nvfp4" / "config.json"
MODEL = ModelConfig.from_dict(json.loads(SLICE.read_text()))


def plan_of(
    memory_gib: float, shard: ShardSpec | None = None, device: str = "cuda", **settings: dict[str, Any]
) -> MemoryPlan:
    return plan_rank(
        config_from_dict(settings),
        MODEL,
        shard or ShardSpec(),
        device=device,
        dtype="bfloat16",
        packed_experts=True,
        memory_bytes=int(memory_gib * GIB),
    )


@given(
    st.floats(90, 200),
    st.integers(1, 4096),
    st.integers(1, 16384),
    st.sampled_from([1, 16, 64]),
    st.sampled_from(["auto", "fp8"]),
)
def test_pages_are_what_is_left(
    memory_gib: float, max_num_seqs: int, max_tokens: int, page_size: int, kv_dtype: str
) -> None:
    plan = plan_of(
        memory_gib,
        scheduler={"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_tokens},
        cache={"page_size": page_size, "kv_dtype": kv_dtype},
    )
    assert sum(size for _, size in plan.lines()) == plan.total_bytes <= memory_gib * GIB
    page_bytes = plan.kv_bytes_per_token * page_size
    most = max_num_seqs * -(-MODEL.max_position_embeddings // page_size)
    assert plan.num_pages == most or plan.total_bytes + page_bytes > memory_gib * GIB
    assert plan.weights == plan_weights(MODEL, packed_experts=True)
    assert all(size >= 0 for _, size in plan.lines())


@pytest.mark.parametrize("setting", ["max_num_seqs", "max_num_batched_tokens"])
def test_larger_steps_leave_fewer_pages(setting: str) -> None:
    base = {"max_num_seqs": 512, "max_num_batched_tokens": 2048}
    small, large = (plan_of(100, scheduler={**base, setting: value}) for value in (1024, 4096))
    assert large.num_pages < small.num_pages


def test_graphs_and_ranks_need_memory_of_their_own() -> None:
    plain = plan_of(100)
    with_graphs = plan_of(100, runner={"cuda_graphs": "auto"})
    assert with_graphs.workspace.keys() - plain.workspace.keys() == {"CUDA graphs"}
    assert with_graphs.num_pages < plain.num_pages
    split = plan_of(100, ShardSpec(tp_size=2), parallel={"tp_size": 2})
    assert split.workspace.keys() - plain.workspace.keys() == {"collectives"}
    assert split.num_pages > plain.num_pages


@pytest.mark.parametrize(
    ("memory_gib", "settings", "parts"),
    [
        (40, {}, ["weights of a rank take 54.9", "40.00 GiB", "parallel.tp_size"]),
        (
            58,
            {"scheduler": {"max_num_seqs": 2048}},
            ["for logits and sampling", "lower scheduler.max_num_batched_tokens or scheduler.max_num_seqs"],
        ),
        (
            58,
            {"scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 16384}},
            ["for attention", "raise cache.memory_fraction"],
        ),
        (80, {"cache": {"num_pages": 10**6}}, ["cache.num_pages is 1000000", "room for", "leave it at auto"]),
    ],
)
def test_what_does_not_fit_is_named(memory_gib: float, settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        plan_of(memory_gib, **settings)
    for part in parts:
        assert part in str(error.value)


def test_a_length_that_the_pages_do_not_hold() -> None:
    settings = {"scheduler": {"max_model_len": 5000}, "cache": {"num_pages": 10}}
    plan = plan_of(80, **settings)
    with pytest.raises(ConfigError, match=r"max_model_len is 5000, but the cache holds 640 tokens"):
        capacity_of(plan, MODEL, config_from_dict(settings).scheduler)
    with pytest.raises(ConfigError, match=r"max_model_len is 300000; this model was trained for at most"):
        plan_of(80, scheduler={"max_model_len": 300000})


def test_on_a_cpu_the_setting_is_for_pages_alone() -> None:
    settings = config_from_dict({"cache": {"cpu_memory_gib": 0.25}})
    assert usable_bytes(settings, "cpu") == GIB // 4
    plan = plan_of(0.25, device="cpu", **settings.to_dict())
    page_bytes = plan.kv_bytes_per_token * plan.page_size
    assert plan.kv_bytes <= GIB // 4 < plan.kv_bytes + page_bytes
    with pytest.raises(ConfigError, match=r"raise cache.cpu_memory_gib"):
        plan_of(1e-5, device="cpu")
