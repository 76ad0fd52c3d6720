"""Does a GPU hold what the memory plan says? Largest steps of a 12-layer slice of GLM-5 with random NVFP4 weights.

    python scripts/check_memory_plan.py [--json FILE] [--set section.field=value]

Plans a rank, loads it, and then makes a prompt as long as a step, as many sequences as may run with top-p sampling and
penalties, and a long context. Prints what PyTorch reserved at most beside weights and pages, and fails if that is more
than was planned for steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from gpu_ladder import SETTINGS, SLICE

from glm5ray.bench.report import environment
from glm5ray.config import load_config
from glm5ray.engine.llm import LLM
from glm5ray.engine.results import RequestFailure
from glm5ray.model.name_table import ShardSpec
from glm5ray.model_config import ModelConfig
from glm5ray.protocol import GenerateRequest, SamplingParams
from glm5ray.worker.memory import plan_rank, usable_bytes


def ask(llm: LLM, number: int, prompt_tokens: int, sampling: SamplingParams) -> None:
    rng = Random(number)
    requests = [
        GenerateRequest(
            request_id=str(i),
            prompt_token_ids=tuple(rng.randrange(llm.capacity.vocab_size) for _ in range(prompt_tokens)),
            sampling=sampling,
        )
        for i in range(number)
    ]
    for result in llm.run(requests):
        if isinstance(result, RequestFailure):
            raise result.error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("memory-plan.json"))
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    config = load_config(
        None, [*SETTINGS, "scheduler.max_num_seqs=1024", "scheduler.max_model_len=auto", *arguments.set]
    )
    limits, before = config.scheduler, usable_bytes(config, "cuda")
    model = ModelConfig.from_checkpoint(SLICE)
    plan = plan_rank(
        config, model, ShardSpec(), device="cuda", dtype="bfloat16", packed_experts=True, memory_bytes=before
    )
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "environment": environment(),
        "config": config.to_dict(),
        "usable_bytes": before,
        "planned": dict(plan.lines()),
        "steps": [],
    }
    held = plan.weights.total_bytes + plan.kv_bytes
    planned = sum(plan.workspace.values())
    with LLM(config=config) as llm:
        report["allocated_after_load"] = torch.cuda.memory_allocated()
        report["planned_weights_and_pages"] = held
        drawn = SamplingParams(
            max_tokens=4, temperature=1.0, top_p=0.9, repetition_penalty=1.1, seed=1, ignore_eos=True
        )
        greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        for what, number, prompt_tokens, sampling in (
            ("a prompt of one step", 1, limits.max_num_batched_tokens, greedy),
            ("as many sequences as may run", limits.max_num_seqs, 16, drawn),
            ("a long context", 1, 100_000, greedy),
            ("mixed", limits.max_num_seqs, 200, drawn),
        ):
            torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            ask(llm, number, prompt_tokens, sampling)
            peak = torch.cuda.max_memory_reserved() - held
            free, total = torch.cuda.mem_get_info()
            row = {
                "what": what,
                "seconds": round(time.perf_counter() - started, 1),
                "allocated_for_steps": torch.cuda.max_memory_allocated() - held,
                "reserved_for_steps": peak,
                "taken_of_the_device": total - free,
            }
            report["steps"].append(row)
            print(row, flush=True)
    report["planned_for_steps"] = planned
    report["fits"] = all(row["reserved_for_steps"] <= planned for row in report["steps"])
    arguments.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(f"planned for steps: {planned / 2**30:.2f} GiB; fits: {report['fits']}")
    sys.exit(0 if report["fits"] else 1)


if __name__ == "__main__":
    main()
