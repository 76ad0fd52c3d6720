"""Makes ``nvfp4.safetensors``: weights, and what nvidia-modelopt makes of them.

    python tests/golden/make_nvfp4.py

Made with nvidia-modelopt 0.47.0 and torch 2.13.0 on a CPU. modelopt imports ``requests`` without declaring it, takes
ten seconds to import and warns of versions, so the tests read this file; ``tests/quantization/test_nvfp4.py`` has a
slow test that makes it anew.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

PATH = Path(__file__).with_name("nvfp4.safetensors")


def cases() -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """name -> (weight, scale_2 or None)."""
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int, scale: float = 0.02) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    # With scale_2 = 2**-4 and a group maximum of 6 * 2**-4, all scales are 1 and every halfway point is exact.
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    ties = torch.cat([halfway, -halfway]).repeat(4, 2) * 2**-4
    near_ties = torch.nextafter(ties, torch.rand(ties.shape, generator=generator) - 0.5)
    near_ties[:, 7::8] = ties[:, 7::8]
    zeros = normal(8, 64)
    zeros[2] = 0.0
    zeros[5, 16:32] = 0.0
    zeros[6, :3] = -0.0
    spread = normal(8, 128) * torch.logspace(-12, 2, 8)[:, None]
    return {
        "normal_fp32": (normal(16, 96), None),
        "normal_bf16": (normal(16, 96).bfloat16(), None),
        "normal_fp16": (normal(4, 32).half(), None),
        "ties": (ties, torch.tensor(2.0**-4)),
        "near_ties": (near_ties, torch.tensor(2.0**-4)),
        "zero_groups": (zeros, None),
        "spread": (spread, None),  # scales below the smallest E4M3 value
        "shared_scale_2": (normal(4, 64), torch.tensor(0.1 / 2688)),
        "small_scale_2": (normal(4, 64), torch.tensor(1e-7)),  # scales above 448, values clipped at 6
    }


def quantize(weight: torch.Tensor, scale_2: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """ModelOpt's four tensors: packed, scale, scale_2 and the weight read back in float32 and bfloat16."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    quantized, scale, scale_2 = NVFP4QTensor.quantize(weight.clone(), 16, None, scale_2)
    keywords = {"scale": scale, "double_scale": scale_2, "block_sizes": {-1: 16}}
    return {
        "packed": quantized._quantized_data,
        "scale": scale,
        "scale_2": scale_2,
        "float32": quantized.dequantize(torch.float32, **keywords),
        "bfloat16": quantized.dequantize(torch.bfloat16, **keywords),
    }


def make() -> dict[str, torch.Tensor]:
    """All tensors of the file, by ``case.part``."""
    tensors = {}
    for name, (weight, scale_2) in cases().items():
        tensors[f"{name}.weight"] = weight
        if scale_2 is not None:
            tensors[f"{name}.given_scale_2"] = scale_2
        tensors |= {f"{name}.{part}": tensor.clone() for part, tensor in quantize(weight, scale_2).items()}
    return tensors


if __name__ == "__main__":
    save_file(make(), PATH)
