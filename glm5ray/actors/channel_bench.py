"""Ranks without a model, for ``glm5ray bench channel``: real actors, real sockets, fixed tokens."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING

import ray

from glm5ray.actors import authentication
from glm5ray.actors.names import NAMESPACE
from glm5ray.actors.ray_executor import RayExecutor
from glm5ray.actors.spec import EngineSpec
from glm5ray.actors.worker_actor import WorkerActor
from glm5ray.config import config_from_dict
from glm5ray.protocol import Capacity, StepOutput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from glm5ray.actors.rank_environment import Assignment
    from glm5ray.engine.executor import Executor
    from glm5ray.protocol import StepInput

TOKEN = 17
_CAPACITY = Capacity(num_pages=1, page_size=1, max_model_len=1, vocab_size=TOKEN + 1, eos_token_ids=(0,))


class _FixedTokens:
    """In a worker's place: the same token for every sequence of a step that has no prompt left."""

    def launch(self, step: StepInput) -> _Done:
        return _Done(step)


class _Done:
    is_done = True

    def __init__(self, step: StepInput) -> None:
        self._step = step

    def output(self) -> StepOutput:
        step = self._step
        seq_ids = step.seq_ids.copy()
        return StepOutput(epoch=step.epoch, step_id=step.step_id, seq_ids=seq_ids, token_ids=[TOKEN] * len(seq_ids))


class FixedTokensActor(WorkerActor):
    """Has the loop and the socket of its parent; loads nothing and meets nobody."""

    def open_meeting(self, host: str) -> tuple[str, int]:
        return host, 0

    def load(self, assignment: Assignment) -> Capacity:
        self._worker = _FixedTokens()
        return _CAPACITY


def _executor(spec: EngineSpec, epoch: int) -> RayExecutor:
    return RayExecutor(spec, epoch, worker_class=FixedTokensActor)


@contextmanager
def fixed_token_ranks(num_ranks: int) -> Iterator[Executor]:
    """``num_ranks`` actors that run, in a Ray of their own on this machine, or in the one that this process is a driver
    of. What a rank says of its capacity means nothing."""
    folder = None
    if not ray.is_initialized():
        authentication.prepare()
        folder = tempfile.mkdtemp(prefix="g5r")
        ray.init(
            address="local",
            num_cpus=num_ranks,  # ranks wait most of the time: they may be more than the cores
            num_gpus=0,
            namespace=NAMESPACE,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=128 * 2**20,
            _temp_dir=folder,
        )
    config = config_from_dict({"model": {"device": "cpu"}, "parallel": {"tp_size": num_ranks}})
    name = f"bench-channel-{secrets.token_hex(3)}"  # two may run in one cluster
    spec = EngineSpec(engine=name, config=config, make_executor=_executor)
    executor = spec.make_executor(spec, 0)
    try:
        executor.start()
        yield executor
    finally:
        executor.shutdown()
        if folder is not None:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
