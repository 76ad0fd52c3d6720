"""What a rank tells while its loop turns, and profiles of its steps: threads, no Ray."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

from glm5ray.actors.rank_control import RankControl, process_memory_bytes
from glm5ray.protocol import StepInput

if TYPE_CHECKING:
    from pathlib import Path


def step(step_id: int) -> StepInput:
    return StepInput(epoch=0, step_id=step_id, seq_ids=[], starts=[], num_tokens=[])


class Loop(threading.Thread):
    """Turns until it is told to stop, with a matrix product in each step."""

    def __init__(self, control: RankControl, num_steps: int) -> None:
        super().__init__(daemon=True)
        self._control = control
        self._num_steps = num_steps

    def run(self) -> None:
        x = torch.ones(4, 4)
        while not self._control.is_stopping:
            if self._control.num_steps == self._num_steps:
                self._control.idle()
                time.sleep(0.001)
                continue
            self._control.begin(step(self._control.num_steps))
            x @ x
            time.sleep(0.001)
            self._control.end()


def test_a_profile_has_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    control = RankControl()
    loop = Loop(control, 10**9)
    loop.start()
    for path in (tmp_path / "new" / "a.json", tmp_path / "b.json"):  # one after another
        control.profile(5, path, 30.0)
        names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
        assert names.count("aten::matmul") == 5
    control.is_stopping = True
    loop.join(10.0)
    assert control.seconds_in_step == 0.0


def test_a_profile_for_which_too_few_steps_come_is_given_up_and_is_not_in_the_way(tmp_path: Path) -> None:
    control = RankControl()
    control.begin(step(0))
    control.begin(step(1))  # launched behind it
    control.end()
    assert control.num_steps == 1
    assert control.step_id == 1
    control.end()
    loop = Loop(control, 3)  # one step is left for it
    errors: list[str] = []

    def profile() -> None:
        try:
            control.profile(5, tmp_path / "a.json", 0.5)
        except TimeoutError as error:
            errors.append(str(error))

    first = threading.Thread(target=profile)
    first.start()
    while control._profile is None:
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="a profile is being made already"):
        control.profile(1, tmp_path / "b.json", 0.01)
    loop.start()
    first.join(10.0)
    assert errors in ([f"{left} of 5 steps did not come within 0.5 s"] for left in (4, 5))
    assert not (tmp_path / "a.json").exists()
    while control._profile is not None:
        time.sleep(0.001)
    with pytest.raises(TimeoutError, match=r"1 of 1 steps did not come within 0\.05 s"):
        control.profile(1, tmp_path / "c.json", 0.05)
    control.is_stopping = True
    loop.join(10.0)
    assert process_memory_bytes() > 2**20
