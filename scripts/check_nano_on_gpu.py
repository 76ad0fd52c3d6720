"""The embedded model's evaluation on the GPU that is here, as GLM-5 runs there: BF16, NVFP4 experts, FP8 cache rows.

    python scripts/check_nano_on_gpu.py [--json FILE] [--examples 40]

The tasks are those of ``glm5ray eval nano``; float32 on the GPU stands beside them. Exits with 1 if a task
has so many more wrong answers than in float32 that chance makes as many in one of a hundred such runs at most (Fisher's
exact test, one-sided), or if no decode step came from a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import sys
from math import comb
from pathlib import Path
from typing import Any

from glm5ray.bench.report import environment
from glm5ray.config import load_config
from glm5ray.engine.executor import InProcessExecutor
from glm5ray.engine.llm import LLM
from glm5ray.model.byte_tokenizer import tokenizer_of
from glm5ray.model.checkpoint_folder import resolve_checkpoint
from glm5ray.nano.engine_backend import EngineBackend
from glm5ray.nano.evaluate import generation_table, load_tokenizer
from glm5ray.worker.worker import Worker

SETTINGS = {
    "float32": ["model.dtype=float32"],
    "bf16, nvfp4, fp8 cache": ["model.dtype=bfloat16", "model.weights=packed", "cache.kv_dtype=fp8"],
}
RARE = 0.01


def chance(wrong: int, wrong_before: int, number: int) -> float:
    """That so many of the ``wrong + wrong_before`` wrong answers, or more, fall into this half of ``2 * number``."""
    both = wrong + wrong_before
    ways = sum(comb(number, k) * comb(number, both - k) for k in range(wrong, min(both, number) + 1))
    return ways / comb(2 * number, both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("nano-on-gpu.json"))
    parser.add_argument("--examples", type=int, default=40)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(resolve_checkpoint("nano"))
    report: dict[str, Any] = {"environment": environment(), "examples": arguments.examples, "results": {}}
    for name, settings in SETTINGS.items():
        config = load_config(None, [f"model.device={arguments.device}", "cache.num_pages=1024", *settings])
        worker = Worker.load(config)
        text = tokenizer_of(resolve_checkpoint("nano"), "checkpoint")
        with LLM.from_executor(InProcessExecutor(lambda w=worker: w, threaded=False), text, config) as llm:
            table = generation_table(EngineBackend(llm), tokenizer, arguments.examples, 0)
        from_graphs = worker.runner.num_fixed_steps if worker.runner is not None else 0
        report["results"][name] = {"tasks": table, "graph_steps": from_graphs}
        print(name, table, "steps from graphs:", from_graphs, flush=True)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    before, now = (found["tasks"] for found in report["results"].values())
    wrong = []
    for task, share in now.items():
        counts = [round((1.0 - x) * arguments.examples) for x in (share, before[task])]
        if chance(*counts, arguments.examples) < RARE:
            wrong.append(f"{task}: {share} where float32 has {before[task]}")
    if arguments.device == "cuda" and not all(found["graph_steps"] for found in report["results"].values()):
        wrong.append("no step came from a graph")
    print("wrong:" if wrong else "right", *wrong)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
