"""Steps that are launched before the output of the one before them was asked for, as on a GPU."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import pytest

from glm5ray.engine.executor import InProcessExecutor
from glm5ray.engine.llm import LLM
from glm5ray.engine.results import RequestResult
from glm5ray.errors import WorkerDied
from glm5ray.protocol import SamplingParams
from glm5ray.worker.launched import LaunchedStep
from glm5ray.worker.step_loop import compute_steps
from glm5ray.worker.worker import Worker
from tests.engine.conftest import settings, settle
from tests.engine.test_fixed_batches import EAGERLY_SAMPLED, KINDS, load, prompts, steps

if TYPE_CHECKING:
    from pathlib import Path

    from glm5ray.protocol import StepInput
    from glm5ray.tokenizer import Tokenizer

PARAMS = [*KINDS, *EAGERLY_SAMPLED[:3], SamplingParams(temperature=0.0, max_tokens=9, logprobs=3, prompt_logprobs=2)]


class QueuingWorker(Worker):
    """A CPU's worker that says what a GPU's says: steps are launched when they are submitted."""

    is_asynchronous = True


def answers(worker: Worker, tokenizer: Tokenizer) -> list:
    config = settings(scheduler={"overlap": True})
    with LLM.from_executor(InProcessExecutor(lambda: worker, threaded=False), tokenizer, config) as llm:
        results = llm.generate(prompts(8), PARAMS)
        settle(llm)
    return [[(c.token_ids, c.logprobs) for c in r.choices] for r in results if isinstance(r, RequestResult)]


@pytest.mark.parametrize("emulate", [False, True], ids=["eager", "fixed"])
def test_the_same_answers(tiny_folder: Path, tokenizer: Tokenizer, emulate: bool) -> None:
    """Also of a worker that has the next step before anyone reads the results of the last."""
    worker = load(tiny_folder, emulate=emulate, most=8)
    worker.__class__ = QueuingWorker
    plain = answers(load(tiny_folder, emulate=emulate, most=8), tokenizer)
    assert len(plain) == 8
    assert answers(worker, tokenizer) == plain


@pytest.mark.parametrize("emulate", [False, True], ids=["eager", "fixed"])
def test_results_are_those_of_their_step(tiny_folder: Path, emulate: bool) -> None:
    ahead, behind = load(tiny_folder, emulate=emulate), load(tiny_folder, emulate=emulate)
    launched = [ahead.launch(step) for step in steps([0, 1, 2])]
    expected = [behind.execute(step) for step in steps([0, 1, 2])]
    for run, output in zip(launched, expected, strict=True):
        found = run.output()
        assert (found.step_id, found.seq_ids, found.token_ids) == (output.step_id, output.seq_ids, output.token_ids)


def test_the_loop_launches_what_arrives_while_a_step_runs(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``is_done`` is as on a GPU: not at the first look. Every output comes, in order, before the loop waits again."""
    looks: dict[int, int] = {}

    def is_done(launched: LaunchedStep) -> bool:
        looks[launched.step.step_id] = looks.get(launched.step.step_id, 0) + 1
        return looks[launched.step.step_id] > 2

    monkeypatch.setattr(LaunchedStep, "is_done", property(is_done))
    worker = load(tiny_folder, emulate=False)
    events: list[str] = []
    launch = worker.launch

    def launch_and_tell(step: StepInput) -> LaunchedStep:
        events.append(f"launch {step.step_id}")
        return launch(step)

    monkeypatch.setattr(worker, "launch", launch_and_tell)
    todo = deque(steps([0, 1, 2]))

    def receive(waits: bool) -> StepInput | None:
        if waits or len(todo) in (3, 1):  # the second and the last come while the one before runs
            return todo.popleft()
        return None

    outputs = compute_steps(worker, receive)
    events += (f"output {next(outputs).step_id}" for _ in range(4))
    assert events == ["launch 0", "launch 1", "output 0", "output 1", "launch 2", "launch 3", "output 2", "output 3"]


def test_a_launch_that_fails_is_a_death(tiny_folder: Path) -> None:
    worker = load(tiny_folder, emulate=False)
    worker.__class__ = QueuingWorker
    executor = InProcessExecutor(lambda: worker, threaded=False)
    executor.start()
    with pytest.raises(WorkerDied, match="AssertionError: step 2 came where 0 was due"):
        executor.submit(steps([0])[2])
