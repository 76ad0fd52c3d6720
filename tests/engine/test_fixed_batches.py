"""Decode steps from fixed, padded batches against eager ones: case B29 of the list of cases, without a GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch

from glm5ray.engine.core import EngineCore
from glm5ray.engine.executor import InProcessExecutor
from glm5ray.engine.llm import LLM
from glm5ray.engine.results import RequestResult
from glm5ray.errors import ConfigError
from glm5ray.protocol import GenerateRequest, NewSequence, SamplingParams, StepInput
from glm5ray.worker.runner import batch_sizes, visible_bounds
from glm5ray.worker.worker import Worker
from tests.engine.conftest import settings, settle

if TYPE_CHECKING:
    from pathlib import Path

    from glm5ray.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
KINDS = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=-(2**63) + 5, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=7, top_k=9, top_p=0.8, max_tokens=23, ignore_eos=True),
    SamplingParams(temperature=1.3, seed=7, min_p=0.1, n=2, max_tokens=11, ignore_eos=True),
]
EAGERLY_SAMPLED = [
    SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, logit_bias={65: 4.0}, logprobs=2, max_tokens=30),
    SamplingParams(temperature=0.0, allowed_token_ids=(65, 66, 67), max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.0, min_tokens=20, max_tokens=30),
]


def load(folder: Path, *, emulate: bool, most: int = 4, **cache: str) -> Worker:
    config = settings(
        model={"path": str(folder), "device": "cpu"},
        kernels={"default": "reference"},
        runner={"cuda_graphs": "emulate" if emulate else False, "max_graph_seqs": most},
        cache=cache,
    )
    return Worker.load(config)


def answers(worker: Worker, tokenizer: Tokenizer, prompts: list[list[int]], params: list[SamplingParams]) -> list:
    """Token ids and log-probabilities of every choice."""
    with LLM.from_executor(InProcessExecutor(lambda: worker, threaded=False), tokenizer, settings()) as llm:
        results = llm.generate(prompts, params)
        settle(llm)
    assert all(isinstance(result, RequestResult) for result in results), results
    return [[(c.token_ids, c.logprobs) for c in r.choices] for r in results if isinstance(r, RequestResult)]


def prompts(count: int) -> list[list[int]]:
    """Lengths on both sides of index_topk (16) and of a page (16); those of 70 take two steps."""
    lengths = (3, 15, 40, 16, 70, 1, 33, 17)
    return [[(7 * i + 13 * j) % 256 for j in range(lengths[i])] for i in range(count)]


@pytest.mark.parametrize("count", [1, 4, 5, 8])
@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_b29_the_same_tokens_as_eager(tiny_folder: Path, tokenizer: Tokenizer, count: int, kind: str) -> None:
    many = prompts(count)
    params = [KINDS[i % len(KINDS)] for i in range(count)]
    eager = answers(load(tiny_folder, emulate=False, kv_dtype=kind), tokenizer, many, params)
    worker = load(tiny_folder, emulate=True, kv_dtype=kind)
    assert answers(worker, tokenizer, many, params) == eager
    runner = worker.runner
    assert runner is not None
    assert runner.num_fixed_steps > 0
    assert runner.num_eager_steps > 0, "the prompts' steps"


def test_b29_a_step_above_the_largest_batch_is_eager(tiny_folder: Path, tokenizer: Tokenizer) -> None:
    worker = load(tiny_folder, emulate=True)
    answers(worker, tokenizer, prompts(5), [GREEDY] * 5)
    runner = worker.runner
    assert runner is not None
    assert runner.num_fixed_steps < runner.num_eager_steps


def test_b29_prompts_alone_use_no_fixed_batch(tiny_folder: Path, tokenizer: Tokenizer) -> None:
    worker = load(tiny_folder, emulate=True)
    answers(worker, tokenizer, [[1, 2, 3], [4, 5]], [SamplingParams(temperature=0.0, max_tokens=1)] * 2)
    assert worker.runner is not None
    assert worker.runner.num_fixed_steps == 0


@pytest.mark.parametrize("params", EAGERLY_SAMPLED, ids=["penalty", "bias and logprobs", "allowed", "min_tokens"])
def test_what_is_sampled_outside_the_graph(tiny_folder: Path, tokenizer: Tokenizer, params: SamplingParams) -> None:
    many, mixed = prompts(3), [GREEDY, params, KINDS[1]]
    eager = answers(load(tiny_folder, emulate=False), tokenizer, many, mixed)
    worker = load(tiny_folder, emulate=True)
    found = answers(worker, tokenizer, many, mixed)
    assert [[ids for ids, _ in choices] for choices in found] == [[ids for ids, _ in choices] for choices in eager]
    assert worker.runner is not None
    assert worker.runner.num_fixed_steps > 20


def steps(seq_ids: list[int]) -> list[StepInput]:
    """Prompts of four tokens, then three decodes."""
    new = tuple(
        NewSequence(
            seq_id=i,
            request_id=f"r{i}",
            index=0,
            token_ids=(i, 2, 3, 4),
            num_prompt_tokens=4,
            sampling=GREEDY,
            pages=(2 * i + 1,),
        )
        for i in seq_ids
    )
    count = len(seq_ids)
    first = StepInput(
        epoch=0, step_id=0, seq_ids=seq_ids, starts=[0] * count, num_tokens=[4] * count, new_sequences=new
    )
    return [first] + [
        StepInput(epoch=0, step_id=n, seq_ids=seq_ids, starts=[3 + n] * count, num_tokens=[1] * count)
        for n in range(1, 4)
    ]


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_padded_rows_write_nothing(tiny_folder: Path, kind: str) -> None:
    """Three sequences in a batch of four: every page that is not theirs stays as it was."""
    worker = load(tiny_folder, emulate=True, kv_dtype=kind)
    cache = worker._cache
    for step in steps([0, 1, 2]):
        worker.execute(step)
    assert worker.runner is not None
    assert worker.runner.num_fixed_steps == 3
    owned = {1, 3, 5}
    for rows in [*cache.latent, *(keys for keys in cache.index_keys if keys is not None)]:
        pages = rows.view(torch.uint8).reshape(cache.num_pages, -1)
        written = {page for page in range(cache.num_pages) if bool(pages[page].any())}
        assert written == owned


def test_a_sequence_that_fails_takes_no_other_with_it(tiny_folder: Path) -> None:
    worker, healthy = load(tiny_folder, emulate=True), load(tiny_folder, emulate=True)
    for step in steps([0, 1, 2])[:2]:
        expected, _ = healthy.execute(step), worker.execute(step)
    worker._cache.latent[0][3 * 16] = torch.nan  # sequence 1's first position
    step = steps([0, 1, 2])[2]
    expected, found = healthy.execute(step), worker.execute(step)
    assert set(found.failed) == {1}
    assert "hidden state is not finite" in found.failed[1]
    assert [found.token_ids[i] for i in (0, 2)] == [expected.token_ids[i] for i in (0, 2)]
    assert not worker._cache.latent[1][3 * 16 + 5].any(), "what the failed row wrote is zeroed"


def test_sizes_and_bounds() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(5) == [1, 2, 4, 5]
    assert batch_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]
    for most in range(1, 300):
        sizes = batch_sizes(most)
        assert sizes[-1] == most
        assert all(size <= 2 * smaller for smaller, size in pairwise(sizes))
    assert visible_bounds(2048, 100_000) == [512, 2048, 8192, 32768, 100_000]
    assert visible_bounds(2048, 1000) == [512, 1000]
    assert visible_bounds(16, 16) == [16]


@pytest.mark.parametrize(
    ("choice", "kernels", "part"),
    [
        (True, {}, "the device is cpu"),
        ("emulate", {}, "the provider cpu of .* takes no padded rows"),
    ],
)
def test_what_cannot_be_is_refused(tiny_folder: Path, choice: object, kernels: dict[str, str], part: str) -> None:
    config = settings(
        model={"path": str(tiny_folder), "device": "cpu"}, kernels=kernels, runner={"cuda_graphs": choice}
    )
    with pytest.raises(ConfigError, match=part):
        Worker.load(config)


def test_auto_on_a_cpu_is_eager(tiny_folder: Path) -> None:
    config = settings(model={"path": str(tiny_folder), "device": "cpu"}, runner={"cuda_graphs": "auto"})
    assert Worker.load(config).runner is None


def test_the_engine_counts_what_came_from_graphs(tiny_folder: Path) -> None:
    """Five sequences are too many for a batch of four until one has ended."""
    worker, config = load(tiny_folder, emulate=True), settings()
    core = EngineCore(InProcessExecutor(lambda: worker, threaded=False), config.scheduler, config.cache, overlap=False)
    for i, prompt in enumerate(prompts(5)):
        params = SamplingParams(temperature=0.0, max_tokens=10 if i else 4, ignore_eos=True)
        core.add(GenerateRequest(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=params))
    while core.has_work:
        core.step()
    core.shutdown()
    runner = worker.runner
    assert runner is not None
    assert core.num_graph_steps == runner.num_fixed_steps > 0
    assert 0 < core.num_decode_steps - core.num_graph_steps < runner.num_eager_steps, "prompts are no decode steps"
