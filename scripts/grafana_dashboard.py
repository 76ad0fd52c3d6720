"""Writes the Grafana dashboard that the package ships: ``python scripts/grafana_dashboard.py``.

Each panel is a line of a table below. A query names its metric so that one dashboard serves both places where the
figures are: ``{__name__=~"${source:raw}vllm[:_]num_requests_running"}`` is the server's
``vllm:num_requests_running`` or Ray's ``ray_vllm_num_requests_running``, as the variable ``source`` says.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).parents[1] / "glm5ray" / "dashboards" / "grafana.json"
WIDTH = 24
BY = "model_name, engine, instance"
"""One line for each engine: a server's page has no engine label, and is an instance of its own."""
LEGEND = "{{model_name}} {{engine}}"


class Panel(NamedTuple):
    """A panel: queries are ``(expression, legend)``; a metric in an expression stands in ``<>``."""

    title: str
    unit: str
    queries: list[tuple[str, str]]
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    description: str = ""


def per_second(metric: str) -> str:
    return f"sum by ({BY}) (rate(<{metric}_total>[$__rate_interval]))"


def total(metric: str) -> str:
    return f"sum by ({BY}) (<{metric}>)"


def ratio(over: str, under: str) -> str:
    return f"{per_second(over)} / ({per_second(under)} > 0)"


def quantiles(metric: str) -> list[tuple[str, str]]:
    return [
        (
            f"histogram_quantile({q}, sum by (le, model_name) (rate(<{metric}_bucket>[$__rate_interval])))",
            f"p{int(q * 100)} {{{{model_name}}}}",
        )
        for q in (0.5, 0.9, 0.99)
    ]


def _of_rank(expression: str) -> str:
    return f"sum by (model_name, engine, rank) ({expression})"


