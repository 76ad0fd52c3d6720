"""The loop over a fake executor: both loops give the same events, and an executor that fails fails the requests, not
the process."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5ray.config import CacheSection, SchedulerSection
from glm5ray.engine.core import EngineCore
from glm5ray.engine.executor import FakeExecutor
from glm5ray.engine.llm import LLM
from glm5ray.engine.results import RequestFailure
from glm5ray.errors import Glm5RayError, WorkerDied
from glm5ray.protocol import Capacity, FinishReason, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from glm5ray.tokenizer import Tokenizer

EOS = 0


def next_token(request_id: str, index: int, position: int) -> int:
    """A token that depends on all that identifies it; about one in twenty is the end."""
    value = zlib.crc32(f"{request_id}/{index}/{position}".encode())
    return EOS if value % 20 == 0 else 1 + value % 99


def make_core(overlap: bool, *, num_pages: int = 12, page_size: int = 4) -> EngineCore:
    capacity = Capacity(
        num_pages=num_pages, page_size=page_size, max_model_len=40, vocab_size=100, eos_token_ids=(EOS,)
    )
    section = SchedulerSection(max_num_seqs=6, max_num_batched_tokens=16)
    return EngineCore(FakeExecutor(capacity, next_token), section, CacheSection(), overlap=overlap)


def drain(core: EngineCore) -> dict[tuple[str, int], tuple[list[int], FinishReason | None]]:
    answers: dict[tuple[str, int], tuple[list[int], FinishReason | None]] = {}
    for _ in range(5_000):
        if not core.has_work:
            return answers
        for event in core.step():
            found, reason = answers.setdefault((event.request_id, event.index), ([], None))
            assert reason is None, f"{event} after the end"
            found += event.token_ids
            answers[event.request_id, event.index] = (found, event.finish_reason)
        core.scheduler.check()
    raise AssertionError("the engine does not come to an end")


requests = st.lists(
    st.builds(
        lambda n, length, max_tokens, ignore: (n, length, max_tokens, ignore),
        st.integers(1, 3),
        st.integers(1, 30),
        st.integers(0, 10),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@given(requests)
@settings(max_examples=60, deadline=None)
def test_both_loops_give_what_the_model_says(shapes):
    expected = {}
    for number, (n, length, max_tokens, ignore) in enumerate(shapes):
        for index in range(n):
            tokens, reason = [], FinishReason.LENGTH
            for position in range(length, length + max_tokens):
                token = next_token(f"r{number}", index, position)
                if token == EOS and not ignore:
                    reason = FinishReason.STOP
                    break
                tokens.append(token)
            expected[f"r{number}", index] = (tokens, reason)
    for overlap in (False, True):
        core = make_core(overlap)
        for number, (n, length, max_tokens, ignore) in enumerate(shapes):
            params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=ignore)
            core.add(GenerateRequest(request_id=f"r{number}", prompt_token_ids=(5,) * length, sampling=params))
        assert drain(core) == expected


def test_the_overlapped_loop_keeps_one_step_ahead():
    core = make_core(overlap=True)
    core.add(
        GenerateRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=3, ignore_eos=True))
    )
    executor = core._executor
    assert isinstance(executor, FakeExecutor)
    assert core.step() == []
    assert len(executor.steps) == 1
    assert [event.token_ids for event in core.step()] == [(next_token("r", 0, 2),)]
    assert len(executor.steps) == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_reaches_the_client_and_the_pages_come_back(overlap: bool):
    core = make_core(overlap)
    core.add(GenerateRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(ignore_eos=True)))
    for _ in range(3):
        core.step()
    core.abort("r")
    core.abort("unknown")
    (_, reason) = drain(core)["r", 0]
    assert reason is FinishReason.ABORT
    assert core.scheduler.stats().num_pages_held == 0


class Broken(FakeExecutor):
    """Fails in the fifth step."""

    def submit(self, step):
        if step.step_id < 4:
            return super().submit(step)

        class Failing:
            def result(self, timeout_s=None):
                raise WorkerDied("rank 0 ended")

        return Failing()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_dead_worker_fails_every_request_and_hangs_none(tokenizer: Tokenizer, overlap: bool):
    capacity = Capacity(num_pages=12, page_size=4, max_model_len=40, vocab_size=100, eos_token_ids=(EOS,))
    from glm5ray.config import EngineConfig

    config = EngineConfig(scheduler=SchedulerSection(max_num_seqs=2, overlap=overlap))
    llm = LLM.from_executor(Broken(capacity, next_token), tokenizer, config)
    results = llm.generate([[1, 2]] * 5, SamplingParams(max_tokens=20, ignore_eos=True))
    assert all(isinstance(r, RequestFailure) and r.error.code == "engine_failed" for r in results)
    assert all("rank 0 ended" in r.error.message for r in results if isinstance(r, RequestFailure))
    later = llm.generate([[1]])
    assert isinstance(later[0], RequestFailure)
    assert later[0].error.status == 500


def fake_llm(tokenizer: Tokenizer, max_num_seqs: int = 2) -> LLM:
    from glm5ray.config import EngineConfig

    capacity = Capacity(num_pages=30, page_size=4, max_model_len=40, vocab_size=100, eos_token_ids=(EOS,))
    config = EngineConfig(scheduler=SchedulerSection(max_num_seqs=max_num_seqs))
    return LLM.from_executor(FakeExecutor(capacity, next_token), tokenizer, config)


def test_run_reads_no_further_than_it_has_room(tokenizer: Tokenizer):
    llm = fake_llm(tokenizer)
    read = 0

    def endless():
        nonlocal read
        while True:
            read += 1
            yield GenerateRequest(request_id=f"r{read}", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=3))

    results = llm.run(endless())
    for done, _ in enumerate(results, 1):
        assert read - done <= 2 * 2 + 256
        if done == 700:
            break
    results.close()
    assert not llm._outputs


def test_two_callers_share_the_engine(tokenizer: Tokenizer):
    llm = fake_llm(tokenizer)
    params = SamplingParams(max_tokens=9, ignore_eos=True)

    def some(name: str):
        return (GenerateRequest(request_id=f"{name}{i}", prompt_token_ids=(1,), sampling=params) for i in range(5))

    first, second = llm.run(some("a")), llm.run(some("b"))
    names = [next(first).request_id, next(second).request_id]
    names += [r.request_id for r in first] + [r.request_id for r in second]
    assert sorted(names) == sorted([f"{c}{i}" for c in "ab" for i in range(5)])


def test_a_request_id_in_use_is_refused(tokenizer: Tokenizer):
    twice = [GenerateRequest(request_id="same", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=4))] * 2
    kinds = sorted(type(r).__name__ for r in fake_llm(tokenizer).run(twice))
    assert kinds == ["RequestFailure", "RequestResult"]


def test_closing_fails_what_runs(tokenizer: Tokenizer):
    llm = fake_llm(tokenizer)
    stream = llm.stream([1, 2], SamplingParams(max_tokens=30, ignore_eos=True))
    next(stream)
    llm.close()
    with pytest.raises(Glm5RayError, match="closed"):
        list(stream)
    llm.close()


def test_wrong_counts_of_parameters_are_named(tokenizer: Tokenizer):
    with pytest.raises(Glm5RayError, match="2 sampling_params for 1 prompts"):
        fake_llm(tokenizer).generate(["a"], [SamplingParams(), SamplingParams()])
