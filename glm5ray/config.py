"""Settings of the engine: frozen dataclasses, and how YAML files and ``--set`` flags become them.

Sources, later ones win: the defaults here, one preset or YAML file (``--config``), ``--set section.field=value``.
An unknown key is an error that suggests the nearest known one. A class is given the section that it needs, never the
whole. What the checkpoint says (:mod:`glm5ray.model_config`) and what the machine allows
(:class:`glm5ray.protocol.Capacity`) are other types.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from glm5ray.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Auto = Literal["auto"]

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_HIGHEST: dict[str, int] = {
    "parallel.tp_size": 2**12,
    "parallel.ep_size": 2**12,
    "parallel.dp_size": 2**12,
    "parallel.ranks_per_gpu": 2**6,
    "cache.page_size": 2**16,
    "cache.num_pages": 2**31 - 1,
    "cache.cpu_memory_gib": 2**20,
    "runner.max_graph_seqs": 2**20,
    "parallel.cpu_threads": 2**12,
    "recovery.start_timeout_s": 2**20,
    "recovery.load_timeout_s": 2**20,
    "recovery.step_timeout_s": 2**20,
    "recovery.stalled_after_s": 2**20,
    "scheduler.max_num_seqs": 2**20,
    "scheduler.max_num_batched_tokens": 2**24,
    "scheduler.max_model_len": 2**24,
    "scheduler.max_skips": 2**31 - 1,
    "scheduler.max_logprobs": 2**20,
}
"""Above what any machine has, and small enough for the integers that count steps, pages and slots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection:
    """Which weights, and how they are held."""

    path: str = "nano"
    """Checkpoint folder, or the name of a model inside the package (``nano``)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of activations and unquantised weights; auto: float32 on a CPU, the checkpoint's on a GPU."""
    norm_eps: Literal["checkpoint", "huggingface"] = "checkpoint"
    """Epsilon of the two latent norms in MLA: the checkpoint's rms_norm_eps, as vLLM and SGLang do, or 1e-6 as
    transformers does.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is one."""
    weights: Literal["auto", "packed", "dequantized"] = "auto"
    """How NVFP4 experts are held: packed, as in the files, or dequantized to ``dtype``; auto: packed on a GPU in
    bfloat16. On a GPU packed needs bfloat16."""
    load_format: Literal["checkpoint", "dummy"] = "checkpoint"
    """dummy: random weights in the layout that ``config.json`` in ``path`` describes; no other file is needed."""
    dummy_routing: Literal["weights", "uniform"] = "weights"
    """With dummy weights, which experts a token has: those that its random router chooses, or, to measure what balanced
    routing costs, any, each as likely; the router is computed all the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSection:
    """How the work is split over ranks."""

    tp_size: int = 1
    """Ranks that split heads, vocabulary and expert columns."""
    ep_size: int = 1
    """Ranks that hold whole experts each."""
    dp_size: int = 1
    """Groups of tp_size ranks that have sequences and pages of their own; the experts are shared by all, so ep_size is
    then dp_size x tp_size. max_num_seqs, max_num_batched_tokens and num_pages are those of each group."""
    ranks_per_gpu: int = 1
    """Above 1: so many ranks share each GPU, with gloo instead of NCCL, which refuses that. To try a layout on fewer
    GPUs than it needs; it is slow."""
    cpu_threads: int | Auto = "auto"
    """Threads with which PyTorch computes on the CPU in each rank (engines in Ray; OMP_NUM_THREADS does not count, for
    Ray sets it); auto: the cores of a machine shared among its ranks."""

    @property
    def layout(self) -> str:
        """``tp 2, ep 2``."""
        sizes = {"dp": self.dp_size, "tp": self.tp_size, "ep": self.ep_size}
        return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "tp 1"

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.dp_size * self.tp_size if self.dp_size > 1 else max(self.tp_size, self.ep_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSection:
    """The KV cache."""

    page_size: int = 64
    """Tokens per page."""
    num_pages: int | Auto = "auto"
    """auto: as many as memory_fraction of the device leaves beside weights and what a step needs; on a CPU as many as
    cpu_memory_gib holds."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """auto: the model's type; fp8: latents and index keys in e4m3 with scales, 656 and 132 bytes a token and layer for
    GLM-5 where bfloat16 takes 1,152 and 256."""
    memory_fraction: float = 0.90
    """Share of a GPU's memory for weights, workspaces and pages."""
    cpu_memory_gib: float = 1.0
    """Memory for pages on a CPU, in GiB."""
    prefix_caching: bool = True
    """Reuse the pages of prompts that begin alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerSection:
    """Limits of a step and the order of waiting requests."""

    max_num_seqs: int = 2048
    """Most sequences that run at once."""
    max_num_batched_tokens: int = 4096
    """Most tokens in one step; longer prompts are computed in chunks."""
    max_model_len: int | Auto = "auto"
    """Most tokens of one sequence; auto: what the model allows and the pages can hold."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of waiting requests: first come first served, or by priority with ageing."""
    max_skips: int = 16
    """How many later requests may pass a waiting one that does not fit yet, before all wait for it."""
    max_logprobs: int = 20
    """Most log-probabilities that a request may ask for at a position."""
    overlap: bool | Auto = "auto"
    """Schedule the next step while one runs; auto: if the device works beside Python, as a GPU does. On a CPU
    nothing is gained, and the same cores are wanted twice (docs/adr/0007-one-thread-for-torch.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSection:
    """How decode steps are computed."""

    cuda_graphs: bool | Literal["auto", "emulate"] = "auto"
    """Decode steps from CUDA graphs, captured before the first request. true: one rank, on a GPU, with kernels that can
    be captured, or an error; auto: where that is so. emulate: the same fixed batches without graphs, to test them on
    any device."""
    max_graph_seqs: int = 1024
    """Sequences of the largest graph; max_num_seqs if that is less. Larger steps run eagerly."""
    warm_up: bool = True
    """On a GPU, compute steps of every kind before the first request, so that none waits for a kernel's compiler."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverySection:
    """When a start or a step counts as one that hangs."""

    start_timeout_s: float = 120.0
    """Seconds for the processes of all ranks to come up, and again for them to meet (engines in Ray)."""
    load_timeout_s: float = 3600.0
    """Seconds for all ranks to load the model (engines in Ray): 400 GB from a slow disk take this long."""
    step_timeout_s: float = 300.0
    """Seconds after which the workers of a step that has not ended are replaced (engines in Ray). Long enough for
    kernels that compile in their first step."""
    stalled_after_s: float = 4.0
    """Age of a step in seconds from which on the status says that the engine is stalled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """All settings of one engine."""

    model: ModelSection = field(default_factory=ModelSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    cache: CacheSection = field(default_factory=CacheSection)
    scheduler: SchedulerSection = field(default_factory=SchedulerSection)
    runner: RunnerSection = field(default_factory=RunnerSection)
    recovery: RecoverySection = field(default_factory=RecoverySection)
    kernels: dict[str, str] = field(default_factory=dict)
    """Op -> provider (``mla_attention: reference``), or ``default`` -> provider for all that it can serve."""

    def __post_init__(self) -> None:
        _check_ranges(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for logs and reports."""
        return dataclasses.asdict(self)


