"""One rank of ``test_expert_parallel``, as a process: ``python -m tests.parallel.expert_rank FOLDER RANK SIZE``.

Every rank makes the same weights and rows from a seed, sends its rows, and compares what comes back with a loop over
all experts in float64."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu

from glm5ray.kernels.interface import ExpertWeights
from glm5ray.kernels.select import select_kernels
from glm5ray.model.expert_parallel import run_across_ranks
from glm5ray.parallel import ParallelContext

NUM_EXPERTS, CHOSEN, HIDDEN, WIDTH = 12, 3, 16, 8
ROWS = {"many": 29, "fewer than ranks": 1, "one rank's experts": 11, "unchosen experts": 17, "uneven ranks": 0}


def routing(case: str, num_rows: int, experts_per_rank: int, generator: torch.Generator) -> Tensor:
    """Distinct experts for each row [T, A]."""
    ids_TA = torch.rand(num_rows, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :CHOSEN]
    if case == "one rank's experts":
        return ids_TA.argsort(dim=1).argsort(dim=1) % experts_per_rank + NUM_EXPERTS - experts_per_rank
    if case == "unchosen experts":
        return torch.tensor([0, 4, 11]).expand(num_rows, CHOSEN).contiguous()
    return ids_TA


def dense(x_TM: Tensor, ids_TA: Tensor, weights_TA: Tensor, experts: ExpertWeights) -> Tensor:
    """float64: token by token, expert by expert."""
    out_TM = torch.zeros(x_TM.shape, dtype=torch.float64)
    for t, a in ((t, a) for t in range(len(x_TM)) for a in range(CHOSEN)):
        expert = int(ids_TA[t, a])
        gate_F, up_F = (experts.gate_up_EFM[expert].double() @ x_TM[t].double()).chunk(2)
        out_TM[t] += float(weights_TA[t, a]) * (experts.down_EMF[expert].double() @ (silu(gate_F) * up_F))
    return out_TM


def main(folder: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=size)
    parallel = ParallelContext.of_rank(rank, 1, size, None, dist.group.WORLD)
    kernels = select_kernels({}, "cpu").experts
    each = NUM_EXPERTS // size
    generator = torch.Generator().manual_seed(5)
    gate_up_EFM = torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN, generator=generator) / 4
    down_EMF = torch.randn(NUM_EXPERTS, HIDDEN, WIDTH, generator=generator) / 4
    whole = ExpertWeights(gate_up_EFM=gate_up_EFM, down_EMF=down_EMF, first_expert=0)
    mine = slice(rank * each, (rank + 1) * each)
    packed = kernels.pack(
        ExpertWeights(gate_up_EFM=gate_up_EFM[mine], down_EMF=down_EMF[mine], first_expert=rank * each)
    )
    for case, num_rows in ROWS.items():
        rows_by_rank = [5 * r for r in range(size)]  # rank 0 has none
        num_rows = num_rows or sum(rows_by_rank)
        x_TM = torch.randn(num_rows, HIDDEN, generator=generator)
        weights_TA = torch.rand(num_rows, CHOSEN, generator=generator)
        ids_TA = routing(case, num_rows, each, generator)
        rows = parallel.own_rows(num_rows)
        if case == "uneven ranks":
            rows = slice(sum(rows_by_rank[:rank]), sum(rows_by_rank[: rank + 1]))
        out_YM = run_across_ranks(
            parallel,
            lambda x, ids, weights: kernels.run(x, ids, weights, packed),
            x_TM[rows],
            ids_TA[rows],
            weights_TA[rows],
            each,
        )
        expected_TM = dense(x_TM, ids_TA, weights_TA, whole)
        torch.testing.assert_close(out_YM.double(), expected_TM[rows], atol=1e-5, rtol=1e-5, msg=case)
        if case != "uneven ranks":
            out_TM = parallel.gather_rows(out_YM, num_rows)
            torch.testing.assert_close(out_TM.double(), expected_TM, atol=1e-5, rtol=1e-5, msg=case)
        sys.stdout.write(f"{case}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
