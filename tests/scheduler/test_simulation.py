"""Whole workloads through the scheduler: the same steps for ever, and admission that keeps pages busy."""

from __future__ import annotations

import hashlib
from random import Random
from typing import TYPE_CHECKING

import pytest

from glm5ray.config import SchedulerSection
from glm5ray.protocol import GenerateRequest, SamplingParams
from glm5ray.scheduler.scheduler import Scheduler
from tests.builders import make_capacity
from tests.scheduler.steps import Loop

if TYPE_CHECKING:
    from glm5ray.protocol import StepInput

GOLDEN = {
    "fcfs, plain": "c13a887fb72393f2f8a6ad493e6b9c669cef8e8508f8577bb90469acc02c4dc0",
    "fcfs, overlapped": "7e0fb5fcdd2bf98e66cff1c5e1526fe049c48d77a39550f26566e18f589fcf38",
    "priority, plain": "2681acf3d19574cc249f899eee5d0208d2dafd167105baac3cf98b171a0d3a52",
    "priority, overlapped": "5c3d2090682ccda7ba1ecbcea18acf38609a002d9bcfeff3f7f2781ca7cda2a1",
}
"""SHA-256 of all decisions. A change here is a change of what the scheduler decides: say so in the changelog."""


def workload(num_requests: int, seed: int, *, longest_prompt: int, most_tokens: int) -> list[GenerateRequest]:
    rng = Random(seed)
    shared = [rng.randint(0, 97) for _ in range(longest_prompt)]
    requests = []
    for number in range(num_requests):
        length = rng.randint(1, longest_prompt)
        num_shared = rng.choice([0, length // 2, length])
        prompt = shared[:num_shared] + [rng.randint(0, 97) for _ in range(length - num_shared)]
        sampling = SamplingParams(max_tokens=rng.randint(1, most_tokens), n=rng.choice([1, 1, 1, 3]))
        requests.append(
            GenerateRequest(
                request_id=f"r{number}", prompt_token_ids=tuple(prompt), sampling=sampling, priority=rng.randint(0, 3)
            )
        )
    return requests


@pytest.mark.parametrize("name", GOLDEN)
def test_the_same_workload_gives_the_same_steps_as_ever(name: str) -> None:
    policy, loop_kind = name.split(", ")
    config = SchedulerSection(max_num_seqs=6, max_num_batched_tokens=48, policy=policy, max_skips=2)  # type: ignore[arg-type]
    scheduler = Scheduler(config, make_capacity(num_pages=24, page_size=4, max_model_len=90))
    for request in workload(60, seed=5, longest_prompt=40, most_tokens=40):
        scheduler.add(request)
    loop = Loop(scheduler, next_token=lambda _, index, at: 99 if at % 37 == 0 else (at + index) % 50)
    loop.finish(overlapped=loop_kind == "overlapped")
    assert scheduler.stats().num_preemptions > 0
    digest = hashlib.sha256("\n".join(map(decisions, loop.steps)).encode()).hexdigest()
    assert digest == GOLDEN[name]


def decisions(step: StepInput) -> str:
    """All that the scheduler decided; what a request carries along is left out."""
    new = [(seq.seq_id, seq.token_ids, seq.pages) for seq in step.new_sequences]
    return repr((step.step_id, step.seq_ids, step.starts, step.num_tokens, new, step.new_pages, step.dropped))


def test_both_loops_give_the_same_tokens_whatever_the_room() -> None:
    answers = []
    for overlapped in (False, True):
        for num_pages in (24, 400):
            config = SchedulerSection(max_num_seqs=6, max_num_batched_tokens=48)
            scheduler = Scheduler(config, make_capacity(num_pages=num_pages, page_size=4, max_model_len=90))
            requests = workload(40, seed=6, longest_prompt=40, most_tokens=40)
            for request in requests:
                scheduler.add(request)
            loop = Loop(scheduler, next_token=lambda _, index, at: 99 if at % 37 == 0 else (at + index) % 50)
            loop.finish(overlapped=overlapped)
            answers.append([loop.tokens(r.request_id, index) for r in requests for index in range(r.sampling.n)])
    assert answers[0] == answers[1] == answers[2] == answers[3]


def test_pages_are_well_used_and_preemptions_are_rare() -> None:
    config = SchedulerSection(max_num_seqs=256, max_num_batched_tokens=512)
    scheduler = Scheduler(config, make_capacity(num_pages=400, page_size=16, max_model_len=600))
    for request in workload(400, seed=7, longest_prompt=200, most_tokens=200):
        scheduler.add(request)
    loop = Loop(scheduler)
    shares = []
    while scheduler.num_waiting > 0:
        loop.turn()
        shares.append(scheduler.stats().num_pages_held / 400)
    loop.finish()
    stats = scheduler.stats()
    assert sum(shares) / len(shares) > 0.9
    assert stats.num_preemptions < 0.15 * stats.num_admissions
