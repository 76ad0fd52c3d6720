"""A process of its own: a Ray with its dashboard, an engine of two ranks, and what Ray then says of it, as JSON.

``python -m tests.actors.dashboard_probe FOLDER``"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import ray
from prometheus_client.parser import text_string_to_metric_families
from ray.util.state import list_actors, list_placement_groups, list_tasks

from glm5ray.actors.launch import connect_llm, start_engine, stop_engine
from glm5ray.config import config_from_dict
from glm5ray.protocol import SamplingParams


def main(folder: str) -> None:
    context = ray.init(
        num_cpus=4,
        num_gpus=0,
        include_dashboard=True,
        dashboard_port=0,
        object_store_memory=100 * 2**20,
        namespace="glm5ray",
        log_to_driver=False,
        _temp_dir=folder,
        _system_config={"metrics_report_interval_ms": 1000},
    )
    config = config_from_dict({"parallel": {"tp_size": 2}, "cache": {"num_pages": 16}})
    start_engine(config, engine="shown", timeout_s=300)
    try:
        with connect_llm("shown") as llm:
            llm.generate("The sky is", SamplingParams(max_tokens=8, ignore_eos=True))
            seen_ranks = _samples_of_ranks()
        seen = _seen(f"http://{context.dashboard_url}")  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        stop_engine("shown")
    seen["ranks"] = seen_ranks
    session = Path(folder) / "session_latest"
    seen["logs"] = [line for path in session.glob("logs/worker-*.err") for line in path.read_text().splitlines()]
    seen["files"] = [str(path.relative_to(session)) for path in session.glob("metrics/**/*")]
    sys.stdout.write(json.dumps(seen) + "\n")
    ray.shutdown()


def _samples_of_ranks() -> dict[str, dict[str, float]]:
    """Metric -> rank -> value, once both ranks have told of their steps; workers do so every five seconds."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    samples: dict[str, dict[str, float]] = {}
    for _ in range(60):
        with urlopen(url, timeout=10) as answer:
            page = answer.read().decode()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name.startswith("ray_glm5ray_rank_"):
                    samples.setdefault(sample.name, {})[sample.labels["rank"]] = sample.value
        steps = samples.get("ray_glm5ray_rank_steps_total", {})
        if all(steps.get(rank, 0.0) >= 8 for rank in ("0", "1")):
            break
        time.sleep(0.5)
    return samples


def _seen(url: str) -> dict[str, Any]:
    """Ray hears of tasks a second late."""
    for _ in range(60):
        tasks = [vars(task) for task in list_tasks(address=url, filters=[("state", "=", "RUNNING")])]
        if sum(task["name"].endswith("run") for task in tasks) == 2:
            break
        time.sleep(0.5)
    return {
        "actors": [vars(actor) for actor in list_actors(address=url, detail=True)],
        "groups": [vars(group) for group in list_placement_groups(address=url, detail=True)],
        "tasks": tasks,
    }


if __name__ == "__main__":
    main(sys.argv[1])
