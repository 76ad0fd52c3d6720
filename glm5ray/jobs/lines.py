"""JSON lines on disk: reading what people write, and writing so that a run can be resumed from what is there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from glm5ray.errors import ConfigError, Glm5RayError
from glm5ray.jobs.paths import open_input

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

MAX_LINE_BYTES = 256 * 2**20
"""Longer lines are refused instead of held in memory."""

_BOM = b"\xef\xbb\xbf"


def read_lines(stream: BinaryIO, max_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes | None]]:
    """Number (from 1) and bytes of each line that is not blank; ``None`` in place of one that is too long.

    A byte order mark, CRLF and a missing last newline are fine. Raises :class:`Glm5RayError` if reading fails.
    """
    number = 0
    while line := _read_line(stream, max_bytes):
        number += 1
        if number == 1:
            line = line.removeprefix(_BOM)
        if len(line) >= max_bytes and not line.endswith(b"\n"):
            while (rest := _read_line(stream, max_bytes)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif line.strip():
            yield number, line


def _read_line(stream: BinaryIO, max_bytes: int) -> bytes:
    try:
        return stream.readline(max_bytes)
    except OSError as error:
        raise Glm5RayError(f"the batch file cannot be read: {error.strerror or error}") from error


def count_lines(path: Path) -> int:
    """Lines that are not blank."""
    with open_input(path) as stream:
        return sum(1 for _ in read_lines(stream))


def to_line(record: dict[str, Any]) -> bytes:
    """A record as one line of UTF-8; half a surrogate pair, which UTF-8 cannot hold, stays escaped."""
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


class LineWriter:
    """Appends lines to a file, each with one system call and whole: a line that an exception (a full disk, Ctrl-C) cuts
    is taken back. Only a kill or a crash of the machine in the middle of that call can leave a part of one.

    Pipes and devices are written alike, but nothing is taken back there.
    """

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
        self._is_regular = stat.S_ISREG(os.fstat(self._fd).st_mode)

    def write(self, record: dict[str, Any]) -> None:
        """Raises :class:`Glm5RayError` if there is no room, with the file as it was before."""
        data = memoryview(to_line(record))
        start = os.fstat(self._fd).st_size
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self._take_back(start)
            raise Glm5RayError(f"cannot write {self._path}: {error.strerror}") from error
        except BaseException:
            self._take_back(start)
            raise

    def _take_back(self, size: int) -> None:
        if self._is_regular:
            os.ftruncate(self._fd, size)
            os.lseek(self._fd, size, os.SEEK_SET)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._is_regular:
                os.fsync(self._fd)
        except OSError as failure:
            if failure.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot sync
                raise Glm5RayError(f"cannot write {self._path}: {failure.strerror}") from failure
        finally:
            os.close(self._fd)


def recover(path: Path, keep: Callable[[dict[str, Any]], bool]) -> Iterator[dict[str, Any]]:
    """The records of an earlier run that are whole and that ``keep`` accepts; at the end the file holds just these.

    A kill or a crash of the machine may have torn the last line. Raises :class:`ConfigError` for a file that cannot be
    read or that holds anything else than results: it is not ours to cut.
    """
    if not path.exists():
        return
    is_whole = True
    try:
        stream = path.open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read {path} to resume it: {error.strerror}") from error
    with stream:
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
        _rewrite(path.resolve(), keep)


def _rewrite(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Replaces the file by its records that ``keep`` accepts; if that fails, it is as before and nothing is left."""
    try:
        fd, rest = tempfile.mkstemp(prefix=f"{path.name[:100]}.", suffix=".recovered", dir=path.parent)
        try:
            with path.open("rb") as stream, open(fd, "wb") as kept:
                for line in stream:
                    record = _read_record(line)
                    if record is not None and keep(record):
                        kept.write(line)
                kept.flush()
                os.fsync(kept.fileno())
            shutil.copymode(path, rest)
            os.replace(rest, path)
        except BaseException:
            Path(rest).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise Glm5RayError(f"cannot resume {path}: its last lines cannot be dropped: {error.strerror}") from error


def _read_record(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and {"custom_id", "response", "error"} <= record.keys() else None
