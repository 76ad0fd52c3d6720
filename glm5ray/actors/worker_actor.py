"""One rank of an engine as an actor: a worker and its end of the step channel.

``load`` and ``run`` are called once each, in the actor's one ordinary thread; the methods of the group ``ctl`` answer
beside them, also while a step runs or hangs.
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import ray

from glm5ray.actors.channel import RankEnd
from glm5ray.actors.local_head import home
from glm5ray.actors.metrics_export import EVERY_S, RankExport, Ticker
from glm5ray.actors.rank_control import RankControl, RankStats, device_memory_bytes, process_memory_bytes
from glm5ray.actors.rank_environment import (
    Assignment,
    backend_of,
    choose_interface,
    device_index_of,
    join_groups,
    num_cores,
    num_threads,
    open_store,
    prepare_thread,
)
from glm5ray.engine.core import collect_garbage_rarely

if TYPE_CHECKING:
    from glm5ray.actors.channel import Line
    from glm5ray.config import EngineConfig
    from glm5ray.parallel import ParallelContext
    from glm5ray.protocol import Capacity, StepInput

CONTROL_GROUP = "ctl"
CONTROL_THREADS = 2
"""One may wait for a profile while another answers."""
LISTEN_S = 0.2
"""How long the loop waits for a step before it looks whether it shall end."""


class Arrival(NamedTuple):
    """What a process says when it is up."""

    gpu_id: int | None
    pid: int


class WorkerActor:
    """Plain class; :class:`~glm5ray.actors.ray_executor.RayExecutor` makes actors of it. What fails here ends
    :meth:`run` or the call, and with it the whole group."""

    metrics_every_s = EVERY_S
    """How often figures are handed to Ray."""

    def __init__(self, engine: str, config: EngineConfig, rank: int, size: int, epoch: int) -> None:
        """``config.model.device`` is decided: cpu or cuda."""
        logging.basicConfig(level=logging.INFO, format=f"%(levelname)s %(name)s {engine} rank {rank}: %(message)s")
        self._engine = engine
        self._config = config
        self._rank = rank
        self._size = size
        self._epoch = epoch
        self._device_index: int | None = None
        self._num_threads = 0
        self._channel: RankEnd | None = None
        self._control = RankControl()

    def __repr__(self) -> str:
        return f"glm5ray {self._engine}: rank {self._rank} of {self._size} ({self._config.parallel.layout})"

    def arrive(self) -> Arrival:
        """The first call: it returns when the process is up."""
        on_gpu = self._config.model.device == "cuda"
        return Arrival(device_index_of(ray.get_gpu_ids()[0]) if on_gpu else None, os.getpid())

    def open_meeting(self, host: str) -> tuple[str, int]:
        """Rank 0: the address at which the ranks meet. It is open before anyone is told of it."""
        self._store = open_store(host, 0, is_master=True, timeout_s=self._config.recovery.start_timeout_s)
        return host, self._store.port

    def load(self, assignment: Assignment) -> Capacity:
        """Meets the other ranks, and reads this rank's part of the weights."""
        from glm5ray.parallel import ParallelContext
        from glm5ray.worker.worker import Worker

        self._device_index = assignment.device_index
        self._num_threads = num_threads(self._config.parallel.cpu_threads, num_cores(), assignment.ranks_on_node)
        prepare_thread(self._device_index, self._num_threads)
        parallel = self._meet(assignment) if self._size > 1 else ParallelContext()
        self._worker = Worker.load(self._config, parallel, epoch=self._epoch)
        return self._worker.capacity

    def _meet(self, assignment: Assignment) -> ParallelContext:
        choose_interface(assignment.node_ip)
        backend = backend_of(assignment.device_index, self._config.parallel.ranks_per_gpu)
        timeout_s = self._config.recovery.start_timeout_s
        is_first = self._rank == 0
        store = self._store if is_first else open_store(*assignment.meeting, is_master=False, timeout_s=timeout_s)
        return join_groups(self._rank, self._config.parallel, store, backend)

    def run(self, line: Line) -> None:
        """Computes step after step until it is told to stop. Rank 0 answers; of several data-parallel groups the first
        rank of each."""
        from glm5ray.worker.step_loop import compute_steps

        if self._num_threads:  # a rank without a model needs no PyTorch
            prepare_thread(self._device_index, self._num_threads)
        sizes = self._config.parallel
        answers = self._rank in range(0, sizes.dp_size * sizes.tp_size, sizes.tp_size)
        collect_garbage_rarely()
        self._channel = channel = RankEnd(line, self._rank, self._epoch)
        export = RankExport(model_name=Path(self._config.model.path).name, engine=self._engine)
        Ticker(lambda: export.tell(self._stats()), every_s=self.metrics_every_s).start()
        try:
            for output in compute_steps(self._worker, self._receive):
                self._control.end()
                if answers:
                    channel.send(output)
        finally:
            channel.close()

    def _receive(self, waits: bool) -> StepInput | None:
        """``waits``: until there is a step, or the loop shall end; then there is none."""
        assert self._channel is not None
        control = self._control
        while not (waits and control.is_stopping):
            step = self._channel.receive(LISTEN_S if waits else 0.0)
            if step is not None:
                control.begin(step)
                return step
            if not waits:
                return None
            control.idle()
        return None

    # --- the control group: beside run() ------------------------------------------------------------------------------

    @ray.method(concurrency_group=CONTROL_GROUP)
    def ping(self) -> tuple[int, int]:
        """Rank and epoch. That it answers says that the process lives, not that its loop turns."""
        return self._rank, self._epoch

    @ray.method(concurrency_group=CONTROL_GROUP)
    def stats(self) -> RankStats:
        """Of this moment."""
        return self._stats()

    def _stats(self) -> RankStats:
        control, channel = self._control, self._channel
        allocated, peak = device_memory_bytes(self._device_index)
        return RankStats(
            rank=self._rank,
            epoch=self._epoch,
            pid=os.getpid(),
            host=socket.gethostname(),
            device="cpu" if self._device_index is None else f"cuda:{self._device_index}",
            step_id=control.step_id,
            num_steps=control.num_steps,
            seconds_in_step=control.seconds_in_step,
            num_waiting=channel.num_waiting if channel is not None else 0,
            memory_bytes=process_memory_bytes(),
            device_memory_bytes=allocated,
            device_memory_peak_bytes=peak,
        )

    @ray.method(concurrency_group=CONTROL_GROUP)
    def profile(self, num_steps: int, timeout_s: float, folder: str | None = None) -> str:
        """Records the next ``num_steps`` steps with PyTorch's profiler; returns the path of a trace for Perfetto, on
        this rank's machine in ``folder``, by default ``$GLM5RAY_HOME/traces``. Raises ``TimeoutError`` if the steps do
        not come within ``timeout_s``."""
        name = f"{self._engine}-epoch{self._epoch}-rank{self._rank}-step{self._control.step_id + 1}.json.gz"
        path = (Path(folder) if folder is not None else home() / "traces") / name
        self._control.profile(num_steps, path, timeout_s)
        return str(path)

    @ray.method(concurrency_group=CONTROL_GROUP)
    def stop(self) -> None:
        """:meth:`run` returns after the step that runs."""
        self._control.is_stopping = True
