"""What a scheduler actor is started with, and started again with by Ray if it dies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from glm5ray.engine.engine_loop import STALLED_AFTER_S
from glm5ray.engine.executor import InProcessExecutor
from glm5ray.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from glm5ray.config import EngineConfig
    from glm5ray.engine.executor import Executor


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """One engine. Travels to the actor by pickle, so ``make_executor`` is a function of an importable module."""

    engine: str
    config: EngineConfig
    make_executor: Callable[[EngineSpec, int], Executor]
    """``make_executor(spec, epoch)``, called inside the actor; ``epoch`` is that of the first workers."""
    overlap: bool = True
    """Which loop; the workers are other processes, so they compute while the scheduler plans."""
    client_timeout_s: float = 30.0
    """A client that has not asked for events for so long is gone: its requests are aborted."""
    stalled_after_s: float = STALLED_AFTER_S
    """A step of this age makes the status say so."""

    @property
    def layout(self) -> str:
        """``tp 2, ep 2``."""
        parallel = self.config.parallel
        sizes = {"dp": getattr(parallel, "dp_size", 1), "tp": parallel.tp_size, "ep": parallel.ep_size}
        return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "tp 1"


def in_process_executor(spec: EngineSpec, epoch: int) -> Executor:
    """One worker in the scheduler's own process. For one rank on a CPU; it dies with the scheduler."""
    from glm5ray.worker.worker import Worker

    if spec.layout != "tp 1":
        raise ConfigError(f"parallel is {spec.layout}; one process runs one rank")
    return InProcessExecutor(lambda: Worker.load(spec.config, epoch=epoch), threaded=spec.overlap)
