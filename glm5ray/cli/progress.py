"""Progress of long work on standard error: a bar on a terminal, else a plain line every few seconds."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from glm5ray.cli import signals

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from glm5ray.jobs.batch_file import BatchSummary

SECONDS_BETWEEN_LINES = 3.0


class ProgressBar:
    """``with ProgressBar("batch", 32, unit="lines") as bar: bar.update(1, "12 tok/s")``. A total of ``None`` is not
    known yet.
    """

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(f"{self._unit} {{task.fields[note]}}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total, note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, note: str = "", total: int | None = None) -> None:
        """``done`` of the total, and a few words on the rate."""
        if total is not None:
            self._total = total
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=self._total, note=note)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            of = "" if self._total is None else f"/{self._total}"
            seconds = time.monotonic() - self._started
            print(f"{self._what}: {done}{of} {self._unit} {note} [{seconds:.0f} s]", file=sys.stderr, flush=True)


def load_progress(bar: ProgressBar) -> Callable[[int, int], None]:
    """For ``LLM(progress=...)``: bytes as MiB."""

    def show(done_bytes: int, total_bytes: int) -> None:
        bar.update(done_bytes // 2**20, total=max(1, total_bytes // 2**20))

    return show


def batch_progress(bar: ProgressBar) -> Callable[[BatchSummary], None]:
    """For ``run_batch(progress=...)``: lines, failures and the rate of tokens. Ends the run after a signal."""

    def show(summary: BatchSummary) -> None:
        failed = f", {summary.failed} failed" if summary.failed else ""
        signals.check()
        bar.update(summary.total, f"{summary.output_tokens_per_s:.0f} output tok/s{failed}")

    return show
