"""Ctrl-C between two turns of the engine, not inside one."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Holds back SIGINT until the end of the block, so that what is changed inside stays whole; a second one goes
    through.

    Scheduler, executor and callers change their state together. A KeyboardInterrupt between two of them would lose a
    step or its tokens, and in a notebook the engine is used again after it. Python delivers signals to the main thread
    alone, so elsewhere, and where SIGINT is ignored, there is nothing to do.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))
        if len(held) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            before(*held[0])
