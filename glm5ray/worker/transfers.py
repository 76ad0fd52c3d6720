"""Copies between the host and the device that do not stop the host: a step is queued on a GPU while the one before it
runs there.

A copy from pageable memory waits for everything that is queued, so what travels lies in pinned memory. PyTorch keeps
that memory until the copy is done, whoever drops it earlier. On a CPU all of this is plain references."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

ALIGNMENT = 16
"""Bytes: kernels read in wide words what begins at a multiple of it."""


def aligned(num_bytes: int) -> int:
    """``num_bytes``, up to a multiple of :data:`ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """``values`` on ``device``; not waited for."""
    if device.type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)
    return stage({"values": values}, device)["values"]


def stage(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """The arrays on ``device``, as views of one tensor: one copy, which is not waited for."""
    if device.type != "cuda":
        return {name: to_device(array, device) for name, array in arrays.items()}
    host = torch.empty(sum(aligned(array.nbytes) for array in arrays.values()), dtype=torch.uint8, pin_memory=True)
    host_bytes = host.numpy()
    begins, at = [], 0
    for array in arrays.values():
        host_bytes[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        begins.append(at)
        at += aligned(array.nbytes)
    packed = host.to(device, non_blocking=True)
    return {
        name: packed[begin : begin + array.nbytes].view(_torch_dtype(array.dtype)).view(array.shape)
        for (name, array), begin in zip(arrays.items(), begins, strict=True)
    }


def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


class ReadBack:
    """Tensors on their way to the host. :meth:`add` them all, :meth:`close`, and read what :meth:`add` returned after
    :meth:`wait`."""

    def __init__(self, device: torch.device) -> None:
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    def add(self, tensor: Tensor) -> Tensor:
        """Where ``tensor`` will be found on the host. It may be overwritten by what is queued from now on."""
        if self._done is None:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def close(self) -> None:
        """Nothing more is added."""
        if self._done is not None:
            self._done.record()

    @property
    def is_done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._done is None or self._done.query()

    def wait(self) -> None:
        """Until all of it is there."""
        if self._done is not None:
            self._done.synchronize()
