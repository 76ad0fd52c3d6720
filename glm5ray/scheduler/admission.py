"""Which waiting sequences start to run, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glm5ray.scheduler.flights import Chunk, next_chunk
from glm5ray.scheduler.probation import Probation
from glm5ray.scheduler.sequence import Sequence, State
from glm5ray.scheduler.waiting import WaitingQueue

if TYPE_CHECKING:
    from glm5ray.config import SchedulerSection
    from glm5ray.scheduler.sequence_pages import SequencePages

OLDEST_EVERY = 16
"""Under ``policy: priority`` every 16th admission is that of the sequence that arrived first, whatever its priority.
So a request ages with the admissions around it, needs no clock, and starts at the latest when the requests older than
it have had their turns."""


class Admission:
    """The waiting sequences, and the rules by which they leave the queue."""

    def __init__(self, config: SchedulerSection, pages: SequencePages) -> None:
        self.waiting = WaitingQueue()
        self.probation = Probation()
        self.max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        """Every running sequence gets at least one token per step, so a batch never has more of them than the step has
        tokens."""
        self.num_admissions = 0
        self._config = config
        self._pages = pages
        self._may_succeed = True

    def wait(self, seq: Sequence) -> None:
        """``seq`` holds no pages, and wants to run."""
        seq.state = State.WAITING
        self.waiting.push(seq)
        self._may_succeed = True

    def look_again(self) -> None:
        """Pages came back."""
        self._may_succeed = True

    def admit(self, budget: int, *, num_running: int, is_idle: bool) -> list[Chunk]:
        """Starts waiting sequences while there are tokens (``budget``), places and pages; their first chunks.

        A sequence whose pages are not there may be passed by later ones, at most ``max_skips`` times; then all wait
        for it. As no more than ``max_skips`` sequences that do not fit are looked at, a step costs the same however
        many wait. ``is_idle``: nothing runs, and no step is in flight.
        """
        if self.probation.is_on:
            return self._admit_suspect(budget) if is_idle else []
        if not self._may_succeed:
            return []
        chunks: list[Chunk] = []
        passed: list[Sequence] = []
        places = self.max_running - num_running
        max_skips = self._config.max_skips
        while budget > 0 and places > 0 and len(passed) <= max_skips:
            if any(seq.num_passes >= max_skips for seq in passed):
                break
            seq = self.waiting.pop(oldest=self._is_turn_of_oldest() and not passed)
            if seq is None:
                break
            if not self._pages.try_fill(seq, self.max_running - places):
                passed.append(seq)
                continue
            for other in passed:
                other.num_passes += 1
            places -= 1
            chunks.append(self._start(seq, budget))
            budget -= chunks[-1].num_tokens
        for seq in passed:
            self.waiting.push(seq)
        # If pages were all that was missing, it is no use to look again before some come back or another sequence
        # arrives.
        self._may_succeed = not passed or budget == 0 or places == 0
        return chunks

    def _admit_suspect(self, budget: int) -> list[Chunk]:
        """The next one, alone: if the workers die now, they die of it."""
        if not self.probation.wants_all_quiet:
            return []
        seq = self.probation.start_next()
        self.waiting.discard(seq)
        is_filled = self._pages.try_fill(seq, 0)
        assert is_filled, f"{seq!r} does not fit, and no other runs: {self._pages!r}"
        self._may_succeed = True
        return [self._start(seq, budget)]

    def _is_turn_of_oldest(self) -> bool:
        return self._config.policy == "priority" and self.num_admissions % OLDEST_EVERY == OLDEST_EVERY - 1

    def _start(self, seq: Sequence, budget: int) -> Chunk:
        """A sequence that has its pages now runs."""
        seq.state = State.PREFILL
        seq.num_passes = 0
        self.num_admissions += 1
        return next_chunk(seq, budget)

    def check(self) -> None:
        """The queue's invariants, and that nobody was passed too often."""
        self.waiting.check()
        for seq in self.waiting.sequences():
            assert seq.num_passes <= self._config.max_skips, f"{seq!r} was passed {seq.num_passes} times"
