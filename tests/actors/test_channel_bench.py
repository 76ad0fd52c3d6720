"""``glm5ray bench channel`` in small: two ranks, eight sequences."""

from __future__ import annotations

import pytest

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def test_steps_go_to_every_rank_and_their_answers_are_timed():
    from ray.util import list_named_actors

    from glm5ray.actors.channel_bench import fixed_token_ranks
    from glm5ray.bench.channel import run_channel_bench

    with fixed_token_ranks(2) as executor:
        names = [actor["name"] for actor in list_named_actors(all_namespaces=True)]
        report = run_channel_bench(executor, num_ranks=2, num_seqs=8, steps=20)
    ranks = [name for name in names if name.startswith("glm5ray:bench-channel-")]
    assert sorted(name.partition(":worker")[2] for name in ranks) == ["0:0", "1:0"]
    for loop in ("actors", "in_process"):
        times = report[loop]
        for name in ("channel_us", "step_us"):
            assert 0 < times[name]["p50"] <= times[name]["p90"] <= times[name]["p99"]
        assert times["channel_us"]["p50"] < times["step_us"]["p50"]
        assert times["tokens_per_s"] == pytest.approx(8 * times["steps_per_s"], rel=0.01)
