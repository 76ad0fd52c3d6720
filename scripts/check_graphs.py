"""Decode steps eagerly, from fixed batches, and from CUDA graphs: the same tokens, and how long each takes.

    python scripts/check_graphs.py [--json FILE] [--modes false,emulate,true] [--set section.field=value]

The model is the 12-layer slice of GLM-5 with random weights, unless ``--set model.path=...`` says another. Graphs must
give the tokens of the same fixed batches without graphs, number for number: same kernels, same sizes. Against eager
steps the share of equal tokens is reported: contexts are split into other parts there, and in bfloat16 sums differ.
Exits with 1 if graphs and fixed batches differ, or if no step came from a fixed batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any

from glm5ray.bench.offline import measure_row
from glm5ray.bench.report import environment
from glm5ray.config import load_config
from glm5ray.engine.executor import InProcessExecutor
from glm5ray.engine.llm import LLM
from glm5ray.engine.results import RequestResult
from glm5ray.model.byte_tokenizer import tokenizer_of
from glm5ray.model.checkpoint_folder import resolve_checkpoint
from glm5ray.protocol import SamplingParams
from glm5ray.worker.worker import Worker

SLICE = Path(str(resources.files("glm5ray"))) / "bench" / "slices" / "glm5-12l-nvfp4"
SETTINGS = [
    f"model.path={SLICE}",
    "model.load_format=dummy",
    "scheduler.max_num_seqs=64",
    "scheduler.max_model_len=4096",
    "cache.num_pages=640",
    "cache.prefix_caching=false",
    "runner.max_graph_seqs=64",
]
BATCHES = ((1, 64), (3, 64), (64, 64), (3, 2100))
"""(prompts, tokens of one). 3 is padded; with 2,100 tokens the indexer selects."""
NEW_TOKENS = 32


def tokens(llm: LLM, count: int, length: int) -> list[tuple[int, ...]]:
    """Of ``count`` prompts, every other one drawn, with a seed."""
    rng = Random(count)
    prompts = [[rng.randrange(llm.capacity.vocab_size) for _ in range(length)] for _ in range(count)]
    params = [
        SamplingParams(max_tokens=NEW_TOKENS, temperature=float(i % 2), seed=i, top_p=0.9, ignore_eos=True)
        for i in range(count)
    ]
    results = llm.generate(prompts, params)
    failures = [result for result in results if not isinstance(result, RequestResult)]
    assert not failures, failures
    return [result.choices[0].token_ids for result in results if isinstance(result, RequestResult)]


def measure(mode: str, overrides: list[str]) -> dict[str, Any]:
    gc.collect()  # the worker of the mode before: two have room, three have not
    config = load_config(None, [*SETTINGS, *overrides, f"runner.cuda_graphs={mode}"])
    started = time.perf_counter()
    worker = Worker.load(config)
    report: dict[str, Any] = {"mode": mode, "load_s": round(time.perf_counter() - started, 1)}
    tokenizer = tokenizer_of(resolve_checkpoint(config.model.path), config.model.load_format)
    with LLM.from_executor(InProcessExecutor(lambda: worker, threaded=False), tokenizer, config) as llm:
        report["tokens"] = {f"{count}x{length}": tokens(llm, count, length) for count, length in BATCHES}
        rows = [measure_row(llm, count, 256, NEW_TOKENS, 1, 0) for count in (1, 64)]
        report["tpot_ms"] = {str(row["conc"]): row["tpot_ms"] for row in rows}
    if worker.runner is not None:
        report["fixed_steps"], report["eager_steps"] = worker.runner.num_fixed_steps, worker.runner.num_eager_steps
    return report


def share_equal(a: dict[str, Any], b: dict[str, Any]) -> float:
    pairs = [
        (x, y)
        for count in a["tokens"]
        for own, other in zip(a["tokens"][count], b["tokens"][count], strict=True)
        for x, y in zip(own, other, strict=True)
    ]
    return round(sum(x == y for x, y in pairs) / len(pairs), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("check-graphs.json"))
    parser.add_argument("--modes", default="false,emulate,true")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    report: dict[str, Any] = {"environment": environment(), "settings": [*SETTINGS, *arguments.set], "modes": {}}
    modes = report["modes"]
    for mode in arguments.modes.split(","):
        modes[mode] = measure(mode, arguments.set)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        print({key: value for key, value in modes[mode].items() if key != "tokens"}, flush=True)
    wrong = [f"{mode}: no fixed step" for mode, found in modes.items() if mode != "false" and not found["fixed_steps"]]
    if "true" in modes and "emulate" in modes and modes["true"]["tokens"] != modes["emulate"]["tokens"]:
        wrong.append(f"graphs and fixed batches: {share_equal(modes['true'], modes['emulate'])} of tokens are equal")
    for mode in modes.keys() - {"false"} if "false" in modes else ():
        print(f"{mode} against eager: {share_equal(modes[mode], modes['false'])} of tokens are equal")
    print("wrong:" if wrong else "right", *wrong)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
