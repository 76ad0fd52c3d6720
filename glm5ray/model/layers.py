"""Weights with their shares per rank: linear layers, norms, embedding, head.

These modules hold parameters under the checkpoint's names; the arithmetic is the kernels'. Parameters are made on the
meta device, so a model of any size is built at once and in no memory, and get their values by ``load_state_dict(...,
assign=True)``.

Shape suffixes as in :mod:`glm5ray.kernels.interface`; W: rows of the vocabulary on this rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from glm5ray.parallel import shard_size

if TYPE_CHECKING:
    from torch import Tensor

    from glm5ray.parallel import ParallelContext


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter that waits for its values."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """``weight`` [out, in]. Whether either is a share of the whole is the owner's matter; no linear layer of the
    family has a bias."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features, dtype=dtype)


class RMSNorm(nn.Module):
    """``weight`` [width] and the epsilon."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(width, dtype=dtype)
        self.eps = eps


class LayerNorm(nn.Module):
    """``weight`` and ``bias`` [width] and the epsilon."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(width, dtype=dtype)
        self.bias = parameter(width, dtype=dtype)
        self.eps = eps


def fuse(layers: list[Linear]) -> Tensor:
    """One weight for layers that share their input: [sum of their outputs, in].

    The layers' own weights become views of it, so that nothing is held twice; while it runs, both copies exist.
    """
    weight_OX = torch.cat([layer.weight.data for layer in layers])
    for layer, part_OX in zip(layers, weight_OX.split([layer.weight.shape[0] for layer in layers]), strict=True):
        layer.weight = nn.Parameter(part_OX, requires_grad=False)
    return weight_OX


class VocabEmbedding(nn.Module):
    """Rows of the vocabulary, split over the tensor-parallel ranks."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, parallel: ParallelContext) -> None:
        super().__init__()
        self.parallel = parallel
        self.num_rows = shard_size(vocab_size, parallel.tp_size, "vocab_size")
        self.weight = parameter(self.num_rows, hidden_size, dtype=dtype)

    def forward(self, token_ids_T: Tensor) -> Tensor:
        """[T, M]; ids are of the whole vocabulary."""
        if self.parallel.tp_size == 1:
            return nn.functional.embedding(token_ids_T, self.weight)
        row_T = token_ids_T - self.parallel.tp_rank * self.num_rows
        is_elsewhere_T = (row_T < 0) | (row_T >= self.num_rows)
        x_TM = nn.functional.embedding(row_T.masked_fill(is_elsewhere_T, 0), self.weight)
        return self.parallel.all_reduce(x_TM.masked_fill(is_elsewhere_T[:, None], 0))
