"""JSON lines on disk: reading what people write, and writing so that a file is whole at any moment."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from glm5ray.errors import ConfigError, Glm5RayError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

MAX_LINE_BYTES = 256 * 2**20
"""Longer lines are refused instead of held in memory."""

_BOM = b"\xef\xbb\xbf"


def read_lines(stream: BinaryIO, max_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes | None]]:
    """Number (from 1) and bytes of each line that is not blank; ``None`` in place of one that is too long.

    A byte order mark, CRLF and a missing last newline are fine.
    """
    number = 0
    while line := stream.readline(max_bytes):
        number += 1
        if number == 1:
            line = line.removeprefix(_BOM)
        if len(line) >= max_bytes and not line.endswith(b"\n"):
            while (rest := stream.readline(max_bytes)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif line.strip():
            yield number, line


def count_lines(path: Path) -> int:
    """Lines that are not blank."""
    with path.open("rb") as stream:
        return sum(1 for _ in read_lines(stream))


def to_line(record: dict[str, Any]) -> bytes:
    """A record as one line of UTF-8; half a surrogate pair, which UTF-8 cannot hold, stays escaped."""
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


class LineWriter:
    """Appends whole lines to a file, each with one system call: a signal or a full disk leaves no half line behind."""

    def __init__(self, path: Path, *, append: bool) -> None:
        """An existing file is continued with ``append``, else emptied. Raises :class:`ConfigError` if it cannot be
        opened.
        """
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
        self._path = path
        try:
            self._fd = os.open(path, flags, 0o666)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error

    def write(self, record: dict[str, Any]) -> None:
        """Raises :class:`Glm5RayError` if there is no room, with the file as it was before."""
        data = memoryview(to_line(record))
        start = os.fstat(self._fd).st_size
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            os.ftruncate(self._fd, start)
            raise Glm5RayError(f"cannot write {self._path}: {error.strerror}") from error
        except BaseException:
            os.ftruncate(self._fd, start)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)


def recover(path: Path, keep: Callable[[dict[str, Any]], bool]) -> Iterator[dict[str, Any]]:
    """The records of an earlier run that are whole and that ``keep`` accepts; at the end the file holds just these.

    A crash of the machine may have torn the last line. Raises :class:`ConfigError` for a file that holds anything else
    than results: it is not ours to cut.
    """
    if not path.exists():
        return
    is_whole = True
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            record = _read_record(line)
            if record is not None and keep(record):
                yield record
                continue
            if record is None and line.endswith(b"\n"):
                raise ConfigError(
                    f"{path} line {number} is no result of a batch; name another file, or use --overwrite"
                )
            is_whole = False
    if not is_whole:
        _rewrite(path, keep)


def _rewrite(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    rest = path.with_name(f"{path.name}.recovered")
    with path.open("rb") as stream, rest.open("wb") as kept:
        for line in stream:
            record = _read_record(line)
            if record is not None and keep(record):
                kept.write(line)
        kept.flush()
        os.fsync(kept.fileno())
    rest.replace(path)


def _read_record(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and {"custom_id", "response", "error"} <= record.keys() else None
