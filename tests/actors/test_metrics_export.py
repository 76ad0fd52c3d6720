"""What Ray's own metrics endpoint shows of an engine is what the server's shows."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING
from urllib.request import urlopen

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from glm5ray.metrics import METRICS, ray_name
from glm5ray.protocol import GenerateRequest, SamplingParams
from glm5ray.server.exposition import ServerMetrics
from tests.actors.engines import dying, make_spec

if TYPE_CHECKING:
    from glm5ray.engine.client import EngineStatus

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
ENGINE = "watched"
OF_ENGINE = {ray_name(metric.series) for metric in METRICS.values() if metric.of == "engine"}
OF_SERVER = {
    ray_name(f"{metric.name}_{part}" if metric.kind == "histogram" else metric.series)
    for metric in METRICS.values()
    if metric.of == "server" and metric.in_ray
    for part in ("bucket", "count")
}
"""Not the sums of histograms: Ray counts each sample as the middle of its bucket."""
MOVING = {"glm5ray_steps_per_second"}
"""Falls while nothing happens."""
SHARED_LABELS = ("model_name", "state", "layout", "finished_reason", "le")


def ours(text: str, *, prefix: str, engine: str = ENGINE, kinds: set[str] = OF_ENGINE) -> Samples:
    """Samples of a page by name and labels: those of this engine, with the labels that the server has too."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            name = ray_name(sample.name.removeprefix(prefix))
            if name in kinds and labels.get("engine", engine) == engine:
                kept = {key: value for key, value in labels.items() if key in SHARED_LABELS}
                samples[name, tuple(sorted(kept.items()))] = sample.value
    return samples


def page_of_ray() -> str:
    import ray

    (node,) = ray.nodes()
    with urlopen(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=10) as answer:
        return answer.read().decode()


def wait_for(expected: Samples, *, engine: str = ENGINE, kinds: set[str] = OF_ENGINE, timeout_s: float = 30) -> Samples:
    """Ray's samples, once they agree. A counter of 0 may be left out there."""
    until_s = time.monotonic() + timeout_s
    while True:
        found = ours(page_of_ray(), prefix="ray_", engine=engine, kinds=kinds)
        wrong = {key: (value, found.get(key)) for key, value in expected.items() if found.get(key, 0.0) != value}
        if found and not wrong:
            return found
        assert time.monotonic() < until_s, f"(expected, found): {wrong}"
        time.sleep(0.3)


async def work(engine: str) -> EngineStatus:
    """Sixteen requests, and one that kills the workers until it is given up alone."""
    from glm5ray.actors.launch import connect

    async def run(name: str) -> None:
        params = SamplingParams(max_tokens=20)
        request = GenerateRequest(request_id=name, prompt_token_ids=(1, 2, 3, 4, 5), sampling=params)
        async for _ in client.generate(request):
            pass

    async with asyncio.timeout(60), connect(engine) as client:
        await asyncio.gather(*(run(f"r{i}") for i in range(16)), run("poison"))
        while (status := await client.status()).scheduler.num_running:
            await asyncio.sleep(0.02)
        return status


def test_ray_shows_what_metrics_shows():
    from glm5ray.actors.launch import start_from_spec, stop_engine

    start_from_spec(make_spec(ENGINE, dying, metrics_every_s=0.2), timeout_s=60.0)
    try:
        status = asyncio.run(work(ENGINE))
        assert (status.num_restarts, status.scheduler.num_quarantined) >= (3, 1)
        expected = ours(ServerMetrics("nano").text(status).decode(), prefix="")
        expected = {key: value for key, value in expected.items() if key[0] not in MOVING}
        assert {name for name, _ in expected} == OF_ENGINE - MOVING
        found = wait_for(expected)
        assert {name for name, _ in found} - {name for name, _ in expected} == MOVING
    finally:
        stop_engine(ENGINE)


def test_ray_shows_what_a_server_counted():
    from glm5ray.actors.http_launch import start_http, wait_until_open
    from glm5ray.actors.launch import start_from_spec, stop_engine
    from glm5ray.actors.server_actor import HttpSpec

    engine = "counted"
    with socket.create_server(("127.0.0.1", 0)) as bound:
        http = HttpSpec(engine=engine, port=bound.getsockname()[1], metrics_every_s=0.2)
    start_from_spec(make_spec(engine), timeout_s=60.0)
    try:
        start_http(http)
        wait_until_open(engine)
        for length in (1, 5, 9):
            body = {"model": "nano", "prompt": [1, 2, 3], "max_tokens": length, "n": 2, "ignore_eos": True}
            assert httpx.post(f"{http.url}/v1/completions", json=body, timeout=60).status_code == 200
        page = httpx.get(f"{http.url}/metrics").text
        expected = ours(page, prefix="", engine=engine, kinds=OF_SERVER)
        assert expected["vllm_generation_tokens_total", (("model_name", "nano"),)] == 30
        found = wait_for(expected, engine=engine, kinds=OF_SERVER)
        assert {name for name, _ in found} == OF_SERVER - {"glm5ray_requests_aborted_total"}, "it is 0"
    finally:
        stop_engine(engine)