def load_config(source: str | Path | None = None, overrides: Iterable[str] = ()) -> EngineConfig:
    """The engine's settings from a preset's name or a YAML file, and ``section.field=value`` strings.

    Raises :class:`ConfigError` with the field, the value and the remedy.
    """
    values: dict[str, Any] = {}
    if source is not None:
        values = _read_yaml(source)
    for override in overrides:
        _apply_override(values, override)
    return config_from_dict(values)


def config_from_dict(values: Mapping[str, Any]) -> EngineConfig:
    """``{"cache": {"page_size": 16}}`` -> :class:`EngineConfig`; absent fields keep their defaults."""
    return _build(EngineConfig, values, "")


def preset_names() -> list[str]:
    """Presets inside the package, each named for its hardware."""
    folder = resources.files("glm5ray") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def field_names() -> list[str]:
    """Every ``section.field`` that can be set."""
    names = []
    for section in dataclasses.fields(EngineConfig):
        kind = get_type_hints(EngineConfig)[section.name]
        if dataclasses.is_dataclass(kind):
            names += [f"{section.name}.{f.name}" for f in dataclasses.fields(kind)]
        else:
            names.append(section.name)
    return names


def _read_yaml(source: str | Path) -> dict[str, Any]:
    path = Path(source)
    if not path.suffix and not path.exists():
        preset = resources.files("glm5ray") / "presets" / f"{source}.yaml"
        if not preset.is_file():
            raise ConfigError(f"no preset is called {str(source)!r}{nearest(str(source), preset_names())}")
        text = preset.read_text("utf-8")
    else:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the config file {path}: {error}") from error
    values = _parse_yaml(text, str(source))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{source} holds a {type(values).__name__}; it must be a mapping of sections")
    return values


