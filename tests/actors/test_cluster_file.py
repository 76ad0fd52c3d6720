"""cluster.yaml and its relatives, by Ray's own validator; what that lets pass and should not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from glm5ray.actors.cluster_file import read_cluster_file, validate_cluster
from glm5ray.errors import ConfigError

ROOT = Path(__file__).parents[2]
START = "RAY_AUTH_MODE=token RAY_enable_autoscaler_v2=0 ray start --head"


def local(**changes: Any) -> dict[str, Any]:
    values = {
        "cluster_name": "test",
        "provider": {"type": "local", "head_ip": "10.0.0.1", "worker_ips": []},
        "auth": {"ssh_user": "ubuntu"},
        "head_start_ray_commands": [START],
    }
    return {**values, **changes}


@pytest.mark.parametrize("workers", [[], ["10.0.0.11"], ["10.0.0.11", "10.0.0.12"]])
def test_our_file_is_valid_once_it_names_machines(workers: list[str]) -> None:
    values = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    values["provider"].update(head_ip="10.0.0.10", worker_ips=workers)
    validate_cluster(values, "cluster.yaml")


def test_our_file_asks_for_its_addresses() -> None:
    with pytest.raises(ConfigError, match="HEAD_ADDRESS"):
        read_cluster_file(ROOT / "cluster.yaml")


@pytest.mark.parametrize("name", ["cluster-gcp-g4.yaml", "cluster-aws-g7e.yaml"])
def test_cloud_files_are_valid(name: str) -> None:
    values = read_cluster_file(ROOT / "examples" / name)
    gpu = values["available_node_types"]["gpu"]
    assert gpu["resources"]["GPU"] == 8
    assert gpu["min_workers"] == gpu["max_workers"], "an idle engine's machine would be taken away"
    assert values["head_node_type"] != "gpu"


def test_files_that_a_cluster_starts_from_open_no_dashboard() -> None:
    for path in (ROOT / "cluster.yaml", *(ROOT / "examples").glob("cluster-*.yaml")):
        (start,) = [c for c in yaml.safe_load(path.read_text())["head_start_ray_commands"] if "ray start" in c]
        assert "--dashboard-host=127.0.0.1" in start


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (local(head_start_ray_command=[]), "head_start_ray_command"),
        (local(provider={"type": "local", "head_ip": "10.0.0.1"}), "worker_ips"),
        (local(head_start_ray_commands=["RAY_AUTH_MODE=token ray start --head"]), "RAY_enable_autoscaler_v2=0"),
        (local(head_start_ray_commands=["RAY_enable_autoscaler_v2=0 ray start --head"]), "RAY_AUTH_MODE"),
        ({"cluster_name": "test"}, "provider"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_cluster(values, "x.yaml")


@pytest.mark.parametrize("text", ["[1]", "a: [", "\x00"])
def test_files_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cluster\.yaml"):
        read_cluster_file(path)
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        read_cluster_file(tmp_path / "absent.yaml")
