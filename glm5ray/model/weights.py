"""Checkpoint folder -> this rank's weights. Strict both ways: each tensor is used or knowingly left out, each
parameter filled once.

Everything is checked from the headers before the first weight is read, then the weights are read in the order in
which they lie in the files, each rank's piece alone, dequantised one at a time into parameters that are allocated
beforehand.

What is checked: names, types and shapes of all tensors; of the values read, that scales are finite and not negative,
and that vectors (norms, biases) are finite. The values of matrices are not looked at.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from glm5ray.errors import CheckpointError
from glm5ray.model.name_table import (
    Placement,
    ShardSpec,
    WeightSpec,
    check_shard,
    checkpoint_weights,
    mtp_layers,
    mtp_weights,
    place_weight,
)
from glm5ray.model.safetensors_reader import CheckpointFiles, TensorEntry
from glm5ray.quantization.dequantize import dequantize, find_bad_scale
from glm5ray.quantization.formats import FLOAT_DTYPES, PART_SUFFIXES, PLAIN, StoredPart, WeightFormat, detect_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from glm5ray.model_config import ModelConfig

__all__ = ["ShardSpec", "load_shard", "match_weights", "resolve_checkpoint"]

logger = logging.getLogger(__name__)

_KNOWN_SKIPS = re.compile(
    r"\.self_attn\.(\w+\.)?[kqv]_scale$"  # of an FP8 KV cache; this engine's scales are its own
    r"|\.rotary_emb\.inv_freq$"  # follows from rope_theta
)
_MTP_SKIPS = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the model's embedding and head that some exports put into MTP layers."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight, and the tensors of the checkpoint that stand for it."""

    spec: WeightSpec
    format: WeightFormat
    parts: dict[str, TensorEntry]
    """By suffix. A vector has one, under ``weight``."""


@dataclass(frozen=True, slots=True)
class MatchedWeights:
    """A checkpoint's tensors, sorted by what they are for."""

    weights: list[StoredWeight]
    mtp: list[StoredWeight]
    """Empty where the checkpoint has no MTP layer."""
    skipped: list[TensorEntry]
    """Tensors that are left out whatever is loaded."""


def resolve_checkpoint(name: str) -> Path:
    """The folder of a checkpoint: ``nano`` for the one inside the package, else a path.

    Raises :class:`CheckpointError` that names the nearest thing there is.
    """
    if name == "nano":
        folder = Path(str(resources.files("glm5ray"))) / "nano" / "checkpoint"
        if not (folder / "config.json").is_file():
            raise CheckpointError("this installation has no 'nano' model inside; name a checkpoint folder instead")
        return folder
    folder = Path(name).expanduser()
    if not folder.exists():
        around = [str(folder.parent / entry.name) for entry in _subfolders(folder.parent)]
        close = get_close_matches(str(folder), around, n=1) or get_close_matches(name, ["nano"], n=1)
        hint = (
            f"; did you mean '{close[0]}'?"
            if close
            else "; name a checkpoint folder, or 'nano' for the one inside the package"
        )
        raise CheckpointError(f"there is no checkpoint folder {name}{hint}")
    if not folder.is_dir():
        raise CheckpointError(f"{name} is a file; name the folder that holds config.json and the safetensors files")
    return folder


