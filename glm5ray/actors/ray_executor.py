"""RayExecutor: ranks as actors in one placement group; steps go to them over ZeroMQ, Ray watches over them.

Used by one thread, the engine's.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
import zmq
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from glm5ray.actors.names import NAMESPACE, group_name, worker_name
from glm5ray.actors.worker_actor import Line, WorkerActor
from glm5ray.errors import ConfigError, Glm5RayError, WorkerDied
from glm5ray.protocol import decode_output, encode_step, merge_outputs

if TYPE_CHECKING:
    from glm5ray.actors.spec import EngineSpec
    from glm5ray.protocol import Capacity, StepInput, StepOutput

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S = 15.0
START_TIMEOUT_S = 120.0
"""For a process with torch to come up."""
LOAD_TIMEOUT_S = 3600.0
WATCH_EVERY_S = 0.05
"""How often a wait looks whether everyone is alive."""


class _Pending:
    def __init__(self, executor: RayExecutor, step: StepInput) -> None:
        self._executor = executor
        self._step = step

    def result(self, timeout_s: float | None = None) -> StepOutput:
        return self._executor.receive(self._step)


class RayExecutor:
    """Ranks are replaced together, in the same placement group; those of an earlier epoch have sockets of their own,
    which are closed, so nothing that they say late is heard."""

    def __init__(self, spec: EngineSpec, epoch: int, *, worker_class: type = WorkerActor) -> None:
        """``worker_class`` has the methods of :class:`WorkerActor`."""
        self._spec = spec
        self._worker_class = worker_class
        self._epoch = epoch
        parallel = spec.config.parallel
        self._size = parallel.world_size
        self._answering = [group * parallel.tp_size for group in range(parallel.dp_size)]
        device = spec.config.model.device
        share = 1 / parallel.ranks_per_gpu
        has_gpus = ray.cluster_resources().get("GPU", 0) >= self._size * share
        self._gpus_each = share if device == "cuda" or (device == "auto" and has_gpus) else 0
        self._workers: list[Any] = []
        self._runs: list[Any] = []
        self._sockets: list[zmq.Socket[bytes]] = []
        self._group: Any = None

    def start(self) -> Capacity:
        """Raises :class:`ConfigError` if the cluster has no room, and what a rank raised while it loaded."""
        self._group = self._place()
        return self._launch()

    def restart(self, epoch: int) -> Capacity:
        self._kill()
        self._epoch = epoch
        try:
            return self._launch()
        except Glm5RayError as error:
            raise WorkerDied(f"the workers of epoch {epoch} did not come up: {error}") from error

    def submit(self, step: StepInput) -> _Pending:
        """Raises :class:`WorkerDied` if a rank ended, or is not connected in time: a socket without its peer would
        block for ever."""
        data = encode_step(step)
        until_s = time.monotonic() + self._spec.config.recovery.step_timeout_s
        for rank, socket in enumerate(self._sockets):
            while not socket.poll(int(WATCH_EVERY_S * 1000), zmq.POLLOUT):
                self._watch()
                if time.monotonic() > until_s:
                    raise WorkerDied(f"rank {rank} does not take step {step.step_id}")
            socket.send(data, zmq.DONTWAIT)
        return _Pending(self, step)

    def receive(self, step: StepInput) -> StepOutput:
        """Waits for the answers: rank 0's, or that of each data-parallel group's first rank. Raises
        :class:`WorkerDied` if a rank ended, or if one does not answer in time."""
        until_s = time.monotonic() + self._spec.config.recovery.step_timeout_s
        return merge_outputs([self._receive_from(rank, step, until_s) for rank in self._answering])

    def _receive_from(self, rank: int, step: StepInput, until_s: float) -> StepOutput:
        socket, timeout_s = self._sockets[rank], self._spec.config.recovery.step_timeout_s
        while True:
            if socket.poll(int(WATCH_EVERY_S * 1000)):
                output = decode_output(socket.recv())
                if (output.epoch, output.step_id) != (step.epoch, step.step_id):
                    raise WorkerDied(
                        f"rank {rank} answered step {output.step_id} of epoch {output.epoch}, not {step.step_id}"
                    )
                return output
            self._watch()
            if time.monotonic() > until_s:
                raise WorkerDied(f"step {step.step_id} did not end within {timeout_s:.0f} s")

    def shutdown(self) -> None:
        self._kill()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    # --- one incarnation --------------------------------------------------------------------------------------------

    def _place(self) -> Any:
        """The placement group of this engine. One that Ray still holds for a scheduler that died is taken over."""
        name = group_name(self._spec.engine)
        bundle = {"CPU": 1.0} | ({"GPU": self._gpus_each} if self._gpus_each else {})
        try:
            group = get_placement_group(name)
            if group.bundle_specs != [bundle] * self._size:
                remove_placement_group(group)  # of an engine of another layout that had the name
                raise ValueError(f"{name} has bundles {group.bundle_specs}")
        except ValueError:
            group = placement_group([bundle] * self._size, strategy="PACK", name=name)
        try:
            ray.get(group.ready(), timeout=PLACEMENT_TIMEOUT_S)
        except GetTimeoutError as error:
            remove_placement_group(group)
            free, total = ray.available_resources(), ray.cluster_resources()
            need = " and ".join(f"{number:g} {kind}" for kind, number in bundle.items())
            have = ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s" for kind in bundle)
            raise ConfigError(
                f"the engine needs {self._size} times {need}, and the cluster has {have} free; "
                "stop another engine (glm5ray status lists them), or lower parallel.tp_size, ep_size or dp_size"
            ) from error
        return group

    def _launch(self) -> Capacity:
        spec = self._spec
        self._workers = [self._make_worker(rank) for rank in range(self._size)]
        meeting = self._all([self._workers[0].open_meeting.remote()], START_TIMEOUT_S)[0]
        capacities = self._all([worker.load.remote(meeting) for worker in self._workers], LOAD_TIMEOUT_S)
        lines = [self._open_line() for _ in self._workers]
        self._runs = [worker.run.remote(line) for worker, line in zip(self._workers, lines, strict=True)]
        logger.info("engine=%s epoch=%d ranks=%d ready", spec.engine, self._epoch, self._size)
        return replace(capacities[0], num_pages=min(capacity.num_pages for capacity in capacities))

    def _make_worker(self, rank: int) -> Any:
        spec = self._spec
        actor = ray.remote(self._worker_class).options(
            name=worker_name(spec.engine, rank, self._epoch),
            namespace=NAMESPACE,
            num_cpus=0,
            num_gpus=self._gpus_each,
            max_restarts=0,
            # every rank sees all GPUs and takes its own: NCCL is slow, or hangs, where the others are hidden
            runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}} if self._gpus_each else {},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
        )
        return actor.remote(spec.engine, spec.config, rank, self._size, self._epoch)

    def _open_line(self) -> Line:
        server_key, server_secret = zmq.curve_keypair()
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = server_key, server_secret
        host = ray.util.get_node_ip_address()
        port = socket.bind_to_random_port(f"tcp://{host}")
        self._sockets.append(socket)
        return Line(f"tcp://{host}:{port}", server_key, *zmq.curve_keypair())

    def _watch(self) -> None:
        """Raises :class:`WorkerDied` if a rank's ``run()`` has ended."""
        ended, _ = ray.wait(self._runs, num_returns=1, timeout=0)
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

    def _all(self, refs: list[Any], timeout_s: float) -> list[Any]:
        """All answers, in order; the first failure is raised without waiting for the others, who may wait for it."""
        until_s = time.monotonic() + timeout_s
        left = refs
        try:
            while left:
                done, left = ray.wait(left, num_returns=1, timeout=max(0.0, until_s - time.monotonic()))
                if not done:
                    raise WorkerDied(f"{len(left)} of {self._size} ranks did not come up within {timeout_s:.0f} s")
                ray.get(done)
            return ray.get(refs)
        except RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, Glm5RayError) else WorkerDied(f"a rank failed: {cause!r}") from error
        except RayError as error:
            raise WorkerDied(f"a rank died: {' '.join(str(error).split())[:500]}") from error

    def _kill(self) -> None:
        """Ends every rank, whatever it does: the peers of a dead one hang in their collectives."""
        for socket in self._sockets:
            socket.close()
        for worker in self._workers:
            ray.kill(worker, no_restart=True)
        if self._runs:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=10.0)
        self._sockets, self._workers, self._runs = [], [], []


def ray_executor(spec: EngineSpec, epoch: int) -> RayExecutor:
    """What :func:`glm5ray.actors.launch.start_engine` runs."""
    return RayExecutor(spec, epoch)
