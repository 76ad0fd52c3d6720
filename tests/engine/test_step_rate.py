"""The step rate, at times that are given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5ray.engine.step_rate import WINDOW_S, StepRate


def test_nothing_has_happened():
    assert StepRate().per_second(5.0) == 0.0


@given(st.floats(0.001, 2.0), st.integers(1, 2000))
def test_a_steady_engine(pace_s: float, num_steps: int):
    rate = StepRate()
    for step in range(1, num_steps + 1):
        rate.note(step, step * pace_s)
    now_s = num_steps * pace_s
    if now_s > 2 * max(1.0, pace_s) + 0.1:
        # what is marked is up to a second old, and a step may be under way
        assert rate.per_second(now_s) == pytest.approx(1 / pace_s, rel=0.01)


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=60))
def test_any_engine(pauses_s: list[float]):
    rate, now_s, times = StepRate(), 100.0, []
    for step, pause_s in enumerate(pauses_s, 1):
        now_s += pause_s
        times.append(now_s)
        rate.note(step, now_s)
        per_second = rate.per_second(now_s)
        recent = [t for t in times if now_s - t <= WINDOW_S]
        assert 0 <= per_second <= len(recent) / 0.1
    assert rate.per_second(now_s + WINDOW_S + 1) == 0.0, "an idle engine makes no steps"


def test_it_falls_while_the_engine_is_idle():
    rate = StepRate()
    for step in range(1, 101):
        rate.note(step, step / 10)
    seen = [rate.per_second(10.0 + later) for later in range(12)]
    assert seen[0] == pytest.approx(10, rel=0.01)
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 0.0