def load_shard(
    folder: Path,
    config: ModelConfig,
    shard: ShardSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    with_mtp: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    """The parameters of one rank: ``{name: tensor on device}``, in the order of the forward pass.

    Names are the checkpoint's; routed experts are stacked as ``mlp.experts.gate_up_proj [E_local, 2 I_local, H]``
    (gate rows first) and ``mlp.experts.down_proj [E_local, H, I_local]``. Quantised weights are dequantised to
    ``dtype``; router and index head weights are float32. MTP layers, at ``model.layers.{num_hidden_layers}``, are
    read only ``with_mtp``. Beside the parameters themselves, memory holds one weight at a time. ``progress(done,
    total)`` is called with bytes of the files, of this rank's part.

    Raises :class:`CheckpointError` for what is wrong with the files and :class:`ConfigError` for a shard that the
    sizes do not allow.
    """
    check_shard(config, shard)
    files = CheckpointFiles.open(folder)
    matched = match_weights(files, config)
    if with_mtp and not matched.mtp:
        raise CheckpointError(f"{folder} has no MTP layer; switch off drafting, or name a checkpoint that has one")
    weights = matched.weights + (matched.mtp if with_mtp else [])
    _warn_of_coarse_router(weights)
    placed = [(w, place) for w in weights if (place := place_weight(w.spec, config, shard)) is not None]
    parameters: dict[str, Tensor] = {}
    for weight, place in placed:
        if weight.spec.parameter not in parameters:
            kind = torch.float32 if weight.spec.keep_float32 else dtype
            parameters[weight.spec.parameter] = torch.empty(place.parameter_shape, dtype=kind, device=device)
    total = sum(_bytes_to_read(weight, place) for weight, place in placed)
    by_place = sorted(placed, key=lambda pair: _first_part(pair[0]))
    for i, (weight, place) in enumerate(by_place):
        _fill(files, weight, place, parameters[weight.spec.parameter])
        file = weight.parts["weight" if "weight" in weight.parts else "weight_packed"].file
        if i + 1 == len(by_place) or _first_part(by_place[i + 1][0])[0] != str(file):
            files.release(file)
        if progress is not None:
            progress(files.bytes_read, total)
    return parameters


def match_weights(files: CheckpointFiles, config: ModelConfig) -> MatchedWeights:
    """Which tensors stand for which weight, from the headers. Raises :class:`CheckpointError` for any that is
    unknown, missing or of the wrong type or shape."""
    left = dict(files.entries)
    weights = _match_all(files, left, checkpoint_weights(config, with_mtp=False))
    prefixes = tuple(f"model.layers.{layer}." for layer in mtp_layers(config))
    skipped = [entry for name, entry in left.items() if _KNOWN_SKIPS.search(name)]
    skipped += [left[prefix + name] for prefix in prefixes for name in _MTP_SKIPS if prefix + name in left]
    for entry in skipped:
        del left[entry.name]
    has_mtp = any(name.startswith(prefixes) for name in left) if prefixes else False
    mtp = _match_all(files, left, mtp_weights(config)) if has_mtp else []
    if left:
        raise _unknown_tensors(list(left.values()), config)
    return MatchedWeights(weights, mtp, skipped)


def _match_all(files: CheckpointFiles, left: dict[str, TensorEntry], specs: Iterable[WeightSpec]) -> list[StoredWeight]:
    """Takes the tensors of ``specs`` out of ``left``."""
    matched, missing = [], []
    for spec in specs:
        weight = _match(spec, left)
        if weight is None:
            missing.append(spec)
        else:
            matched.append(weight)
    if missing:
        spec = missing[0]
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{files.folder}: {spec.name} {list(spec.shape)} is missing{more}")
    return matched


def _match(spec: WeightSpec, left: dict[str, TensorEntry]) -> StoredWeight | None:
    if not spec.is_linear:
        entry = left.pop(spec.name, None)
        if entry is None:
            return None
        _check_entry(entry, FLOAT_DTYPES, spec.shape)
        return StoredWeight(spec, PLAIN, {"weight": entry})
    found = {suffix: left[name] for suffix in PART_SUFFIXES if (name := f"{spec.module}.{suffix}") in left}
    form = detect_format({suffix: entry.dtype for suffix, entry in found.items()})
    if form.parts[0].suffix not in found:
        return None
    rows, columns = spec.shape
    parts = {}
    for part in form.parts:
        if part.suffix in found:
            _check_part(found[part.suffix], part, rows, columns)
            parts[part.suffix] = left.pop(found[part.suffix].name)
        elif part.required:
            first = found[form.parts[0].suffix]
            expected = f"{part.dtypes[0]} {list(part.shape(rows, columns))}"
            raise CheckpointError(f"{first.file}: {first} but {spec.module}.{part.suffix}, {expected}, is missing")
    if columns % form.block[1] and form.name.startswith("nvfp4"):
        raise CheckpointError(
            f"{parts[form.parts[0].suffix].file}: {spec.name} has {columns} columns, no multiple of 16"
        )
    return StoredWeight(spec, form, parts)


def _check_part(entry: TensorEntry, part: StoredPart, rows: int, columns: int) -> None:
    expected = part.shape(rows, columns)
    if part.unit is None and entry.shape == (1,):
        expected = (1,)
    _check_entry(entry, part.dtypes, expected)


def _check_entry(entry: TensorEntry, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    if entry.dtype not in dtypes or entry.shape != shape:
        raise CheckpointError(f"{entry.file}: {entry}; expected {' or '.join(dtypes)} {list(shape)}")


def _unknown_tensors(entries: list[TensorEntry], config: ModelConfig) -> CheckpointError:
    entry = entries[0]
    more = f", and {len(entries) - 1} more" if len(entries) > 1 else ""
    hint = ""
    layer = re.match(r"model\.layers\.(\d+)\.self_attn\.indexer\.", entry.name)
    if layer and int(layer[1]) < config.num_hidden_layers and config.indexer_types[int(layer[1])] == "shared":
        hint = f"; config.json says that layer {layer[1]} shares the selection of an earlier one"
    elif entry.name.startswith(f"model.layers.{config.num_hidden_layers}."):
        hint = f"; config.json has {config.num_hidden_layers} layers and num_nextn_predict_layers 0"
    elif "scale" in entry.name.rpartition(".")[2]:
        hint = "; it does not go with the type of the weight beside it"
    return CheckpointError(f"{entry.file}: {entry}, which no part of this model is called{more}{hint}")


def _warn_of_coarse_router(weights: list[StoredWeight]) -> None:
    for weight in weights:
        entry = weight.parts.get("weight")
        if entry is not None and entry.name.endswith("e_score_correction_bias") and entry.dtype != "F32":
            logger.warning("%s is %s; routing is as coarse as that, F32 is usual", entry.name, entry.dtype)
            return


def _first_part(weight: StoredWeight) -> tuple[str, int]:
    entry = weight.parts[weight.format.parts[0].suffix]
    return str(entry.file), entry.start


def _bytes_to_read(weight: StoredWeight, place: Placement) -> int:
    total = 0
    for part in weight.format.parts:
        if part.required:
            entry = weight.parts[part.suffix]
            rows, columns = _piece(weight.format, part, place, entry)
            per_element = entry.num_bytes // max(1, _count(entry.shape))
            total += per_element * (1 if rows is None else len(rows) * (1 if columns is None else len(columns)))
    return total


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _piece(
    form: WeightFormat, part: StoredPart, place: Placement, entry: TensorEntry
) -> tuple[range | None, range | None]:
    """Rows and columns of a stored part that the rank's piece of the weight needs, rounded out to whole blocks."""
    if part.unit is None:
        return None, None
    rows = _outer(place.rows, form.block[0], part.unit[0], entry.shape[0])
    if place.columns is None:
        return rows, None
    return rows, _outer(place.columns, form.block[1], part.unit[1], entry.shape[1])


def _outer(piece: range, block: int, unit: int, size: int) -> range:
    start = piece.start // block * block // unit
    stop = -(-piece.stop // block) * block // unit
    return range(start, min(stop, size))


def _fill(files: CheckpointFiles, weight: StoredWeight, place: Placement, parameter: Tensor) -> None:
    """Reads, dequantises and copies one weight's piece to its place."""
    form, spec = weight.format, weight.spec
    parts = {}
    for part in form.parts:
        if part.required:
            entry = weight.parts[part.suffix]
            parts[part.suffix] = files.read(entry, *_piece(form, part, place, entry))
    fault = find_bad_scale(parts)
    if fault is not None:
        entry = weight.parts[fault[0]]
        raise CheckpointError(f"{entry.file}: {entry.name} {fault[1]}")
    if len(spec.shape) == 1 and not bool(torch.isfinite(parts["weight"]).all()):
        entry = weight.parts["weight"]
        raise CheckpointError(f"{entry.file}: {entry.name} holds NaN or infinity")
    values = dequantize(form, parts, parameter.dtype)
    # Blocks were read whole; the piece may begin inside one.
    row_skip = place.rows.start % form.block[0]
    values = values[row_skip : row_skip + len(place.rows)]
    if place.columns is not None:
        column_skip = place.columns.start % form.block[1]
        values = values[:, column_skip : column_skip + len(place.columns)]
    target = parameter if place.expert_index is None else parameter[place.expert_index]
    target[place.row_offset : place.row_offset + len(place.rows)].copy_(values)


def _subfolders(folder: Path) -> list[Path]:
    try:
        return [entry for entry in folder.iterdir() if entry.is_dir()]
    except OSError:
        return []
