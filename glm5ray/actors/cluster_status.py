"""What runs in a Ray cluster: machines, what is free on them, and engines."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import ray

from glm5ray.actors.handles import SchedulerHandle
from glm5ray.actors.http_launch import find_http, http_status
from glm5ray.actors.launch import join_ray, list_all
from glm5ray.errors import EngineUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

_ANSWER_TIMEOUT_S = 5.0


def cluster_status(address: str | None = "auto") -> dict[str, Any]:
    """``{"address", "nodes", "free", "engines"}`` of plain values. An engine that does not answer is listed with the
    reason; ``http`` in it is the state of its HTTP actor, or ``None``. Raises :class:`EngineUnavailable` if there is no
    cluster."""
    join_ray(address)
    free = ray.available_resources()
    return {
        "address": ray.get_runtime_context().gcs_address,
        "nodes": [_node(node) for node in ray.nodes()],
        "free": {name: free.get(name, 0.0) for name in ("CPU", "GPU")},
        "engines": [_engine(name) for name in list_all(address)],
    }


def _node(node: Mapping[str, Any]) -> dict[str, Any]:
    resources = node["Resources"]
    return {
        "address": node["NodeManagerAddress"],
        "is_alive": bool(node["Alive"]),
        "num_cpus": resources.get("CPU", 0.0),
        "num_gpus": resources.get("GPU", 0.0),
    }


def _engine(name: str) -> dict[str, Any]:
    return {**_scheduler(name), "http": _http(name)}


def _http(name: str) -> dict[str, Any] | None:
    """``None``: the engine has no HTTP actor."""
    try:
        find_http(name)
    except EngineUnavailable:
        return None
    try:
        return dataclasses.asdict(http_status(name))
    except EngineUnavailable as error:
        return {"url": None, "is_listening": False, "is_open": False, "detail": str(error)}


def _scheduler(name: str) -> dict[str, Any]:
    handle = SchedulerHandle(name)
    try:
        status = handle.call("status", timeout_s=_ANSWER_TIMEOUT_S)
        values = dataclasses.asdict(status)
        info, _ = handle.call("info", timeout_s=_ANSWER_TIMEOUT_S)
    except EngineUnavailable as error:
        return {"engine": name, "state": "unavailable", "detail": str(error)}
    return {**values, "model": info.model_path, "max_model_len": info.capacity.max_model_len}
