"""The table of metrics: one row each, wherever they are shown. vLLM's names where vLLM has the figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_TIMES = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One row. Every metric has the label ``model_name`` before its own ``labels``."""

    name: str
    """A counter's without ``_total``, which the text format adds."""
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, in seconds."""
    of: Literal["engine", "server", "rank"] = "engine"
    """Who counts: an engine, for all of its clients; a server, for its own requests; a rank in Ray, for Ray alone."""
    in_ray: bool = True
    """Whether Ray is told, too: it takes samples one by one, so not those of every token."""

    @property
    def series(self) -> str:
        """Name of the series; a histogram has several, which begin so."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("vllm:num_requests_running", "gauge", "Sequences that run."),
        Metric("vllm:num_requests_waiting", "gauge", "Sequences that wait for room."),
        Metric("vllm:kv_cache_usage_perc", "gauge", "Share of the pages that sequences hold, 0 to 1."),
        Metric("vllm:num_preemptions", "counter", "Sequences that gave their pages back to others."),
        Metric("vllm:prefix_cache_queries", "counter", "Prompt tokens that were looked up in the prefix cache."),
        Metric("vllm:prefix_cache_hits", "counter", "Of these, tokens that were found."),
        Metric("vllm:prompt_tokens", "counter", "Prompt tokens of requests that ended.", of="server"),
        Metric("vllm:generation_tokens", "counter", "Tokens sent to clients.", of="server"),
        Metric("vllm:request_success", "counter", "Choices that ended, by reason.", ("finished_reason",), of="server"),
        Metric(
            "vllm:time_to_first_token_seconds",
            "histogram",
            "From a request to its first token.",
            (),
            _LATENCIES,
            of="server",
        ),
        Metric(
            "vllm:inter_token_latency_seconds",
            "histogram",
            "Between two arrivals of tokens of one choice.",
            (),
            _TOKEN_TIMES,
            of="server",
            in_ray=False,
        ),
        Metric(
            "vllm:request_time_per_output_token_seconds",
            "histogram",
            "Mean time between two tokens of a choice that ended, its first token left out.",
            (),
            _TOKEN_TIMES,
            of="server",
        ),
        Metric(
            "vllm:e2e_request_latency_seconds", "histogram", "From a request to its end.", (), _LATENCIES, of="server"
        ),
        Metric("glm5ray:engine_info", "gauge", "1; the labels say which engine it is.", ("engine", "layout")),
        Metric("glm5ray:engine_state", "gauge", "1 for the state that the engine is in.", ("state",)),
        Metric("glm5ray:engine_epoch", "gauge", "Incarnation of the workers."),
        Metric("glm5ray:engine_restarts", "counter", "Times that the workers were replaced."),
        Metric("glm5ray:step_age_seconds", "gauge", "Age of the oldest step in flight."),
        Metric("glm5ray:steps", "counter", "Steps of the engine."),
        Metric("glm5ray:steps_per_second", "gauge", "Steps of the engine a second, over the last ten seconds."),
        Metric("glm5ray:decode_steps", "counter", "Steps in which every sequence had one token."),
        Metric("glm5ray:graph_steps", "counter", "Of these, steps that a CUDA graph computed."),
        Metric("glm5ray:graph_coverage", "gauge", "Share of the decode steps that CUDA graphs computed, 0 to 1."),
        Metric("glm5ray:tokens_scheduled", "counter", "Tokens that went through the model: of prompts, and decoded."),
        Metric("glm5ray:tokens_sampled", "counter", "Tokens that the engine drew, whoever asked for them."),
        Metric("glm5ray:requests_aborted", "counter", "Requests whose client left before the end.", of="server"),
        Metric("glm5ray:corrupted_sequences", "counter", "Sequences whose numbers went wrong."),
        Metric("glm5ray:quarantined_sequences", "counter", "Sequences with which the workers died again and again."),
        Metric("glm5ray:rank_steps", "counter", "Steps that a rank has computed.", ("rank",), of="rank"),
        Metric("glm5ray:rank_step_age_seconds", "gauge", "Age of the step that a rank is in.", ("rank",), of="rank"),
        Metric("glm5ray:rank_memory_bytes", "gauge", "Of the machine's, by a rank's process.", ("rank",), of="rank"),
        Metric("glm5ray:rank_device_memory_bytes", "gauge", "Of the GPU's, by a rank's tensors.", ("rank",), of="rank"),
    )
}


def ray_name(name: str) -> str:
    """``vllm:num_requests_running`` -> ``vllm_num_requests_running``: Ray takes no colon, and puts ``ray_`` before."""
    return name.replace(":", "_")
