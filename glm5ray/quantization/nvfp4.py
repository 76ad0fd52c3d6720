"""NVFP4: four-bit floats in groups of sixteen, as NVIDIA ModelOpt and compressed-tensors store them.

A weight ``[N, K]`` becomes three tensors:

* ``packed`` uint8 ``[N, K / 2]``: byte ``b`` of a row holds column ``2b`` in its low and ``2b + 1`` in its high nibble;
* ``scale`` float8_e4m3fn ``[N, K / 16]``: one per group of 16 columns, row-major;
* ``scale_2`` float32 scalar: one for the whole tensor.

``W[n, k] = e2m1(code[n, k]) * (scale[n, k // 16] * scale_2)``, in float32 and in this order, which is ModelOpt's.
compressed-tensors stores ``1 / scale_2`` as ``weight_global_scale`` and divides: ``W = e2m1(code) * (scale /
global_scale)``.

Shape suffixes: N rows (out-features), K columns (in-features), B bytes of a row (K / 2), G groups of a row (K / 16).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZE = 16
"""Columns that share one scale."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
_E4M3_SMALLEST = 2.0**-9
"""Smallest positive (subnormal) value of float8_e4m3fn."""

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""Value of each code; bit 3 is the sign. Code 8 decodes to plain zero, as in ModelOpt."""

_BYTE_TO_PAIR = torch.stack([_E2M1.repeat(16), _E2M1.repeat_interleave(16)], dim=1)
"""[256, 2]: the two values in a byte, low nibble first."""


def _rounding_bounds() -> Tensor:
    """Code of ``x >= 0`` is the number of bounds below it: halfway points, ties to the even code.

    At 0.25, 1.25, 2.5 and 5 the even code is the lower one. At 0.75, 1.75 and 3.5 it is the upper one, so there the
    bound is the float just below.
    """
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    below = torch.nextafter(halfway, torch.zeros(()))
    return torch.where(torch.arange(7) % 2 == 1, below, halfway)


_BOUNDS = _rounding_bounds()


@dataclass(frozen=True, slots=True)
class Nvfp4Tensor:
    """One quantised weight, in ModelOpt's convention. See the module's docstring for the layout."""

    packed: Tensor
    """uint8 [N, K / 2]."""
    scale: Tensor
    """float8_e4m3fn [N, K / 16]."""
    scale_2: Tensor
    """float32 scalar; it multiplies."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K] in ``dtype``."""
        return dequantize_nvfp4(self.packed, self.scale, self.scale_2, dtype)

    @property
    def global_scale(self) -> Tensor:
        """float32 [1]: what compressed-tensors stores in place of ``scale_2``; it divides."""
        return (1.0 / self.scale_2).reshape(1)


def nvfp4_scale_2(weight_NK: Tensor) -> Tensor:
    """``amax / (6 * 448)`` as a float32 scalar, so that the largest group scale is the largest E4M3 value.

    Tensors that share one (gate and up of an expert, in ModelOpt's exports) take the largest of theirs. An all-zero
    tensor gets 1.0, where ModelOpt's division by zero would make every scale NaN.
    """
    amax = weight_NK.abs().amax().float()
    if not bool(torch.isfinite(amax)):
        raise ValueError("the weight holds NaN or infinity; there is no scale for it")
    scale_2 = amax / (E2M1_MAX * E4M3_MAX)
    return torch.where(scale_2 == 0, 1.0, scale_2)


def quantize_nvfp4(weight_NK: Tensor, *, scale_2: Tensor | None = None) -> Nvfp4Tensor:
    """Rounds ``weight_NK`` (any float type, ``K`` a multiple of 16) to NVFP4, to the bit as ModelOpt 0.47 does.

    ``scale = e4m3(group_amax / (6 * scale_2))``, at least the smallest E4M3 value and 1.0 for a group of zeros; the
    codes are ``W / (scale * scale_2)`` rounded half to even. ``scale_2`` is :func:`nvfp4_scale_2` of the weight
    unless given.

    Raises ``ValueError`` for another shape, or for NaN and infinity when ``scale_2`` is not given.
    """
    if weight_NK.ndim != 2 or weight_NK.shape[1] % GROUP_SIZE:
        raise ValueError(
            f"NVFP4 needs [N, K] with K a multiple of {GROUP_SIZE}; this weight is {list(weight_NK.shape)}"
        )
    if scale_2 is None:
        scale_2 = nvfp4_scale_2(weight_NK)
    scale_2 = scale_2.to(weight_NK.device, torch.float32).reshape(())
    groups_NGx = weight_NK.float().unflatten(1, (-1, GROUP_SIZE))
    raw_scale_NG = groups_NGx.abs().amax(2) / (E2M1_MAX * scale_2)
    raw_scale_NG = torch.where(raw_scale_NG == 0, 1.0, raw_scale_NG)
    scale_NG = raw_scale_NG.clamp(_E4M3_SMALLEST, E4M3_MAX).to(torch.float8_e4m3fn)
    scaled_NK = (groups_NGx / (scale_NG.float() * scale_2)[:, :, None]).flatten(1)
    return Nvfp4Tensor(_pack(_encode(scaled_NK)), scale_NG, scale_2)


def dequantize_nvfp4(
    packed_NB: Tensor, scale_NG: Tensor, scale_2: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """ModelOpt's convention: ``e2m1 * (scale * scale_2)`` in float32, then one rounding to ``dtype``. Gives [N, K]."""
    return _unpack(packed_NB, scale_NG.float() * scale_2.float().reshape(()), dtype)


def dequantize_nvfp4_inverse(
    packed_NB: Tensor, scale_NG: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """compressed-tensors' convention: ``e2m1 * (scale / global_scale)`` in float32, then one rounding to ``dtype``."""
    return _unpack(packed_NB, scale_NG.float() / global_scale.float().reshape(()), dtype)


def _encode(scaled_NK: Tensor) -> Tensor:
    """float32 -> uint8 codes 0 to 15. A negative value that rounds to zero keeps its sign (code 8), -0.0 does not."""
    sign_NK = (scaled_NK < 0).to(torch.uint8) << 3
    return sign_NK | torch.bucketize(scaled_NK.abs(), _BOUNDS.to(scaled_NK.device)).to(torch.uint8)


def _pack(code_NK: Tensor) -> Tensor:
    return code_NK[:, 0::2] | (code_NK[:, 1::2] << 4)


def _unpack(packed_NB: Tensor, step_NG: Tensor, dtype: torch.dtype) -> Tensor:
    """``step`` is what one unit of E2M1 is worth in each group."""
    value_NK = _BYTE_TO_PAIR.to(packed_NB.device)[packed_NB.int()].flatten(1)
    groups_NGx = value_NK.unflatten(1, (-1, GROUP_SIZE))
    return (groups_NGx * step_NG[:, :, None]).flatten(1).to(dtype)
