"""The ranks of a running engine, for people and tools: how they are, and profiles of what they do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from glm5ray.actors.handles import SchedulerHandle
from glm5ray.actors.names import NAMESPACE, worker_name
from glm5ray.errors import EngineUnavailable

if TYPE_CHECKING:
    from glm5ray.actors.rank_control import RankStats
    from glm5ray.config import EngineConfig
    from glm5ray.engine.client import EngineStatus

ANSWER_TIMEOUT_S = 15.0
"""A rank that is busy in Python answers late."""


def rank_stats(engine: str) -> list[RankStats]:
    """Each rank of the present epoch, also while a step runs or hangs. This process must be a driver of the cluster.
    Raises :class:`EngineUnavailable`."""
    return _ask(engine, "stats", timeout_s=ANSWER_TIMEOUT_S)


def profile_ranks(engine: str, num_steps: int, *, folder: str | None = None, timeout_s: float = 60.0) -> list[str]:
    """Records the next ``num_steps`` steps on every rank with PyTorch's profiler; returns the paths of the traces (for
    Perfetto), each on its rank's machine in ``folder``, by default ``$GLM5RAY_HOME/traces``.

    The steps are those that clients ask for: nothing runs by itself. Raises :class:`EngineUnavailable` if too few come
    within ``timeout_s``."""
    return _ask(engine, "profile", num_steps, timeout_s, folder, timeout_s=timeout_s + ANSWER_TIMEOUT_S)


def _ask(engine: str, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
    handle = SchedulerHandle(engine)
    config: EngineConfig
    _, config = handle.call("info")
    status: EngineStatus = handle.call("status")
    try:
        names = [worker_name(engine, rank, status.epoch) for rank in range(config.parallel.world_size)]
        ranks = [ray.get_actor(name, NAMESPACE) for name in names]
        return ray.get([getattr(rank, method).remote(*arguments) for rank in ranks], timeout=timeout_s)
    except ValueError as error:
        raise EngineUnavailable(f"engine {engine!r} is {status.state.value}, its ranks are not all there") from error
    except RayTaskError as error:
        raise EngineUnavailable(f"a rank of engine {engine!r}: {error.cause}") from error
    except (RayActorError, GetTimeoutError) as error:
        raise EngineUnavailable(f"a rank of engine {engine!r} does not answer") from error
