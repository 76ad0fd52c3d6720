"""Random weights in the real layout, made on the device: to measure a model whose files are not here.

Matrices are normal with deviation 0.02, norms are one, biases zero. Routing by such weights is nearly uniform. Every
rank draws a weight from a seed of its name, so what ranks hold in common is equal; what they split is not a part of
one larger matrix, so results depend on the layout."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

from glm5ray.model.glm5 import MoE

if TYPE_CHECKING:
    from torch import Tensor, nn

DEVIATION = 0.02
_E2M1_DEVIATION = 2.92
"""Of an E2M1 number whose code is uniform."""
_E4M3_ONE = 0x38


def dummy_state(model: nn.Module, device: torch.device | str) -> dict[str, Tensor]:
    """Values for all parameters of ``model``, which is on the meta device. The same in every run on one device."""
    generator = torch.Generator(device)
    state = {}
    for name, parameter in model.state_dict().items():
        generator.manual_seed(zlib.crc32(name.encode()))
        state[name] = _values(name, parameter, generator)
    return state


def route_uniformly(model: nn.Module, max_tokens: int, device: torch.device | str) -> None:
    """From now on, each row of a step has experts that are drawn once and for all, any set of them as likely, others in
    each layer. Costs nothing in a step: the ids are a view.

    max_tokens: most rows of a step. Random weights route nearly alike what lies near in the hidden space, and with
    random weights all tokens come to do: a few experts would get most of them."""
    for name, moe in model.named_modules():
        if isinstance(moe, MoE):
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            lots_TE = torch.rand(max_tokens, len(moe.gate.weight), device=device, generator=generator)
            moe.dummy_ids_TA = lots_TE.topk(moe.settings.num_experts_per_tok, dim=-1, sorted=False).indices


def _values(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    device = generator.device
    if like.dtype == torch.uint8:
        return torch.randint(0, 256, like.shape, dtype=torch.uint8, device=device, generator=generator)
    if like.dtype == torch.float8_e4m3fn:
        return torch.full(like.shape, _E4M3_ONE, dtype=torch.uint8, device=device).view(like.dtype)
    if name.endswith("_global"):
        return torch.full(like.shape, DEVIATION / _E2M1_DEVIATION, dtype=like.dtype, device=device)
    if like.ndim == 1:
        fill = torch.zeros if name.endswith("bias") else torch.ones
        return fill(like.shape, dtype=like.dtype, device=device)
    return torch.empty(like.shape, dtype=like.dtype, device=device).normal_(0.0, DEVIATION, generator=generator)
