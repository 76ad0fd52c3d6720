"""Any sequence of calls keeps the scheduler's promises: the cache that a slice reads holds its own prefix, budgets
hold, pages are free or owned, each client sees the model's tokens once and in order, and everything ends."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.scheduler.random_run import RandomRun


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.randoms(use_true_random=False), st.integers(1, 10))
def test_any_run_keeps_the_promises(rng: Random, num_requests: int) -> None:
    RandomRun(rng).run(num_requests)


def run_seeds(num_steps: int, first_seed: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    seed = first_seed
    while counts["steps"] < num_steps:
        try:
            counts += RandomRun(Random(seed)).run(num_requests=30)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        seed += 1
    return counts


def check_that_all_was_tried(counts: Counter[str]) -> None:
    """A run in which nothing happens proves nothing."""
    wanted = ("preemptions", "hits", "cached", "restarts", "aborted", "refused", "stop", "length", "error")
    assert all(counts[name] for name in wanted), counts


def test_thousands_of_random_steps() -> None:
    check_that_all_was_tried(run_seeds(6_000, first_seed=0))


@pytest.mark.slow
def test_a_hundred_thousand_random_steps() -> None:
    check_that_all_was_tried(run_seeds(100_000, first_seed=1_000_000))


def test_the_same_calls_give_the_same_steps() -> None:
    for seed in range(20):
        first, second = RandomRun(Random(seed)), RandomRun(Random(seed))
        first.run(num_requests=15)
        second.run(num_requests=15)
        assert first.trace == second.trace
