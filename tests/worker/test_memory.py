"""The memory plan of a rank: it adds up, pages are what is left, and what does not fit is named."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm5ray.config import config_from_dict
from glm5ray.errors import ConfigError
from glm5ray.model.load_plan import MemoryPlan, plan_weights
from glm5ray.model.name_table import ShardSpec
from glm5ray.model_config import ModelConfig
from glm5ray.worker import memory
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
    plain, with_graphs = plan_of(100, runner={"cuda_graphs": False}), plan_of(100)
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
            [
                "for CUDA graphs",
                "lower scheduler.max_num_batched_tokens, scheduler.max_num_seqs or runner.max_graph_seqs",
            ],
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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Free bytes of a GPU of 100 GiB, at each look; the last stays."""
    free = [97 * GIB]

    def look() -> tuple[int, int]:
        return (free.pop(0) if len(free) > 1 else free[0]), 100 * GIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", look)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return free


def test_a_rank_uses_its_share_of_a_gpu(gpu: list[int]) -> None:
    assert usable_bytes(config_from_dict({}), "cuda") == 87 * GIB, "0.9 of all, and 3 are taken"
    shared = config_from_dict({"parallel": {"tp_size": 4, "ranks_per_gpu": 4}})
    assert usable_bytes(shared, "cuda") == int(22.5 * GIB)


def test_a_rank_that_comes_again_gets_the_pages_of_before(gpu: list[int]) -> None:
    """The memory of its predecessor comes back late, and a little less of it."""
    first = plan_of(usable_bytes(config_from_dict({}), "cuda") / GIB)
    gpu[:] = [9 * GIB, 9 * GIB, 96 * GIB]
    again = {"cache": {"num_pages": first.num_pages}}
    memory_bytes = usable_bytes(config_from_dict(again), "cuda")
    assert memory_bytes == 96 * GIB
    assert plan_of(memory_bytes / GIB, **again).num_pages == first.num_pages


def test_others_that_stay_are_not_waited_for_longer(gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PATIENCE_S", 0.3)
    gpu[:] = [60 * GIB]
    assert usable_bytes(config_from_dict({}), "cuda") == 50 * GIB


def test_memory_that_was_taken_while_weights_were_read(gpu: list[int]) -> None:
    plan = plan_of(87)
    gpu[:] = [97 * GIB - plan.weights.total_bytes - GIB // 2]  # the driver has loaded some code meanwhile
    memory.require_room(plan)
    gpu[:] = [30 * GIB]
    with pytest.raises(ConfigError, match=r"30.00 GiB of the GPU are free.*another process took memory meanwhile"):
        memory.require_room(plan)
