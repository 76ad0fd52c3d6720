"""NVFP4 experts from seeds, with the same numbers unquantised for the reference."""

from __future__ import annotations

import torch

from glm5ray.kernels.interface import ExpertWeights, Nvfp4ExpertWeights
from glm5ray.quantization.nvfp4 import dequantize_nvfp4, quantize_nvfp4


def make_nvfp4_experts(
    num_experts: int, hidden_size: int, intermediate_size: int, first_expert: int = 0, seed: int = 0
) -> Nvfp4ExpertWeights:
    generator = torch.Generator().manual_seed(seed)

    def quantized(rows: int, columns: int, scale: float):
        made = quantize_nvfp4(torch.randn(rows, columns, generator=generator) * scale * columns**-0.5)
        return made.packed, made.scale.view(torch.uint8), made.scale_2

    gates = [quantized(intermediate_size, hidden_size, 1.0) for _ in range(num_experts)]
    ups = [quantized(intermediate_size, hidden_size, 3.0) for _ in range(num_experts)]  # another global scale
    downs = [quantized(hidden_size, intermediate_size, 1.0) for _ in range(num_experts)]
    both = [
        [torch.cat([g, u]) for g, u in zip(gate[:2], up[:2], strict=True)] for gate, up in zip(gates, ups, strict=True)
    ]
    return Nvfp4ExpertWeights(
        gate_up_packed=torch.stack([packed for packed, _ in both]),
        gate_up_scales=torch.stack([scales for _, scales in both]).view(torch.float8_e4m3fn),
        gate_up_global=torch.stack([torch.stack([g[2], u[2]]) for g, u in zip(gates, ups, strict=True)]),
        down_packed=torch.stack([d[0] for d in downs]),
        down_scales=torch.stack([d[1] for d in downs]).view(torch.float8_e4m3fn),
        down_global=torch.stack([d[2] for d in downs]),
        first_expert=first_expert,
    )


def unquantized(experts: Nvfp4ExpertWeights) -> ExpertWeights:
    """The same numbers in fp32."""
    gate_up, down = [], []
    for e in range(len(experts.down_global)):
        packed, scales = experts.gate_up_packed[e].chunk(2), experts.gate_up_scales[e].chunk(2)
        halves = [dequantize_nvfp4(packed[i], scales[i], experts.gate_up_global[e, i]) for i in range(2)]
        gate_up.append(torch.cat(halves))
        down.append(dequantize_nvfp4(experts.down_packed[e], experts.down_scales[e], experts.down_global[e]))
    return ExpertWeights(
        gate_up_EFM=torch.stack(gate_up), down_EMF=torch.stack(down), first_expert=experts.first_expert
    )
