"""Weights from files to their places in memory, read ahead by threads.

A weight is cut into pieces of rows, pieces that lie side by side in a file are read as a group, and a few groups are
under way at once, in the order of the files. On a CPU a part that is kept as it is stored is read straight to its
place; what has to be computed first, and everything for a GPU, passes through a buffer of a few megabytes, page-locked
for a GPU, so that the next group is read while the last one is copied. Beside the parameters themselves memory holds
these buffers and the float32 values of the pieces that are being dequantised, whatever the size of the model.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from glm5ray.errors import CheckpointError
from glm5ray.model import packed
from glm5ray.quantization.dequantize import dequantize, find_bad_scale
from glm5ray.quantization.formats import PLAIN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from concurrent.futures import Future

    from torch import Tensor

    from glm5ray.model.matching import StoredWeight
    from glm5ray.model.name_table import Placement
    from glm5ray.model.safetensors_reader import CheckpointFiles, TensorEntry

MAX_VALUES = 2**22
"""Of a piece, unless one block of rows has more: 16 MiB in float32."""
GROUP_BYTES = 4 * 2**20
"""After so many bytes a group ends."""
PINNED_BYTES = GROUP_BYTES + 4 * MAX_VALUES
"""Of a page-locked buffer: a group that a piece of float32 was added to last."""
MAX_READERS = 8
ALIGNMENT = 64
"""Bytes, of a part in a buffer."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one weight."""

    weight: StoredWeight
    place: Placement
    num_bytes: int
    """Of the files."""

    def parts(self) -> Iterator[tuple[str, TensorEntry, range | None, range | None]]:
        return self.weight.pieces(self.place)


