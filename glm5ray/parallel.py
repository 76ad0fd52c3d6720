"""Ranks, sizes and collectives. At size 1 every collective returns its input and ``torch.distributed`` is not imported.

Two ways to split run over the same ranks. ``tp_size`` ranks split attention heads, vocabulary and the columns of
MLPs; ``ep_size`` ranks hold whole routed experts each, and where it is 1, ``tp`` splits the experts' columns too:

    tp 8, ep 1   heads by 8, each expert's columns by 8
    tp 8, ep 8   heads by 8, whole experts by 8
    tp 2, ep 8   heads by 2 (four copies of attention), whole experts by 8
    tp 1, ep 8   attention on every rank, whole experts by 8

With ``dp_size`` above 1 the ranks form groups of ``tp_size``, each with sequences and a KV cache of its own; whole
experts are split over all ranks (``ep_size = dp_size * tp_size``), who meet in every layer with experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glm5ray.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ParallelContext:
    """This rank's place. ``tp_group`` and ``world_group`` are process groups of ``torch.distributed``; ``None`` at
    size 1."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    tp_group: Any = None
    world_group: Any = None

    def __post_init__(self) -> None:
        if self.ep_size > 1 and self.ep_size % self.tp_size:
            raise ConfigError(
                f"parallel.ep_size is {self.ep_size} and parallel.tp_size is {self.tp_size}; both split the same "
                "ranks, so ep_size must be 1 or a multiple of tp_size"
            )
        if self.dp_size > 1 and self.ep_size != self.dp_size * self.tp_size:
            raise ConfigError(
                f"parallel.ep_size is {self.ep_size}, parallel.dp_size {self.dp_size} and parallel.tp_size "
                f"{self.tp_size}; ep_size must be their product"
            )
        if not (0 <= self.tp_rank < self.tp_size and 0 <= self.ep_rank < self.ep_size):
            raise ConfigError(
                f"rank (tp {self.tp_rank}, ep {self.ep_rank}) is outside (tp {self.tp_size}, ep {self.ep_size})"
            )

    @classmethod
    def of_rank(
        cls,
        rank: int,
        tp_size: int,
        ep_size: int,
        tp_group: Any = None,
        world_group: Any = None,
        *,
        dp_size: int = 1,
    ) -> ParallelContext:
        """The context of rank ``rank`` of ``max(tp_size, ep_size)``; ``tp`` ranks are neighbours."""
        dp_rank = rank // tp_size if dp_size > 1 else 0
        return cls(
            rank % tp_size,
            tp_size,
            rank % ep_size,
            ep_size,
            dp_rank,
            dp_size,
            tp_group=tp_group,
            world_group=world_group,
        )

    @property
    def world_size(self) -> int:
        return max(self.tp_size, self.ep_size)

    @property
    def expert_tp_size(self) -> int:
        """Ranks that split the columns of one routed expert."""
        return self.tp_size if self.ep_size == 1 else 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the tensor-parallel ranks; x may be overwritten."""
        if self.tp_size == 1 or not x.numel():
            return x
        import torch.distributed as dist

        x = x.contiguous()
        dist.all_reduce(x, group=self.tp_group)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The tensor-parallel ranks' x side by side along ``dim``, in order of rank; shapes are equal."""
        if self.tp_size == 1:
            return x
        import torch
        import torch.distributed as dist

        parts = [torch.empty_like(x) for _ in range(self.tp_size)]
        dist.all_gather(parts, x.contiguous(), group=self.tp_group)
        return torch.cat(parts, dim)

    def own_rows(self, num_rows: int) -> slice:
        """Of ``num_rows`` rows, which the ranks of a ``dp`` group (without ``dp``: all ranks) have alike, those that
        this rank answers for: equal shares in order of rank, the last ones smaller or empty."""
        share = -(-num_rows // self._num_alike)
        first = min((self.tp_rank if self.dp_size > 1 else self.ep_rank) * share, num_rows)
        return slice(first, min(first + share, num_rows))

    def gather_rows(self, x: Tensor, num_rows: int) -> Tensor:
        """The ``num_rows`` rows of which ``x`` is this rank's :meth:`own_rows`, on every rank that has them."""
        if self._num_alike == 1 or not num_rows:
            return x
        import torch.distributed as dist

        share = -(-num_rows // self._num_alike)
        padded = x.new_zeros(share, *x.shape[1:])
        padded[: len(x)] = x
        whole = x.new_empty(self._num_alike * share, *x.shape[1:])
        group = self.tp_group if self.dp_size > 1 else self.world_group
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from torch 2.13 on
        gather(whole, padded, group=group)
        return whole[:num_rows]

    @property
    def _num_alike(self) -> int:
        """Ranks that compute the same rows."""
        return self.tp_size if self.dp_size > 1 else self.ep_size

    def all_to_all(self, x: Tensor, send_rows: list[int], receive_rows: list[int]) -> Tensor:
        """Rows of x to all ranks: ``send_rows[r]`` of them, in order, to rank r; returns ``receive_rows[r]`` rows
        from each rank r."""
        if self.world_size == 1:
            return x
        import torch.distributed as dist

        out = x.new_empty(sum(receive_rows), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive_rows, send_rows, group=self.world_group)
        return out


def shard_size(total: int, size: int, what: str) -> int:
    """What each of ``size`` ranks holds of ``total``. Raises :class:`ConfigError` if they do not share evenly."""
    if total % size:
        raise ConfigError(
            f"{what} is {total}, which {size} ranks cannot share evenly; lower parallel.tp_size or parallel.ep_size"
        )
    return total // size
