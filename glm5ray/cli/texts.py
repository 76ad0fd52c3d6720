"""Texts from the command line and from standard input, whatever the locale is."""

from __future__ import annotations

import os
import sys

from glm5ray.errors import ConfigError


def decoded(text: str, name: str) -> str:
    """An argument as the text that its bytes are in UTF-8, where Python could not decode it (a locale such as C).

    Raises :class:`ConfigError` if that is none either.
    """
    if not any("\udc80" <= character <= "\udcff" for character in text):
        return text
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError as error:
        raise ConfigError(
            f"{name} cannot be decoded: its bytes are text neither in this locale ({sys.getfilesystemencoding()}) nor "
            "in UTF-8; write it in UTF-8"
        ) from error


def read_standard_input() -> str:
    """All of it. Raises :class:`ConfigError` if it is closed, unreadable or no UTF-8."""
    if sys.stdin is None:
        raise ConfigError("standard input is closed; give the text as an argument")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"standard input cannot be read: {error.strerror}") from error
