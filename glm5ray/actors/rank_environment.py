"""What a rank's process sets before it computes: device, threads, network interface, process groups.

The environment variables of other libraries that are set here, unless the user has set them: ``GLOO_SOCKET_IFNAME`` and
``NCCL_SOCKET_IFNAME``. (``RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES`` is set where the actors are made.)
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from glm5ray.errors import ConfigError
from glm5ray.parallel import ParallelContext

if TYPE_CHECKING:
    from glm5ray.config import ParallelSection

logger = logging.getLogger(__name__)

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915
"""Linux's number for asking an interface for its IPv4 address: linux/sockios.h."""


class Assignment(NamedTuple):
    """What a rank is told once all processes are up."""

    meeting: tuple[str, int]
    """Host and port of rank 0's store."""
    device_index: int | None
    """The GPU; ``None``: it computes on the CPU."""
    ranks_on_node: int
    node_ip: str
    """The address of this rank by which the others reach it; loopback if all are on one machine."""


def prepare_thread(device_index: int | None, num_threads: int) -> None:
    """To be called in every thread that computes: each has a current CUDA device of its own."""
    import torch

    torch.set_num_threads(num_threads)
    if device_index is None:
        return
    if not torch.cuda.is_available():
        raise ConfigError(
            f"model.device is cuda and Ray gave this rank GPU {device_index}, but PyTorch finds no CUDA device on "
            f"{socket.gethostname()}; install a PyTorch with CUDA there, or set model.device=cpu"
        )
    torch.cuda.set_device(device_index)


def device_index_of(gpu_id: int | str) -> int:
    """PyTorch's number for the GPU that Ray calls ``gpu_id``. Where ``CUDA_VISIBLE_DEVICES`` was set when Ray started,
    Ray has its entries as names (``"5"``, ``"GPU-8f3a..."``), and PyTorch counts them from 0."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return int(gpu_id)
    names = [name.strip() for name in visible.split(",")]
    if str(gpu_id) not in names:
        raise ConfigError(
            f"Ray gave this rank GPU {gpu_id}, which CUDA_VISIBLE_DEVICES={visible} does not have on "
            f"{socket.gethostname()}; start Ray there with the GPUs that it may use, and nothing sets it for actors"
        )
    return names.index(str(gpu_id))


def num_threads(setting: int | str, num_cores: int, ranks_on_node: int) -> int:
    """PyTorch's threads in a rank. Ranks that share cores and spin for each other are slower than with one each."""
    return setting if isinstance(setting, int) else max(1, num_cores // ranks_on_node)


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_interface(node_ip: str) -> None:
    """Points gloo and NCCL at the interface that has ``node_ip``. Left alone, gloo takes what the host's name resolves
    to, often loopback, and NCCL takes the first one, which may be a bridge of containers."""
    name = interface_of(node_ip)
    for variable in INTERFACE_VARIABLES:
        if name is not None:
            os.environ.setdefault(variable, name)
    chosen = " ".join(f"{variable}={os.environ.get(variable, '')}" for variable in INTERFACE_VARIABLES)
    logger.info("node_ip=%s %s", node_ip, chosen)


def interface_of(ip: str) -> str | None:
    """The network interface with this IPv4 address; ``None`` if it cannot be told."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it is down, or has no such address
            if socket.inet_ntoa(answer[20:24]) == ip:
                return name
    return None


def backend_of(device_index: int | None, ranks_per_gpu: int) -> str:
    """Who carries tensors between the ranks: NCCL between GPUs, gloo between CPUs and between ranks that share a GPU,
    which NCCL refuses. Raises :class:`ConfigError` if PyTorch was built without it."""
    import torch.distributed as dist

    if device_index is None or ranks_per_gpu > 1:
        return "gloo"
    if not dist.is_nccl_available():
        raise ConfigError("several ranks with model.device cuda need NCCL, which this PyTorch was built without")
    return "nccl"


def open_store(host: str, port: int, *, is_master: bool, timeout_s: float) -> Any:
    """Where the ranks meet: rank 0's, at a free port if ``port`` is 0, or the connection of another one to it."""
    import torch.distributed as dist

    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, port, is_master=is_master, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def join_groups(rank: int, sizes: ParallelSection, store: Any, backend: str) -> ParallelContext:
    """Makes the process groups; returns when every rank has come."""
    import torch.distributed as dist

    size, tp_size = sizes.world_size, sizes.tp_size
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    tp_group = dist.group.WORLD
    for first in range(0, size, tp_size) if 1 < tp_size < size else ():
        ranks = list(range(first, first + tp_size))
        group = dist.new_group(ranks)  # every rank makes every group
        tp_group = group if rank in ranks else tp_group
    return ParallelContext.of_rank(rank, tp_size, sizes.ep_size, tp_group, dist.group.WORLD, dp_size=sizes.dp_size)
