"""The report's fields; what it says of speed is the machine's business."""

from __future__ import annotations

import gc
import json

from glm5ray.bench.scheduler import run_scheduler_bench


def test_the_report_has_what_its_readers_look_for() -> None:
    threshold = gc.get_threshold()
    said: list[str] = []
    report = run_scheduler_bench(num_seqs=(3, 130), steps=4, repetitions=2, progress=said.append)
    assert gc.get_threshold() == threshold
    assert len(said) == 4
    assert [row["num_seqs"] for row in report["results"]] == [3, 130]
    for row in report["results"]:
        assert all(row[name] > 0 for name in ("schedule_us", "update_us", "step_us", "step_us_rare_gc"))
        assert row["spread_us"][0] == row["step_us"] <= row["spread_us"][1]
    assert {"commit", "versions", "python", "cpu"} <= report.keys()
    assert json.loads(json.dumps(report)) == report
