"""The Grafana dashboard asks for what is really exported."""

from __future__ import annotations

import importlib.util
import json
import re
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from glm5ray.cli.app import app
from glm5ray.metrics import METRICS, ray_name

if TYPE_CHECKING:
    from types import ModuleType

    from glm5ray.metrics import Metric

ROOT = Path(__file__).parents[2]
NOT_SHOWN = ("glm5ray:engine_info", "glm5ray:engine_epoch", "glm5ray:graph_coverage", "glm5ray:rank_memory_bytes")
"""The coverage is that since the start; the panel has the ratio of the last minutes."""
SELECTOR = re.compile(r'__name__=~"([^"]+)"')


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads((resources.files("glm5ray") / "dashboards" / "grafana.json").read_text("utf-8"))


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def names(expression: str, source: str) -> list[re.Pattern[str]]:
    """What an expression selects by name, when the variable has this value."""
    selectors = SELECTOR.findall(expression)
    assert selectors, expression
    assert len(selectors) == expression.replace("${", "").count("{"), "every selector has a name"
    return [re.compile(selector.replace("${source:raw}", source)) for selector in selectors]


def series(metric: Metric) -> list[str]:
    """What a panel may ask for."""
    return [f"{metric.name}_bucket"] if metric.kind == "histogram" else [metric.series]


def sources(dashboard: dict[str, Any]) -> dict[str, str]:
    (variable,) = (v for v in dashboard["templating"]["list"] if v["name"] == "source")
    assert variable["query"] == ", ".join(f"{o['text']} : {o['value']}" for o in variable["options"])
    return {option["text"]: option["value"] for option in variable["options"]}


def test_every_name_is_one_of_a_running_server(dashboard: dict[str, Any], nano_url: str) -> None:
    httpx.post(f"{nano_url}/v1/completions", json={"prompt": "The sky is", "max_tokens": 3}, timeout=30)
    page = text_string_to_metric_families(httpx.get(f"{nano_url}/metrics").text)
    exported = {sample.name for family in page for sample in family.samples}
    asked = [name for query in queries(dashboard) for name in names(query, sources(dashboard)["server's /metrics"])]
    exported |= {metric.series for metric in METRICS.values() if metric.of == "rank"}  # in Ray alone
    for name in asked:
        assert any(name.fullmatch(known) for known in exported), name.pattern
    shown = {name for name, m in METRICS.items() if any(n.fullmatch(one) for n in asked for one in series(m))}
    assert set(METRICS) - shown == set(NOT_SHOWN), "the others are on no panel"


def test_what_ray_is_told_is_found_there(dashboard: dict[str, Any]) -> None:
    """That Ray really has these names, tests/actors/test_metrics_export.py says."""
    in_ray = {f"ray_{ray_name(name)}" for metric in METRICS.values() if metric.in_ray for name in series(metric)}
    elsewhere = {f"ray_{ray_name(name)}" for metric in METRICS.values() if not metric.in_ray for name in series(metric)}
    found = set()
    for query in queries(dashboard):
        for name in names(query, sources(dashboard)["Ray"]):
            found |= (matches := {known for known in in_ray if name.fullmatch(known)})
            assert matches or any(name.fullmatch(known) for known in elsewhere), name.pattern
    assert in_ray - found == {f"ray_{ray_name(name)}" for name in NOT_SHOWN}


def test_panels_have_places_and_known_variables(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    known = {variable["name"] for variable in dashboard["templating"]["list"]} | {"__rate_interval"}
    for query in queries(dashboard):
        assert set(re.findall(r"\$\{?(\w+)", query)) <= known
        assert all(query.count(a) == query.count(b) for a, b in ("()", "{}", "[]"))


def test_the_file_is_what_its_script_makes(dashboard: dict[str, Any]) -> None:
    assert script().dashboard_json() == dashboard


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grafana_dashboard", ROOT / "scripts" / "grafana_dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_writes_it(dashboard: dict[str, Any], tmp_path: Path) -> None:
    assert json.loads(CliRunner().invoke(app, ["metrics", "grafana"]).stdout) == dashboard
    target = tmp_path / "glm5ray.json"
    assert CliRunner().invoke(app, ["metrics", "grafana", "-o", str(target)]).exit_code == 0
    assert json.loads(target.read_text()) == dashboard
    listed = json.loads(CliRunner().invoke(app, ["metrics", "list", "--json"]).stdout)["metrics"]
    assert [row["at /metrics"] or row["in Ray"] for row in listed] == [
        f"ray_{ray_name(metric.series)}" if metric.of == "rank" else metric.series for metric in METRICS.values()
    ]
