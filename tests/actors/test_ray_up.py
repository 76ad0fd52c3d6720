"""cluster.yaml through a true `ray up`: ssh and rsync are stand-ins that act on this machine, so that head and worker
are two nodes of one host."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PORT = 26393

SSH = """#!{python}
import subprocess, sys
arguments, command = sys.argv[1:], []
while arguments and arguments[0].startswith("-"):
    takes_value = arguments[0] in ("-i", "-o", "-p", "-L", "-S")
    arguments = arguments[2 if takes_value else 1 :]
sys.exit(subprocess.call(["bash", "-c", " ".join(arguments[1:]) or "true"]))
"""

RSYNC = """#!{python}
import pathlib, shutil, sys
source, target = (pathlib.Path(a.split(":", 1)[-1].replace("~", "{home}", 1)) for a in sys.argv[-2:])
if source.is_file() and source.resolve() != target.resolve():
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
"""


def our_file(folder: Path) -> dict[str, object]:
    """cluster.yaml with this machine's addresses; nothing is installed, no other Ray ended, and ports and folders are
    the test's own."""
    values = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    values["provider"].update(head_ip="127.0.0.1", worker_ips=["127.0.0.2"])
    values["auth"] = {"ssh_user": "tester", "ssh_private_key": str(folder / "key")}
    values["file_mounts"] = {"~/.ray/auth_token": "~/.ray/auth_token"}
    values["setup_commands"] = []
    for name, more in (
        ("head_start_ray_commands", f"--num-cpus=2 --temp-dir={folder}/r --dashboard-port=28293"),
        ("worker_start_ray_commands", "--num-cpus=3 --node-ip-address=127.0.0.2"),
    ):
        (start,) = [command for command in values[name] if "ray start" in command]
        start = start.replace("~/glm5ray/.venv/bin/ray", str(Path(sys.executable).parent / "ray"))
        start = start.replace("6379", str(PORT)).replace("2000000000", "100000000")
        values[name] = [f"{start} {more}"]
    return values


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="g5u", dir="/tmp"))  # short: paths of sockets have 107 characters
    binaries = folder / "bin"
    binaries.mkdir()
    for name, text in (("ssh", SSH), ("rsync", RSYNC)):
        (binaries / name).write_text(text.format(python=sys.executable, home=folder))
        (binaries / name).chmod(0o755)
    # Ray's commands run in login shells, which set PATH anew
    (folder / ".bashrc").write_text(f'export PATH="{binaries}:{Path(sys.executable).parent}:$PATH"\n')
    (folder / "key").write_text("no key")
    (folder / "key").chmod(0o600)
    yield folder
    for _ in range(3):  # some start others; the last to go are those that were told last
        end_processes_of(folder)
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)


def end_processes_of(folder: Path) -> None:
    """Whoever has the folder as its home: the nodes that ray up started, and nothing else on the machine."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"HOME={folder}".encode() in environment:
            os.kill(int(process.name), signal.SIGKILL)


@pytest.mark.ray
@pytest.mark.slow
def test_ray_up_brings_all_machines(folder: Path) -> None:
    """With the worker: without RAY_enable_autoscaler_v2=0 it never comes."""
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(our_file(folder), width=1000))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "HOME": str(folder),
        "PATH": f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "USER": "tester",
    }
    command = [sys.executable, "-c", "from glm5ray.cli.app import main; main()"]
    up = subprocess.run(
        [*command, "up", str(path)], env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert up.returncode == 0, up.stdout[-3000:] + up.stderr[-3000:]
    until_s = time.monotonic() + 120
    while True:
        status = subprocess.run(
            [*command, "status", "--address", f"127.0.0.1:{PORT}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if "3 CPUs" in status.stdout and "2 CPUs" in status.stdout:
            break
        assert time.monotonic() < until_s, status.stdout + status.stderr
        time.sleep(1)
