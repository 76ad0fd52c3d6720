"""An HTTP actor before an engine: real clients, and whatever may die."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from glm5ray.actors.spec import EngineSpec
from glm5ray.config import load_config
from glm5ray.errors import ConfigError
from tests.actors import engines
from tests.actors.engines import make_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


RESTARTS = "glm5ray:engine_restarts"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


def until(holds: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until_s, what
        time.sleep(0.05)


def health(url: str) -> int:
    """The status; 0 if nobody listens."""
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code
    except httpx.TransportError:
        return 0


def num_running(engine: str) -> int:
    from glm5ray.actors.handles import SchedulerHandle

    return SchedulerHandle(engine).call("status").scheduler.num_running


def sdk(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def complete(client: openai.OpenAI, max_tokens: int = 4) -> openai.types.Completion:
    return client.completions.create(
        model="nano", prompt=[1, 2, 3], max_tokens=max_tokens, extra_body={"ignore_eos": True}
    )


@contextlib.contextmanager
def served(spec: EngineSpec) -> Iterator[str]:
    """The address; the port is there before the engine."""
    from glm5ray.actors.http_launch import start_http, wait_until_open
    from glm5ray.actors.launch import list_all, start_from_spec, stop_engine
    from glm5ray.actors.server_actor import HttpSpec

    http = HttpSpec(engine=spec.engine, port=free_port())
    start_http(http)
    try:
        early = httpx.post(f"{http.url}/v1/completions", json={"prompt": "x"})
        assert (early.status_code, early.headers["retry-after"]) == (503, "5")
        assert "no engine" in early.json()["error"]["message"]
        assert health(http.url) == 503
        start_from_spec(spec, timeout_s=60.0)
        assert wait_until_open(spec.engine).names[0] == "nano"
        yield http.url
    finally:
        assert stop_engine(spec.engine)
        assert health(http.url) == 0, "the port is closed"
        assert spec.engine not in list_all()


def test_a_killed_server_comes_back_on_its_port_and_the_engine_stays():
    from glm5ray.actors.cluster_status import cluster_status
    from glm5ray.actors.http_launch import start_http
    from glm5ray.actors.server_actor import HttpSpec

    broken = []

    def ask_for_long() -> None:
        body = {"model": "nano", "prompt": [1, 2, 3], "max_tokens": 110, "ignore_eos": True}
        with pytest.raises(httpx.TransportError) as caught:
            httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        broken.append(caught.value)

    with served(make_spec("web", engines.slow)) as url, sdk(url) as client:
        first = complete(client)
        assert first.usage is not None
        assert first.usage.completion_tokens == 4
        (entry,) = [one for one in cluster_status()["engines"] if one["engine"] == "web"]
        assert (entry["state"], entry["http"]["url"], entry["http"]["is_open"]) == ("ready", url, True)
        with pytest.raises(ConfigError, match="served already"):
            start_http(HttpSpec(engine="web", port=free_port()))

        pid, epoch = entry["http"]["pid"], entry["epoch"]
        asking = threading.Thread(target=ask_for_long)
        asking.start()
        until(lambda: num_running("web"), "the request did not begin")
        os.kill(pid, signal.SIGKILL)
        asking.join(10)
        assert broken, "whoever waits is told at once: the connection breaks"
        until(lambda: health(url) == 200, "the server did not come back")
        assert complete(client).usage.completion_tokens == 4
        (entry,) = [one for one in cluster_status()["engines"] if one["engine"] == "web"]
        assert entry["http"]["pid"] != pid
        assert (entry["epoch"], entry["num_restarts"]) == (epoch, 0)


@pytest.mark.slow
def test_a_taken_port_is_told_and_nothing_is_left():
    from glm5ray.actors.http_launch import list_http, start_http
    from glm5ray.actors.server_actor import HttpSpec

    with socket.create_server(("127.0.0.1", 0)) as taken:
        spec = HttpSpec(engine="taken", port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1"):
            start_http(spec)
    assert "taken" not in list_http()


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
def test_a_scheduler_that_dies_is_503_for_what_ran_and_comes_back(tmp_path: Path, streams: bool):
    flag = tmp_path / "died"
    spec = make_spec(f"dies{streams}", partial(engines.suicidal, str(flag)))
    with served(spec) as url, sdk(url) as client:
        started_s = time.monotonic()
        body = {"model": "nano", "prompt": [1, 2, 3], "max_tokens": 60, "ignore_eos": True, "stream": streams}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert flag.exists()
        if streams:
            assert '"engine_unavailable"' in answer.text
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.status_code == 503, answer.text
            assert "retry-after" in answer.headers
        assert time.monotonic() - started_s < 30
        until(lambda: health(url) == 200, "the scheduler did not come back")
        assert complete(client, 20).usage.completion_tokens == 20


@pytest.mark.slow
def test_a_rank_that_hangs_is_not_healthy_within_five_seconds_and_the_answer_comes(tmp_path: Path):
    """With the settings' limits; the watchdog ends the rank, and the answer is that of a run without a fault."""
    for done in ("0", "1"):  # of the three faults, those before the hang
        (tmp_path / done).touch()
    hung = tmp_path / "2"
    overrides = ["cache.num_pages=32", "model.device=cpu", "parallel.tp_size=2", "recovery.step_timeout_s=9"]
    config = load_config(None, overrides)
    spec = EngineSpec(engine="hangs", config=config, make_executor=partial(engines.faulty, str(tmp_path), 3))
    texts = []

    def ask() -> None:
        answer = client.completions.create(model="nano", prompt="The sky is", max_tokens=24, temperature=0.0)
        texts.append(answer.choices[0].text)

    with served(spec) as url, sdk(url) as client:
        asking = threading.Thread(target=ask)
        asking.start()
        until(hung.exists, "the rank did not hang")
        until(lambda: health(url) == 503, "a hang is well", timeout_s=5.0)
        asking.join(60)
        until(lambda: health(url) == 200, "it is well again")
        ask()
        assert texts[0] == texts[1]
        (status,) = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith(RESTARTS)]
        assert float(status.rpartition(" ")[2]) == 1


