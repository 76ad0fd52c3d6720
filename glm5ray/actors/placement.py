"""Where the ranks of an engine sit: a placement group with one bundle for each, and who gets which."""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError
from ray.util import get_placement_group, placement_group, placement_group_table, remove_placement_group

from glm5ray.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PLACEMENT_TIMEOUT_S = 10.0
"""With what stands before it, a command that finds no room says so within 15 seconds."""


class Seat(NamedTuple):
    """The place of one rank."""

    node_ip: str
    node_id: str
    bundle: int
    """Its number in the placement group."""


def place(name: str, size: int, bundle: dict[str, float]) -> Any:
    """The placement group ``name`` of ``size`` bundles. One that Ray still holds for a scheduler that died is taken
    over. Raises :class:`ConfigError` if the cluster has no room."""
    try:
        group = get_placement_group(name)
        if group.bundle_specs != [bundle] * size:
            remove_placement_group(group)  # of an engine of another layout that had the name
            raise ValueError(f"{name} has bundles {group.bundle_specs}")
    except ValueError:
        group = placement_group([bundle] * size, strategy="PACK", name=name)
    try:
        ray.get(group.ready(), timeout=PLACEMENT_TIMEOUT_S)
    except GetTimeoutError as error:
        remove_placement_group(group)
        free, total = ray.available_resources(), ray.cluster_resources()
        need = " and ".join(f"{number:g} {kind}" for kind, number in bundle.items())
        have = ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s" for kind in bundle)
        raise ConfigError(
            f"the engine needs {size} times {need}, and the cluster has {have} free; stop another engine (glm5ray "
            "status lists them), or lower parallel.tp_size, ep_size or dp_size"
            + (", or set model.device=cpu" if "GPU" in bundle else "")
        ) from error
    return group


def seats_of(group: Any) -> list[Seat]:
    """The seats of a placement group that is ready; number r is for rank r."""
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    where: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return in_order(Seat(address.get(node_id, ""), node_id, bundle) for bundle, node_id in where.items())


def in_order(seats: Iterable[Seat]) -> list[Seat]:
    """Seats of one machine are neighbours, machines go by the number in their address (10.0.0.9 before 10.0.0.10), and
    bundles by theirs: the ranks of a tensor-parallel group, which are neighbours too, share a machine if they can."""

    def key(seat: Seat) -> tuple[int, int, str, int]:
        try:
            ip = ip_address(seat.node_ip)
        except ValueError:
            return (99, 0, seat.node_ip + seat.node_id, seat.bundle)
        return (ip.version, int(ip), seat.node_id, seat.bundle)

    return sorted(seats, key=key)


def deal_devices(seats: Sequence[Seat], gpu_ids: Sequence[int | None]) -> list[int | None]:
    """The device of each rank. Ray gave ``gpu_ids[r]`` to rank r, in any order; the ranks of a machine take what they
    have together in order of rank, so that rank and device number grow together."""
    devices: list[int | None] = [None] * len(seats)
    for node_id in {seat.node_id for seat in seats}:
        ranks = [rank for rank, seat in enumerate(seats) if seat.node_id == node_id]
        ids = sorted(gpu for rank in ranks if (gpu := gpu_ids[rank]) is not None)
        for rank, gpu in zip(ranks, ids, strict=False):  # without GPUs there are no ids
            devices[rank] = gpu
    return devices
