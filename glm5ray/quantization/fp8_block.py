"""FP8 weights with one scale per block of 128 x 128, as in the ``-FP8`` checkpoints of GLM-5 and DeepSeek-V3.

``weight`` float8_e4m3fn ``[N, K]`` and ``weight_scale_inv`` float32 ``[ceil(N / 128), ceil(K / 128)]``; **W = weight
* scale_inv** of its block, in spite of the name. Blocks at the right and lower edge may be partial ones:
kv_a_proj_with_mqa has 576 rows, four and a half.

Shape suffixes: N rows, K columns, R and C blocks along them.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_SIZE = 128
E4M3_MAX = 448.0


def dequantize_fp8_block(weight_NK: Tensor, scale_inv_RC: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``W [N, K]``: products in float32, then one rounding to ``dtype``. ``weight_NK`` begins at the corner of a
    block."""
    rows, columns = weight_NK.shape
    scale_RK = scale_inv_RC.float().repeat_interleave(BLOCK_SIZE, dim=1)[:, :columns]
    scale_NK = scale_RK.repeat_interleave(BLOCK_SIZE, dim=0)[:rows]
    return (weight_NK.float() * scale_NK).to(dtype)


def quantize_fp8_block(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """``(weight, weight_scale_inv)``: each block divided by ``amax / 448`` and rounded to the nearest E4M3 value.

    An all-zero block gets the scale 1.0. Raises ``ValueError`` for NaN or infinity.
    """
    rows, columns = weight_NK.shape
    padded_NK = torch.nn.functional.pad(weight_NK.float(), (0, -columns % BLOCK_SIZE, 0, -rows % BLOCK_SIZE))
    blocks = padded_NK.unflatten(1, (-1, BLOCK_SIZE)).unflatten(0, (-1, BLOCK_SIZE))
    scale_RC = blocks.abs().amax(dim=(1, 3)) / E4M3_MAX
    if not bool(torch.isfinite(scale_RC).all()):
        raise ValueError("the weight holds NaN or infinity; there is no scale for it")
    scale_RC = torch.where(scale_RC == 0, 1.0, scale_RC)
    scaled_NK = (blocks / scale_RC[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return scaled_NK.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale_RC