@pytest.mark.slow
def test_a_scheduler_that_freezes_is_not_healthy_and_nobody_waits_for_ever(tmp_path: Path):
    answers = []

    def ask() -> None:
        body = {"model": "nano", "prompt": [1, 2, 3], "max_tokens": 110, "ignore_eos": True}
        answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))

    with served(make_spec("freezes", partial(engines.telling, str(tmp_path / "pid")))) as url, sdk(url) as client:
        pid = int((tmp_path / "pid").read_text())
        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(0.5)
        os.kill(pid, signal.SIGSTOP)
        try:
            frozen_s = time.monotonic()
            assert health(url) == 503
            assert time.monotonic() - frozen_s < 5.0
            asking.join(45)
            assert answers[0].status_code == 503, answers[0].text
            assert "does not answer" in answers[0].json()["error"]["message"]
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: health(url) == 200, "it answers again")
        assert complete(client).usage.completion_tokens == 4


@pytest.mark.slow
def test_the_end_lets_requests_end_and_then_gives_them_up():
    """Of two, one ends within the time and one does not; neither hangs."""
    from glm5ray.actors.http_launch import stop_http

    codes: dict[int, int] = {}

    def ask(url: str, max_tokens: int) -> None:
        body = {"model": "nano", "prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": True}
        codes[max_tokens] = httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code

    with served(make_spec("drains", engines.slow)) as url:
        threads = [threading.Thread(target=ask, args=(url, max_tokens)) for max_tokens in (10, 110)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        assert stop_http("drains", drain_s=3.0)
        for thread in threads:
            thread.join(30)
        assert codes == {10: 200, 110: 503}
