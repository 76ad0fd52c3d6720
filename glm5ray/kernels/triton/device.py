"""What a launch needs to know about the device of its tensors. On a CPU kernels run in Triton's interpreter, which is
taken for a small GPU of capability 90."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@cache
def _properties(index: int) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor, torch.cuda.get_device_properties(index).multi_processor_count


def capability(x: Tensor) -> int:
    """Compute capability of x's device: 90, 120."""
    return _properties(x.device.index)[0] if x.is_cuda else 90


def num_processors(x: Tensor) -> int:
    """Multiprocessors of x's device."""
    return _properties(x.device.index)[1] if x.is_cuda else 2


def dot_precision(x: Tensor) -> str:
    """How products of x's numbers are computed: ``ieee`` in fp32, to which operands are widened first; ``tf32``, which
    leaves bf16 as it is. The interpreter multiplies no bf16."""
    return "tf32" if x.is_cuda and x.dtype != torch.float32 else "ieee"
