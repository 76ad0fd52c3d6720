"""Starting, finding and ending HTTP actors. This process is a driver of the cluster already."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from glm5ray.actors.names import NAMESPACE, http_name, served_engine_of
from glm5ray.actors.server_actor import DRAIN_S, HttpActor
from glm5ray.errors import ConfigError, EngineUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from glm5ray.actors.server_actor import HttpSpec, HttpStatus

logger = logging.getLogger(__name__)

LISTEN_TIMEOUT_S = 60.0
"""From the start of the actor's process to its open port."""
_PORT_PATIENCE_S = 2.0
_CALL_TIMEOUT_S = 5.0


def start_http(spec: HttpSpec, *, timeout_s: float = LISTEN_TIMEOUT_S) -> None:
    """Starts an HTTP actor on this machine and waits until it listens; the engine may come later. It goes on when this
    process ends, and Ray starts it again, always on this machine.

    Raises :class:`ConfigError` if the engine has one already or the port is taken, :class:`EngineUnavailable` if it
    does not come up; then nothing is left of it."""
    options = ray.remote(HttpActor).options(
        name=http_name(spec.engine),
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        num_gpus=0,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=4,
        enable_task_events=False,
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    )
    try:
        options.remote(spec)
    except ValueError as error:
        raise ConfigError(
            f"engine {spec.engine!r} is served already (glm5ray status); end it: glm5ray down --engine {spec.engine}"
        ) from error
    try:
        _wait_until_listening(spec, timeout_s)
    except BaseException:
        stop_http(spec.engine, drain_s=0.0)
        raise


def _wait_until_listening(spec: HttpSpec, timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    first_s = None
    while not (status := http_status(spec.engine, timeout_s=timeout_s)).is_listening:
        first_s = first_s or time.monotonic()
        if time.monotonic() - first_s > _PORT_PATIENCE_S and status.detail.startswith("cannot listen"):
            raise ConfigError(status.detail)
        if time.monotonic() > until_s:
            raise EngineUnavailable(f"the HTTP server was not up within {timeout_s:.0f} s: {status.detail}")
        time.sleep(0.05)


def wait_until_open(engine: str, *, timeout_s: float = LISTEN_TIMEOUT_S) -> HttpStatus:
    """Waits until requests reach the engine, which is ready. Raises :class:`EngineUnavailable`."""
    until_s = time.monotonic() + timeout_s
    while not (status := http_status(engine)).is_open:
        if status.error is not None:
            raise EngineUnavailable(status.error)
        if time.monotonic() > until_s:
            raise EngineUnavailable(
                f"the HTTP server did not find its engine within {timeout_s:.0f} s: {status.detail}"
            )
        time.sleep(0.05)
    return status


def http_status(engine: str, *, timeout_s: float = _CALL_TIMEOUT_S) -> HttpStatus:
    """Raises :class:`EngineUnavailable` if the engine has no HTTP actor, or it does not answer."""
    return _call(find_http(engine), "status", timeout_s)


def find_http(engine: str) -> Any:
    """The handle. Raises :class:`EngineUnavailable` if there is none."""
    try:
        return ray.get_actor(http_name(engine), NAMESPACE)
    except ValueError as error:
        raise EngineUnavailable(f"engine {engine!r} has no HTTP server in this Ray cluster") from error


def list_http() -> list[str]:
    """The engines that are served, whether they run or not."""
    named: Any = list_named_actors(all_namespaces=True)  # of dicts, whatever its annotation says
    names = [served_engine_of(entry["name"]) for entry in named if entry["namespace"] == NAMESPACE]
    return sorted(name for name in names if name is not None)


def stop_http(engine: str, *, drain_s: float = DRAIN_S) -> bool:
    """Ends an engine's HTTP actor; requests in flight have ``drain_s``. False if it has none."""
    try:
        actor = find_http(engine)
    except EngineUnavailable:
        return False
    try:
        if not _call(actor, "stop", drain_s + 10.0, drain_s):
            logger.warning("engine=%s: some requests over HTTP did not end", engine)
    except EngineUnavailable as error:
        logger.warning("engine=%s: the HTTP server is ended by force: %s", engine, error)
    ray.kill(actor, no_restart=True)
    until_s = time.monotonic() + 20.0
    while engine in list_http():
        if time.monotonic() > until_s:
            raise EngineUnavailable(f"the HTTP server of engine {engine!r} was told to end and is still there")
        time.sleep(0.05)
    return True


def _call(actor: Any, method: str, timeout_s: float, *args: Any) -> Any:
    remote: Callable[..., Any] = getattr(actor, method).remote
    try:
        return ray.get(remote(*args), timeout=timeout_s)
    except RayActorError as error:
        raise EngineUnavailable("the HTTP server has ended, or is being started again") from error
    except RayError as error:  # Ray's timeout is one of them
        raise EngineUnavailable(f"the HTTP server does not answer: {' '.join(str(error).split())[:300]}") from error
