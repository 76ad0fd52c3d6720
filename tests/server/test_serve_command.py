"""``glm5ray serve`` as a user runs it."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

COMMAND = [sys.executable, "-c", "from glm5ray.cli.app import main; main()", "serve", "--port"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_answers_until_a_signal(number: signal.Signals, status: int) -> None:
    process = subprocess.Popen([*COMMAND, "0"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = None
        for line in process.stderr:
            if (found := re.search(r"serving nano at (http://127\.0\.0\.1:\d+)", line)) is not None:
                url = found[1]
                break
        assert url is not None
        process.stderr.readline()  # the example
        answer = httpx.post(
            f"{url}/v1/completions", json={"model": "nano", "prompt": "The", "max_tokens": 2}, timeout=30
        )
        assert answer.json()["usage"]["completion_tokens"] == 2
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(30) == status
        assert "Traceback" not in rest
    finally:
        process.kill()
        process.wait(10)
        if process.stderr is not None:
            process.stderr.close()


def test_a_taken_port_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run([*COMMAND, str(port)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
