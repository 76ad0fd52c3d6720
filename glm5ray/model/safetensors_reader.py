"""Checkpoint folders of safetensors files: what is in them, from their headers alone, and pieces of their tensors.

A file begins with eight bytes, the length of a JSON header that gives each tensor's type, shape and place; the bytes
of the tensors follow. All of a header is checked before any tensor is touched, so that a damaged or truncated file is
an error that names it, never a crash: every size agrees with its shape, the tensors fill the file without gaps or
overlaps, and no name comes twice.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import warnings
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from glm5ray.errors import CheckpointError
from glm5ray.model_config import is_there, read_json, unique_keys
from glm5ray.quantization.formats import DTYPE_BYTES

if TYPE_CHECKING:
    from io import FileIO
    from pathlib import Path

    from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The limit of the format's own reader."""

_TORCH_DTYPES = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
"""Types that a weight's parts have; :func:`glm5ray.model.matching.match_weights` refuses others."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file, as its header describes it."""

    name: str
    file: Path
    dtype: str
    """safetensors' name of the type: ``BF16``, ``F8_E4M3``..."""
    shape: tuple[int, ...]
    start: int
    """Byte in the file at which it begins."""
    num_bytes: int

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name} is {self.dtype} {list(self.shape)}"


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file. Reads the header alone. Raises :class:`CheckpointError`."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is no regular file")
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_bytes > file_bytes - 8:
                raise CheckpointError(f"{path} is no safetensors file, or cut short: it has {file_bytes} bytes")
            if header_bytes > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: the header claims {header_bytes} bytes; at most {MAX_HEADER_BYTES} are allowed"
                )
            text = file.read(header_bytes)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    header = _parse_header(path, text)
    header.pop("__metadata__", None)
    entries = {name: _parse_entry(path, name, value, 8 + header_bytes) for name, value in header.items()}
    _check_layout(path, entries, 8 + header_bytes, file_bytes)
    return entries


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a {type(header).__name__}; it must be a JSON object")
    return header


def _parse_entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: the header's entry of {name} is {value!r}; it must be a JSON object")
    fields: dict[str, Any] = value
    dtype, shape, offsets = (fields.get(field) for field in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{path}: {name} has the type {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
    if not _are_sizes(shape):
        raise CheckpointError(f"{path}: {name} has the shape {shape!r}; it must be a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{path}: {name} has the data_offsets {offsets!r}; they must be its begin and end")
    num_bytes = offsets[1] - offsets[0]
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if num_bytes != expected:
        raise CheckpointError(f"{path}: {name} is {dtype} {shape}, which is {expected} bytes, but has {num_bytes}")
    return TensorEntry(name, path, dtype, tuple(shape), data_start + offsets[0], num_bytes)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def _check_layout(path: Path, entries: dict[str, TensorEntry], data_start: int, file_bytes: int) -> None:
    end = data_start
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.num_bytes)):
        if entry.start != end:
            fault = "overlaps the tensor before it" if entry.start < end else "leaves a gap before it"
            raise CheckpointError(f"{path}: {entry.name} begins at byte {entry.start} and {fault}, which ends at {end}")
        end = entry.start + entry.num_bytes
    if end > file_bytes:
        raise CheckpointError(f"{path} is truncated: it has {file_bytes} bytes, its header describes {end}")
    if end < file_bytes:
        raise CheckpointError(f"{path} has {file_bytes - end} bytes behind its last tensor")


