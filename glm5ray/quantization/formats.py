"""How a weight matrix lies in a checkpoint: as itself, or as a few tensors that stand for it.

Which format a weight has is decided per weight, from the tensors that are there. The exclude lists of ``config.json``
are not trusted with that: the FP8 checkpoints of GLM-5 list ``self_attn.indexers_proj``, which is the name of no
tensor, and ModelOpt's leave out the router, which is not quantised either. They serve to plan memory before any file
is read (:class:`QuantizationClaim`).

No torch here: planning starts without it. See :mod:`glm5ray.quantization.dequantize` for the arithmetic.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from glm5ray.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes of one element, by the name that safetensors gives a type."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One of the tensors that stand for a weight ``W [N, K]``, named ``<module>.<suffix>``."""

    suffix: str
    dtypes: tuple[str, ...]
    """Types that it may have; the first is the usual one."""
    unit: tuple[int, int] | None
    """Rows and columns of ``W`` that one element is for; None for a scalar, which may have shape [] or [1]."""
    required: bool = True

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Its shape for a ``W`` of these sizes; the last block of a row or column may be a partial one."""
        if self.unit is None:
            return ()
        return -(-rows // self.unit[0]), -(-columns // self.unit[1])


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A way to store ``W [N, K]``."""

    name: str
    parts: tuple[StoredPart, ...]
    block: tuple[int, int]
    """Rows and columns of the smallest piece of ``W`` that can be computed from its parts alone."""
    columns_multiple: int = 1
    """What the number of columns must divide by."""

    def stored_bytes(self, rows: int, columns: int, plain_bytes: int = 2) -> int:
        """Bytes of the parts that have to be kept for ``W``; optional ones left out."""
        total = 0
        for part in self.parts:
            if part.required:
                count = 1
                for size in part.shape(rows, columns):
                    count *= size
                total += count * (plain_bytes if self is PLAIN else DTYPE_BYTES[part.dtypes[0]])
        return total


FLOAT_DTYPES = ("BF16", "F32", "F16")

PLAIN = WeightFormat("plain", (StoredPart("weight", FLOAT_DTYPES, (1, 1)),), (1, 1))

FP8_BLOCK = WeightFormat(
    "fp8-block",
    (StoredPart("weight", ("F8_E4M3",), (1, 1)), StoredPart("weight_scale_inv", ("F32",), (128, 128))),
    (128, 128),
)
"""DeepSeek's and Z.ai's FP8. In spite of its name the scale multiplies."""

NVFP4 = WeightFormat(
    "nvfp4",
    (
        StoredPart("weight", ("U8",), (1, 2)),
        StoredPart("weight_scale", ("F8_E4M3",), (1, 16)),
        StoredPart("weight_scale_2", ("F32",), None),
        StoredPart("input_scale", ("F32",), None, required=False),
    ),
    (1, 16),
    columns_multiple=16,
)
"""As NVIDIA ModelOpt writes it. ``input_scale`` is for four-bit activations, which this engine does not have: read by
nobody."""

NVFP4_INVERSE = WeightFormat(
    "nvfp4-ct",
    (
        StoredPart("weight_packed", ("U8",), (1, 2)),
        StoredPart("weight_scale", ("F8_E4M3",), (1, 16)),
        StoredPart("weight_global_scale", ("F32",), None),
        StoredPart("input_global_scale", ("F32",), None, required=False),
    ),
    (1, 16),
    columns_multiple=16,
)
"""As compressed-tensors writes it (``nvfp4-pack-quantized``): the global scale is the inverse and divides."""

FORMATS = (PLAIN, FP8_BLOCK, NVFP4, NVFP4_INVERSE)
PART_SUFFIXES = tuple(dict.fromkeys(part.suffix for form in FORMATS for part in form.parts))


def detect_format(dtypes: Mapping[str, str]) -> WeightFormat:
    """The format of a weight from ``{suffix: dtype}`` of the tensors that its module has."""
    if "weight_packed" in dtypes:
        return NVFP4_INVERSE
    return {"U8": NVFP4, "F8_E4M3": FP8_BLOCK}.get(dtypes.get("weight", ""), PLAIN)


@dataclass(frozen=True, slots=True)
class QuantizationClaim:
    """What ``quantization_config`` (or ``hf_quant_config.json``) says of the files."""

    format: WeightFormat
    excluded: tuple[str, ...] = ()
    """Module names, globs (``model.layers.1.*``) or, behind ``re:``, regular expressions."""

    def format_of(self, module: str) -> WeightFormat:
        """The claimed format of a linear layer (``model.layers.0.self_attn.o_proj``)."""
        # Under FP8 this layer is excluded by a name that it does not have.
        aliases = (module, module.replace(".indexer.weights_proj", ".indexers_proj"))
        return PLAIN if any(is_excluded(name, self.excluded) for name in aliases) else self.format


def is_excluded(module: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of ``patterns`` is the module's name or that of a parent, or a glob or regular expression that fits
    it.

    ``model.layers.1`` and ``model.layers.1.*`` cover layer 1 and not layers 10 to 19.
    """
    return _compile(patterns).match(module) is not None


@lru_cache(maxsize=16)
def _compile(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """One expression for all: a checkpoint has some 60,000 modules and 150 patterns."""
    branches = []
    for pattern in patterns:
        if pattern.startswith("re:"):
            branches.append(pattern.removeprefix("re:"))
        else:
            branches += [re.escape(pattern) + r"(\.|\Z)", translate(pattern)]
    return re.compile("|".join(f"(?:{branch})" for branch in branches) or r"(?!)")


def parse_claim(quantization: Mapping[str, Any] | None, where: str = "quantization_config") -> QuantizationClaim:
    """Reads either place's mapping. Raises :class:`CheckpointError` for a scheme that this engine does not have."""
    if quantization is None:
        return QuantizationClaim(PLAIN)
    method = str(quantization.get("quant_method", "modelopt"))
    if method == "fp8":
        _require(where, quantization, "weight_block_size", [128, 128])
        return QuantizationClaim(FP8_BLOCK, _patterns(where, quantization, "modules_to_not_convert"))
    if method.startswith("modelopt"):
        _require(where, quantization, "quant_algo", "NVFP4")
        _require(where, quantization, "group_size", 16, optional=True)
        key = "ignore" if "ignore" in quantization else "exclude_modules"
        return QuantizationClaim(NVFP4, _patterns(where, quantization, key))
    if method == "compressed-tensors":
        _require(where, quantization, "format", "nvfp4-pack-quantized")
        return QuantizationClaim(NVFP4_INVERSE, _patterns(where, quantization, "ignore"))
    raise CheckpointError(
        f"{where}: quant_method is {method!r}; this engine reads fp8, modelopt and compressed-tensors"
    )


def _require(where: str, values: Mapping[str, Any], name: str, supported: object, *, optional: bool = False) -> None:
    if optional and values.get(name) is None:
        return
    if values.get(name) != supported:
        raise CheckpointError(f"{where}: {name} is {values.get(name)!r}; this engine reads {supported!r} only")


def _patterns(where: str, values: Mapping[str, Any], name: str) -> tuple[str, ...]:
    listed = values.get(name) or []
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        raise CheckpointError(f"{where}: {name} must be a list of module names")
    for entry in listed:
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as error:
            raise CheckpointError(f"{where}: {name} has {entry!r}, which is no regular expression: {error}") from error
    return tuple(listed)
