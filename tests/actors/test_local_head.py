"""Ray's head as glm5ray up starts it and glm5ray down ends it, through the commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """A home of its own, with a short path: those of sockets have 107 characters."""
    folder = tempfile.mkdtemp(prefix="g5h", dir="/tmp")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    yield {**environment, "HOME": folder, "RAY_TMPDIR": f"{folder}/r", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    shutil.rmtree(folder, ignore_errors=True)


def glm5ray(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from glm5ray.cli.app import main; main()", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.ray
@pytest.mark.slow
def test_up_status_down(environment: dict[str, str]) -> None:
    options = ("up", "--port", "26391", "--dashboard-port", "28291", "--num-cpus", "4", "--num-gpus", "0")
    up = glm5ray(environment, *options)
    assert up.returncode == 0, up.stderr
    token = Path(environment["HOME"], ".ray", "auth_token")
    assert token.stat().st_mode & 0o777 == 0o600

    again = glm5ray(environment, *options)
    assert again.returncode == 1
    assert "runs already" in again.stderr
    status = glm5ray(environment, "status", "--json")
    assert status.returncode == 0, status.stderr
    seen = json.loads(status.stdout.splitlines()[-1])
    assert seen["engines"] == []
    assert [(node["num_cpus"], node["num_gpus"]) for node in seen["nodes"]] == [(4.0, 0.0)]

    down = glm5ray(environment, "down")
    assert "Ray has ended" in down.stdout, down.stderr
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert environment["HOME"] not in running
    assert "No Ray" in glm5ray(environment, "down").stdout
    # Another Ray may run on this machine, and status finds it; ours is gone.
    gone = glm5ray(environment, "status")
    assert "26391" not in gone.stdout
    assert gone.returncode == 0 or "no Ray cluster" in gone.stderr


@pytest.mark.ray
@pytest.mark.slow
def test_a_head_that_cannot_start_says_why_and_leaves_nothing(environment: dict[str, str]) -> None:
    failed = glm5ray(environment, "up", "--port", "26392", "--dashboard-port", "28292", "--node-ip", "203.0.113.1")
    assert failed.returncode == 1
    assert "Ray did" in failed.stderr or "was not up" in failed.stderr
    assert environment["HOME"] not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "No Ray" in glm5ray(environment, "down").stdout
