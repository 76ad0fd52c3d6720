"""How many steps an engine makes a second, over the last ten."""

from __future__ import annotations

WINDOW_S = 10.0
_MARK_EVERY_S = 1.0
_SHORTEST_S = 0.1


class StepRate:
    """Told of each step by one thread, asked by others. Between two marks, a second apart, a step costs an addition."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._marks: tuple[tuple[float, int], ...] = ()
        """``(time, steps until then)``, at most one a second; replaced, never changed, so any thread may read it."""

    def note(self, num_steps: int, now_s: float) -> None:
        """``num_steps`` have been made since the start, at the time ``now_s`` (``time.monotonic()``)."""
        self._num_steps = num_steps
        if not self._marks or now_s - self._marks[-1][0] >= _MARK_EVERY_S:
            young = tuple(mark for mark in self._marks if now_s - mark[0] <= WINDOW_S)
            self._marks = (*young, (now_s, num_steps))

    def per_second(self, now_s: float) -> float:
        """Mean over the last ten seconds, or since the first step in them; 0 if there was none."""
        for marked_s, num_steps in self._marks:
            if _SHORTEST_S <= now_s - marked_s <= WINDOW_S:
                return (self._num_steps - num_steps) / (now_s - marked_s)
        return 0.0
