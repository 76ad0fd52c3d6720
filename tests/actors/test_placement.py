"""Which rank sits where, and what its process sets for itself: without Ray."""

from __future__ import annotations

import os
from itertools import permutations

import pytest

from glm5ray.actors import rank_environment
from glm5ray.actors.placement import Seat, deal_devices, in_order
from glm5ray.errors import ConfigError


def test_ranks_go_by_machine_in_the_order_of_their_numbers() -> None:
    seats = [
        Seat("10.0.0.9", "n9", 2),
        Seat("10.0.0.9", "n9", 11),
        Seat("10.0.0.10", "n10", 0),
        Seat("10.0.0.10", "n10", 10),
        Seat("fe80::1", "n6", 1),
    ]
    for shuffled in permutations(seats):
        assert in_order(shuffled) == seats


def test_two_machines_behind_one_address_stay_apart() -> None:
    seats = [Seat("127.0.0.1", "a", 1), Seat("127.0.0.1", "b", 0), Seat("127.0.0.1", "a", 2)]
    assert [seat.node_id for seat in in_order(seats)] == ["a", "a", "b"]


@pytest.mark.parametrize("given", list(permutations([0, 2, 10])))
def test_devices_grow_with_ranks_and_stay_on_their_machine(given: tuple[int, int, int]) -> None:
    seats = [Seat("10.0.0.1", "a", i) for i in range(3)] + [Seat("10.0.0.2", "b", i) for i in range(3, 5)]
    assert deal_devices(seats, [*given, 7, 6]) == [0, 2, 10, 6, 7]


def test_ranks_may_share_a_device_or_have_none() -> None:
    seats = [Seat("10.0.0.1", "a", i) for i in range(4)]
    assert deal_devices(seats, [1, 0, 1, 0]) == [0, 0, 1, 1]
    assert deal_devices(seats, [None] * 4) == [None] * 4


def test_cores_are_shared_among_the_ranks_of_a_machine() -> None:
    assert [rank_environment.num_threads("auto", 16, ranks) for ranks in (1, 3, 16, 64)] == [16, 5, 1, 1]
    assert rank_environment.num_threads(7, 2, 8) == 7


def test_nccl_is_for_ranks_with_a_gpu_each() -> None:
    assert rank_environment.backend_of(None, 1) == "gloo"
    assert rank_environment.backend_of(0, 2) == "gloo"
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        with pytest.raises(ConfigError, match=r"model\.device cuda need NCCL"):
            rank_environment.backend_of(0, 1)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"Ray gave this rank GPU 3, but PyTorch finds no CUDA device"):
            rank_environment.prepare_thread(3, torch.get_num_threads())


@pytest.mark.parametrize(
    ("visible", "gpu_id", "index"),
    [(None, 3, 3), ("", 3, 3), ("4,5", "5", 1), ("6, 2", "2", 1), ("GPU-8f3a,GPU-11c0", "GPU-11c0", 1), ("0,1", 1, 1)],
)
def test_where_gpus_are_hidden_the_device_is_counted_among_the_others(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpu_id: int | str, index: int
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert rank_environment.device_index_of(gpu_id) == index


def test_a_gpu_that_is_hidden_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigError, match="GPU 3, which CUDA_VISIBLE_DEVICES=4,5 does not have"):
        rank_environment.device_index_of(3)


def test_the_interface_is_that_of_the_address_unless_the_user_chose_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    assert rank_environment.interface_of("203.0.113.77") is None
    rank_environment.choose_interface("203.0.113.77")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    rank_environment.choose_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "mine"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
