"""Which tensors of a checkpoint stand for which weight of the model, from the headers alone.

Strict both ways: every tensor is used or on a short list of those that are knowingly left out, and every weight is
there, with the types and shapes that its format asks for. What is wrong is an error before any weight is read.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from glm5ray.errors import CheckpointError
from glm5ray.model.name_table import checkpoint_weights, mtp_layers, mtp_weights
from glm5ray.quantization.formats import FLOAT_DTYPES, PART_SUFFIXES, PLAIN, StoredPart, WeightFormat, detect_format

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from glm5ray.model.name_table import Placement, WeightSpec
    from glm5ray.model.safetensors_reader import CheckpointFiles, TensorEntry
    from glm5ray.model_config import ModelConfig

_KNOWN_SKIPS = re.compile(
    r"\.self_attn\.(\w+\.)?[kqv]_scale$"  # of an FP8 KV cache; this engine's scales are its own
    r"|\.rotary_emb\.inv_freq$"  # follows from rope_theta
)
_MTP_SKIPS = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the model's embedding and head that some exports put into MTP layers."""
_MAX_MISSING = 100_000
"""After so many missing weights nobody looks for more: a damaged config may ask for billions of experts."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight, and the tensors of the checkpoint that stand for it."""

    spec: WeightSpec
    format: WeightFormat
    parts: dict[str, TensorEntry]
    """By suffix. A vector has one, under ``weight``."""

    @property
    def first(self) -> TensorEntry:
        """The part with the values, which stands for the weight in errors and in the order of reading."""
        return self.parts[self.format.parts[0].suffix]

    def pieces(self, place: Placement) -> Iterator[tuple[str, TensorEntry, range | None, range | None]]:
        """``(suffix, tensor, rows, columns)`` of what must be read for a rank's piece of the weight: whole blocks of
        the format, and of a scalar (None, None)."""
        for part in self.format.parts:
            if part.required:
                entry = self.parts[part.suffix]
                rows = columns = None
                if part.unit is not None:
                    rows = _outer(place.rows, self.format.block[0], part.unit[0], entry.shape[0])
                    if place.columns is not None:
                        columns = _outer(place.columns, self.format.block[1], part.unit[1], entry.shape[1])
                yield part.suffix, entry, rows, columns

    def bytes_to_read(self, place: Placement) -> int:
        """Of the files, for a rank's piece of the weight."""
        total = 0
        for _, entry, rows, columns in self.pieces(place):
            shape = [len(rows)] if rows is not None else []
            shape += [len(columns)] if columns is not None else []
            total += math.prod(shape) * entry.element_bytes
        return total


@dataclass(frozen=True, slots=True)
class MatchedWeights:
    """A checkpoint's tensors, sorted by what they are for."""

    weights: list[StoredWeight]
    mtp: list[StoredWeight]
    """Empty where the checkpoint has no MTP layer."""
    skipped: list[TensorEntry]
    """Tensors that are left out whatever is loaded."""


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
        if weight is not None:
            matched.append(weight)
            continue
        missing.append(spec)
        if len(missing) > _MAX_MISSING:
            break
    if missing:
        spec = missing[0]
        raise CheckpointError(f"{files.folder}: {spec.name} {list(spec.shape)} is missing{_and_more(len(missing) - 1)}")
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
    hint = ""
    layer = re.match(r"model\.layers\.(\d+)\.self_attn\.indexer\.", entry.name)
    if layer and int(layer[1]) < config.num_hidden_layers and config.indexer_types[int(layer[1])] == "shared":
        hint = f"; config.json says that layer {layer[1]} shares the selection of an earlier one"
    elif entry.name.startswith(f"model.layers.{config.num_hidden_layers}."):
        hint = f"; config.json has {config.num_hidden_layers} layers and num_nextn_predict_layers 0"
    elif "scale" in entry.name.rpartition(".")[2]:
        hint = "; it does not go with the type of the weight beside it"
    return CheckpointError(
        f"{entry.file}: {entry}, which no part of this model is called{_and_more(len(entries) - 1)}{hint}"
    )


def _and_more(others: int) -> str:
    return f", and {others} more" if others else ""


def _outer(piece: range, block: int, unit: int, size: int) -> range:
    """The blocks that ``piece`` touches, counted in elements of a part of which one stands for ``unit``."""
    start = piece.start // block * block // unit
    stop = -(-piece.stop // block) * block // unit
    return range(start, min(stop, size))
