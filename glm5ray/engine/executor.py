"""Executor: whoever computes steps. The engine knows no more of it than this."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from glm5ray.errors import WorkerDied
from glm5ray.protocol import Capacity, StepInput, StepOutput, merge_outputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from glm5ray.protocol import NewSequence
    from glm5ray.worker.worker import Worker


class PendingStep(Protocol):
    """A step that was submitted."""

    def result(self, timeout_s: float | None = None) -> StepOutput:
        """Waits for the output. Raises :class:`WorkerDied` if a worker failed."""
        ...


class Executor(Protocol):
    """Computes steps in the order in which they are submitted."""

    def start(self) -> Capacity:
        """Loads whatever is needed and says what fits."""
        ...

    def submit(self, step: StepInput) -> PendingStep:
        """Returns at once; a second step may be submitted while one runs. Raises :class:`WorkerDied` if that is known
        already."""
        ...

    def shutdown(self) -> None:
        """Ends the workers. Harmless if called twice."""
        ...


@runtime_checkable
class RestartableExecutor(Executor, Protocol):
    """An executor that can replace its workers: :class:`~glm5ray.engine.core.EngineCore` then goes on after a death."""

    def restart(self, epoch: int) -> Capacity:
        """Ends every worker, whatever it does, and starts incarnation ``epoch``. Steps in flight are lost.

        The capacity is that of before. Raises :class:`WorkerDied` if the new workers do not come up either, or hold
        less; it may be called again, with a higher epoch."""
        ...

    def check(self) -> None:
        """Raises :class:`WorkerDied` if a worker has ended. Returns at once; for times in which no step runs."""
        ...


class _Running:
    """A step on the worker's thread."""

    def __init__(self, future: Future[StepOutput]) -> None:
        self._future = future

    def result(self, timeout_s: float | None = None) -> StepOutput:
        error = self._future.exception(timeout_s)
        if error is not None:
            raise _death(error) from error
        return self._future.result()


class _Deferred:
    """A step that is computed by whoever asks for its output."""

    def __init__(self, worker: Worker, step: StepInput) -> None:
        self._worker = worker
        self._step = step

    def result(self, timeout_s: float | None = None) -> StepOutput:
        try:
            return self._worker.execute(self._step)
        except Exception as error:
            raise _death(error) from error


class _Launched:
    """A step that the device has in its queue."""

    def __init__(self, worker: Worker, step: StepInput) -> None:
        try:
            self._launched = worker.launch(step)
        except Exception as error:
            raise _death(error) from error

    def result(self, timeout_s: float | None = None) -> StepOutput:
        try:
            return self._launched.output()
        except Exception as error:
            raise _death(error) from error


def _death(error: BaseException) -> WorkerDied:
    return WorkerDied(f"the worker failed in a step: {type(error).__name__}: {error}")


class InProcessExecutor:
    """One worker in this process.

    On a GPU a step is queued when it is submitted, behind the one that runs: the GPU has its next step before anyone
    waits for the one before. On a CPU each step is computed in the thread that asks for its output: every thread that
    calls PyTorch has its own team of OpenMP threads, and two teams on a few cores are in each other's way
    (docs/adr/0007-one-thread-for-torch.md). ``threaded``: the worker has a thread of its own all the same, where it is
    loaded as well, and computes while the engine schedules.
    """

    def __init__(self, load: Callable[[], Worker], *, threaded: bool) -> None:
        """``load`` makes the worker; it is called by :meth:`start`."""
        self._load = load
        self._worker: Worker | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="glm5ray-worker") if threaded else None

    def start(self) -> Capacity:
        self._worker = self._load() if self._thread is None else self._thread.submit(self._load).result()
        return self._worker.capacity

    def submit(self, step: StepInput) -> PendingStep:
        assert self._worker is not None, "submit() before start()"
        if self._thread is None:
            return (_Launched if self._worker.is_asynchronous else _Deferred)(self._worker, step)
        return _Running(self._thread.submit(self._worker.execute, step))

    def shutdown(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._worker = None


class _Done:
    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self, timeout_s: float | None = None) -> StepOutput:
        return self._output


class FakeExecutor:
    """No model: the next token is a function of (request_id, index, position). For tests of what stands above an
    executor, and for benchmarks of it."""

    def __init__(self, capacity: Capacity, next_token: Callable[[str, int, int], int]) -> None:
        self.capacity = capacity
        self.steps: deque[StepInput] = deque(maxlen=1_000)
        """The latest steps."""
        self._next_token = next_token
        self._known: dict[int, tuple[NewSequence, int]] = {}

    def start(self) -> Capacity:
        return self.capacity

    def submit(self, step: StepInput) -> PendingStep:
        self.steps.append(step)
        outputs = [self._compute(part) for part in step.parts or (step,)]
        merged = merge_outputs([replace(output, step_id=step.step_id) for output in outputs])
        return _Done(merged)

    def _compute(self, step: StepInput) -> StepOutput:
        for seq_id in step.dropped:
            del self._known[seq_id]
        for new in step.new_sequences:
            self._known[new.seq_id] = (new, len(new.token_ids))
        seq_ids, token_ids = [], []
        for seq_id, start, count in step.slices():
            new, num_tokens = self._known[seq_id]
            if start + count == num_tokens:
                seq_ids.append(seq_id)
                token_ids.append(self._next_token(new.request_id, new.index, num_tokens))
                self._known[seq_id] = (new, num_tokens + 1)
        return StepOutput(epoch=step.epoch, step_id=step.step_id, seq_ids=seq_ids, token_ids=token_ids)

    def shutdown(self) -> None:
        self._known.clear()
