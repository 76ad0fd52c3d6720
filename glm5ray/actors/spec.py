"""What a scheduler actor is started with, and started again with by Ray if it dies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from glm5ray.actors.metrics_export import EVERY_S

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
    metrics_every_s: float = EVERY_S
    """How often figures are handed to Ray."""

    @property
    def layout(self) -> str:
        """``tp 2, ep 2``."""
        return self.config.parallel.layout
