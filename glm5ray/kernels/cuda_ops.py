"""The operations that :mod:`glm5ray.kernels.cuda` serves, under the names of the table; what their kernels do not take,
they leave to Triton's or the vendor's library."""

from __future__ import annotations

import torch

from glm5ray.kernels.cuda import experts_nvfp4, linear_few
from glm5ray.kernels.cuda.experts_nvfp4 import experts
from glm5ray.kernels.cuda.linear_few import linear, route

__all__ = ["experts", "linear", "load", "route"]


def load(op: str) -> None:
    """Compiles what ``op`` needs for the current device, seconds the first time on a machine. Without a device, where a
    model is only measured (on torch's meta device), there is nothing to compile."""
    if torch.cuda.is_available():
        (experts_nvfp4 if op == "experts" else linear_few).load(op)
