"""One rank of ``test_sharding``, as a process: ``python -m tests.model.sharded_rank FOLDER RANK``.

FOLDER holds the whole model's weights, its config, a batch of token sequences and transformers' logits (``task.pt``),
and is where the two ranks meet. Prints one line per layout with the largest difference. No pytest and no transformers
here: it starts faster."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from glm5ray.kernels.select import select_kernels
from glm5ray.model.glm5 import Glm5
from glm5ray.parallel import ParallelContext
from tests.model.paged_run import PagedRun

LAYOUTS = {"tp2": (2, 1), "ep2": (1, 2), "tp2+ep2": (2, 2)}

ROWS = (
    "embed_tokens.weight",
    "lm_head.weight",
    "q_b_proj.weight",
    "kv_b_proj.weight",
    "gate_proj.weight",
    "up_proj.weight",
)
COLUMNS = ("o_proj.weight", "down_proj.weight")


def shard(name: str, whole: Tensor, parallel: ParallelContext) -> Tensor:
    """This rank's part of a parameter, by its name alone."""
    tp_rank, tp_size = parallel.tp_rank, parallel.tp_size
    if ".mlp.experts." in name:
        if parallel.ep_size > 1:
            return whole.chunk(parallel.ep_size, dim=0)[parallel.ep_rank]
        if name.endswith("gate_up_proj"):
            return torch.cat([half.chunk(tp_size, dim=1)[tp_rank] for half in whole.chunk(2, dim=1)], dim=1)
        return whole.chunk(tp_size, dim=2)[tp_rank]
    if name.endswith(ROWS):
        return whole.chunk(tp_size, dim=0)[tp_rank]
    if name.endswith(COLUMNS):
        return whole.chunk(tp_size, dim=1)[tp_rank]
    return whole


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2)
    task = torch.load(folder / "task.pt", weights_only=False)
    for layout, (tp_size, ep_size) in LAYOUTS.items():
        parallel = ParallelContext.of_rank(rank, tp_size, ep_size, dist.group.WORLD, dist.group.WORLD)
        model = Glm5(task["config"], select_kernels({}, "cpu"), parallel, dtype=torch.float32, norm_eps="huggingface")
        state = {name: shard(name, whole, parallel).clone() for name, whole in task["state"].items()}
        expected_shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert {name: tuple(part.shape) for name, part in state.items()} == expected_shapes, f"{layout}: shapes"
        model.load_state_dict(state, strict=True, assign=True)
        model.prepare()
        logits = PagedRun(model, task["sequences"], page_size=8).all_logits(task["steps"])
        worst = max(float((a - b).abs().max()) for a, b in zip(logits, task["logits"], strict=True))
        sys.stdout.write(f"{layout} {worst}\n")
    rows = torch.arange(3.0)[:, None] + 10 * rank  # rank 0 sends 1 row to 0 and 2 to 1, rank 1 sends 2 and 1
    send, receive = ([1, 2], [1, 2]) if rank == 0 else ([2, 1], [2, 1])
    got = parallel.all_to_all(rows, send, receive).flatten().tolist()
    assert got == ([0.0, 10.0, 11.0] if rank == 0 else [1.0, 2.0, 12.0]), got
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
