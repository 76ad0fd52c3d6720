"""From the stored parts of a weight, or of a piece of it that begins and ends with whole blocks, to its values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from glm5ray.quantization.formats import FP8_BLOCK, NVFP4, NVFP4_INVERSE, PLAIN, WeightFormat
from glm5ray.quantization.fp8_block import dequantize_fp8_block
from glm5ray.quantization.nvfp4 import dequantize_nvfp4, dequantize_nvfp4_inverse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def dequantize(form: WeightFormat, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """``W [N, K]`` in ``dtype`` from ``{suffix: tensor}``. Rounded once, from float32."""
    if form is PLAIN:
        return parts["weight"].to(dtype)
    if form is FP8_BLOCK:
        return dequantize_fp8_block(parts["weight"], parts["weight_scale_inv"], dtype)
    if form is NVFP4:
        return dequantize_nvfp4(parts["weight"], parts["weight_scale"], parts["weight_scale_2"], dtype)
    assert form is NVFP4_INVERSE, f"format {form.name} has no dequantisation"
    scale, global_scale = parts["weight_scale"], parts["weight_global_scale"]
    return dequantize_nvfp4_inverse(parts["weight_packed"], scale, global_scale, dtype)


def find_bad_scale(parts: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """``(suffix, what is wrong)`` of the first scale among ``parts`` that no quantiser writes, or None.

    Scales are at most one in sixteen of a weight's values, so looking at all of them is cheap. A scale must be finite
    and not negative; the scale of a whole tensor must be above zero where it divides.
    """
    for suffix, tensor in parts.items():
        if "scale" not in suffix or _is_plausible(tensor, divides=suffix == "weight_global_scale"):
            continue
        values = tensor.float()
        if bool(torch.isnan(values).any()):
            return suffix, "holds NaN"
        if bool(torch.isinf(values).any()):
            return suffix, "holds infinity"
        if bool((values < 0).any()):
            return suffix, f"holds a negative scale, {float(values.min()):g}"
        if suffix == "weight_global_scale" and bool((values == 0).any()):
            return suffix, "is 0 and has to divide"
    return None


def _is_plausible(scales: Tensor, *, divides: bool) -> bool:
    """Whether all are finite, and at least 0 (above it, if they divide). In one pass: there are gigabytes of them."""
    if scales.numel() == 0:
        return True
    if scales.dtype == torch.float8_e4m3fn and not divides:
        return int(scales.view(torch.uint8).max()) < _E4M3_NAN
    least, most = torch.aminmax(scales.float())
    return bool((least > 0 if divides else least >= 0) & (most < torch.inf))  # NaN is neither


_E4M3_NAN = 0x7F
"""The first code above those of the numbers from 0 on."""
