"""The planned workspaces against what the model with its GPU kernels really allocates, at GLM-5's real sizes: on the
meta device, where a launch does nothing."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.runtime.interpreter import InterpretedFunction

from glm5ray.kernels import nvfp4_fragments
from glm5ray.kernels.interface import ForwardBatch
from glm5ray.kernels.select import select_kernels
from glm5ray.kernels.triton import experts_nvfp4, indexer, mla
from glm5ray.model import workspace
from glm5ray.model.cache import PagedCache
from glm5ray.model.glm5 import Glm5, MoE
from glm5ray.model.name_table import ShardSpec
from glm5ray.model.workspace import StepLimits, plan_workspace
from glm5ray.model_config import ModelConfig
from glm5ray.parallel import ParallelContext
from glm5ray.protocol import SamplingParams
from glm5ray.worker import sampler
from glm5ray.worker.batch import MirrorSequence
from glm5ray.worker.sampler import Draws, draw
from tests.model.live_bytes import LiveBytes

PAGE = 64


def real_sizes() -> ModelConfig:
    """GLM-5 in NVFP4, but for the number of layers: one is dense, two have experts."""
    path = Path(str(resources.files("glm5ray"))) / "bench" / "slices" / "glm5-12l-nvfp4" / "config.json"
    values = json.loads(path.read_text())
    return ModelConfig.from_dict({**values, "num_hidden_layers": 3, "first_k_dense_replace": 1})


@pytest.fixture(autouse=True)
def nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda self, grid: lambda *args, **kwargs: None)
    for module in ("mla", "router"):
        monkeypatch.setattr(f"glm5ray.kernels.triton.{module}.num_processors", lambda x: 188)


def pack_one(num_experts: int, matrix: Any) -> tuple[torch.Tensor, ...]:
    """All experts have the shape of the first."""
    first = nvfp4_fragments.pack_matrix(*matrix(0))
    return tuple(x.new_empty(num_experts, *x.shape) for x in first)


def make_model(parallel: ParallelContext) -> Glm5:
    kernels = select_kernels({"experts": "triton"}, "cuda", frozenset({"experts"}))
    model = Glm5(real_sizes(), kernels, parallel, dtype=torch.bfloat16, packed_experts=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvfp4_fragments, "_pack_each", pack_one)
        model.prepare()
    return model


@pytest.fixture(scope="module")
def model() -> Glm5:
    return make_model(ParallelContext())


def batch_of(slices: list[tuple[int, int]], max_visible: int) -> ForwardBatch:
    """(start, tokens) of each."""
    tokens = sum(count for _, count in slices)

    def meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    return ForwardBatch(
        token_ids_T=meta(tokens),
        positions_T=meta(tokens),
        slots_T=meta(tokens),
        slice_T=meta(tokens, dtype=torch.int32),
        page_table_SP=meta(len(slices), -(-max_visible // PAGE), dtype=torch.int32),
        starts=tuple(start for start, _ in slices),
        num_tokens=tuple(count for _, count in slices),
        page_size=PAGE,
        max_visible=max_visible,
        logits_rows_L=meta(len(slices)),
    )


def allocated(model: Glm5, slices: list[tuple[int, int]], *, draws: bool) -> int:
    """Peak bytes of a step, sampling included."""
    max_visible = max(start + count for start, count in slices)
    cache = PagedCache(model.config, 2, PAGE, torch.bfloat16, "meta")
    batch = batch_of(slices, max_visible)
    rows = len(slices)
    columns = torch.empty(rows, 1, device="meta")
    numbers = torch.empty(rows, dtype=torch.int64, device="meta")
    with torch.inference_mode(), LiveBytes() as live:
        live.ignore(*(keys for keys in (*cache.latent, *cache.index_keys) if keys is not None))
        live.ignore(*model.parameters(), *model.buffers(), columns, numbers)
        hidden_TM = model.forward_hidden(batch, cache)
        logits_LV = model.compute_logits(hidden_TM[batch.logits_rows_L]).float()
        if draws:
            masked_LV = logits_LV.clone()
            masked_LV.argmax(dim=-1)
            draw(masked_LV[numbers], Draws(columns, columns, columns, columns, numbers, numbers, numbers))
        else:
            logits_LV.argmax(dim=-1)
    return live.peak


STEPS: dict[str, tuple[StepLimits, list[tuple[int, int]]]] = {
    "one prompt": (StepLimits(max_num_tokens=8192, max_num_seqs=1, max_model_len=16384), [(0, 8192)]),
    "long context": (StepLimits(max_num_tokens=4096, max_num_seqs=4, max_model_len=131072), [(126976, 4096)]),
    "one token": (StepLimits(max_num_tokens=1, max_num_seqs=1, max_model_len=131072), [(131071, 1)]),
    "eight tokens": (StepLimits(max_num_tokens=8, max_num_seqs=8, max_model_len=32768), [(32767, 1)] * 8),
    "64 tokens": (StepLimits(max_num_tokens=64, max_num_seqs=64, max_model_len=4096), [(4095, 1)] * 64),
    "1,024 tokens": (StepLimits(max_num_tokens=2048, max_num_seqs=1024, max_model_len=2048), [(2047, 1)] * 1024),
    "mixed": (
        StepLimits(max_num_tokens=8192, max_num_seqs=256, max_model_len=8192),
        [(8191, 1)] * 225 + [(0, 256)] * 31,
    ),
    "mixed with a long prompt": (
        StepLimits(max_num_tokens=8192, max_num_seqs=256, max_model_len=8192),
        [(8191, 1)] * 255 + [(0, 8192 - 255)],
    ),
}


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_fits_its_plan(model: Glm5, name: str, draws: bool) -> None:
    limits, slices = STEPS[name]
    lines = plan_workspace(model.config, ShardSpec(), limits, dtype="bfloat16", on_gpu=False)
    planned = sum(lines.values()) - lines["penalty counts"]
    found = allocated(model, slices, draws=draws)
    assert found <= planned, f"{found / 2**20:.0f} MiB, {planned / 2**20:.0f} planned: {lines}"
    # a long prompt is not absorbed, and needs less than the short ones for which there must be room
    if draws and sum(count for _, count in slices) >= 1024 and name != "mixed with a long prompt":
        assert planned < 4 * found, f"{found / 2**20:.0f} MiB, {planned / 2**20:.0f} planned: the plan wastes memory"


@pytest.mark.parametrize("tp_size", [2, 8])
def test_a_tensor_parallel_step_fits_its_plan(tp_size: int) -> None:
    """With torch's process group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp_size)
    try:
        model = make_model(ParallelContext.of_rank(0, tp_size, 1, dist.group.WORLD, dist.group.WORLD))
        limits = StepLimits(max_num_tokens=4096, max_num_seqs=512, max_model_len=8192)
        shard = ShardSpec(tp_size=tp_size)
        lines = plan_workspace(model.config, shard, limits, dtype="bfloat16", on_gpu=False)
        found = allocated(model, [(8191, 1)] * 511 + [(0, 4096 - 511)], draws=True)
    finally:
        dist.destroy_process_group()
    planned = sum(lines.values()) - lines["penalty counts"]
    assert found <= planned < 4 * found, f"{found / 2**20:.0f} MiB, {planned / 2**20:.0f} planned: {lines}"


