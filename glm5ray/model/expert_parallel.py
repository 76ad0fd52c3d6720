"""Tokens to the ranks that hold their experts, and the results back.

Each token has one rank that *answers* for it; that rank routes it and sends it once to every rank that holds one of its
experts, however many of them are there. The receiver computes the weighted sum over its own experts, and one row goes
back. Bytes for each token and layer: docs/parallel.md.

Letters as in :mod:`glm5ray.kernels.interface`, and: Y rows that this rank answers for; W ranks; X rows sent; Z rows
received. Any of Y, X and Z may be 0 on any rank: it takes part in the collectives all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from glm5ray.parallel import ParallelContext


class Sending(NamedTuple):
    """Who gets which rows."""

    token_X: Tensor
    """int64, the row of each message; by receiver, then by row."""
    counts: list[int]
    """Rows to each rank."""


def plan_sending(ids_YA: Tensor, num_ranks: int, experts_per_rank: int) -> Sending:
    """ids_YA: int64, numbers of the experts in the model; rank r holds those from ``r * experts_per_rank``. Waits for
    the device."""
    is_sent_WY = torch.zeros(num_ranks, len(ids_YA), dtype=torch.bool, device=ids_YA.device)
    is_sent_WY.scatter_(0, (ids_YA // experts_per_rank).t(), True)
    return Sending(is_sent_WY.nonzero()[:, 1], is_sent_WY.sum(dim=1).tolist())


def run_across_ranks(
    parallel: ParallelContext,
    run: Callable[[Tensor, Tensor, Tensor], Tensor],
    x_YM: Tensor,
    ids_YA: Tensor,
    weights_YA: Tensor,
    experts_per_rank: int,
) -> Tensor:
    """The routed experts of all ranks on the rows that this rank answers for: [Y, M] of x's type.

    ``run(x_ZM, ids_ZA, weights_ZA)`` is this rank's experts, which skip the assignments to others. The parts are added
    in fp32 in order of rank, so the same rows give the same bits. All ranks must call it together."""
    num_ranks = parallel.world_size
    sending = plan_sending(ids_YA, num_ranks, experts_per_rank)
    counts_W = torch.tensor(sending.counts, dtype=torch.int64, device=x_YM.device)
    ones = [1] * num_ranks
    receiving = parallel.all_to_all(counts_W, ones, ones).tolist()

    x_ZM = parallel.all_to_all(x_YM[sending.token_X], sending.counts, receiving)
    # ids and weights are both 32 bits wide on the way: one message
    choices_YB = torch.cat([ids_YA.to(torch.int32), weights_YA.float().view(torch.int32)], dim=1)
    choices_ZB = parallel.all_to_all(choices_YB[sending.token_X], sending.counts, receiving)
    ids_ZA, bits_ZA = choices_ZB.chunk(2, dim=1)
    weights_ZA = bits_ZA.contiguous().view(torch.float32)
    part_ZM = run(x_ZM, ids_ZA.to(torch.int64), weights_ZA) if len(x_ZM) else x_ZM
    part_XM = parallel.all_to_all(part_ZM, receiving, sending.counts)

    out_YM = torch.zeros(x_YM.shape, dtype=torch.float32, device=x_YM.device)
    parts = zip(sending.token_X.split(sending.counts), part_XM.split(sending.counts), strict=True)
    for token_V, part_VM in parts:
        out_YM.index_add_(0, token_V, part_VM.float())  # no row twice from one rank
    return out_YM.to(x_YM.dtype)
