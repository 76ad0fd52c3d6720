"""What can be asked of a rank while it computes: its state, a profile of its next steps, its end.

The rank's loop reports to :class:`RankControl`; the methods of the actor's ``ctl`` group, which run in threads of their
own, read it. Nothing here touches the model: all CUDA work stays in the loop's thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm5ray.protocol import StepInput


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStats:
    """One rank at one moment."""

    rank: int
    epoch: int
    pid: int
    host: str
    device: str
    """``cpu``, ``cuda:3``."""
    step_id: int
    """The step that runs, or the last one; -1 before the first."""
    num_steps: int
    """Steps that came to their end."""
    seconds_in_step: float
    """Age of the oldest step that runs; 0 if none does."""
    num_waiting: int
    """Steps that have come and wait for it."""
    memory_bytes: int
    """Of the process, in the machine's memory."""
    device_memory_bytes: int
    """That tensors take on the GPU; 0 on a CPU."""
    device_memory_peak_bytes: int


class _Profile:
    """A wish for a profile, and what became of it."""

    def __init__(self, num_steps: int, path: Path) -> None:
        self.num_left = num_steps
        self.path = path
        self.is_wanted = True
        self.has_ended = threading.Event()
        self.profiler: Any = None


class RankControl:
    """Shared by the loop's thread, which calls :meth:`begin`, :meth:`end` and :meth:`idle`, and those of the control
    group."""

    def __init__(self) -> None:
        self.step_id = -1
        self.num_steps = 0
        self.is_stopping = False
        self._starts_s: deque[float] = deque()
        """When the steps that run were begun, oldest first: one may be launched behind another."""
        self._lock = threading.Lock()
        self._profile: _Profile | None = None

    @property
    def seconds_in_step(self) -> float:
        try:
            return time.monotonic() - self._starts_s[0]
        except IndexError:
            return 0.0

    def begin(self, step: StepInput) -> None:
        """Before a step is computed."""
        profile = self._profile
        if profile is not None and profile.profiler is None and profile.is_wanted:
            profile.profiler = _start_profiler()
        self.step_id = step.step_id
        self._starts_s.append(time.monotonic())

    def end(self) -> None:
        """When the oldest step is done."""
        self._starts_s.popleft()
        self.num_steps += 1
        profile = self._profile
        if profile is None:
            return
        if profile.profiler is not None:
            profile.num_left -= 1
        if profile.num_left <= 0 or not profile.is_wanted:
            self._put_away(profile)

    def idle(self) -> None:
        """Between two steps, when none came for a while."""
        if self._profile is not None and not self._profile.is_wanted:
            self._put_away(self._profile)

    def profile(self, num_steps: int, path: Path, timeout_s: float) -> None:
        """Waits until the next ``num_steps`` steps were recorded in ``path``. Raises ``RuntimeError`` if another
        profile is being made, and ``TimeoutError`` if too few steps came."""
        profile = _Profile(num_steps, path)
        with self._lock:
            if self._profile is not None:
                raise RuntimeError(f"a profile is being made already: {self._profile.path}")
            self._profile = profile
        if not profile.has_ended.wait(timeout_s):
            profile.is_wanted = False  # the loop puts it away
            raise TimeoutError(f"{profile.num_left} of {num_steps} steps did not come within {timeout_s:g} s")

    def _put_away(self, profile: _Profile) -> None:
        """In the loop's thread, as the start was: PyTorch records the operations of one thread."""
        if profile.profiler is not None:
            profile.profiler.stop()
            if profile.is_wanted:
                profile.path.parent.mkdir(parents=True, exist_ok=True)
                profile.profiler.export_chrome_trace(str(profile.path))
        with self._lock:
            self._profile = None
        profile.has_ended.set()


def _start_profiler() -> Any:
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities)
    profiler.start()
    return profiler


def process_memory_bytes() -> int:
    """Resident memory of this process; 0 where /proc is not there."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


def device_memory_bytes(device_index: int | None) -> tuple[int, int]:
    """Now and at the peak."""
    if device_index is None:
        return 0, 0
    import torch

    return torch.cuda.memory_allocated(device_index), torch.cuda.max_memory_allocated(device_index)