RANK = "{{engine}} rank {{rank}}"
ROWS: dict[str, list[Panel]] = {
    "Engine": [
        Panel(
            "State",
            "none",
            [(f"max by (state, {BY}) (<glm5ray:engine_state>) == 1", "{{model_name}} {{engine}}: {{state}}")],
            kind="stat",
            width=8,
            height=4,
            description="starting, ready, recovering (workers are replaced, or a step takes long), failed or stopped.",
        ),
        Panel("Steps a second", "none", [(total("glm5ray:steps_per_second"), LEGEND)], "stat", 4, 4),
        Panel("Running", "none", [(total("vllm:num_requests_running"), LEGEND)], "stat", 4, 4),
        Panel("Waiting", "none", [(total("vllm:num_requests_waiting"), LEGEND)], "stat", 4, 4),
        Panel("Restarts", "none", [(total("glm5ray:engine_restarts_total"), LEGEND)], "stat", 4, 4),
    ],
    "Throughput": [
        Panel(
            "Tokens drawn a second",
            "none",
            [(per_second("glm5ray:tokens_sampled"), LEGEND)],
            description="By the engine, for all of its clients.",
        ),
        Panel(
            "Tokens through the model a second",
            "none",
            [(per_second("glm5ray:tokens_scheduled"), LEGEND)],
            description="Of prompts, and decoded ones; without those found in the prefix cache.",
        ),
        Panel("Steps a second", "none", [(per_second("glm5ray:steps"), LEGEND)]),
        Panel("Tokens in a step", "none", [(ratio("glm5ray:tokens_scheduled", "glm5ray:steps"), LEGEND)]),
        Panel(
            "Decode steps from CUDA graphs",
            "percentunit",
            [(ratio("glm5ray:graph_steps", "glm5ray:decode_steps"), LEGEND)],
        ),
        Panel(
            "Sequences",
            "none",
            [
                (total("vllm:num_requests_running"), "running {{model_name}} {{engine}}"),
                (total("vllm:num_requests_waiting"), "waiting {{model_name}} {{engine}}"),
            ],
        ),
        Panel(
            "Tokens of the server a second",
            "none",
            [
                (per_second("vllm:generation_tokens"), "sent {{model_name}}"),
                (per_second("vllm:prompt_tokens"), "prompts {{model_name}}"),
            ],
        ),
    ],
    "Latency (of a server's requests)": [
        Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds"), width=12),
        Panel("Time per token of a request", "s", quantiles("vllm:request_time_per_output_token_seconds"), width=12),
        Panel("Between two arrivals of tokens", "s", quantiles("vllm:inter_token_latency_seconds"), width=12),
        Panel("Whole request", "s", quantiles("vllm:e2e_request_latency_seconds"), width=12),
    ],
    "KV cache": [
        Panel("Pages held", "percentunit", [(f"max by ({BY}) (<vllm:kv_cache_usage_perc>)", LEGEND)]),
        Panel(
            "Prompt tokens found in the prefix cache",
            "percentunit",
            [(ratio("vllm:prefix_cache_hits", "vllm:prefix_cache_queries"), LEGEND)],
        ),
        Panel("Preemptions a second", "none", [(per_second("vllm:num_preemptions"), LEGEND)]),
    ],
    "Health": [
        Panel(
            "Age of the oldest step",
            "s",
            [(f"max by ({BY}) (<glm5ray:step_age_seconds>)", LEGEND)],
            description="Grows while a step hangs; the workers are replaced at recovery.step_timeout_s.",
        ),
        Panel(
            "Answers a second, by how they ended",
            "none",
            [
                (
                    "sum by (finished_reason, model_name) (rate(<vllm:request_success_total>[$__rate_interval]))",
                    "{{finished_reason}} {{model_name}}",
                )
            ],
        ),
        Panel(
            "What went wrong",
            "none",
            [
                (total("glm5ray:engine_restarts_total"), "restarts {{engine}}"),
                (total("glm5ray:corrupted_sequences_total"), "corrupted {{engine}}"),
                (total("glm5ray:quarantined_sequences_total"), "quarantined {{engine}}"),
                (total("glm5ray:requests_aborted_total"), "aborted {{engine}}"),
            ],
        ),
    ],
    "Ranks (in Ray)": [
        Panel("Steps a second", "none", [(_of_rank("rate(<glm5ray:rank_steps_total>[$__rate_interval])"), RANK)]),
        Panel("Age of the step in progress", "s", [(_of_rank("<glm5ray:rank_step_age_seconds>"), RANK)]),
        Panel("GPU memory of tensors", "bytes", [(_of_rank("<glm5ray:rank_device_memory_bytes>"), RANK)]),
    ],
}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def select(expression: str) -> str:
    """``<vllm:name>`` -> a selector by name, source and model."""
    pattern = re.compile(r"<(vllm|glm5ray):(\w+)>")
    return pattern.sub(r'{__name__=~"${source:raw}\1[:_]\2", model_name=~"$model"}', expression)


def panel_json(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"textMode": "name" if panel.title == "State" else "auto"} if panel.kind == "stat" else {},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": select(expression), "legendFormat": legend}
            for i, (expression, legend) in enumerate(panel.queries)
        ],
    }


def panels_json() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place})
        x, y, height = 0, y + 1, 0
        for panel in row:
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            panels.append(panel_json(len(panels) + 1, panel, x, y))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return panels


def variables_json() -> list[dict[str, Any]]:
    models = 'label_values({__name__=~"${source:raw}vllm[:_]num_requests_running"}, model_name)'
    places = {"server's /metrics": "()", "Ray": "ray_"}
    options = [{"text": text, "value": value, "selected": value == "()"} for text, value in places.items()]
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1},
        {
            "name": "source",
            "label": "Figures of",
            "type": "custom",
            "query": ", ".join(f"{text} : {value}" for text, value in places.items()),
            "options": options,
            "current": options[0],
        },
        {
            "name": "model",
            "label": "Model",
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": models, "refId": "models"},
            "definition": models,
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def dashboard_json() -> dict[str, Any]:
    return {
        "uid": "glm5ray",
        "title": "glm5ray",
        "tags": ["glm5ray"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "templating": {"list": variables_json()},
        "annotations": {"list": []},
        "panels": panels_json(),
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(dashboard_json(), indent=1) + "\n")
    print(f"wrote {TARGET}")