def test_penalties_keep_what_is_planned_for_them() -> None:
    config = real_sizes()
    limits = StepLimits(max_num_tokens=64, max_num_seqs=8, max_model_len=256)
    lines = plan_workspace(config, ShardSpec(), limits, dtype="bfloat16")
    params = SamplingParams(repetition_penalty=1.1, seed=1)
    sequence = MirrorSequence(0, 0, 0, params, np.arange(10), num_prompt_tokens=5, num_tokens=11, num_pages=1)
    counts = sampler.Sampler(config.vocab_size, (), torch.device("cpu"))
    counts.add(sequence)
    held = counts._penalties[0]
    assert lines["penalty counts"] == 8 * (held.output_V.nbytes + held.prompt_V.nbytes)


def test_sizes_that_are_taken_from_kernels() -> None:
    """They are written down without torch, so they can differ."""
    assert workspace.EXPERT_TOKENS == experts_nvfp4.MAX_TOKENS
    assert workspace.MAX_SCORES == indexer.MAX_SCORES
    assert workspace.SAMPLED_NUMBERS == sampler.SAMPLED_NUMBERS


@pytest.mark.parametrize("processors", [132, 188])
@pytest.mark.parametrize("num_heads", [8, 16, 64])
@pytest.mark.parametrize("longest", [600, 2048])
def test_split_contexts_fit_their_bound(processors: int, num_heads: int, longest: int) -> None:
    for tokens in [*range(1, 65), *range(72, 520, 8)]:
        for arch, selects in ((90, True), (90, False), (120, True), (120, False)):
            step = mla.kind_of_step(tokens, longest, selects)
            tile = mla.choose_tile(arch, torch.bfloat16, False, num_heads, 512, step)
            programs = tokens * -(-num_heads // tile.heads)
            parts = mla.count_parts(programs, longest, tile.positions, processors)
            held = 0 if parts == 1 else tokens * parts * num_heads * 4 * 513
            assert held <= workspace.SPLIT_BYTES, (tokens, arch, parts, held / 2**20)


@pytest.mark.parametrize(("tp_size", "ep_size", "dp_size"), [(1, 8, 1), (8, 8, 1), (1, 8, 8), (2, 4, 2)])
def test_experts_of_many_ranks_fit_their_line(
    monkeypatch: pytest.MonkeyPatch, tp_size: int, ep_size: int, dp_size: int
) -> None:
    """The worst routing: every rank sends all of its rows here, and this one all of its to every rank."""
    tokens, world_size = 256, max(tp_size * dp_size, ep_size)
    mine = tokens if dp_size > 1 and tp_size == 1 else tokens * dp_size // world_size

    def receive(out: torch.Tensor, x: torch.Tensor, *sizes: Any, group: Any) -> None:
        if out.dtype == torch.int64 and out.shape == (world_size,):  # rows that each will send
            out.fill_(mine)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    monkeypatch.setattr(dist, "all_to_all_single", receive)
    # the weights have no data, and what comes out has no meaning here
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, weight: x.new_empty(len(x), len(weight)))
    try:
        world = dist.group.WORLD
        own = world if tp_size == world_size else dist.new_group(list(range(tp_size)))
        model = make_model(ParallelContext.of_rank(0, tp_size, ep_size, own, world, dp_size=dp_size))
        moe = model.model.layers[1].mlp
        assert isinstance(moe, MoE)
        everywhere = torch.arange(moe.settings.num_experts_per_tok) * moe.experts.num_experts
        moe.dummy_ids_TA = (everywhere % model.config.n_routed_experts).expand(tokens, -1)
        x_TM = torch.zeros(tokens, model.config.hidden_size, dtype=torch.bfloat16)
        with torch.inference_mode(), LiveBytes() as live:
            live.ignore(x_TM, *moe.parameters())
            moe(x_TM)
    finally:
        dist.destroy_process_group()
    limits = StepLimits(max_num_tokens=tokens, max_num_seqs=tokens, max_model_len=tokens)
    shard = ShardSpec(tp_size=tp_size, ep_size=ep_size)
    line = plan_workspace(model.config, shard, limits, dtype="bfloat16", dp_size=dp_size)["experts"]
    assert live.peak <= line < 3 * live.peak, f"{live.peak / 2**20:.0f} MiB, {line / 2**20:.0f} planned"
