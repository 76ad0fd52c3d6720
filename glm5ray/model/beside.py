"""Work beside other work: two branches of a CUDA graph that run at the same time.

At small batches a step is many short kernels, each of which leaves most of the GPU idle while it begins and ends. What
does not depend on them fills that time."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

R = TypeVar("R")

MAX_ROWS = 16
"""Larger batches keep the GPU busy by themselves, and two products at once take each other's caches."""


class Beside(Generic[R]):
    """``function(x)``, begun here and joined by :meth:`result`.

    While a CUDA graph is captured, and x has at most :data:`MAX_ROWS` rows, the function's kernels are a branch of
    their own from here to there; at all other times :meth:`result` computes it. Launched one by one from Python a
    second stream costs more than it gains."""

    def __init__(self, function: Callable[[Tensor], R], x: Tensor) -> None:
        self._function, self._x = function, x
        self._branch: torch.cuda.Stream | None = None
        if x.is_cuda and len(x) <= MAX_ROWS and torch.cuda.is_current_stream_capturing():
            self._branch = _branch(x.device)
            self._branch.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(self._branch):
                self._early = function(x)

    def result(self) -> R:
        """To be called once, while x is as it was."""
        if self._branch is None:
            return self._function(self._x)
        # Memory needs no more than this: what the branch allocated or read is freed, and given out again, in the order
        # of the streams, which meet here.
        torch.cuda.current_stream(self._x.device).wait_stream(self._branch)
        return self._early


@cache
def _branch(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