class CheckpointFiles:
    """The tensors of a checkpoint folder; files are opened as they are needed."""

    def __init__(self, folder: Path, entries: dict[str, TensorEntry], files: list[Path]) -> None:
        self.folder = folder
        self.entries = entries
        self.files = files
        self.bytes_read = 0
        """Bytes of tensors handed out so far."""
        self._lock = Lock()
        self._handles: dict[Path, FileIO] = {}
        self._maps: dict[Path, tuple[mmap.mmap, Tensor]] = {}

    @classmethod
    def open(cls, folder: Path) -> CheckpointFiles:
        """Reads the index, if there is one, and the header of every file. Raises :class:`CheckpointError`."""
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is no folder; name a checkpoint folder that holds safetensors files")
        index = folder / INDEX_NAME
        if is_there(index):
            weight_map = _read_index(index)
            files = [folder / name for name in sorted(set(weight_map.values()))]
        else:
            weight_map = None
            files = sorted(folder.glob("*.safetensors"))
            if not files:
                raise CheckpointError(f"{folder} holds no safetensors files and no {INDEX_NAME}")
        entries: dict[str, TensorEntry] = {}
        for file in files:
            for name, entry in read_header(file).items():
                if name in entries:
                    raise CheckpointError(f"{name} is in two files: {entries[name].file} and {file}")
                entries[name] = entry
        if weight_map is not None:
            _check_index(index, weight_map, entries)
        return cls(folder, entries, files)

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()

    @staticmethod
    def dtype(entry: TensorEntry) -> torch.dtype:
        return _TORCH_DTYPES[entry.dtype]

    @staticmethod
    def piece_shape(entry: TensorEntry, rows: range | None, columns: range | None) -> torch.Size:
        """Of ``rows`` and ``columns`` of a tensor; ``None`` stands for all."""
        shape = list(entry.shape)
        for i, part in enumerate((rows, columns)):
            if part is not None:
                shape[i] = len(part)
        return torch.Size(shape)

    def read_into(self, entry: TensorEntry, rows: range | None, columns: range | None, target: Tensor) -> None:
        """Copies a piece of a tensor to ``target``, which is contiguous, on the CPU and of its type and shape; other
        bytes are not handed out. Several threads may read at once. Raises :class:`CheckpointError`."""
        raw = target.view(-1).view(torch.uint8)
        if columns is not None and len(columns) < entry.shape[1]:
            # columns of a row are few bytes: a call for each would cost more than the pages in between
            piece = self._view(entry)[rows.start : rows.stop] if rows is not None else self._view(entry)
            target.view(torch.uint8).copy_(piece[:, columns.start : columns.stop].view(torch.uint8))
        else:
            row_bytes = entry.num_bytes // max(entry.shape[0], 1) if entry.shape else 0
            start = entry.start + (rows.start * row_bytes if rows is not None else 0)
            self._read_at(entry.file, start, raw.numpy().data)
        with self._lock:
            self.bytes_read += len(raw)

    def _read_at(self, file: Path, start: int, out: memoryview) -> None:
        try:
            with self._lock:
                if file not in self._handles:
                    self._handles[file] = file.open("rb", buffering=0)
            handle = self._handles[file].fileno()
            while len(out):
                count = os.preadv(handle, [out], start)
                if not count:
                    raise CheckpointError(f"{file} was cut short while it was read")
                out, start = out[count:], start + count
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error

    def _view(self, entry: TensorEntry) -> Tensor:
        """The tensor in the map of its file. Not to be written to."""
        raw = self._map(entry.file)[entry.start : entry.start + entry.num_bytes]
        dtype = _TORCH_DTYPES[entry.dtype]
        if entry.start % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(entry.shape)

    def release(self, file: Path) -> None:
        """Lets the system drop the file's pages from this process; they come back if it is read again."""
        if file in self._maps and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[file][0].madvise(mmap.MADV_DONTNEED)

    def _map(self, file: Path) -> Tensor:
        with self._lock:
            if file not in self._maps:
                try:
                    with file.open("rb") as handle:
                        mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
                except (OSError, ValueError) as error:
                    raise CheckpointError(f"{file} cannot be mapped: {error}") from error
                with warnings.catch_warnings():
                    # torch warns of memory that it may not write to. A private, writable map would count as memory that
                    # is used: one of more than the machine has is refused.
                    warnings.simplefilter("ignore", UserWarning)
                    self._maps[file] = mapped, torch.frombuffer(mapped, dtype=torch.uint8)
            return self._maps[file][1]


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing; it must map tensor names to file names")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or "/" in file or "\\" in file:
            raise CheckpointError(
                f"{path}: {name} is in {file!r}; it must be the name of a safetensors file in the same folder"
            )
    return weight_map


def _check_index(path: Path, weight_map: dict[str, str], entries: dict[str, TensorEntry]) -> None:
    for name, file in weight_map.items():
        if name not in entries:
            raise CheckpointError(f"{path} says that {name} is in {file}; it is not")
        if entries[name].file.name != file:
            raise CheckpointError(f"{path} says that {name} is in {file}; it is in {entries[name].file.name}")
    for name, entry in entries.items():
        if name not in weight_map:
            raise CheckpointError(f"{entry.file} holds {name}, which {path.name} does not list")
