"""Ray's head node on this machine, as a process of its own that outlives the command which starts it.

``ray start --block`` in a session of its own: a SIGTERM ends it with all of its processes, and of no other Ray on the
machine (``ray stop`` ends them all). What was started is remembered in ``$GLM5RAY_HOME/ray-head.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from glm5ray.actors import authentication
from glm5ray.errors import ConfigError, EngineUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

OBJECT_STORE_BYTES = 512 * 2**20
"""Ray's shared memory: an engine's steps and tokens do not pass through it, so little is enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalHead:
    """A head that was started here."""

    pid: int
    started_ticks: int
    """From /proc: tells it from a later process of the same number."""
    address: str
    dashboard_url: str
    log: str


def home() -> Path:
    """``$GLM5RAY_HOME``, by default ``~/.glm5ray``."""
    return Path(os.environ.get("GLM5RAY_HOME") or Path.home() / ".glm5ray")


def running_head() -> LocalHead | None:
    """The head that :func:`start_head` started and that still runs."""
    try:
        head = LocalHead(**json.loads(_record().read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return head if _start_ticks(head.pid) == head.started_ticks else None


def start_head(
    *,
    node_ip: str | None = None,
    port: int = 6379,
    dashboard_host: str = "127.0.0.1",
    dashboard_port: int = 8265,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    more: tuple[str, ...] = (),
    progress: Callable[[str], None] = lambda _: None,
    timeout_s: float = 90.0,
) -> LocalHead:
    """Starts Ray's head and waits until it can be joined. ``None``: as Ray finds it. ``more``: for ``ray start``.

    Raises :class:`ConfigError` if one runs already, :class:`EngineUnavailable` with the end of its log if it does not
    come up within ``timeout_s``; nothing of it is left then."""
    if (head := running_head()) is not None:
        raise ConfigError(f"Ray runs already, at {head.address} (process {head.pid}); end it with: glm5ray down")
    home().mkdir(parents=True, exist_ok=True)
    log = home() / "ray-head.log"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    command += [f"--dashboard-host={dashboard_host}", f"--dashboard-port={dashboard_port}", "--include-dashboard=true"]
    command += ["--disable-usage-stats", f"--object-store-memory={OBJECT_STORE_BYTES}", *more]
    for option, value in (("node-ip-address", node_ip), ("num-cpus", num_cpus), ("num-gpus", num_gpus)):
        if value is not None:
            command.append(f"--{option}={value}")
    progress("Ray starts")
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**authentication.prepare(), "RAY_COLOR_PREFIX": "0", "NO_COLOR": "1"},
        )
    try:
        address = _wait_until_up(process, log, timeout_s)
        ticks = _start_ticks(process.pid)
        assert ticks is not None, f"process {process.pid} came up and is not there"
        head = LocalHead(
            pid=process.pid,
            started_ticks=ticks,
            address=address,
            dashboard_url=f"http://{dashboard_host}:{dashboard_port}",
            log=str(log),
        )
        partial = _record().with_suffix(".tmp")
        partial.write_text(json.dumps(asdict(head)))
        partial.replace(_record())
    except BaseException:
        _end(process.pid, 10.0)
        raise
    return head


def stop_head(timeout_s: float = 20.0) -> bool:
    """Ends the head that :func:`start_head` started, with every engine on it. False if none runs."""
    head = running_head()
    if head is None:
        return False
    _end(head.pid, timeout_s)
    _record().unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if _remembered().read_text().strip() == head.address:
            _remembered().unlink()
    return True


def require_answer(address: str, timeout_s: float = 3.0) -> None:
    """Raises :class:`EngineUnavailable` if nothing listens at the address of a cluster; ``auto``: the one that Ray
    remembers on this machine. Ray itself would try for minutes."""
    if address == "auto":
        try:
            address = os.environ.get("RAY_ADDRESS") or _remembered().read_text().strip()
        except FileNotFoundError:
            return  # Ray says so itself, at once
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError as error:
        raise EngineUnavailable(
            f"no Ray cluster answers at {address}: {error.strerror or error}; start one with: glm5ray up"
        ) from error


def _remembered() -> Path:
    """Where Ray keeps the address of the last head that was started on this machine."""
    temporary = os.environ.get("RAY_TMPDIR") or (os.environ.get("TMPDIR") if sys.platform == "linux" else None)
    return Path(temporary or "/tmp", "ray", "ray_current_cluster")


def _record() -> Path:
    return home() / "ray-head.json"


def _wait_until_up(process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> str:
    """The address, once Ray says so."""
    until_s = time.monotonic() + timeout_s
    while True:
        text = log.read_text(errors="replace")
        if "This command will now block forever" in text:
            marker = "ray start --address='"
            return text.partition(marker)[2].partition("'")[0]
        if process.poll() is not None or time.monotonic() > until_s:
            what = "did not start" if process.poll() is not None else f"was not up after {timeout_s:.0f} s"
            last = [line for line in text.splitlines() if line.strip()][-3:]
            raise EngineUnavailable(f"Ray {what}; the end of {log}: {' / '.join(last)}")
        time.sleep(0.1)


def _end(pid: int, timeout_s: float) -> None:
    """SIGTERM, so that it ends its children; after ``timeout_s`` SIGKILL for the whole session."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    until_s = time.monotonic() + timeout_s
    while _group_lives(pid):
        if time.monotonic() > until_s:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # if it is a child of this very process, it waits to be collected
        time.sleep(0.05)


def _group_lives(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; ``None`` if it is gone. Without /proc: 0 if it lives."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        return 0
    return None if stat.rpartition(")")[2].split()[0] == "Z" else int(stat.rpartition(")")[2].split()[19])
