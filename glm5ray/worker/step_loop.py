"""Steps as they arrive from elsewhere, so that the device has its next step while one runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from glm5ray.protocol import StepInput, StepOutput

POLL_S = 1e-4
"""Between two looks, while a step runs, at whether it is done or the next one is there."""


class Running(Protocol):
    """:class:`~glm5ray.worker.launched.LaunchedStep`"""

    @property
    def is_done(self) -> bool: ...

    def output(self) -> StepOutput: ...


class Launcher(Protocol):
    """:class:`~glm5ray.worker.worker.Worker`"""

    def launch(self, step: StepInput) -> Running: ...


def compute_steps(worker: Launcher, receive: Callable[[bool], StepInput | None]) -> Iterator[StepOutput]:
    """Outputs of the steps that ``receive`` gives, in their order.

    ``receive(True)`` waits for a step, and ends the loop with ``None``; ``receive(False)`` is ``None`` if no step is
    there. A step that arrives while one runs on a GPU is launched behind it, before the output of the first is waited
    for. On a CPU a launch is the whole step, which is then done."""
    while (step := receive(True)) is not None:
        running: Running | None = worker.launch(step)
        while running is not None:
            behind = None
            while behind is None and not running.is_done:
                if (step := receive(False)) is not None:
                    behind = worker.launch(step)
                else:
                    time.sleep(POLL_S)
            yield running.output()
            running = behind
