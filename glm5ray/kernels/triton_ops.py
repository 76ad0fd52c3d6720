"""The operations that :mod:`glm5ray.kernels.triton` serves, under the names of the table.

Each name of ``Provider("triton").ops`` is an attribute here; kernels themselves live in the folder, a file a family.
Products with a weight that is not quantised are the vendor's library's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from glm5ray.kernels.interface import Nvfp4Weight
from glm5ray.kernels.triton.experts_nvfp4 import experts
from glm5ray.kernels.triton.head_products import mla_output, mla_query
from glm5ray.kernels.triton.indexer import select_tokens
from glm5ray.kernels.triton.linear_nvfp4 import linear_nvfp4
from glm5ray.kernels.triton.mla import mla_attention
from glm5ray.kernels.triton.norm_rope import (
    add_rms_norm,
    append_index_keys,
    append_latent,
    rms_norm,
    rope,
    silu_and_mul,
)
from glm5ray.kernels.triton.pick_tokens import pick_tokens
from glm5ray.kernels.triton.router import route

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "add_rms_norm",
    "append_index_keys",
    "append_latent",
    "experts",
    "linear",
    "mla_attention",
    "mla_output",
    "mla_query",
    "pick_tokens",
    "rms_norm",
    "rope",
    "route",
    "select_tokens",
    "silu_and_mul",
]


def linear(x_TX: Tensor, weight_OX: Tensor | Nvfp4Weight) -> Tensor:
    if isinstance(weight_OX, Nvfp4Weight):
        return linear_nvfp4(x_TX, weight_OX)
    return functional.linear(x_TX, weight_OX)
