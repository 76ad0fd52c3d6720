"""One rank of an engine as an actor: a worker and a socket."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
import zmq

from glm5ray.protocol import decode_step, encode_output

if TYPE_CHECKING:
    from glm5ray.config import EngineConfig
    from glm5ray.parallel import ParallelContext
    from glm5ray.protocol import Capacity, StepInput

MEETING_TIMEOUT_S = 120.0
"""All ranks are processes that run already when they are asked to meet."""


class Line(NamedTuple):
    """Where a rank's steps come from. The keys are those of CurveZMQ: they travel through Ray, so nobody else can read
    a step or send one."""

    address: str
    server_key: bytes
    public_key: bytes
    secret_key: bytes


class WorkerActor:
    """Plain class; :class:`~glm5ray.actors.ray_executor.RayExecutor` makes actors of it. What fails here ends
    :meth:`run` or the call, and with it the whole group."""

    def __init__(self, engine: str, config: EngineConfig, rank: int, size: int, epoch: int) -> None:
        logging.basicConfig(level=logging.INFO, format=f"%(levelname)s %(name)s {engine} rank {rank}: %(message)s")
        self._engine = engine
        self._config = config
        self._rank = rank
        self._size = size
        self._epoch = epoch

    def __repr__(self) -> str:
        return f"glm5ray {self._engine}: rank {self._rank} of {self._size}"

    def open_meeting(self) -> tuple[str, int]:
        """Rank 0: the address at which the ranks meet. It is open before anyone is told of it."""
        host = ray.util.get_node_ip_address()
        self._store = _store(host, 0, is_master=True)
        return host, self._store.port

    def load(self, meeting: tuple[str, int]) -> Capacity:
        """Meets the other ranks, and reads this rank's part of the weights."""
        import torch

        from glm5ray.parallel import ParallelContext
        from glm5ray.worker.worker import Worker

        if gpu_ids := ray.get_gpu_ids():
            torch.cuda.set_device(int(gpu_ids[0]))
        parallel = self._meet(meeting) if self._size > 1 else ParallelContext()
        self._worker = Worker.load(self._config, parallel, epoch=self._epoch)
        return self._worker.capacity

    def _meet(self, meeting: tuple[str, int]) -> ParallelContext:
        import torch
        import torch.distributed as dist

        from glm5ray.parallel import ParallelContext

        store = self._store if self._rank == 0 else _store(*meeting, is_master=False)
        has_gpu = torch.cuda.is_available() and self._config.model.device != "cpu"
        backend = "nccl" if has_gpu and self._config.parallel.ranks_per_gpu == 1 else "gloo"
        dist.init_process_group(backend, store=store, rank=self._rank, world_size=self._size)
        tp_size = self._config.parallel.tp_size
        tp_group = dist.group.WORLD
        for first in range(0, self._size, tp_size) if 1 < tp_size < self._size else ():
            ranks = list(range(first, first + tp_size))
            group = dist.new_group(ranks)  # every rank makes every group
            tp_group = group if self._rank in ranks else tp_group
        sizes = self._config.parallel
        return ParallelContext.of_rank(
            self._rank, tp_size, sizes.ep_size, tp_group, dist.group.WORLD, dp_size=sizes.dp_size
        )

    def run(self, line: Line) -> None:
        """Computes step after step, for ever. Rank 0 answers; of several data-parallel groups the first of each."""
        from glm5ray.worker.step_loop import compute_steps

        sizes = self._config.parallel
        answers = self._rank in range(0, sizes.dp_size * sizes.tp_size, sizes.tp_size)
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = line[1:]
        socket.connect(line.address)

        def receive(waits: bool) -> StepInput | None:
            return decode_step(socket.recv()) if waits or socket.poll(0) else None

        for output in compute_steps(self._worker, receive):
            if answers:
                socket.send(encode_output(output))


def _store(host: str, port: int, *, is_master: bool) -> Any:
    import torch.distributed as dist

    timeout = timedelta(seconds=MEETING_TIMEOUT_S)
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, port, is_master=is_master, wait_for_workers=False, timeout=timeout
    )
