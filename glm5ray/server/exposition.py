"""``/metrics``: the server's own counts, and the engine's figures of this moment, in Prometheus's text format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from glm5ray.engine.figures import engine_figures
from glm5ray.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric as Family

    from glm5ray.engine.client import EngineStatus


class ServerMetrics:
    """What happened on this server. Its registry is its own, so several servers may live in one process."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self._registry = CollectorRegistry()
        self.ttft_s = self._histogram("vllm:time_to_first_token_seconds")
        self.inter_token_s = self._histogram("vllm:inter_token_latency_seconds")
        self.time_per_token_s = self._histogram("vllm:request_time_per_output_token_seconds")
        self.latency_s = self._histogram("vllm:e2e_request_latency_seconds")
        self.prompt_tokens = self._counter("vllm:prompt_tokens").labels(model_name)
        self.generation_tokens = self._counter("vllm:generation_tokens").labels(model_name)
        self.aborted = self._counter("glm5ray:requests_aborted").labels(model_name)
        self._ended = self._counter("vllm:request_success")

    def ended(self, reason: str) -> None:
        """One choice ended."""
        self._ended.labels(self.model_name, reason).inc()

    def families(self) -> Iterable[Family]:
        """What was counted so far; may be asked from any thread."""
        return self._registry.collect()

    def text(self, status: EngineStatus | None) -> bytes:
        """The whole page; without a status, only the server's part."""
        registry = CollectorRegistry()
        if status is not None:
            registry.register(_EngineFigures(self.model_name, status))
        return generate_latest(self._registry) + generate_latest(registry)

    def _counter(self, name: str) -> Counter:
        metric = METRICS[name]
        return Counter(name, metric.help, ("model_name", *metric.labels), registry=self._registry)

    def _histogram(self, name: str) -> Histogram:
        metric = METRICS[name]
        family = Histogram(name, metric.help, ("model_name",), registry=self._registry, buckets=metric.buckets)
        return family.labels(self.model_name)


class _EngineFigures:
    """A collector of one status."""

    def __init__(self, model_name: str, status: EngineStatus) -> None:
        self._model_name = model_name
        self._status = status

    def collect(self) -> Iterator[Family]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for figure in engine_figures(self._status):
            metric = METRICS[figure.name]
            if (family := families.get(metric.name)) is None:
                kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
                family = families[metric.name] = kind(metric.name, metric.help, labels=["model_name", *metric.labels])
            family.add_metric([self._model_name, *figure.labels], figure.value)
        yield from families.values()