def cut(weight: StoredWeight, place: Placement) -> Iterator[Piece]:
    """The weight's rows in ``place``, in pieces that begin and end with whole blocks of its format."""
    columns = 1 if place.columns is None else len(place.columns)
    block = weight.format.block[0]
    step = max(MAX_VALUES // max(columns, 1) // block * block, block)
    start = place.rows.start
    while start < place.rows.stop:
        stop = min((start + step) // block * block, place.rows.stop)
        part = replace(place, rows=range(start, stop), row_offset=place.row_offset + start - place.rows.start)
        yield Piece(weight, part, weight.bytes_to_read(part))
        start = stop


@dataclass(slots=True)
class Group:
    """Pieces that are read together."""

    pieces: list[Piece] = field(default_factory=list)
    num_bytes: int = 0


@dataclass(slots=True)
class Buffer:
    """A page-locked one, and when the device has taken from it what was in it before."""

    data: Tensor
    copied: torch.cuda.Event


def stream_weights(
    files: CheckpointFiles, weights: Iterable[tuple[StoredWeight, Placement]], parameters: Mapping[str, Tensor]
) -> Iterator[Group]:
    """Fills ``parameters`` with what the files hold of ``weights``, which come in the order in which they lie there;
    yields each group when it is done, in order.

    Raises :class:`CheckpointError` for files that cannot be read, and for values that no quantiser writes."""
    device = next((tensor.device for tensor in parameters.values()), torch.device("cpu"))
    num_readers = min(MAX_READERS, os.cpu_count() or 1)
    buffers = [_pinned_buffer() for _ in range(num_readers + 1)] if _needs_buffers(device) else []
    free: list[Buffer | None] = [*buffers] or [None] * (num_readers + 1)
    waiting: deque[tuple[Group, Buffer | None, Future[list[Mapping[str, Tensor]]]]] = deque()

    def finish() -> Group:
        group, buffer, future = waiting.popleft()
        found = future.result()
        if buffer is not None:
            for piece, parts in zip(group.pieces, found, strict=True):
                _put(piece, parts, parameters, device)
            buffer.copied.record()
        free.append(buffer)
        return group

    with ThreadPoolExecutor(num_readers, thread_name_prefix="weights") as readers:
        try:
            for group in _groups(weights):
                if not free:
                    yield finish()
                buffer = free.pop(0)
                waiting.append((group, buffer, readers.submit(_read, files, group, parameters, buffer)))
            while waiting:
                yield finish()
        finally:
            readers.shutdown(cancel_futures=True)
    for buffer in buffers:  # they go now
        buffer.copied.synchronize()


def _needs_buffers(device: torch.device) -> bool:
    return device.type != "cpu"


def _pinned_buffer() -> Buffer:
    return Buffer(torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())


def _groups(weights: Iterable[tuple[StoredWeight, Placement]]) -> Iterator[Group]:
    group = Group()
    for weight, place in weights:
        for piece in cut(weight, place):
            group.pieces.append(piece)
            group.num_bytes += piece.num_bytes
            if group.num_bytes >= GROUP_BYTES:
                yield group
                group = Group()
    if group.pieces:
        yield group


def _read(
    files: CheckpointFiles, group: Group, parameters: Mapping[str, Tensor], buffer: Buffer | None
) -> list[Mapping[str, Tensor]]:
    """In a thread: ``{suffix: tensor on the CPU}`` of each piece, checked. Without a buffer they are put in place, too,
    and nothing is returned."""
    if buffer is not None:
        buffer.copied.synchronize()
    found, used = [], 0
    for piece in group.pieces:
        targets = _unchanged(piece, parameters) if buffer is None else {}
        parts: dict[str, Tensor] = {}
        for suffix, entry, rows, columns in piece.parts():
            target = targets.get(suffix)
            if target is None or not target.is_contiguous():
                shape, dtype = files.piece_shape(entry, rows, columns), files.dtype(entry)
                size = shape.numel() * dtype.itemsize
                if buffer is None or used + size > len(buffer.data):
                    raw = torch.empty(size, dtype=torch.uint8)
                else:
                    raw = buffer.data[used : used + size]
                    used += -(-size // ALIGNMENT) * ALIGNMENT
                target = raw.view(dtype).view(shape)
            files.read_into(entry, rows, columns, target)
            parts[suffix] = target
        _check(piece, parts)
        if buffer is None:
            _put(piece, parts, parameters, torch.device("cpu"))
        else:
            found.append(parts)
    return found


def _check(piece: Piece, parts: Mapping[str, Tensor]) -> None:
    fault = find_bad_scale(parts)
    if fault is not None:
        entry = piece.weight.parts[fault[0]]
        raise CheckpointError(f"{entry.file}: {entry.name} {fault[1]}")
    first = piece.weight.first
    if len(first.shape) == 1 and not bool(torch.isfinite(parts["weight"]).all()):
        raise CheckpointError(f"{first.file}: {first.name} holds NaN or infinity")


def _unchanged(piece: Piece, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``{suffix: where it belongs}`` of the parts that are kept as they are stored."""
    weight, place = piece.weight, piece.place
    if weight.spec.parameter not in parameters:
        return packed.places(weight, place, parameters)
    target = _rows_of(parameters[weight.spec.parameter], place)
    is_kept = weight.format is PLAIN and target.dtype == _STORED[weight.first.dtype]
    return {"weight": target} if is_kept else {}


_STORED = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def _rows_of(parameter: Tensor, place: Placement) -> Tensor:
    target = parameter if place.expert_index is None else parameter[place.expert_index]
    return target[place.row_offset : place.row_offset + len(place.rows)]


def _put(piece: Piece, parts: Mapping[str, Tensor], parameters: Mapping[str, Tensor], device: torch.device) -> None:
    """Copies or dequantises one piece to its place; what was read straight there stays."""
    weight, place = piece.weight, piece.place
    targets = _unchanged(piece, parameters)
    for suffix, target in targets.items():
        part = parts[suffix]
        if part.data_ptr() != target.data_ptr():
            # as bytes: not every device copies every type
            target.view(torch.uint8).copy_(part.view(torch.uint8), non_blocking=True)
    if weight.spec.parameter not in parameters:
        packed.put_global(weight, place, parts, parameters)
    elif not targets:
        form, parameter = weight.format, parameters[weight.spec.parameter]
        here = {suffix: part.to(device, non_blocking=True) for suffix, part in parts.items()}
        values = dequantize(form, here, parameter.dtype)
        # Whole blocks were read; the piece may begin inside one.
        row_skip = place.rows.start % form.block[0]
        values = values[row_skip : row_skip + len(place.rows)]
        if place.columns is not None:
            column_skip = place.columns.start % form.block[1]
            values = values[:, column_skip : column_skip + len(place.columns)]
        _rows_of(parameter, place).copy_(values)
