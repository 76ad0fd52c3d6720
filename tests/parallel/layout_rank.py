"""One rank of ``test_layouts``, as a process: ``python -m tests.parallel.layout_rank FOLDER RANK SIZE``.

Every rank has the whole of the engine, scheduler and worker, and all schedulers plan the same: what the answering ranks
sampled is gathered after each step. Prints the tokens of each layout as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from glm5ray.config import EngineConfig, config_from_dict
from glm5ray.parallel import ParallelContext
from glm5ray.protocol import (
    GenerateRequest,
    SamplingParams,
    StepOutput,
    decode_output,
    decode_step,
    encode_output,
    encode_step,
    merge_outputs,
)
from glm5ray.scheduler.data_parallel import DataParallelScheduler
from glm5ray.scheduler.scheduler import Scheduler
from glm5ray.worker.worker import Worker

LAYOUTS = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2)],
    4: [(4, 1, 1), (1, 4, 1), (2, 4, 1), (1, 4, 4), (2, 4, 2)],
    8: [(8, 1, 1), (1, 8, 1), (8, 8, 1), (1, 8, 8), (2, 8, 4)],
}
"""Ranks -> (tp, ep, dp)."""
PROMPT_LENGTHS = (70, 3, 41, 9, 1)


def name_of(layout: tuple[int, int, int]) -> str:
    return "tp {} ep {} dp {}".format(*layout)


def settings(folder: Path, layout: tuple[int, int, int]) -> EngineConfig:
    """Chunks of 24 tokens; few enough pages that sequences are preempted, but room for the longest."""
    return config_from_dict(
        {
            "model": {"path": str(folder / "model"), "dtype": "float32", "device": "cpu"},
            "parallel": dict(zip(("tp_size", "ep_size", "dp_size"), layout, strict=True)),
            "cache": {"page_size": 4, "num_pages": 32},
            "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 128},
        }
    )


def generate(config: EngineConfig, parallel: ParallelContext) -> dict[str, list[int]]:
    """Greedy tokens of all requests; the last arrives when the others run."""
    worker = Worker.load(config, parallel)
    dp_size = parallel.dp_size
    scheduler = (
        DataParallelScheduler(config.scheduler, worker.capacity, dp_size)
        if dp_size > 1
        else Scheduler(config.scheduler, worker.capacity)
    )
    requests = [
        GenerateRequest(
            request_id=str(number),
            prompt_token_ids=tuple((7 * number + 5 * i + i * i) % 250 for i in range(length)),
            sampling=SamplingParams(max_tokens=12 + number, temperature=0.0, ignore_eos=True),
        )
        for number, length in enumerate(PROMPT_LENGTHS)
    ]
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests[:-1]:
        scheduler.add(request)
    late = requests[-1:]
    while scheduler.has_unfinished or late:
        step = scheduler.schedule()
        assert step is not None, scheduler
        output = worker.execute(decode_step(encode_step(step)))
        for event in scheduler.update(step, gathered(output, parallel)):
            tokens[event.request_id] += event.token_ids
        scheduler.check()
        if step.step_id == 5 and late:
            scheduler.add(late.pop())
    return tokens


def gathered(output: StepOutput, parallel: ParallelContext) -> StepOutput:
    if parallel.world_size == 1:
        return output
    outputs: list[bytes] = [b""] * parallel.world_size
    dist.all_gather_object(outputs, encode_output(output))
    return merge_outputs([decode_output(outputs[i * parallel.tp_size]) for i in range(parallel.dp_size)])


def meet(folder: Path, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / f'meet{size}'}", rank=rank, world_size=size)


def main(folder: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    if size > 1:
        meet(folder, rank, size)
    results = {}
    for layout in LAYOUTS[size]:
        tp_size, ep_size, dp_size = layout
        groups = [dist.new_group(list(range(i, i + tp_size))) for i in range(0, size, tp_size)] if size > 1 else [None]
        parallel = ParallelContext.of_rank(
            rank, tp_size, ep_size, groups[rank // tp_size], dist.group.WORLD if size > 1 else None, dp_size=dp_size
        )
        results[name_of(layout)] = generate(settings(folder, layout), parallel)
    sys.stdout.write(json.dumps(results))
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
