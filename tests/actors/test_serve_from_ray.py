"""``glm5ray serve --address`` as a user runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest
import ray

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from glm5ray.cli.app import main; main()"]

JOIN = """
import signal, sys
from glm5ray.actors.launch import join_ray

def ours(number, frame):
    sys.exit(128 + number)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, ours)
join_ray(sys.argv[1])
assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == [ours, ours]
"""


def glm5ray(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments, "--address", ray.get_runtime_context().gcs_address]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=180, check=False)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}


def test_joining_ray_leaves_the_signals_to_the_program():
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", JOIN, address],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_serve_ends_with_the_status_of_the_signal_and_ends_its_engine(number: signal.Signals, status: int):
    from glm5ray.actors.launch import list_engines

    engine = f"signal{number.value}"
    arguments = ["serve", "--address", ray.get_runtime_context().gcs_address, "--engine", engine, "--port", "0"]
    process = subprocess.Popen([*COMMAND, *arguments], env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = next(
            found[1]
            for line in process.stderr
            if (found := re.search(r"serving nano at (http://127\.0\.0\.1:\d+)", line)) is not None
        )
        body = {"model": "nano", "prompt": "The", "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
        assert answer.json()["usage"]["completion_tokens"] == 2
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(30) == status, rest
        assert "Traceback" not in rest
        assert engine not in list_engines()
    finally:
        process.kill()
        process.wait(10)
        if process.stderr is not None:
            process.stderr.close()


@pytest.mark.slow
def test_detached_it_goes_on_until_down():
    """Two ranks; neither the end of the command nor a second one for the same engine changes anything."""
    from glm5ray.actors.launch import list_all

    serve = ("serve", "--tp", "2", "--detach", "--engine", "stays", "--port", "0")
    started = glm5ray(*serve)
    try:
        assert started.returncode == 0, started.stderr
        found = re.search(r"serving nano at (http://127\.0\.0\.1:\d+)", started.stderr)
        assert found is not None, started.stderr
        assert "glm5ray down --engine stays" in started.stderr
        with openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0, timeout=30) as client:
            options = {
                "model": "nano",
                "messages": [{"role": "user", "content": "What is 3 plus 4?"}],
                "temperature": 0.0,
                "max_tokens": 100,
                "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
            }
            text = client.chat.completions.create(**options).choices[0].message.content
            assert "7" in text
            chunks = client.chat.completions.create(stream=True, **options)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text

        again = glm5ray(*serve)
        assert again.returncode == 1
        assert "served already" in again.stderr
        taken = glm5ray("serve", "--detach", "--engine", "other", "--port", found[1].rpartition(":")[2])
        assert taken.returncode == 1
        assert "cannot listen" in taken.stderr
        assert list_all() == ["stays"]
        status = glm5ray("status").stdout
        assert "stays: ready, nano, tp 2" in status
        assert f"{found[1]}/v1 serves nano" in status
    finally:
        down = glm5ray("down", "--engine", "stays")
    assert down.returncode == 0, down.stderr
    assert list_all() == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{found[1]}/health")


@pytest.mark.slow
def test_what_cannot_be_served_is_told_and_nothing_stays(tmp_path: Path):
    from glm5ray.actors.launch import list_all

    failed = glm5ray("serve", str(tmp_path), "--detach", "--engine", "empty", "--port", "0")
    assert failed.returncode == 1
    assert "did not start" in failed.stderr
    assert "config.json" in failed.stderr
    assert list_all() == []


@pytest.mark.slow
def test_a_signal_while_it_loads_leaves_nothing():
    from glm5ray.actors.launch import list_all

    address = ray.get_runtime_context().gcs_address
    arguments = ["serve", "--detach", "--engine", "early", "--port", "0", "--address", address]
    process = subprocess.Popen([*COMMAND, *arguments], env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("the scheduler starts" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(30) == 143, rest
        assert "Traceback" not in rest
        assert list_all() == []
    finally:
        process.kill()
        process.wait(10)
        if process.stderr is not None:
            process.stderr.close()
