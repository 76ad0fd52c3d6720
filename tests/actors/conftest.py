"""One Ray for all tests that need one."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Logical CPUs enough for every test; the dashboard is off. Workers import what the tests import."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray

    folder = tempfile.mkdtemp(prefix="g5r", dir="/tmp")  # short: the paths of sockets have 107 characters
    ray.init(
        num_cpus=16,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=128 * 2**20,
        namespace="glm5ray",
        log_to_driver=False,
        _temp_dir=folder,
        _system_config={"metrics_report_interval_ms": 1000},  # ten times as often as by default
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