def _apply_override(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    path = name.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(f"--set {override!r} is not of the form section.field=value, as in cache.page_size=64")
    target = values
    for part in path[:-1]:
        if target.get(part) is None:  # also a section that a file names and leaves empty
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            raise ConfigError(f"--set {override!r}: {part} is no section")
    target[path[-1]] = _parse_yaml(text, f"--set {override!r}: the value")


def _parse_yaml(text: str, what: str) -> Any:
    try:
        return yaml.safe_load(text)
    # PyYAML lets out what its constructors raise: 2026-13-45 is a ValueError, !!bool x a KeyError
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        why = " ".join(str(error).split())  # PyYAML shows the place on lines of its own
        raise ConfigError(f"{what} is not valid YAML: {why}") from error


def _build(kind: Any, values: Any, where: str) -> Any:
    if not isinstance(values, dict | types.MappingProxyType):
        raise ConfigError(f"{where.rstrip('.') or 'the config'} is {values!r}; it must be a mapping of its fields")
    hints = get_type_hints(kind)
    built = {}
    for key, value in values.items():
        if key not in hints:
            hint = nearest(f"{where}{key}", field_names()) if where else nearest(str(key), [*hints, *field_names()])
            raise ConfigError(f"unknown setting {where}{key}{hint}")
        built[key] = _convert(hints[key], value, f"{where}{key}")
    return kind(**built)


def _convert(hint: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(hint, value if value is not None else {}, f"{name}.")
    if get_origin(hint) is dict:
        value = {} if value is None else value
        if not isinstance(value, dict) or not all(isinstance(x, str) for pair in value.items() for x in pair):
            raise ConfigError(f"{name} is {value!r}; it must map op names to provider names")
        return dict(value)
    choices: list[str] = []
    for option in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        if get_origin(option) is Literal:
            if value in get_args(option):
                return value
            choices += [repr(x) for x in get_args(option)]
        elif option is float and (number := _finite_number(value)) is not None:
            return number
        elif option is not float and isinstance(value, option) and not (option is int and isinstance(value, bool)):
            return value
        else:
            choices.append(
                {"int": "a whole number", "float": "a finite number", "bool": "true or false", "str": "a text"}[
                    option.__name__
                ]
            )
    raise ConfigError(f"{name} is {value!r}; it must be {' or '.join(choices)}")


def _finite_number(value: Any) -> float | None:
    """``value`` as a number, if it is one. YAML 1.1 takes ``1e-9``, without a point, for a text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number and not (isinstance(value, str) and _NUMBER.fullmatch(value)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _check_ranges(config: EngineConfig) -> None:
    for name, highest in _HIGHEST.items():
        section, _, field_name = name.partition(".")
        value = getattr(getattr(config, section), field_name)
        if value == "auto":
            continue
        if field_name in ("max_skips", "max_logprobs"):
            if value < 0:
                raise ConfigError(f"{name} is {value}; it must be 0 or more")
        elif not value > 0:
            raise ConfigError(f"{name} is {value}; it must be above 0")
        if value > highest:
            raise ConfigError(f"{name} is {value}; it must be at most {highest}")
    if config.model.dummy_routing == "uniform" and config.model.load_format != "dummy":
        raise ConfigError(
            "model.dummy_routing is 'uniform', which would change what a real model says; set model.load_format=dummy, "
            "or remove it"
        )
    model = config.model
    if (model.weights, model.device, model.dtype) == ("packed", "cuda", "float32"):
        raise ConfigError(
            "model.weights is 'packed' and model.dtype is 'float32'; on cuda NVFP4 experts are computed in bfloat16: "
            "set model.dtype to bfloat16, or model.weights to dequantized"
        )
    parallel = config.parallel
    if parallel.dp_size > 1 and parallel.ep_size != parallel.world_size:
        raise ConfigError(
            f"parallel.ep_size is {parallel.ep_size}; with parallel.dp_size {parallel.dp_size} and parallel.tp_size "
            f"{parallel.tp_size} all {parallel.world_size} ranks share the experts: set it to {parallel.world_size}"
        )
    if parallel.ep_size > 1 and parallel.ep_size % parallel.tp_size:
        raise ConfigError(
            f"parallel.ep_size is {parallel.ep_size} and parallel.tp_size is {parallel.tp_size}; both split the same "
            "ranks, so ep_size must be 1 or a multiple of tp_size"
        )
    if not 0.0 < config.cache.memory_fraction <= 1.0:
        raise ConfigError(f"cache.memory_fraction is {config.cache.memory_fraction}; it must be above 0 and at most 1")
