"""Which requests are suspected of killing the workers, and how the guilty one is found.

Workers die for many reasons, and every sequence of the steps in flight is a suspect. One that was in such steps twice
without gaining a token between is put *on probation*: it runs alone until it has gained one. So the innocent clear
themselves one by one, and the poison fails alone; a third failure ends it (docs/adr, "probation").
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from glm5ray.scheduler.sequence import State

if TYPE_CHECKING:
    from glm5ray.scheduler.sequence import Sequence

FAILURES_TO_PROBATION = 2
FAILURES_TO_QUARANTINE = 3


class Probation:
    """The suspects, in the order of their arrival. It begins only with a restart, when nothing runs, and ends before
    anything else runs again; so it needs no fairness: each suspect takes one prefill and one token."""

    def __init__(self) -> None:
        self._waiting: deque[Sequence] = deque()
        self._running: Sequence | None = None

    def __repr__(self) -> str:
        return f"Probation({len(self._waiting)} waiting, running {self._running!r})"

    def blame(self, suspects: list[Sequence]) -> list[Sequence]:
        """The workers died with ``suspects`` in the steps in flight. Returns those that are given up."""
        given_up: list[Sequence] = []
        if self._running is not None and self._running not in suspects:
            self._waiting.append(self._running)  # it is on trial still: no step had it when they died
        self._running = None
        for seq in suspects:
            has_gained = seq.num_tokens > seq.num_tokens_at_failure
            seq.num_failures = 1 if has_gained else seq.num_failures + 1
            seq.num_tokens_at_failure = seq.num_tokens
            if seq.num_failures >= FAILURES_TO_QUARANTINE:
                given_up.append(seq)
            elif seq.num_failures >= FAILURES_TO_PROBATION:
                self._waiting.append(seq)
        self._waiting = deque(sorted(set(self._waiting), key=lambda seq: seq.seq_id))
        return given_up

    @property
    def is_on(self) -> bool:
        """Whether only suspects may be admitted."""
        self._clear()
        return self._running is not None or bool(self._waiting)

    @property
    def wants_all_quiet(self) -> bool:
        """Whether whatever runs must stop for the next suspect."""
        self._clear()
        return self._running is None and bool(self._waiting)

    def start_next(self) -> Sequence:
        """Nothing runs: the suspect that does so from now on."""
        self._running = self._waiting.popleft()
        return self._running

    def _clear(self) -> None:
        """Those that ended or gained a token are suspects no more."""
        while self._waiting and _is_cleared(self._waiting[0]):
            self._waiting.popleft()
        if self._running is not None and _is_cleared(self._running):
            self._running = None


def _is_cleared(seq: Sequence) -> bool:
    return seq.state is State.FINISHED or seq.num_tokens > seq.num_tokens_at_failure
