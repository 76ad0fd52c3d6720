"""The engine's figures as metrics of Ray, so that whatever scrapes a Ray cluster has them, with or without a server.

Names are those of :mod:`glm5ray.metrics` with ``_`` for the colon, and Ray puts ``ray_`` before them:
``vllm:num_requests_running`` of ``/metrics`` is ``ray_vllm_num_requests_running``. A thread of its own reads the
status every few seconds; the engine's thread takes no part.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from ray.util.metrics import Counter, Gauge

from glm5ray.engine.figures import engine_figures
from glm5ray.metrics import METRICS, ray_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from glm5ray.engine.client import EngineStatus

logger = logging.getLogger(__name__)


class EngineMetrics:
    """Of one engine in one process. Every metric has the tags ``model_name`` and ``engine``."""

    def __init__(self, *, model_name: str, engine: str) -> None:
        self._tags = {"model_name": model_name, "engine": engine}
        self._metrics: dict[str, Counter | Gauge] = {}
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}

    def tell(self, status: EngineStatus) -> None:
        """Hands ``status`` to Ray. Counters there can only be added to, so they get what came since the last time."""
        for figure in engine_figures(status):
            metric = METRICS[figure.name]
            if (exported := self._metrics.get(metric.name)) is None:
                kind = Gauge if metric.kind == "gauge" else Counter
                keys = tuple(dict.fromkeys((*self._tags, *metric.labels)))
                exported = self._metrics[metric.name] = kind(ray_name(metric.name), metric.help, keys)
            tags = {**self._tags, **dict(zip(metric.labels, figure.labels, strict=True))}
            if isinstance(exported, Gauge):
                exported.set(figure.value, tags)
                continue
            before = self._counted.get((figure.name, figure.labels), 0.0)
            if figure.value > before:
                exported.inc(figure.value - before, tags)
                self._counted[figure.name, figure.labels] = figure.value


class StatusWatcher:
    """Reads an engine's status every few seconds and tells it to ``listeners``, in a daemon thread."""

    def __init__(
        self,
        status: Callable[[], EngineStatus],
        listeners: Sequence[Callable[[EngineStatus], None]],
        *,
        every_s: float,
    ) -> None:
        self._status = status
        self._listeners = listeners
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="glm5ray-metrics", daemon=True)

    def start(self) -> None:
        """Returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """They are told once more."""
        self._ended.set()
        self._thread.join(self._every_s)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.wait(self._every_s)
            try:
                status = self._status()
                for tell in self._listeners:
                    tell(status)
            except Exception:  # the outermost loop: figures must never end an engine
                logger.exception("the figures are watched no longer")
                return
