"""SIGINT (Ctrl-C) and SIGTERM (docker stop, a job's time limit): the first one ends a command in order.

It raises ``KeyboardInterrupt``, so that files are closed and the worker's thread is joined; further ones are ignored
meanwhile, for they would cut just that short. What was received stays known: an import or a finaliser may swallow the
exception, and :func:`check` raises it again.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _State:
    """Of the process, as signals are."""

    received: int | None = None
    is_held: bool = False
    message: str = "interrupted"


_state = _State()


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _state.received is not None:
        return
    _state.received = number
    if not _state.is_held:
        raise KeyboardInterrupt


@contextmanager
def handled() -> Iterator[None]:
    """Both signals raise ``KeyboardInterrupt`` inside, once. After one, they are ignored to the end of the process.

    A signal that the parent has set to be ignored (``nohup``, background jobs) stays ignored.
    """
    _state.received, _state.is_held, _state.message = None, False, "interrupted"
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            # ignored for good: Python takes a handler of its own away before it has ended
            signal.signal(number, handler if _state.received is None else signal.SIG_IGN)


@contextmanager
def held() -> Iterator[None]:
    """A signal that comes inside takes effect at the end: for imports of C extensions, which do not bear exceptions
    at any point.
    """
    _state.is_held = True
    try:
        yield
    finally:
        _state.is_held = False
    check()


def check() -> None:
    """Raises ``KeyboardInterrupt`` if a signal was received."""
    if _state.received is not None:
        raise KeyboardInterrupt


def exit_status() -> int | None:
    """130 after SIGINT, 143 after SIGTERM, as shells have it; ``None`` without either."""
    return None if _state.received is None else 128 + _state.received


def explain(message: str) -> None:
    """What to tell the user in place of ``interrupted``."""
    _state.message = message


def message() -> str:
    """One line for the user."""
    return _state.message
