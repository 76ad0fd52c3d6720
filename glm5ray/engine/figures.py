"""The figures of an engine's status under the names of the metric table, for whoever shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from glm5ray.engine.client import EngineState

if TYPE_CHECKING:
    from glm5ray.engine.client import EngineStatus


class Figure(NamedTuple):
    """One sample. A counter's value is its count since the engine started."""

    name: str
    """As in :data:`glm5ray.metrics.METRICS`."""
    value: float
    labels: tuple[str, ...] = ()
    """Values of the metric's own labels."""


def engine_figures(status: EngineStatus) -> list[Figure]:
    """All that the table has of an engine; what a server counts (latencies, tokens sent) is not among them."""
    stats = status.scheduler
    values = {
        "vllm:num_requests_running": stats.num_running,
        "vllm:num_requests_waiting": stats.num_waiting,
        "vllm:kv_cache_usage_perc": stats.num_pages_held / max(1, stats.num_pages),
        "vllm:num_preemptions": stats.num_preemptions,
        "vllm:prefix_cache_queries": stats.prefix_query_tokens,
        "vllm:prefix_cache_hits": stats.prefix_hit_tokens,
        "glm5ray:engine_epoch": status.epoch,
        "glm5ray:engine_restarts": status.num_restarts,
        "glm5ray:step_age_seconds": status.seconds_since_step,
        "glm5ray:steps": stats.num_steps,
        "glm5ray:steps_per_second": status.steps_per_second,
        "glm5ray:decode_steps": status.num_decode_steps,
        "glm5ray:graph_steps": status.num_graph_steps,
        "glm5ray:graph_coverage": status.num_graph_steps / max(1, status.num_decode_steps),
        "glm5ray:tokens_scheduled": stats.num_tokens_scheduled,
        "glm5ray:tokens_sampled": stats.num_tokens_sampled,
        "glm5ray:corrupted_sequences": stats.num_corrupted,
        "glm5ray:quarantined_sequences": stats.num_quarantined,
    }
    figures = [Figure(name, float(value)) for name, value in values.items()]
    figures += [Figure("glm5ray:engine_state", float(known is status.state), (known.value,)) for known in EngineState]
    figures.append(Figure("glm5ray:engine_info", 1.0, (status.engine, status.layout)))
    return figures
