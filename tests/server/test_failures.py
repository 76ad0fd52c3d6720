"""What a client sees when the engine fails it, and for how long."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from glm5ray.engine.executor import FakeExecutor
from glm5ray.protocol import Capacity
from tests.engine.faults import DyingExecutor, GatedExecutor
from tests.server.conftest import serving

if TYPE_CHECKING:
    from glm5ray.engine.executor import PendingStep
    from glm5ray.protocol import StepInput

CAPACITY = Capacity(num_pages=256, page_size=16, max_model_len=400, vocab_size=4096, eos_token_ids=(0,))
POISON_LEN = 100


def next_token(request_id: str, index: int, position: int) -> int:
    return 97 + position % 26


def die_of_long_prompts(executor: DyingExecutor, step: StepInput) -> bool:
    return max(executor.reach(step).values(), default=0) >= POISON_LEN


def test_a_request_that_kills_workers_is_500_and_not_repeated():
    """By OpenAI's client, which repeats every other 5xx; the next request is served."""
    with (
        serving(DyingExecutor(CAPACITY, next_token, die_of_long_prompts)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=3, timeout=30) as client,
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="nano", prompt=[1] * POISON_LEN, max_tokens=2)
        assert caught.value.code == "quarantined"
        assert caught.value.type == "server_error"
        assert "the workers died 3 times in a row" in caught.value.message
        assert client.completions.create(model="nano", prompt=[1, 2], max_tokens=2).usage.completion_tokens == 2
        restarts = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if "restarts" in line]
        assert any(line.endswith(" 3.0") for line in restarts), "one attempt: three deaths"
        streamed = client.completions.create(model="nano", prompt=[1, 2], max_tokens=200, stream=True)
        with pytest.raises(openai.APIError) as broken:
            for _ in streamed:
                pass
        assert broken.value.code == "quarantined"


def test_a_step_that_hangs_is_not_healthy_and_what_waits_goes_on():
    executor = GatedExecutor(CAPACITY, next_token, stops_at=2)
    answers = []
    with serving(executor, stalled_after_s=0.2) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        body = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
        asking = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body)))
        asking.start()
        until_s = time.monotonic() + 10
        while (health := httpx.get(f"{url}/health")).status_code == 200:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert (health.status_code, health.json()["state"]) == (503, "recovering")
        assert "a step has been running" in health.json()["detail"]
        executor.gate.set()
        asking.join(30)
        assert answers[0].json()["usage"]["completion_tokens"] == 5
        assert httpx.get(f"{url}/health").status_code == 200


def test_an_engine_that_ended_is_503_with_a_time_to_wait():
    with serving(DyingExecutor(CAPACITY, next_token, lambda executor, step: True)) as url:
        body = {"prompt": [1, 2, 3], "max_tokens": 5}
        answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=30) for _ in range(4)]
        last = answers[-1]
        assert last.status_code == 503, [answer.text for answer in answers]
        assert last.headers["retry-after"] == "5"
        assert last.json()["error"]["code"] == "engine_unavailable"
        assert "failed" in last.json()["error"]["message"]
        assert httpx.get(f"{url}/health").json()["state"] == "failed"


class SlowExecutor(FakeExecutor):
    """Steps that take a while, as on a device."""

    def submit(self, step: StepInput) -> PendingStep:
        time.sleep(0.02)
        return super().submit(step)


@pytest.mark.parametrize("streams", [False, True])
def test_what_outlasts_the_end_of_the_server_is_to_be_repeated(streams: bool):
    answers = []
    body = {"prompt": [1, 2, 3], "max_tokens": 390, "ignore_eos": True, "stream": streams}
    with serving(SlowExecutor(CAPACITY, next_token), drain_s=0.3) as url:
        asking = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body)))
        asking.start()
        until_s = time.monotonic() + 10
        while not num_running(httpx.get(f"{url}/metrics").text):
            assert time.monotonic() < until_s
            time.sleep(0.01)
    asking.join(10)
    if streams:
        *_, error, done, last = answers[0].text.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        assert (done, last) == ("data: [DONE]", "")
    else:
        assert answers[0].status_code == 503
        assert answers[0].headers["retry-after"] == "5"


def num_running(page: str) -> float:
    (line,) = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running{")]
    return float(line.rpartition(" ")[2])


def test_connections_are_used_again():
    with serving(FakeExecutor(CAPACITY, next_token)) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
        sockets = set()
        for path, body in [("/v1/completions", {"prompt": "ab", "max_tokens": 2}), ("/v1/completions", {"n": -1})] * 2:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            sockets.add(connection.sock)
            connection.getresponse().read()
        assert len(sockets) == 1
        assert None not in sockets
        connection.close()


def test_a_pause_longer_than_connections_live_is_no_error():
    with (
        serving(FakeExecutor(CAPACITY, next_token), idle_connection_s=1) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        for _ in range(2):
            assert client.completions.create(model="nano", prompt="ab", max_tokens=3).usage.completion_tokens == 3
            time.sleep(1.2)
