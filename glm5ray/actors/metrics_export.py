"""Figures of engines and servers as metrics of Ray, so that whatever scrapes a Ray cluster has them.

Names are those of :mod:`glm5ray.metrics` with ``_`` for the colon, and Ray puts ``ray_`` before them:
``vllm:num_requests_running`` of ``/metrics`` is ``ray_vllm_num_requests_running``. A thread of its own reads the
figures every few seconds; nothing on a step's or a token's way takes part.
"""

from __future__ import annotations

import logging
import threading
from itertools import pairwise
from typing import TYPE_CHECKING

from ray.util.metrics import Counter, Gauge, Histogram

from glm5ray.engine.figures import engine_figures
from glm5ray.metrics import METRICS, ray_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client.samples import Sample

    from glm5ray.actors.rank_control import RankStats
    from glm5ray.engine.client import EngineStatus
    from glm5ray.metrics import Metric
    from glm5ray.server.exposition import ServerMetrics

logger = logging.getLogger(__name__)

EVERY_S = 5.0
"""How often figures are handed to Ray; its agents collect every ten seconds."""

Labels = tuple[str, ...]


class _RayMetrics:
    """Ray's metrics of one process. Every one has the tags ``model_name`` and ``engine``."""

    def __init__(self, *, model_name: str, engine: str) -> None:
        self._tags = {"model_name": model_name, "engine": engine}
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        self._counted: dict[tuple[str, Labels], float] = {}

    def set(self, metric: Metric, labels: Labels, value: float) -> None:
        """A gauge's value; a counter's count so far, which grows in Ray by what came since the last time."""
        found = self._metric(metric)
        if isinstance(found, Gauge):
            found.set(value, self._all_tags(metric, labels))
        elif isinstance(found, Counter) and (more := self._more(metric.name, labels, value)) > 0:
            found.inc(more, self._all_tags(metric, labels))

    def observe(self, metric: Metric, bounds: list[float], counts: list[float]) -> None:
        """A histogram's counts so far, each up to its bound. New ones are told to Ray in the middle of their bucket,
        which is where its own agent counts them for the sum."""
        found = self._metric(metric)
        assert isinstance(found, Histogram)
        for (low, high), (before, count) in zip(pairwise([0.0, *bounds]), pairwise([0.0, *counts]), strict=True):
            value = (low + high) / 2 if high != float("inf") else 2 * low
            for _ in range(round(self._more(metric.name, (str(high),), count - before))):
                found.observe(value, self._tags)

    def _more(self, name: str, labels: Labels, count: float) -> float:
        more = count - self._counted.get((name, labels), 0.0)
        if more > 0:
            self._counted[name, labels] = count
        return more

    def _metric(self, metric: Metric) -> Counter | Gauge | Histogram:
        if metric.name not in self._metrics:
            keys, name = tuple(dict.fromkeys((*self._tags, *metric.labels))), ray_name(metric.name)
            if metric.kind == "histogram":
                made = Histogram(name, metric.help, list(metric.buckets), keys)
            else:
                made = (Gauge if metric.kind == "gauge" else Counter)(name, metric.help, keys)
            self._metrics[metric.name] = made
        return self._metrics[metric.name]

    def _all_tags(self, metric: Metric, labels: Labels) -> dict[str, str]:
        return {**self._tags, **dict(zip(metric.labels, labels, strict=True))}


class EngineExport:
    """The figures of an engine."""

    def __init__(self, *, model_name: str, engine: str) -> None:
        self._ray = _RayMetrics(model_name=model_name, engine=engine)

    def tell(self, status: EngineStatus) -> None:
        """Hands them to Ray."""
        for figure in engine_figures(status):
            self._ray.set(METRICS[figure.name], figure.labels, figure.value)


class RankExport:
    """The figures of one rank."""

    def __init__(self, *, model_name: str, engine: str) -> None:
        self._ray = _RayMetrics(model_name=model_name, engine=engine)

    def tell(self, stats: RankStats) -> None:
        """Hands them to Ray."""
        values = {
            "glm5ray:rank_steps": stats.num_steps,
            "glm5ray:rank_step_age_seconds": stats.seconds_in_step,
            "glm5ray:rank_memory_bytes": stats.memory_bytes,
            "glm5ray:rank_device_memory_bytes": stats.device_memory_bytes,
        }
        for name, value in values.items():
            self._ray.set(METRICS[name], (str(stats.rank),), float(value))


class ServerExport:
    """What a server counted."""

    def __init__(self, metrics: ServerMetrics, *, engine: str) -> None:
        self._server = metrics
        self._ray = _RayMetrics(model_name=metrics.model_name, engine=engine)

    def tell(self) -> None:
        """Hands it to Ray."""
        for family in self._server.families():
            if (metric := METRICS.get(family.name)) is None or not metric.in_ray:
                continue
            if metric.kind == "histogram":
                self._tell_buckets(metric, family.samples)
                continue
            for sample in family.samples:
                if sample.name == metric.series:
                    self._ray.set(metric, tuple(sample.labels[key] for key in metric.labels), sample.value)

    def _tell_buckets(self, metric: Metric, samples: list[Sample]) -> None:
        buckets = [(float(s.labels["le"]), s.value) for s in samples if s.name == f"{metric.name}_bucket"]
        self._ray.observe(metric, [bound for bound, _ in buckets], [count for _, count in buckets])


class Ticker:
    """Calls ``body`` every few seconds in a daemon thread, and once more at the end."""

    def __init__(self, body: Callable[[], None], *, every_s: float = EVERY_S) -> None:
        self._body = body
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="glm5ray-metrics", daemon=True)

    def start(self) -> None:
        """Returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Harmless if called twice."""
        self._ended.set()
        self._thread.join(self._every_s)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.wait(self._every_s)
            try:
                self._body()
            except Exception:  # the outermost loop: figures must never end an engine or a server
                logger.exception("figures are handed to Ray no longer")
                return
