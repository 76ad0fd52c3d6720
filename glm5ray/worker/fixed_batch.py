"""Where the inputs of a padded decode batch lie: at addresses that never change, so that a CUDA graph can read them.

All inputs of a step are one stretch of bytes, which is filled on the host and copied to the device at once. The page
table stands last: the addresses of the others depend on the number of rows alone.

Shapes: B rows of the batch, padded ones included; P pages of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from glm5ray.worker.sampler import MIN_TEMPERATURE, signed

if TYPE_CHECKING:
    from torch import Tensor

    from glm5ray.worker.batch import Decode

_ALIGNMENT = 16
"""Bytes: Triton reads in wide words what begins at a multiple of it."""


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


@dataclass(frozen=True, slots=True)
class Views:
    """The inputs of batches of B rows and P pages, on the host and on the device."""

    host: dict[str, np.ndarray]
    device: dict[str, Tensor]
    host_table_BP: np.ndarray
    device_table_BP: Tensor
    num_bytes: int


class FixedBuffers:
    """Memory for batches up to ``max_rows`` x ``max_pages``; one step uses it at a time."""

    def __init__(self, max_rows: int, max_pages: int, spare_row: int, device: torch.device) -> None:
        self._spare_row = spare_row
        size = _table_offset(max_rows) + 4 * max_rows * max_pages
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._views: dict[tuple[int, int], Views] = {}

    def views(self, num_rows: int, num_pages: int) -> Views:
        """The same addresses at every call."""
        key = num_rows, num_pages
        if key not in self._views:
            self._views[key] = self._make_views(num_rows, num_pages)
        return self._views[key]

    def fill(self, views: Views, decode: Decode | None, vocab_size: int) -> None:
        """Writes a step, and padding behind it (``None``: padding only), and copies all to the device.

        The copy is not waited for: what was written must not be changed before the step's results are there."""
        count = 0 if decode is None else len(decode.sequences)
        for name, field in FIELDS.items():
            views.host[name][count:] = self._spare_row if name == "rows" else field.padding
        views.host_table_BP.fill(-1)
        if decode is not None:
            self._fill_rows(views, decode, count, vocab_size)
        self._device[: views.num_bytes].copy_(self._host[: views.num_bytes], non_blocking=True)

    def _fill_rows(self, views: Views, decode: Decode, count: int, vocab_size: int) -> None:
        params = [sequence.sampling for sequence in decode.sequences]
        drawn = [p.temperature >= MIN_TEMPERATURE for p in params]
        values = {
            "token_ids": decode.known_S,
            "positions": decode.positions_S,
            "slots": decode.slots_S,
            "rows": decode.rows_S,
            "slices": np.arange(count),
            "seeds": [signed(p.seed or 0) if is_drawn else 0 for p, is_drawn in zip(params, drawn, strict=True)],
            "indexes": [sequence.index for sequence in decode.sequences],
            "output_positions": [sequence.num_output_tokens - 1 for sequence in decode.sequences],
            "temperature": [p.temperature if is_drawn else 0.0 for p, is_drawn in zip(params, drawn, strict=True)],
            "min_p": [p.min_p for p in params],
            "top_k": [p.top_k if p.top_k > 0 else vocab_size for p in params],
            "top_p": [p.top_p for p in params],
        }
        for name, column in values.items():
            views.host[name][:count] = column
        views.host_table_BP[:count, : decode.page_table_SP.shape[1]] = decode.page_table_SP

    def _make_views(self, num_rows: int, num_pages: int) -> Views:
        at = 0
        host: dict[str, np.ndarray] = {}
        device: dict[str, Tensor] = {}
        for name, field in FIELDS.items():
            end = at + num_rows * field.dtype.itemsize
            host[name] = self._host[at:end].view(field.dtype).numpy()
            device[name] = self._device[at:end].view(field.dtype)
            at += _aligned(num_rows * field.dtype.itemsize)
        end = at + 4 * num_rows * num_pages
        host_table = self._host[at:end].view(torch.int32).view(num_rows, num_pages).numpy()
        device_table = self._device[at:end].view(torch.int32).view(num_rows, num_pages)
        return Views(host, device, host_table, device_table, end)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _table_offset(num_rows: int) -> int:
    return sum(_aligned(num_rows * field.dtype.itemsize) for field in FIELDS.values())
