"""One scheduler for each group of ranks that has a KV cache of its own, behind the face of a single one.

The groups share the experts, so they compute in step: :meth:`DataParallelScheduler.schedule` makes one step of as many
parts as there are groups. A request goes to the group with the fewest unfinished sequences, of equals the first, and
stays there: its pages are there.

A suspect on probation must run alone on *all* ranks, for they die together. So while a group has suspects it alone has
work, and begins when nothing of the others is in flight.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from itertools import count
from typing import TYPE_CHECKING

from glm5ray.errors import RequestError
from glm5ray.protocol import FinishReason, StepInput, StepOutput, TokenEvent
from glm5ray.scheduler.scheduler import Scheduler
from glm5ray.scheduler.stats import SchedulerStats

if TYPE_CHECKING:
    from glm5ray.config import SchedulerSection
    from glm5ray.protocol import Capacity, GenerateRequest


class DataParallelScheduler:
    """Has what :class:`~glm5ray.scheduler.scheduler.Scheduler` has for an engine. Sequence ``s`` is of group
    ``s % dp_size``."""

    def __init__(
        self,
        config: SchedulerSection,
        capacity: Capacity,
        dp_size: int,
        *,
        prefix_caching: bool = True,
        epoch: int = 0,
    ) -> None:
        """``config`` and ``capacity`` are those of each group."""
        self.groups = tuple(
            Scheduler(config, capacity, prefix_caching=prefix_caching, epoch=epoch, seq_ids=count(group, dp_size))
            for group in range(dp_size)
        )
        self.limits = self.groups[0].limits
        self._num_steps = 0
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._next_step_id = 0

    def __repr__(self) -> str:
        return f"DataParallelScheduler(step {self._next_step_id}, {self.groups!r})"

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        return any(group.has_unfinished for group in self.groups)

    @property
    def num_unfinished(self) -> int:
        """Sequences, not requests."""
        return sum(group.num_unfinished for group in self.groups)

    @property
    def num_waiting(self) -> int:
        return sum(group.num_waiting for group in self.groups)

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return sum(group.num_running for group in self.groups)

    def has_request(self, request_id: str) -> bool:
        """Whether a request of this id is unfinished."""
        return any(group.has_request(request_id) for group in self.groups)

    def add(self, request: GenerateRequest) -> None:
        """Raises :class:`RequestError`; then nothing has changed."""
        if self.has_request(request.request_id):
            raise RequestError(
                f"request_id {request.request_id!r} is in use by an unfinished request; choose another.",
                param="request_id",
            )
        min(self.groups, key=lambda group: group.num_unfinished).add(request)

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> list[TokenEvent]:
        """Ends a request, or one of its answers. Unknown and finished ones give no event."""
        return [event for group in self.groups for event in group.abort(request_id, index, reason)]

    def restart(self, epoch: int) -> list[TokenEvent]:
        """The workers of all groups were replaced. Returns the ends of sequences that are given up."""
        self._begin(epoch)
        return [event for group in self.groups for event in group.restart(epoch)]

    # --- steps ------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepInput | None:
        """The next step of all groups, or ``None`` if none of them can run before an ``update()`` or an ``add()``."""
        on_trial = next((group for group in self.groups if group.is_on_probation), None)
        if on_trial is not None and any(group.num_in_flight for group in self.groups if group is not on_trial):
            return None
        steps = [group.schedule() if on_trial in (None, group) else None for group in self.groups]
        if not any(steps):
            return None
        nothing = StepInput(epoch=self._epoch, step_id=self._next_step_id, seq_ids=[], starts=[], num_tokens=[])
        step = StepInput(
            epoch=self._epoch,
            step_id=self._next_step_id,
            seq_ids=[],
            starts=[],
            num_tokens=[],
            parts=tuple(part or nothing for part in steps),
        )
        self._next_step_id += 1
        self._num_steps += 1
        return step

    def update(self, step: StepInput, output: StepOutput) -> list[TokenEvent]:
        """Takes in what the oldest step in flight sampled, in all groups. A result of workers that were replaced since
        gives no event."""
        if output.epoch != self._epoch:
            return []
        assert step.step_id == output.step_id, f"result {output.step_id} of step {step.step_id}"
        outputs = self._split(step, output)
        return [
            event
            for group, part, part_output in zip(self.groups, step.parts, outputs, strict=True)
            if part.seq_ids
            for event in group.update(part, part_output)
        ]

    def _split(self, step: StepInput, output: StepOutput) -> list[StepOutput]:
        """What each group's sequences got."""
        size = len(self.groups)
        outputs = [
            StepOutput(
                epoch=output.epoch,
                step_id=part.step_id,
                seq_ids=[],
                token_ids=[],
                logprobs={s: value for s, value in output.logprobs.items() if s % size == group},
                prompt_logprobs={s: value for s, value in output.prompt_logprobs.items() if s % size == group},
                failed={s: message for s, message in output.failed.items() if s % size == group},
                duration_s=output.duration_s,
            )
            for group, part in enumerate(step.parts)
        ]
        for seq_id, token_id in zip(output.seq_ids, output.token_ids, strict=True):
            mine = outputs[seq_id % size]
            mine.seq_ids.append(seq_id)
            mine.token_ids.append(token_id)
        return outputs

    # --- looking ----------------------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """Sums over the groups; a step of all of them counts once."""
        parts = [group.stats() for group in self.groups]
        finished: Counter[str] = Counter()
        for part in parts:
            finished.update(part.num_finished)
        sums = {
            field.name: sum(getattr(part, field.name) for part in parts)
            for field in fields(SchedulerStats)
            if field.name not in ("num_steps", "num_finished")
        }
        return SchedulerStats(**sums, num_steps=self._num_steps, num_finished=dict(finished))

    def check(self) -> None:
        """All invariants; raises ``AssertionError`` with the values."""
        for number, group in enumerate(self.groups):
            group.check()
            assert group.num_in_flight <= self._next_step_id, f"group {number} is ahead: {group!r}"
