"""Settings: every preset loads, every mistake is named with its remedy."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from glm5ray import config as config_module
from glm5ray.config import EngineConfig, config_from_dict, field_names, load_config, preset_names
from glm5ray.errors import ConfigError


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads(name: str) -> None:
    settings = load_config(name)
    assert settings != EngineConfig()
    assert config_from_dict(settings.to_dict()) == settings


def test_presets_are_in_the_package() -> None:
    assert preset_names() == ["cpu-nano", "h200-x1", "h200-x2", "rtx-pro-6000-x8"]


def test_later_sources_win(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("cache: {page_size: 16, num_pages: 5}\nscheduler: {overlap: false}\n")
    settings = load_config(path, ["cache.page_size=32", "kernels.default=reference", "scheduler.max_model_len=auto"])
    assert (settings.cache.page_size, settings.cache.num_pages) == (32, 5)
    assert settings.scheduler.overlap is False
    assert settings.kernels == {"default": "reference"}
    (tmp_path / "empty.yaml").write_text("")
    assert load_config(tmp_path / "empty.yaml") == EngineConfig() == load_config()


def test_every_field_is_documented() -> None:
    """A text stands below each field of a section; that is what ``docs`` and readers see."""
    tree = ast.parse(inspect.getsource(config_module))
    sections = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Section")]
    assert {section.name for section in sections} >= {"ModelSection", "CacheSection", "SchedulerSection"}
    for section in sections:
        for here, below in zip(section.body, [*section.body[1:], ast.Pass()], strict=True):
            if isinstance(here, ast.AnnAssign):
                assert isinstance(below, ast.Expr), f"{section.name}.{ast.unparse(here.target)} has no text below it"


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"cahce": {}}, ["unknown setting cahce", "did you mean 'cache'"]),
        ({"cache": {"pagesize": 1}}, ["unknown setting cache.pagesize", "did you mean 'cache.page_size'"]),
        ({"page_size": 1}, ["unknown setting page_size", "cache.page_size"]),
        ({"cache": 3}, ["cache is 3", "mapping"]),
        ({"cache": {"page_size": "many"}}, ["cache.page_size is 'many'", "whole number"]),
        ({"cache": {"page_size": True}}, ["cache.page_size is True", "whole number"]),
        ({"cache": {"page_size": 0}}, ["cache.page_size is 0", "above 0"]),
        ({"cache": {"num_pages": "all"}}, ["cache.num_pages is 'all'", "'auto'"]),
        ({"cache": {"memory_fraction": 1.5}}, ["cache.memory_fraction is 1.5", "at most 1"]),
        ({"cache": {"prefix_caching": 1}}, ["cache.prefix_caching is 1", "true or false"]),
        ({"scheduler": {"policy": "lifo"}}, ["scheduler.policy is 'lifo'", "'fcfs'", "'priority'"]),
        ({"scheduler": {"max_skips": -1}}, ["scheduler.max_skips is -1"]),
        ({"kernels": {"mla_attention": 3}}, ["kernels is", "provider names"]),
        ({"model": {"path": 3}}, ["model.path is 3", "a text"]),
        ({"cache": {"cpu_memory_gib": float("inf")}}, ["cache.cpu_memory_gib is inf", "finite number"]),
        ({"cache": {"cpu_memory_gib": float("nan")}}, ["cache.cpu_memory_gib is nan", "finite number"]),
        ({"cache": {"cpu_memory_gib": 10**400}}, ["cache.cpu_memory_gib is 1000", "finite number"]),
        ({"cache": {"cpu_memory_gib": "1e999"}}, ["cache.cpu_memory_gib is '1e999'", "finite number"]),
        ({"cache": {"cpu_memory_gib": 1e12}}, ["cache.cpu_memory_gib is 1000000000000.0", "at most"]),
        ({"cache": {"num_pages": 10**12}}, ["cache.num_pages is 1000000000000", "at most 2147483647"]),
        ({"scheduler": {"max_num_seqs": 10**12}}, ["scheduler.max_num_seqs is 1000000000000", "at most"]),
        ({"scheduler": {"max_logprobs": -1}}, ["scheduler.max_logprobs is -1", "0 or more"]),
        (
            {"model": {"weights": "packed", "dtype": "float32", "device": "cuda"}},
            ["model.weights is 'packed'", "model.dtype is 'float32'", "dequantized"],
        ),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(values)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_every_count_has_bounds() -> None:
    for name in field_names():
        section, _, field = name.partition(".")
        if isinstance(getattr(getattr(EngineConfig(), section), field, None), int) and field not in (
            "prefix_caching",
            "overlap",
        ):
            for value in (-1, 10**30):
                with pytest.raises(ConfigError, match=f"{name} is {value}; it must be "):
                    config_from_dict({section: {field: value}})


def test_numbers_as_people_write_them() -> None:
    for text, expected in (("1e-9", 1e-9), ("2E3", 2000.0), ("1.5e+1", 15.0), (".5", 0.5), ("3", 3.0)):
        assert load_config(None, [f"cache.cpu_memory_gib={text}"]).cache.cpu_memory_gib == expected


def test_empty_sections_are_sections(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("cache:\nkernels:\nscheduler:\n")
    assert load_config(tmp_path / "x.yaml") == EngineConfig()
    overrides = ["cache.page_size=4", "kernels.default=reference"]
    settings = load_config(tmp_path / "x.yaml", overrides)
    assert (settings.cache.page_size, settings.kernels) == (4, {"default": "reference"})


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("cache.page_size", "not of the form"),
        ("=3", "not of the form"),
        ("cache..x=3", "not of the form"),
        ("cache.page_size.x=3", "must be a whole number"),
        ("cache.page_size=[1", "not valid YAML"),
        ("cache.page_size=2026-13-45", "not valid YAML"),
        ("cache.page_size=!!bool x", "not valid YAML"),
        ("cache.page_size=" + "[" * 5000, "not valid YAML"),
        ("cache.page_size=\udcff", "not valid YAML"),
        ("cache.pagesize=3", "did you mean 'cache.page_size'"),
    ],
)
def test_bad_overrides(override: str, part: str) -> None:
    with pytest.raises(ConfigError, match=None) as caught:
        load_config(None, [override])
    assert part in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'cpu-nano'"):
        load_config("cpu-nan")
    with pytest.raises(ConfigError, match="cannot read the config file"):
        load_config(tmp_path / "no.yaml")
    for text, part in (("[1, 2]", "must be a mapping"), ("a: [", "not valid YAML"), ("\udcff", "cannot read")):
        path = tmp_path / "bad.yaml"
        path.write_text(text, errors="surrogateescape")
        with pytest.raises(ConfigError, match=part):
            load_config(path)


def test_settings_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().cache.page_size = 3  # type: ignore[misc]
    assert "scheduler.max_num_seqs" in field_names()
    assert EngineConfig().scheduler.max_num_seqs == 2048


def test_every_setting_is_read_by_something() -> None:
    """A field that nothing reads is a promise that nobody keeps."""
    package = Path(config_module.__file__).parent
    source = "\n".join(path.read_text() for path in package.rglob("*.py") if path.name != "config.py")
    unread = [name for name in field_names() if not re.search(rf"\.{name.rpartition('.')[2]}\b", source)]
    assert unread == []
