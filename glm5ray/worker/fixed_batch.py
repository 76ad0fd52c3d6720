"""Where the inputs of a padded decode batch lie: at addresses that never change, so that a CUDA graph can read them.

All inputs of a step are one stretch of bytes, which is filled on the host (new pinned memory for each step, so that one
can be filled while the one before runs) and copied to the device at once. The page table stands last: the addresses of
the others depend on the number of rows alone.

Shapes: B rows of the batch, padded ones included; P pages of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from glm5ray.worker.sampler import MIN_TEMPERATURE, signed
from glm5ray.worker.transfers import aligned

if TYPE_CHECKING:
    from torch import Tensor

    from glm5ray.worker.batch import Decode


@dataclass(frozen=True, slots=True)
class Field:
    """One input: a number a row."""

    dtype: torch.dtype
    padding: float
    """Of padded rows; ``rows`` has the mirror's spare row there."""


FIELDS = {
    "token_ids": Field(torch.int64, 0),  # -1: only the device has it
    "positions": Field(torch.int64, -1),
    "slots": Field(torch.int64, -1),
    "rows": Field(torch.int64, 0),
    "seeds": Field(torch.int64, 0),
    "indexes": Field(torch.int64, 0),
    "output_positions": Field(torch.int64, 0),
    "slices": Field(torch.int32, 0),
    "temperature": Field(torch.float32, 0.0),  # below MIN_TEMPERATURE: greedy
    "min_p": Field(torch.float32, 0.0),
    "top_k": Field(torch.float32, 1.0),
    "top_p": Field(torch.float32, 1.0),
}
GREEDY = {name: FIELDS[name].padding for name in ("temperature", "min_p", "top_k", "top_p")}
NUMPY_TYPES = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}


@dataclass(frozen=True, slots=True)
class Views:
    """The inputs of batches of B rows and P pages, on the device, and where they lie in a step's bytes."""

    num_rows: int
    num_pages: int
    device: dict[str, Tensor]
    device_table_BP: Tensor
    num_bytes: int


class FixedBuffers:
    """Memory on the device for batches up to ``max_rows`` x ``max_pages``; the steps use it one after the other."""

    def __init__(self, max_rows: int, max_pages: int, spare_row: int, device: torch.device) -> None:
        self._spare_row = spare_row
        size = _table_offset(max_rows) + 4 * max_rows * max_pages
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._views: dict[tuple[int, int], Views] = {}

    def views(self, num_rows: int, num_pages: int) -> Views:
        """The same addresses at every call."""
        key = num_rows, num_pages
        if key not in self._views:
            self._views[key] = self._make_views(num_rows, num_pages)
        return self._views[key]

    def fill(self, views: Views, decode: Decode | None, vocab_size: int) -> None:
        """Writes a step, and padding behind it (``None``: padding only), and copies all to the device, behind what is
        queued there. Nothing waits."""
        host = torch.empty(views.num_bytes, dtype=torch.uint8, pin_memory=self._device.is_cuda)
        columns = _columns(host.numpy(), views.num_rows)
        count = 0 if decode is None else len(decode.sequences)
        for name, field in FIELDS.items():
            columns[name][count:] = self._spare_row if name == "rows" else field.padding
        table_BP = host.numpy()[_table_offset(views.num_rows) :].view(np.int32).reshape(views.num_rows, -1)
        table_BP.fill(-1)
        if decode is not None:
            for name, values in _values(decode, vocab_size).items():
                columns[name][:count] = values
            table_BP[:count, : decode.page_table_SP.shape[1]] = decode.page_table_SP
        self._device[: views.num_bytes].copy_(host, non_blocking=True)

    def _make_views(self, num_rows: int, num_pages: int) -> Views:
        device: dict[str, Tensor] = {}
        at = 0
        for name, field in FIELDS.items():
            num_bytes = num_rows * field.dtype.itemsize
            device[name] = self._device[at : at + num_bytes].view(field.dtype)
            at += aligned(num_bytes)
        end = at + 4 * num_rows * num_pages
        device_table = self._device[at:end].view(torch.int32).view(num_rows, num_pages)
        return Views(num_rows, num_pages, device, device_table, end)


def _columns(host: np.ndarray, num_rows: int) -> dict[str, np.ndarray]:
    """Each input in a step's bytes."""
    columns: dict[str, np.ndarray] = {}
    at = 0
    for name, field in FIELDS.items():
        num_bytes = num_rows * field.dtype.itemsize
        columns[name] = host[at : at + num_bytes].view(NUMPY_TYPES[field.dtype])
        at += aligned(num_bytes)
    return columns


def _values(decode: Decode, vocab_size: int) -> dict[str, Any]:
    """Of each sequence."""
    params = [sequence.sampling for sequence in decode.sequences]
    drawn = [p.temperature >= MIN_TEMPERATURE for p in params]
    values: dict[str, Any] = {
        "token_ids": decode.known_S,
        "positions": decode.positions_S,
        "slots": decode.slots_S,
        "rows": decode.rows_S,
        "slices": np.arange(len(params)),
    }
    if not any(drawn):
        return values | dict.fromkeys(("seeds", "indexes", "output_positions"), 0) | GREEDY
    return values | {
        "seeds": [signed(p.seed or 0) if is_drawn else 0 for p, is_drawn in zip(params, drawn, strict=True)],
        "indexes": [sequence.index for sequence in decode.sequences],
        "output_positions": [sequence.num_output_tokens - 1 for sequence in decode.sequences],
        "temperature": [p.temperature if is_drawn else 0.0 for p, is_drawn in zip(params, drawn, strict=True)],
        "min_p": [p.min_p for p in params],
        "top_k": [p.top_k if p.top_k > 0 else vocab_size for p in params],
        "top_p": [p.top_p for p in params],
    }


def _table_offset(num_rows: int) -> int:
    return sum(aligned(num_rows * field.dtype.itemsize) for field in FIELDS.values())
