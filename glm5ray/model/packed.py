"""Routed experts as they lie in NVFP4 files: which parameters they are, and where pieces of files belong in them.

The four-bit codes and group scales are copied as they are; compressed-tensors' global scale, which divides, becomes
its inverse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from glm5ray.errors import CheckpointError, ConfigError
from glm5ray.quantization.formats import NVFP4, NVFP4_INVERSE, parse_claim

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from glm5ray.model.matching import StoredWeight
    from glm5ray.model.name_table import Placement
    from glm5ray.model_config import ModelConfig

WeightsChoice = Literal["auto", "packed", "dequantized"]
GROUP = 16
"""Columns of one scale."""


def packs_experts(choice: WeightsChoice, config: ModelConfig, device: str, dtype: str) -> bool:
    """Whether experts stay in NVFP4: as ``model.weights`` says; auto: on a GPU in
    bfloat16, which its kernels need, if ``config.json`` says that they are.

    Raises :class:`ConfigError` if they are to stay what they are not, or in a type that no GPU kernel has."""
    if "sparse" not in config.mlp_layer_types:
        return False
    layer = config.mlp_layer_types.index("sparse")
    form = parse_claim(config.quantization).format_of(f"model.layers.{layer}.mlp.experts.0.gate_proj")
    are_nvfp4 = form in (NVFP4, NVFP4_INVERSE)
    if choice == "packed" and not are_nvfp4:
        raise ConfigError(
            f"model.weights is 'packed', and this checkpoint's experts are {form.name}, not NVFP4; set it to auto"
        )
    if choice == "packed" and device.startswith("cuda") and dtype != "bfloat16":
        raise ConfigError(
            f"model.weights is 'packed', and the model would be {dtype} on {device}, where NVFP4 experts are computed "
            "in bfloat16; set model.dtype to bfloat16, or model.weights to dequantized"
        )
    return are_nvfp4 and (
        choice == "packed" or (choice == "auto" and device.startswith("cuda") and dtype == "bfloat16")
    )


def packed_shapes(shape: tuple[int, ...], stack: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """``{suffix: (shape, dtype)}`` of the tensors for a stack [E, rows, columns] named ``gate_up_proj`` or
    ``down_proj``; see :class:`glm5ray.kernels.interface.Nvfp4ExpertWeights`."""
    experts, rows, columns = shape
    if columns % GROUP:
        raise ConfigError(f"a rank's part of {stack} has {columns} columns, which are no groups of {GROUP}")
    return {
        "packed": ((experts, rows, columns // 2), torch.uint8),
        "scales": ((experts, rows, columns // GROUP), torch.float8_e4m3fn),
        "global": ((experts, 2) if stack == "gate_up_proj" else (experts,), torch.float32),
    }


def allocate(parameters: dict[str, Tensor], place: Placement, name: str, device: torch.device | str) -> None:
    """Adds the tensors of the stack ``name`` (``...mlp.experts.down_proj``) once."""
    if f"{name}_packed" not in parameters:
        for suffix, (shape, dtype) in packed_shapes(place.parameter_shape, name.rpartition(".")[2]).items():
            parameters[f"{name}_{suffix}"] = torch.empty(shape, dtype=dtype, device=device)


def require_nvfp4(weight: StoredWeight) -> None:
    """Raises :class:`CheckpointError` for an expert that is stored otherwise."""
    if weight.format not in (NVFP4, NVFP4_INVERSE):
        raise CheckpointError(
            f"{weight.first.file}: {weight.first.name} is stored as {weight.format.name}, and config.json says that "
            "experts are NVFP4; set model.weights to dequantized"
        )


def places(weight: StoredWeight, place: Placement, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``{suffix: where it belongs}`` of an expert's codes and scales, which are kept as they are stored."""
    name, expert = weight.spec.parameter, place.expert_index
    assert expert is not None, f"{weight.spec.name} is no expert's"
    if place.columns is not None and place.columns.start % GROUP:
        raise ConfigError(f"{weight.spec.name} is split at column {place.columns.start}, inside a group of {GROUP}")
    rows = slice(place.row_offset, place.row_offset + len(place.rows))
    codes = "weight" if weight.format is NVFP4 else "weight_packed"
    return {
        codes: parameters[f"{name}_packed"][expert, rows],
        "weight_scale": parameters[f"{name}_scales"][expert, rows],
    }


def put_global(
    weight: StoredWeight, place: Placement, parts: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> None:
    """The global scale of an expert's matrix, or its inverse if that is what the files hold."""
    if weight.format is NVFP4:
        factor = float(parts["weight_scale_2"].float())
    else:
        factor = float(1.0 / parts["weight_global_scale"].float())
    target = parameters[f"{weight.spec.parameter}_global"][place.expert_index]
    (target if target.ndim == 0 else target[weight.spec.half or 0]).fill_(factor)
