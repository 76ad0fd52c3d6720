"""The files of a batch: what may be read and written, and that no two of them are one."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from glm5ray.errors import ConfigError, RequestError

STANDARD_INPUT = "standard input"


def check_paths(source: str | Path | BinaryIO, outputs: list[Path], *, resume: bool, overwrite: bool) -> None:
    """What :func:`glm5ray.jobs.batch_file.run_batch` checks first, for callers that load a model in between.

    Raises :class:`ConfigError`, and :class:`RequestError` with code ``empty_file`` for an empty file.
    """
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other")
    if isinstance(source, str | Path):
        _check_input(Path(source))
    for i, path in enumerate(outputs):
        if any(same_file(path, other) for other in outputs[:i]):
            raise ConfigError(
                f"{path} cannot take both answers and errors; leave --error-file out to have them in one file"
            )
        if same_file(path, source):
            raise ConfigError(f"{path} is the input; name another output file")
        _check_output(path, resume=resume, overwrite=overwrite)


def _check_input(path: Path) -> None:
    status = status_of(path)
    if status is None:
        raise ConfigError(f"the batch file {path} does not exist")
    if stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"the batch file {path} is a folder; name a file")
    if stat.S_ISREG(status.st_mode):
        open_input(path).close()
        if status.st_size == 0:
            raise empty_file(path)


def _check_output(path: Path, *, resume: bool, overwrite: bool) -> None:
    status = status_of(path)
    if status is None:
        if not path.parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
        return
    if stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"cannot write {path}: it is a folder; name a file")
    if resume and not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"--resume cannot read back what {path} was given; it needs an ordinary file")
    if stat.S_ISREG(status.st_mode) and not (resume or overwrite):
        raise ConfigError(
            f"{path} exists; continue it with --resume, replace it with --overwrite, or name another file"
        )


def same_file(path: Path, other: str | Path | BinaryIO) -> bool:
    """Whether both are one file, by whatever name or link; files that are not there yet are told by their place.

    Terminals and devices such as ``/dev/null`` may be used twice.
    """
    here = status_of(path)
    there = status_of(Path(other)) if isinstance(other, str | Path) else _status_of_stream(other)
    if here is not None and there is not None:
        return not stat.S_ISCHR(here.st_mode) and os.path.samestat(here, there)
    return here is there is None and isinstance(other, str | Path) and path.resolve() == Path(other).resolve()


def status_of(path: Path) -> os.stat_result | None:
    """``None`` if there is nothing. Raises :class:`ConfigError` for a path that cannot be looked up."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot use the path {path}: {getattr(error, 'strerror', None) or error}") from error


def _status_of_stream(stream: BinaryIO) -> os.stat_result | None:
    try:
        return os.fstat(stream.fileno())
    except (OSError, AttributeError):  # a stream in memory has no descriptor
        return None


def empty_file(source: str | Path | BinaryIO) -> RequestError:
    """The error for a source without lines."""
    return RequestError(f"{_name_of(source)} has no lines; a batch file has one JSON object a line.", code="empty_file")


def _name_of(source: str | Path | BinaryIO) -> str:
    if isinstance(source, str | Path):
        return str(source)
    name = getattr(source, "name", None)
    return STANDARD_INPUT if name == "<stdin>" else name if isinstance(name, str) else "the stream"


def open_input(path: str | Path) -> BinaryIO:
    """Raises :class:`ConfigError` if it cannot be read."""
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read the batch file {path}: {error.strerror}") from error
