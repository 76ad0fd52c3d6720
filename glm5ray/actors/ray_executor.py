"""RayExecutor: ranks as actors in one placement group; steps go to them over the channel, Ray watches over them.

Used by one thread, the engine's.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from glm5ray.actors.channel import LOOPBACK, SchedulerEnd
from glm5ray.actors.names import NAMESPACE, group_name, worker_name
from glm5ray.actors.placement import Seat, deal_devices, place, seats_of
from glm5ray.actors.rank_environment import Assignment
from glm5ray.actors.worker_actor import CONTROL_GROUP, CONTROL_THREADS, WorkerActor
from glm5ray.errors import ChannelError, Glm5RayError, WorkerDied
from glm5ray.protocol import encode_step, merge_outputs

if TYPE_CHECKING:
    from glm5ray.actors.spec import EngineSpec
    from glm5ray.config import EngineConfig
    from glm5ray.protocol import Capacity, StepInput, StepOutput

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 0.05
"""How often a wait looks whether everyone is alive."""
LAST_WORDS_S = 2.0
"""How long Ray may take to say what a rank died of whose connection broke, and a rank to end that was told to."""


class _Pending:
    def __init__(self, executor: RayExecutor, step: StepInput) -> None:
        self._executor = executor
        self._step = step

    def result(self, timeout_s: float | None = None) -> StepOutput:
        return self._executor.receive(self._step)


class RayExecutor:
    """Ranks are replaced together, in the same placement group; those of an earlier epoch have connections of their
    own, which are closed, so nothing that they say late is heard."""

    def __init__(self, spec: EngineSpec, epoch: int, *, worker_class: type = WorkerActor) -> None:
        """``worker_class`` has the methods of :class:`WorkerActor`."""
        self._spec = spec
        self._worker_class = worker_class
        self._epoch = epoch
        parallel = spec.config.parallel
        self._size = parallel.world_size
        self._answering = [group * parallel.tp_size for group in range(parallel.dp_size)]
        device = spec.config.model.device
        if device == "auto":
            device = "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"
        self._gpus_each = 1 / parallel.ranks_per_gpu if device == "cuda" else 0
        self._config = replace(spec.config, model=replace(spec.config.model, device=device))
        self._capacity: Capacity | None = None
        self._workers: list[Any] = []
        self._runs: list[Any] = []
        self._ends: list[SchedulerEnd] = []
        self._group: Any = None

    def start(self) -> Capacity:
        """Raises :class:`ConfigError` if the cluster has no room, and what a rank raised while it loaded."""
        bundle = {"CPU": 1.0} | ({"GPU": self._gpus_each} if self._gpus_each else {})
        self._group = place(group_name(self._spec.engine), self._size, bundle)
        self._capacity = self._launch(self._config)
        return self._capacity

    def restart(self, epoch: int) -> Capacity:
        self._kill()
        self._epoch = epoch
        before = self._capacity
        assert before is not None, "restart() before start()"
        # not what would fit now: the scheduler goes on with the pages that it has
        config = replace(self._config, cache=replace(self._config.cache, num_pages=before.num_pages))
        try:
            capacity = self._launch(config)
        except Glm5RayError as error:
            raise WorkerDied(f"the workers of epoch {epoch} did not come up: {error}") from error
        if capacity != before:
            raise WorkerDied(f"the workers of epoch {epoch} hold {capacity}, and those before held {before}")
        return capacity

    def submit(self, step: StepInput) -> _Pending:
        """Raises :class:`WorkerDied` if a rank has ended or hung up."""
        data = encode_step(step)
        try:
            for end in self._ends:
                end.send(data)
        except ChannelError as error:
            self._fail(error)
        return _Pending(self, step)

    def receive(self, step: StepInput) -> StepOutput:
        """Waits for the answers: rank 0's, or that of each data-parallel group's first rank. Raises
        :class:`WorkerDied` if a rank ended, or if one does not answer in time."""
        until_s = time.monotonic() + self._config.recovery.step_timeout_s
        try:
            return merge_outputs([self._receive_from(self._ends[rank], step, until_s) for rank in self._answering])
        except ChannelError as error:
            self._fail(error)

    def _receive_from(self, end: SchedulerEnd, step: StepInput, until_s: float) -> StepOutput:
        while (output := end.receive(step, WATCH_EVERY_S)) is None:
            self.check()
            if time.monotonic() > until_s:
                timeout_s = self._config.recovery.step_timeout_s
                raise WorkerDied(f"rank {end.rank} did not answer step {step.step_id} within {timeout_s:g} s")
        return output

    def check(self) -> None:
        """Raises :class:`WorkerDied` if a rank has ended or hung up."""
        self._check_runs(0.0)
        try:
            for end in self._ends:
                end.check()
        except ChannelError as error:
            self._fail(error)

    def shutdown(self) -> None:
        """Ranks that do not end by themselves are ended."""
        stops = [worker.stop.remote() for worker in self._workers if self._runs]
        if stops:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=LAST_WORDS_S)
        self._kill()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    # --- one incarnation --------------------------------------------------------------------------------------------

    def _launch(self, config: EngineConfig) -> Capacity:
        """In phases, each with a limit: all processes are up; they meet and load; each has said hello."""
        limits, began_s = config.recovery, time.monotonic()
        seats = seats_of(self._group)
        self._workers = [self._make_worker(rank, seat, config) for rank, seat in enumerate(seats)]
        arrivals = self._all([worker.arrive.remote() for worker in self._workers], limits.start_timeout_s, "start")
        up_s = time.monotonic()
        in_one_place = len({seat.node_id for seat in seats}) == 1
        addresses = [LOOPBACK if in_one_place else seat.node_ip for seat in seats]
        opened = [self._workers[0].open_meeting.remote(addresses[0])]
        meeting = self._all(opened, limits.start_timeout_s, "open the meeting")[0]
        nodes = [seat.node_id for seat in seats]
        devices = deal_devices(seats, [arrival.gpu_id for arrival in arrivals])
        assignments = [
            Assignment(meeting, device, nodes.count(node), address)
            for device, node, address in zip(devices, nodes, addresses, strict=True)
        ]
        loading = [worker.load.remote(one) for worker, one in zip(self._workers, assignments, strict=True)]
        capacities = self._all(loading, limits.load_timeout_s, "load the model")
        self._connect(seats, limits.start_timeout_s)
        logger.info(
            "engine=%s epoch=%d ranks=%d pids=%s devices=%s seconds_up=%.1f seconds_load=%.1f",
            *(self._spec.engine, self._epoch, self._size, [arrival.pid for arrival in arrivals], devices),
            *(up_s - began_s, time.monotonic() - up_s),
        )
        return replace(capacities[0], num_pages=min(capacity.num_pages for capacity in capacities))

    def _make_worker(self, rank: int, seat: Seat, config: EngineConfig) -> Any:
        spec = self._spec
        remote: Any = ray.remote  # its types know of no concurrency_groups
        actor = remote(concurrency_groups={CONTROL_GROUP: CONTROL_THREADS})(self._worker_class).options(
            name=worker_name(spec.engine, rank, self._epoch),
            namespace=NAMESPACE,
            num_cpus=0,
            num_gpus=self._gpus_each,
            max_restarts=0,
            # every rank sees all GPUs and takes its own: NCCL is slow, or hangs, where the others are hidden
            runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}} if self._gpus_each else {},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=seat.bundle),
        )
        return actor.remote(spec.engine, config, rank, self._size, self._epoch)

    def _connect(self, seats: list[Seat], timeout_s: float) -> None:
        """Starts the ranks' loops; returns when each has connected and said who it is."""
        here, own_ip = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        for rank, seat in enumerate(seats):
            host = LOOPBACK if seat.node_id == here else own_ip
            self._ends.append(SchedulerEnd(rank, self._epoch, host))
        self._runs = [worker.run.remote(end.line) for worker, end in zip(self._workers, self._ends, strict=True)]
        until_s = time.monotonic() + timeout_s
        try:
            for end in self._ends:
                while not end.has_hello(WATCH_EVERY_S):
                    self.check()
                    if time.monotonic() > until_s:
                        raise WorkerDied(f"rank {end.rank} did not connect within {timeout_s:g} s")
        except ChannelError as error:
            self._fail(error)

    def _fail(self, error: ChannelError) -> NoReturn:
        """A connection breaks when its rank dies: what it died of says more."""
        self._check_runs(LAST_WORDS_S)
        raise WorkerDied(str(error)) from error

    def _check_runs(self, timeout_s: float) -> None:
        ended, _ = ray.wait(self._runs, num_returns=1, timeout=timeout_s)
        if not ended:
            return
        rank = self._runs.index(ended[0])
        try:
            ray.get(ended[0])
        except RayTaskError as error:
            raise WorkerDied(f"rank {rank} failed: {type(error.cause).__name__}: {error.cause}") from error
        except RayError as error:
            raise WorkerDied(f"rank {rank} died: {' '.join(str(error).split())[:500]}") from error
        raise WorkerDied(f"rank {rank} left its loop")

    def _all(self, refs: list[Any], timeout_s: float, what: str) -> list[Any]:
        """All answers, in order; the first failure is raised without waiting for the others, who may wait for it."""
        until_s = time.monotonic() + timeout_s
        left = refs
        try:
            while left:
                done, left = ray.wait(left, num_returns=1, timeout=max(0.0, until_s - time.monotonic()))
                if not done:
                    late = [rank for rank, ref in enumerate(refs) if ref in left]
                    raise WorkerDied(f"ranks {late} of {self._size} did not {what} within {timeout_s:g} s")
                ray.get(done)
            return ray.get(refs)
        except RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, Glm5RayError) else WorkerDied(f"a rank failed: {cause!r}") from error
        except RayError as error:
            raise WorkerDied(f"a rank died: {' '.join(str(error).split())[:500]}") from error

    def _kill(self) -> None:
        """Ends every rank, whatever it does: the peers of a dead one hang in their collectives."""
        for end in self._ends:
            end.close()
        for worker in self._workers:
            ray.kill(worker, no_restart=True)
        if self._runs:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=10.0)
        self._ends, self._workers, self._runs = [], [], []


def ray_executor(spec: EngineSpec, epoch: int) -> RayExecutor:
    """What :func:`glm5ray.actors.launch.start_engine` runs."""
    return RayExecutor(spec, epoch)
