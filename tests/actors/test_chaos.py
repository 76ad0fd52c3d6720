"""Random ranks, and the scheduler, are killed while a batch runs: the tokens are those of an undisturbed run."""

from __future__ import annotations

import os
import signal
import threading
import time
from random import Random

import pytest

from glm5ray.config import load_config
from glm5ray.engine.client import EngineState, EngineStatus
from glm5ray.engine.results import RequestResult
from glm5ray.errors import EngineUnavailable
from glm5ray.protocol import GenerateRequest, SamplingParams

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
SETTINGS = ["cache.num_pages=64", "scheduler.max_num_seqs=8", "model.device=cpu"]


def requests(count: int) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"r{i}",
            prompt_token_ids=tuple(range(20 + i, 30 + 2 * i)),
            sampling=SamplingParams(max_tokens=64, ignore_eos=True, temperature=i % 2, seed=i),
        )
        for i in range(count)
    ]


class Killer(threading.Thread):
    """Kills one actor after another, each when the engine has done some steps since it came back."""

    def __init__(self, engine: str, kills: list[str]) -> None:
        super().__init__(daemon=True)
        self.num_kills = 0
        self.has_ended = threading.Event()
        self._engine = engine
        self._kills = kills
        self._rng = Random(0)

    def run(self) -> None:
        import ray

        from glm5ray.actors.handles import find_scheduler
        from glm5ray.actors.names import NAMESPACE, worker_name
        from glm5ray.actors.ranks import rank_stats

        for kind in self._kills:
            status = self._after_steps(self._rng.randint(2, 12))
            if status is None:
                return
            if kind == "scheduler":
                ray.kill(find_scheduler(self._engine), no_restart=False)
            elif kind == "process":
                os.kill(self._rng.choice(rank_stats(self._engine)).pid, signal.SIGKILL)
            else:
                name = worker_name(self._engine, self._rng.randrange(2), status.epoch)
                ray.kill(ray.get_actor(name, NAMESPACE))
            self.num_kills += 1

    def _after_steps(self, count: int) -> EngineStatus | None:
        """The status when the engine has done ``count`` more steps; ``None`` when the batch has ended before."""
        from glm5ray.actors.handles import SchedulerHandle

        handle = SchedulerHandle(self._engine)
        first: tuple[int, int] | None = None
        while not self.has_ended.is_set():
            time.sleep(0.02)
            try:
                status: EngineStatus = handle.call("status")
            except EngineUnavailable:
                continue
            if status.state is not EngineState.READY:
                continue
            if first is None or first[0] != status.epoch:
                first = (status.epoch, status.scheduler.num_steps)
            if status.scheduler.num_steps >= first[1] + count:
                return status
        return None


@pytest.mark.parametrize(
    ("engine", "layout", "kills"),
    [
        ("ranks", ["tp_size=2"], ["process"] * 20),
        ("groups", ["dp_size=2", "ep_size=2"], ["process"] * 20),
        ("scheduler", ["tp_size=2"], ["rank", "scheduler", "scheduler"]),
    ],
)
def test_kills_change_no_token(engine: str, layout: list[str], kills: list[str]):
    """process: SIGKILL for the process of a rank, as when memory runs out; rank: Ray ends its actor."""
    from glm5ray import LLM
    from glm5ray.actors.launch import open_llm

    with LLM(config=load_config(None, SETTINGS)) as local:
        expected = {result.request_id: result for result in local.run(iter(requests(64)))}
    killer = Killer(engine, kills)
    with open_llm(load_config(None, [*SETTINGS, *(f"parallel.{size}" for size in layout)]), engine=engine) as llm:
        killer.start()
        got = list(llm.run(iter(requests(64))))
        num_restarts = llm._core.status().num_restarts  # pyright: ignore[reportAttributeAccessIssue]
        killer.has_ended.set()
        killer.join(20.0)
    assert killer.num_kills == len(kills), "the batch ended before all were killed"
    assert engine == "scheduler" or num_restarts == len(kills)
    assert sorted(result.request_id for result in got) == sorted(expected)
    for result in got:
        assert isinstance(result, RequestResult), result
        assert result.choices[0].token_ids == expected[result.request_id].choices[0].token_ids, result.request_id
