"""What every benchmark report says of where it ran."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def environment(packages: tuple[str, ...] = ("glm5ray", "torch")) -> dict[str, Any]:
    """Commit, versions and hardware; values that cannot be found are ``None``."""
    return {
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
    }


def _git(*arguments: str) -> str | None:
    """Output of git in the folder of this package, which may be no checkout."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None
