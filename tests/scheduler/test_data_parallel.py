"""Groups of ranks behind one scheduler: the promises of a single one, exclusive probation, and who gets what."""

from __future__ import annotations

import zlib
from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5ray.config import CacheSection, SchedulerSection, load_config
from glm5ray.engine.core import EngineCore
from glm5ray.errors import ConfigError, RequestError
from glm5ray.parallel import ParallelContext
from glm5ray.protocol import GenerateRequest, SamplingParams, StepInput, StepOutput
from glm5ray.scheduler.data_parallel import DataParallelScheduler
from tests.builders import make_capacity
from tests.engine.faults import DyingExecutor
from tests.scheduler.random_run import RandomRun

CAPACITY = make_capacity(num_pages=16, page_size=4, max_model_len=40, vocab_size=100, eos=0)


def request(name: str, length: int = 3, max_tokens: int = 6, n: int = 1) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_token_ids=(5,) * length, sampling=sampling)


def next_token(request_id: str, index: int, position: int) -> int:
    return 1 + zlib.crc32(f"{request_id}/{index}/{position}".encode()) % 99


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.randoms(use_true_random=False), st.integers(1, 12), st.integers(2, 4))
def test_any_run_keeps_the_promises(rng: Random, num_requests: int, dp_size: int) -> None:
    RandomRun(rng, dp_size).run(num_requests)


def test_thousands_of_random_steps() -> None:
    counts: Counter[str] = Counter()
    for seed in range(100):
        counts += RandomRun(Random(seed), dp_size=2 + seed % 3).run(num_requests=30)
    wanted = ("preemptions", "hits", "restarts", "aborted", "refused", "stop", "length", "error")
    assert all(counts[name] for name in wanted), counts


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(2, 9), st.sets(st.integers(0, 8), max_size=2), st.booleans())
def test_only_the_poison_is_given_up(dp_size: int, num_requests: int, poison: set[int], overlap: bool) -> None:
    """Workers of all groups die together, whoever is to blame."""
    guilty = {str(i) for i in poison if i < num_requests}
    together: list[set[str]] = []

    def kills(executor: DyingExecutor, step: StepInput) -> bool:
        names = set(executor.reach(step))
        if names & guilty:
            together.append(names)
        return bool(names & guilty)

    executor = DyingExecutor(CAPACITY, next_token, kills)
    section = SchedulerSection(max_num_seqs=4, max_num_batched_tokens=16)
    core = EngineCore(executor, section, CacheSection(), overlap=overlap, dp_size=dp_size)
    for i in range(num_requests):
        core.add(request(str(i)))
    tokens: dict[str, list[int]] = {str(i): [] for i in range(num_requests)}
    codes: dict[str, str] = {}
    while core.has_work:
        for event in core.step():
            tokens[event.request_id] += event.token_ids
            if event.error_code is not None:
                codes[event.request_id] = event.error_code
        core.scheduler.check()
    assert codes == dict.fromkeys(guilty, "quarantined")
    for name in tokens.keys() - guilty:
        assert tokens[name] == [next_token(name, 0, position) for position in range(3, 9)]
    for name in guilty:
        assert {name} in together, "it was given up without having failed alone"


def test_requests_go_where_the_fewest_are() -> None:
    scheduler = DataParallelScheduler(SchedulerSection(), CAPACITY, 3)
    for name, n in (("a", 2), ("b", 1), ("c", 1), ("d", 1), ("e", 1)):
        scheduler.add(request(name, n=n))
    assert [[group.has_request(name) for name in "abcde"].index(True) for group in scheduler.groups] == [0, 1, 2]
    assert [group.num_unfinished for group in scheduler.groups] == [2, 2, 2]
    with pytest.raises(RequestError, match="in use by an unfinished request"):
        scheduler.add(request("c"))
    scheduler.abort("b")
    scheduler.add(request("f"))
    assert scheduler.groups[1].has_request("f")


def test_a_step_has_a_part_for_each_group() -> None:
    scheduler = DataParallelScheduler(SchedulerSection(), CAPACITY, 2)
    scheduler.add(request("a"))
    step = scheduler.schedule()
    assert step is not None
    assert [part.seq_ids for part in step.parts] == [[0], []]
    assert (step.seq_ids, step.total_tokens) == ([], 3)
    output = StepOutput(epoch=0, step_id=0, seq_ids=[0], token_ids=[9])
    assert [event.token_ids for event in scheduler.update(step, output)] == [(9,)]
    assert scheduler.stats().num_pages == 2 * CAPACITY.num_pages


def test_layouts_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match=r"ep_size is 2; with parallel.dp_size 2 .* set it to 4"):
        load_config(None, ["parallel.dp_size=2", "parallel.tp_size=2", "parallel.ep_size=2"])
    with pytest.raises(ConfigError, match="ep_size must be 1 or a multiple of tp_size"):
        load_config(None, ["parallel.tp_size=4", "parallel.ep_size=2"])
    with pytest.raises(ConfigError, match="must be their product"):
        ParallelContext(ep_size=3, dp_size=2)
    config = load_config(None, ["parallel.dp_size=2", "parallel.tp_size=2", "parallel.ep_size=4"])
    assert config.parallel.world_size == 4
    ranks = [ParallelContext.of_rank(rank, 2, 4, dp_size=2) for rank in range(4)]
    assert [(p.dp_rank, p.tp_rank, p.ep_rank) for p in ranks] == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]
    assert [p.own_rows(3) for p in ranks] == [slice(0, 2), slice(2, 3)] * 2
