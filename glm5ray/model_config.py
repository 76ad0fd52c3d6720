"""What a checkpoint's ``config.json`` says of a ``glm_moe_dsa`` model. Nothing else in the package reads that file.

Fields have the checkpoint's own names. Traps that public checkpoints set:

* ``rope_theta`` is nested in ``rope_parameters`` (GLM-5.2: 8e6); a reader of the top level alone gets a default.
* ``head_dim`` is 64 in GLM-5, 192 in GLM-5.2, and means nothing: the rope part is ``qk_rope_head_dim``.
* IndexShare comes as ``indexer_types``, or as ``index_topk_pattern``, or as ``index_topk_freq`` with an offset whose
  default differs between engines; a wrong length would silently degrade answers.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from glm5ray.errors import CheckpointError

IndexerType = Literal["full", "shared"]
MlpType = Literal["dense", "sparse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes and constants of one GLM-5 family model. See ``docs/architecture.md`` for the forward pass."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    """Width of the dense layers' MLP."""
    moe_intermediate_size: int
    """Width of one expert."""
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[IndexerType, ...]
    """Per layer: its own selection, or that of the nearest full layer before it."""
    mlp_layer_types: tuple[MlpType, ...]
    rope_theta: float
    rms_norm_eps: float
    routed_scaling_factor: float
    norm_topk_prob: bool
    n_group: int
    topk_group: int
    max_position_embeddings: int
    num_nextn_predict_layers: int
    """MTP layers, stored behind the others."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    """Of the unquantised tensors, as the checkpoint says: ``bfloat16`` or ``float32``."""
    quantization: dict[str, Any] | None = field(default=None, compare=False)
    """The checkpoint's ``quantization_config`` (or ``hf_quant_config.json``) as it stands."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_full_index_layers(self) -> int:
        """Layers with an indexer and an index key cache, MTP not counted."""
        return self.indexer_types.count("full")

    @classmethod
    def from_checkpoint(cls, folder: str | Path) -> ModelConfig:
        """Reads ``folder/config.json``, ``hf_quant_config.json`` and ``generation_config.json``, the last two if they
        are there.

        Raises :class:`CheckpointError` with the file, the field and the value.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is no folder; name a checkpoint folder that holds config.json")
        values = read_json(folder / "config.json")
        if values.get("quantization_config") is None and is_there(folder / "hf_quant_config.json"):
            quantization = read_json(folder / "hf_quant_config.json").get("quantization")
            values = {**values, "quantization_config": quantization}
        config = cls.from_dict(values, where=str(folder / "config.json"))
        generation = folder / "generation_config.json"
        if is_there(generation):
            more = _eos_token_ids(_Reader(read_json(generation), str(generation)), config.vocab_size)
            config = replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))
        return config

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "config.json") -> ModelConfig:
        """The same from a mapping; ``where`` names it in errors."""
        if values.get("model_type") != "glm_moe_dsa":
            raise CheckpointError(
                f"{where}: model_type is {values.get('model_type')!r}; this engine runs 'glm_moe_dsa' "
                "(GLM-5, 5.1, 5.2, 5.3)"
            )
        read = _Reader(_with_n_routed_experts(values, where), where)
        num_layers = read.size("num_hidden_layers")
        config = cls(
            **{name: read.size(name) for name in _SIZES},
            num_hidden_layers=num_layers,
            n_group=read.size("n_group", 1),
            topk_group=read.size("topk_group", 1),
            n_shared_experts=read.count("n_shared_experts", 1),
            num_nextn_predict_layers=read.count("num_nextn_predict_layers", 0),
            indexer_types=_indexer_types(read, num_layers),
            mlp_layer_types=_mlp_layer_types(read, num_layers),
            rope_theta=_rope_theta(read),
            rms_norm_eps=read.number("rms_norm_eps", 1e-5),
            routed_scaling_factor=read.number("routed_scaling_factor", 1.0),
            norm_topk_prob=read.flag("norm_topk_prob", True),
            eos_token_ids=_eos_token_ids(read, read.size("vocab_size")),
            dtype=str(values.get("dtype") or values.get("torch_dtype") or "bfloat16").removeprefix("torch."),
            quantization=read.mapping("quantization_config"),
        )
        _check(config, read)
        return config


_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "max_position_embeddings",
)


MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000
"""Above these a field is damage and not a size; what loops over layers must not be asked for billions."""


class _Reader:
    """Typed look-ups in ``config.json`` whose errors name the file, the field and the value."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {message}")

    def count(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.error(f"{name} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(f"{name} is {value!r}; it must be a whole number")
        most = MAX_LAYERS if name in ("num_hidden_layers", "num_nextn_predict_layers") else MAX_SIZE
        if value > most:
            raise self.error(f"{name} is {value}; it must be at most {most}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        value = self.count(name, default)
        if value == 0:
            raise self.error(f"{name} is 0; it must be above 0")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(f"{name} is {value!r}; it must be a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} is {value!r}; it must be true or false")
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"{name} is {value!r}; it must be a mapping")
        return value

    def layer_list(self, name: str, num_layers: int, allowed: tuple[str, ...]) -> tuple[Any, ...] | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or any(entry not in allowed for entry in value):
            raise self.error(f"{name} must be a list of {' and '.join(allowed)}")
        if len(value) != num_layers:
            raise self.error(f"{name} has {len(value)} entries for {num_layers} layers")
        return tuple(value)


def _with_n_routed_experts(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Some exports name the number of experts ``num_experts``, or give both."""
    named = {name: values[name] for name in ("n_routed_experts", "num_experts") if values.get(name) is not None}
    if len(set(map(repr, named.values()))) > 1:
        raise CheckpointError(
            f"{where}: n_routed_experts is {named['n_routed_experts']!r} but num_experts is {named['num_experts']!r}"
        )
    return {**values, "n_routed_experts": next(iter(named.values()), None)}


def _rope_theta(read: _Reader) -> float:
    nested = read.mapping("rope_parameters") or read.mapping("rope_scaling") or {}
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind != "default":
        raise read.error(f"rope_parameters.rope_type is {kind!r}; the GLM-5 family has 'default' only")
    theta = nested.get("rope_theta", read.values.get("rope_theta"))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
        raise read.error(f"rope_parameters.rope_theta is {theta!r}; it must be a number above 0")
    return float(theta)


def _indexer_types(read: _Reader, num_layers: int) -> tuple[IndexerType, ...]:
    """``indexer_types`` wins; else ``index_topk_pattern`` (a letter a layer, "F" full or "S" shared); else frequency
    and offset.

    Layer i is full iff ``max(i - offset + 1, 0) % freq == 0``. GLM-5.2 writes offset 3, from which its
    ``indexer_types`` follow. Where the field is absent the offset is 2, as in transformers and vLLM.
    """
    listed: tuple[IndexerType, ...] | None = read.layer_list("indexer_types", num_layers, ("full", "shared"))
    if listed is None:
        pattern = read.values.get("index_topk_pattern")
        if pattern is not None:
            if not isinstance(pattern, str) or len(pattern) != num_layers or set(pattern) - {"F", "S"}:
                raise read.error(
                    f"index_topk_pattern is {pattern!r}; it must have an F or S for each of {num_layers} layers"
                )
            listed = tuple("shared" if letter == "S" else "full" for letter in pattern)
        else:
            freq, offset = read.size("index_topk_freq", 1), read.count("index_skip_topk_offset", 2)
            listed = tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(num_layers))
    if listed[0] != "full":
        raise read.error("the first layer is 'shared' but has no full layer before it whose selection it could use")
    return listed


def _mlp_layer_types(read: _Reader, num_layers: int) -> tuple[MlpType, ...]:
    listed = read.layer_list("mlp_layer_types", num_layers, ("dense", "sparse"))
    if listed is not None:
        return listed
    first_sparse, freq = read.count("first_k_dense_replace", 3), read.size("moe_layer_freq", 1)
    return tuple("sparse" if i >= first_sparse and i % freq == 0 else "dense" for i in range(num_layers))


def _eos_token_ids(read: _Reader, vocab_size: int) -> tuple[int, ...]:
    """Ids that the vocabulary does not have (left over in cut-down models) are dropped: they can never be sampled."""
    value = read.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise read.error(f"eos_token_id is {value!r}; it must be a token id or a list of them")
    return tuple(i for i in ids if i < vocab_size)


def _check(config: ModelConfig, read: _Reader) -> None:
    fixed = {"hidden_act": "silu", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    for name, supported in fixed.items():
        if read.values.get(name, supported) != supported:
            raise read.error(f"{name} is {read.values[name]!r}; this engine has {supported!r} only")
    for name in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if read.values.get(name, False):
            raise read.error(f"{name} is true; no model of the GLM-5 family has that")
    for name in ("rope_interleave", "indexer_rope_interleave"):
        if read.values.get(name, True) is not True:
            raise read.error(f"{name} is {read.values[name]!r}; GLM-5 rotates interleaved pairs")
    if config.qk_rope_head_dim % 2 or config.index_head_dim < config.qk_rope_head_dim:
        raise read.error(
            f"qk_rope_head_dim is {config.qk_rope_head_dim}; "
            f"it must be even and at most index_head_dim, {config.index_head_dim}"
        )
    if config.num_experts_per_tok > config.n_routed_experts:
        raise read.error(
            f"num_experts_per_tok is {config.num_experts_per_tok}; "
            f"it must be at most n_routed_experts, {config.n_routed_experts}"
        )
    if config.n_routed_experts % config.n_group or config.topk_group > config.n_group:
        raise read.error(
            f"n_group {config.n_group} and topk_group {config.topk_group} do not fit {config.n_routed_experts} experts"
        )
    if config.dtype not in ("bfloat16", "float32", "float16"):
        raise read.error(f"dtype is {config.dtype!r}; known: bfloat16, float32, float16")


def is_there(path: Path) -> bool:
    """Whether an optional file of a checkpoint is there, be it as a link to nowhere: that is a damaged checkpoint, and
    not one without the file."""
    return os.path.lexists(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from ``path``. Raises :class:`CheckpointError` that names the file."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is no regular file")
    try:
        values = json.loads(path.read_text("utf-8"), object_pairs_hook=unique_keys)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # bad UTF-8, bad JSON, a name twice, a number or nesting out of reason
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}; it must be a JSON object")
    return values


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.loads(object_pairs_hook=...)``: a name that comes twice is an error and not the last value. Raises
    ``ValueError``."""
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{twice!r} is there twice")
    return values
