"""How many bytes of tensors live at once while a model runs, on any device: on the meta device, of any size."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages that operations have made, from their making until nobody holds them. What an operation needs
    inside itself is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._older: set[int] = set()

    def ignore(self, *tensors: torch.Tensor) -> None:
        """They were there before."""
        self._older |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._older and storage._cdata not in self._live:
                    self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._live.values()))
        return out
