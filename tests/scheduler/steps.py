"""One engine's loop for tests that look at single steps."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from glm5ray.protocol import StepOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from glm5ray.protocol import StepInput, TokenEvent
    from glm5ray.scheduler.scheduler import Scheduler


class Loop:
    """Answers each step with ``next_token(request_id, index, position)``, one at a time or with one step in flight."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        next_token: Callable[[str, int, int], int] = lambda *_: 1,
        fails: Callable[[StepInput], dict[int, str]] = lambda _: {},
    ) -> None:
        self.scheduler = scheduler
        self.steps: list[StepInput] = []
        self.events: list[TokenEvent] = []
        self.in_flight: deque[tuple[StepInput, StepOutput]] = deque()
        self._next_token = next_token
        self._fails = fails
        self._names: dict[int, tuple[str, int]] = {}
        self._lengths: dict[int, int] = {}

    def schedule(self) -> StepInput | None:
        step = self.scheduler.schedule()
        self.scheduler.check()
        if step is None:
            return None
        for new in step.new_sequences:
            self._names[new.seq_id] = (new.request_id, new.index)
            self._lengths[new.seq_id] = len(new.token_ids)
        output = StepOutput(epoch=step.epoch, step_id=step.step_id, seq_ids=[], token_ids=[], failed=self._fails(step))
        for seq_id, start, num_tokens in step.slices():
            if start + num_tokens == self._lengths[seq_id]:
                output.seq_ids.append(seq_id)
                output.token_ids.append(self._next_token(*self._names[seq_id], start + num_tokens))
                self._lengths[seq_id] += 1
        self.steps.append(step)
        self.in_flight.append((step, output))
        return step

    def update(self) -> list[TokenEvent]:
        events = self.scheduler.update(*self.in_flight.popleft())
        self.scheduler.check()
        self.events += events
        return events

    def turn(self) -> list[TokenEvent]:
        assert self.schedule() is not None, f"nothing to run: {self.scheduler!r}"
        return self.update()

    def finish(self, *, overlapped: bool = False, max_turns: int = 10_000) -> Loop:
        """Until everything has ended."""
        for _ in range(max_turns):
            if not self.scheduler.has_unfinished:
                break
            step = self.schedule()
            if self.in_flight and (step is None or not overlapped or len(self.in_flight) == 2):
                self.update()
        assert not self.scheduler.has_unfinished, f"not finished after {max_turns} turns: {self.scheduler!r}"
        while self.in_flight:
            self.update()
        return self

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        of_answer = [e for e in self.events if (e.request_id, e.index) == (request_id, index)]
        return [token for event in of_answer for token in event.token_ids]

    def started(self) -> list[str]:
        """request_ids in the order in which they were admitted, repeats included."""
        return [new.request_id for step in self.steps for new in step.new_sequences]
