"""What Ray's state API, and so its dashboard, says of an engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from glm5ray.metrics import METRICS, ray_name

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    folder = tempfile.mkdtemp(prefix="g5d", dir="/tmp")  # short: paths of sockets have 107 characters
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.actors.dashboard_probe", folder],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_actors_say_whose_they_are(seen: dict[str, Any]) -> None:
    actors = {actor["name"]: actor["repr_name"] for actor in seen["actors"] if actor["state"] == "ALIVE"}
    assert len(actors) == 3
    assert actors.pop("glm5ray:shown:scheduler") == "glm5ray shown: scheduler (nano, tp 2)"
    ranks = {}
    for name, text in actors.items():
        match = re.fullmatch(r"glm5ray:shown:worker(\d):\d+", name)
        assert match, name
        ranks[int(match[1])] = text
    assert ranks == {rank: f"glm5ray shown: rank {rank} of 2 (tp 2)" for rank in range(2)}


def test_the_group_and_the_loops_are_named(seen: dict[str, Any]) -> None:
    assert [group["name"] for group in seen["groups"]] == ["glm5ray:shown"]
    running = sorted(task["name"] for task in seen["tasks"] if task["type"] == "ACTOR_TASK")
    assert running == [f"glm5ray shown: rank {rank} of 2 (tp 2).run" for rank in range(2)]


def test_the_schedulers_log_has_figures(seen: dict[str, Any]) -> None:
    lines = [line for line in seen["logs"] if "steps_per_s=" in line]
    assert any("state=ready layout='tp 2'" in line for line in lines), seen["logs"]
    (last,) = (line for line in lines if "state=stopped" in line)
    assert int(re.findall(r"steps=(\d+)", last)[0]) >= 8


def test_files_for_prometheus_and_grafana_are_where_the_docs_say(seen: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    paths = set(re.findall(r"/tmp/ray/session_latest/(metrics/\S+)", text)) - {
        "metrics/grafana/dashboards/glm5ray.json"
    }
    assert len(paths) == 2
    assert paths | {"metrics/grafana/dashboards"} <= set(seen["files"])


def test_every_rank_tells_ray_of_itself(seen: dict[str, Any]) -> None:
    ranks = seen["ranks"]
    assert set(ranks) == {f"ray_{ray_name(metric.series)}" for metric in METRICS.values() if metric.of == "rank"}
    steps = ranks["ray_glm5ray_rank_steps_total"]
    assert set(steps) == {"0", "1"}
    assert steps["0"] == steps["1"] >= 8
    assert min(ranks["ray_glm5ray_rank_memory_bytes"].values()) > 2**26
    assert set(ranks["ray_glm5ray_rank_device_memory_bytes"].values()) == {0.0}, "on a CPU"
