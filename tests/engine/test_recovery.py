"""Workers that die: nothing is lost, nothing comes twice, only what kills them is given up, and it all ends."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5ray.config import CacheSection, SchedulerSection
from glm5ray.engine.core import MAX_RESTARTS_IN_A_ROW, EngineCore
from glm5ray.errors import WorkerDied
from glm5ray.protocol import Capacity, GenerateRequest, SamplingParams
from tests.engine.faults import DyingExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from glm5ray.protocol import StepInput

EOS = 0
CAPACITY = Capacity(num_pages=16, page_size=4, max_model_len=40, vocab_size=100, eos_token_ids=(EOS,))
Answers = dict[tuple[str, int], tuple[list[int], str]]


def next_token(request_id: str, index: int, position: int) -> int:
    value = zlib.crc32(f"{request_id}/{index}/{position}".encode())
    return EOS if value % 20 == 0 else 1 + value % 99


def request(name: str, length: int, max_tokens: int, n: int = 1) -> GenerateRequest:
    sampling = SamplingParams(n=n, max_tokens=max_tokens)
    return GenerateRequest(request_id=name, prompt_token_ids=(5,) * length, sampling=sampling)


def expected(asked: GenerateRequest) -> Answers:
    """What the model says, computed without an engine."""
    answers: Answers = {}
    length = len(asked.prompt_token_ids)
    for index in range(asked.sampling.n):
        tokens: list[int] = []
        reason = "length"
        for position in range(length, length + (asked.sampling.max_tokens or 0)):
            if next_token(asked.request_id, index, position) == EOS:
                reason = "stop"
                break
            tokens.append(next_token(asked.request_id, index, position))
        answers[asked.request_id, index] = (tokens, reason)
    return answers


def drain(core: EngineCore) -> Answers:
    answers: Answers = {}
    for _ in range(5_000):
        if not core.has_work:
            stats = core.scheduler.stats()
            assert stats.num_pages_held == stats.num_running == stats.num_waiting == 0
            return answers
        for event in core.step():
            tokens, reason = answers.get((event.request_id, event.index), ([], ""))
            assert reason == "", f"{event} after the end"
            answers[event.request_id, event.index] = (
                tokens + list(event.token_ids),
                event.error_code or event.finish_reason or "",
            )
        core.scheduler.check()
    raise AssertionError("the engine does not come to an end")


def make_core(
    kills: Callable[[DyingExecutor, StepInput], bool],
    *,
    overlap: bool,
    restarts_fail: frozenset[int] = frozenset(),
    **limits: int,
) -> tuple[EngineCore, DyingExecutor]:
    executor = DyingExecutor(CAPACITY, next_token, kills, restarts_fail=restarts_fail)
    section = SchedulerSection(**{"max_num_seqs": 6, "max_num_batched_tokens": 16, **limits})
    return EngineCore(executor, section, CacheSection(), overlap=overlap), executor


shapes = st.lists(st.tuples(st.integers(1, 24), st.integers(0, 10), st.integers(1, 3)), min_size=1, max_size=10)


@given(shapes, st.booleans(), st.lists(st.integers(1, 40), max_size=2), st.sampled_from([(), (1,), (2,)]))
@settings(max_examples=80, deadline=None)
def test_deaths_of_unknown_cause_change_no_token(shapes, overlap, lives, restarts_fail):
    """Two deaths, at any steps, and perhaps a restart that fails."""
    taken = 0

    def kills(executor: DyingExecutor, step: StepInput) -> bool:
        nonlocal taken
        taken += 1
        if lives and taken == lives[0]:
            lives.pop(0)
            taken = 0
            return True
        return False

    core, executor = make_core(kills, overlap=overlap, restarts_fail=frozenset(restarts_fail))
    asked = [request(f"r{i}", *shape) for i, shape in enumerate(shapes)]
    want: Answers = {}
    for one in asked:
        core.add(one)
        want |= expected(one)
    assert drain(core) == want
    assert core.num_restarts == executor.num_restarts <= 2 + len(restarts_fail)
    assert core.scheduler.stats().num_quarantined == 0


@given(shapes, st.booleans(), st.dictionaries(st.integers(0, 9), st.integers(1, 30), max_size=3), st.integers(1, 40))
@settings(max_examples=120, deadline=None)
def test_poison_fails_alone(shapes, overlap, positions, budget):
    """``positions``: request -> the position at which it kills the workers; several may."""
    asked = [request(f"r{i}", *shape) for i, shape in enumerate(shapes)]
    poison = {f"r{i}": position for i, position in positions.items()}

    def kills(executor: DyingExecutor, step: StepInput) -> bool:
        return any(name in poison and reach >= poison[name] for name, reach in executor.reach(step).items())

    core, executor = make_core(kills, overlap=overlap, max_num_batched_tokens=budget)
    want: Answers = {}
    for one in asked:
        core.add(one)
        want |= expected(one)
    got = drain(core)
    guilty = {name for (name, _), (_, reason) in got.items() if reason == "quarantined"}
    assert guilty <= poison.keys()
    for key, (tokens, reason) in got.items():
        if key[0] in guilty:
            assert tokens == want[key][0][: len(tokens)]
        else:
            assert (tokens, reason) == want[key]
    assert got.keys() == want.keys()
    assert executor.num_restarts <= 3 * len(poison)


@pytest.mark.parametrize("overlap", [False, True])
def test_suspects_run_alone_and_clear_themselves(overlap: bool):
    """Eight prompts in one step, one of them poison: the others are tried one by one, and come to no harm."""
    alone: list[set[str]] = []

    def kills(executor: DyingExecutor, step: StepInput) -> bool:
        if executor.num_restarts == 2:
            alone.append(set(executor.reach(step)))
        return "r5" in executor.reach(step)

    core, executor = make_core(kills, overlap=overlap, max_num_seqs=8, max_num_batched_tokens=32)
    for i in range(8):
        core.add(request(f"r{i}", 2, 5))
    got = drain(core)
    assert [reason for _, reason in got.values()].count("quarantined") == 1
    assert got["r5", 0] == ([], "quarantined")
    assert executor.num_restarts == 3
    assert all(len(names) == 1 for names in alone)
    assert alone[-1] == {"r5"}
    assert [{f"r{i}"} for i in range(6)] == list(dict.fromkeys(map(frozenset, alone)))


def test_a_request_that_kills_is_given_up_with_all_its_answers():
    core, executor = make_core(lambda ex, step: "bad" in ex.reach(step), overlap=True)
    core.add(request("bad", 12, 5, n=3))
    core.add(request("good", 12, 5, n=3))
    got = drain(core)
    assert {key: reason for key, (_, reason) in got.items() if key[0] == "bad"} == {
        ("bad", i): "quarantined" for i in range(3)
    }
    assert {key: answer for key, answer in got.items() if key[0] == "good"} == expected(request("good", 12, 5, n=3))
    assert executor.num_restarts == 3
    assert core.scheduler.stats().num_quarantined == 3


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_in_which_no_step_ends_gives_up(overlap: bool):
    core, executor = make_core(lambda ex, step: True, overlap=overlap)
    for i in range(40):
        core.add(request(f"r{i}", 8, 5))
    with pytest.raises(WorkerDied, match="restarts in a row did not bring one step to its end"):
        drain(core)
    assert executor.num_restarts == 3 * MAX_RESTARTS_IN_A_ROW


def test_workers_that_do_not_come_up_end_the_engine():
    core, executor = make_core(lambda ex, step: True, overlap=False, restarts_fail=frozenset(range(99)))
    core.add(request("r", 8, 5))
    with pytest.raises(WorkerDied, match="did not come up"):
        drain(core)
    assert executor.num_restarts == MAX_RESTARTS_IN_A_ROW


def test_a_suspect_that_is_aborted_lets_the_others_run():
    core, _ = make_core(lambda ex, step: "bad" in ex.reach(step), overlap=True)
    core.add(request("bad", 4, 5))
    core.add(request("good", 4, 5))
    while core.num_restarts < 2:
        core.step()
    core.abort("bad")
    assert drain(core)["good", 0] == expected(request("good", 4, 5))["good", 0]
    assert core.num_restarts == 2
