"""Executors that die, for tests only: nothing in the product looks for a fault to inject."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from glm5ray.engine.executor import FakeExecutor
from glm5ray.errors import WorkerDied

if TYPE_CHECKING:
    from collections.abc import Callable

    from glm5ray.engine.executor import PendingStep
    from glm5ray.protocol import Capacity, StepInput, StepOutput


class _Dead:
    def __init__(self, executor: DyingExecutor) -> None:
        self._executor = executor

    def result(self, timeout_s: float | None = None) -> StepOutput:
        raise WorkerDied(f"rank 0 of epoch {self._executor.epoch} ended")


class DyingExecutor(FakeExecutor):
    """A fake executor whose workers die with the steps that ``kills`` says, and with all after them, until they are
    replaced. ``restarts_fail`` are attempts (counted from 1) at which the new workers do not come up."""

    def __init__(
        self,
        capacity: Capacity,
        next_token: Callable[[str, int, int], int],
        kills: Callable[[DyingExecutor, StepInput], bool],
        *,
        restarts_fail: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(capacity, next_token)
        self.epoch = 0
        self.num_restarts = 0
        self.is_dead = False
        self._kills = kills
        self._restarts_fail = restarts_fail

    def reach(self, step: StepInput) -> dict[str, int]:
        """request_id -> the highest position (plus one) of its slices in ``step``, which was not submitted yet."""
        names = {seq_id: new.request_id for seq_id, (new, _) in self._known.items()}
        reach: dict[str, int] = {}
        for part in step.parts or (step,):
            names |= {new.seq_id: new.request_id for new in part.new_sequences}
            for seq_id, start, count in part.slices():
                reach[names[seq_id]] = max(start + count, reach.get(names[seq_id], 0))
        return reach

    def submit(self, step: StepInput) -> PendingStep:
        if not self.is_dead:
            assert step.epoch == self.epoch, f"a step of epoch {step.epoch} for workers of epoch {self.epoch}"
            self.is_dead = self._kills(self, step)
        return _Dead(self) if self.is_dead else super().submit(step)

    def check(self) -> None:
        if self.is_dead:
            raise WorkerDied(f"rank 0 of epoch {self.epoch} ended")

    def restart(self, epoch: int) -> Capacity:
        assert epoch > self.epoch, f"epoch {epoch} follows {self.epoch}"
        self.epoch = epoch
        self.num_restarts += 1
        self._known.clear()
        if self.num_restarts in self._restarts_fail:
            raise WorkerDied(f"the workers of epoch {epoch} did not come up")
        self.is_dead = False
        return self.capacity


class GatedExecutor(FakeExecutor):
    """A fake executor whose steps from ``stops_at`` on wait until :attr:`gate` is set: a worker that hangs."""

    def __init__(self, capacity: Capacity, next_token: Callable[[str, int, int], int], stops_at: int) -> None:
        super().__init__(capacity, next_token)
        self.gate = threading.Event()
        self._stops_at = stops_at

    def submit(self, step: StepInput) -> PendingStep:
        pending, gate = super().submit(step), self.gate
        if step.step_id < self._stops_at:
            return pending

        class Waiting:
            def result(self, timeout_s: float | None = None) -> StepOutput:
                assert gate.wait(30.0), "nobody opened the gate"
                return pending.result()

        return Waiting()
