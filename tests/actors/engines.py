"""Engines without a model for the actors' tests. Their executors live inside the scheduler actor, so this module is
imported there."""

from __future__ import annotations

import os
import time
import zlib
from typing import TYPE_CHECKING

from glm5ray.actors.ray_executor import RayExecutor
from glm5ray.actors.spec import EngineSpec
from glm5ray.actors.worker_actor import WorkerActor
from glm5ray.config import config_from_dict
from glm5ray.engine.executor import FakeExecutor
from glm5ray.errors import CheckpointError
from glm5ray.protocol import Capacity
from tests.engine.faults import DyingExecutor

if TYPE_CHECKING:
    from glm5ray.actors.channel import Line
    from glm5ray.engine.executor import Executor, PendingStep
    from glm5ray.protocol import StepInput
    from glm5ray.worker.launched import LaunchedStep

CAPACITY = Capacity(num_pages=64, page_size=4, max_model_len=120, vocab_size=100, eos_token_ids=(0,))


def next_token(request_id: str, index: int, position: int) -> int:
    """Of the client's id: what stands before the slash is the scheduler's."""
    name = request_id.rpartition("/")[2]
    return 1 + zlib.crc32(f"{name}/{index}/{position}".encode()) % 99


class PacedExecutor(FakeExecutor):
    """Each step takes five milliseconds."""

    def submit(self, step: StepInput) -> PendingStep:
        time.sleep(0.005)
        return super().submit(step)


def paced(spec: EngineSpec, epoch: int) -> Executor:
    return PacedExecutor(CAPACITY, next_token)


class SlowExecutor(FakeExecutor):
    """Each step takes a tenth of a second."""

    def submit(self, step: StepInput) -> PendingStep:
        time.sleep(0.1)
        return super().submit(step)


def slow(spec: EngineSpec, epoch: int) -> Executor:
    return SlowExecutor(CAPACITY, next_token)


def telling(path: str, spec: EngineSpec, epoch: int) -> Executor:
    """``path``: gets the number of the scheduler's process."""
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    return SlowExecutor(CAPACITY, next_token)


def dying(spec: EngineSpec, epoch: int) -> Executor:
    """Workers die in every tenth step, and with every step that has a request called poison."""

    def kills(executor: DyingExecutor, step: StepInput) -> bool:
        names = {name.rpartition("/")[2] for name in executor.reach(step)}
        return step.step_id == 9 or "poison" in names

    executor = DyingExecutor(CAPACITY, next_token, kills)
    executor.epoch = epoch
    return executor


def unloadable(spec: EngineSpec, epoch: int) -> Executor:
    raise CheckpointError("model.safetensors: no such file")


def telling_what_workers_inherit(spec: EngineSpec, epoch: int) -> Executor:
    import ray

    inherited = ray.get_runtime_context().runtime_env.get("env_vars", {})
    raise CheckpointError(f"workers inherit {sorted(inherited)}")


class SuicidalExecutor(PacedExecutor):
    """Ends the scheduler's own process, once, in the middle of its work."""

    def __init__(self, flag: str) -> None:
        super().__init__(CAPACITY, next_token)
        self._flag = flag

    def submit(self, step: StepInput) -> PendingStep:
        if step.step_id % 13 == 12 and not os.path.exists(self._flag):
            open(self._flag, "w").close()
            os._exit(1)
        return super().submit(step)


def suicidal(flag: str, spec: EngineSpec, epoch: int) -> Executor:
    """``flag``: a file that is there once it has happened."""
    return SuicidalExecutor(flag)


class FaultyWorker(WorkerActor):
    """Rank 1 exits, raises and hangs, one after another, each time in its eighth step. ``folder`` remembers what has
    happened: a process that ends does not."""

    folder: str
    most: int
    """How many of the three."""

    def run(self, line: Line) -> None:
        worker, launch = self._worker, self._worker.launch

        def faulty(step: StepInput) -> LaunchedStep:
            num_faults = len(os.listdir(self.folder))
            if self._rank == 1 and step.step_id == 7 and num_faults < self.most:
                open(os.path.join(self.folder, str(num_faults)), "w").close()
                if num_faults == 0:
                    os._exit(1)
                if num_faults == 1:
                    raise RuntimeError("rank 1 raises")
                time.sleep(3600)
            return launch(step)

        worker.launch = faulty
        super().run(line)


def faulty(folder: str, most: int, spec: EngineSpec, epoch: int) -> Executor:
    return RayExecutor(
        spec, epoch, worker_class=type("FaultyWorker", (FaultyWorker,), {"folder": folder, "most": most})
    )


def make_spec(engine: str, make_executor=paced, **changes) -> EngineSpec:
    config = config_from_dict({"scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64}})
    return EngineSpec(engine=engine, config=config, make_executor=make_executor, **changes)
