"""Decode ladder and prefill of a slice of GLM-5 with random NVFP4 weights, on the GPU that is here.

    python scripts/gpu_ladder.py [--json FILE] [--limit SECONDS] [--rows 1,10,2048:32x16] [--set section.field=value]

First the nano model's greedy tokens in float32 on the GPU are compared with the CPU's. Then, for each row: n prompts of
256 random tokens at once, greedy, end-of-sequence ignored; ``prefill_s`` is the wall time with 1 new token, ``total_s``
with 65, and ``tpot_ms = (total_s - prefill_s) / 64``. The first run of a row, whose number of prompts the engine has
not seen, is ``first_tpot_ms``; the other fields are medians of ``--repetitions`` runs behind it. ``n:PxN`` is a row of
n prompts of P tokens and N new ones after the first, for what would take too long otherwise; its sizes stand in the
row. Last one prompt of 8,192 tokens, if a sequence may be as long. Experts are chosen uniformly
(``model.dummy_routing``), as the peer's figures have it. ``first_token_s`` is from the begin of loading to the answer
of a first short prompt.

A row that fails says so and the next one is tried; a request that is not answered is a failure. The report is written
after every row, so that a limit leaves what was measured.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib import resources
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import torch

from glm5ray.bench.offline import attempt_row, random_prompts, timed
from glm5ray.bench.report import environment
from glm5ray.config import load_config
from glm5ray.engine.llm import LLM
from glm5ray.engine.results import RequestFailure
from glm5ray.errors import Glm5RayError
from glm5ray.protocol import GenerateRequest, SamplingParams

SLICE = Path(str(resources.files("glm5ray"))) / "bench" / "slices" / "glm5-12l-nvfp4"
SETTINGS = [
    f"model.path={SLICE}",
    "model.load_format=dummy",
    "model.dummy_routing=uniform",
    "scheduler.max_num_batched_tokens=8192",
    "scheduler.max_model_len=16384",
    "cache.prefix_caching=false",
]


LONG_PROMPT = 8192


class Row(NamedTuple):
    number: int
    prompt_tokens: int
    new_tokens: int


def parse_rows(text: str) -> list[Row]:
    """``1,10,2048:32x16``"""
    rows = []
    for part in text.split(","):
        number, _, sizes = part.partition(":")
        prompt_tokens, _, new_tokens = (sizes or "256x64").partition("x")
        rows.append(Row(int(number), int(prompt_tokens), int(new_tokens)))
    return rows


def nano_tokens(device: str) -> list[tuple[int, ...]]:
    """Greedy tokens of eight prompts, in float32."""
    config = load_config(None, [f"model.device={device}", "model.dtype=float32", "cache.num_pages=256"])
    rng = Random(1)
    requests = [
        GenerateRequest(
            request_id=str(i),
            prompt_token_ids=tuple(rng.randrange(256) for _ in range(20 + 40 * i)),
            sampling=SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True),
        )
        for i in range(8)
    ]
    with LLM(config=config) as llm:
        results = {}
        for result in llm.run(requests):
            if isinstance(result, RequestFailure):
                raise result.error
            results[result.request_id] = result.choices[0].token_ids
    return [results[request.request_id] for request in requests]


def measure(report: dict[str, Any], arguments: argparse.Namespace, save: Any) -> None:
    most = max(row.number for row in arguments.rows)
    config = load_config(None, [*SETTINGS, f"scheduler.max_num_seqs={most}", *arguments.set])
    started = time.perf_counter()
    with LLM(config=config) as llm:
        report["config"] = config.to_dict()
        report["load_s"] = round(time.perf_counter() - started, 1)
        report["memory_allocated_gb"] = round(torch.cuda.memory_allocated() / 1e9, 1)
        report["capacity_tokens"] = llm.capacity.num_pages * llm.capacity.page_size
        timed(llm, random_prompts(llm, 1, 4, 3), 1)
        report["first_token_s"] = round(time.perf_counter() - started, 1)
        save()
        for row in arguments.rows:
            if time.perf_counter() - arguments.started > arguments.limit:
                report["cut_short"] = f"before concurrency {row.number}: over {arguments.limit} s"
                break
            done = attempt_row(llm, *row, arguments.repetitions)
            report["one_h200"].append({**done, "prompt_tokens": row.prompt_tokens, "new_tokens": row.new_tokens})
            print(report["one_h200"][-1], flush=True)
            save()
        if llm.capacity.max_model_len > LONG_PROMPT:
            prompts = random_prompts(llm, 1, LONG_PROMPT, 2)
            times = [round(timed(llm, prompts, 1), 4) for _ in range(1 + arguments.repetitions)]
            report["first_prefill_8192_s"], report["prefill_8192_s"] = times[0], median(times[1:])
        report["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu-ladder.json"))
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which no further row is begun")
    parser.add_argument("--repetitions", type=int, default=2, help="runs of a row behind the first one")
    parser.add_argument("--rows", type=parse_rows, default="1,10,64,256,512,1024")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    arguments.started = time.perf_counter()
    report: dict[str, Any] = {
        "what": "glm5ray, one process, a 12-layer slice of GLM-5 (3 dense + 9 MoE layers), NVFP4 routed experts, the "
        "rest BF16, random weights, BF16 KV cache",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "environment": environment(),
        "one_h200": [],
    }

    def save() -> None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")

    try:
        report["nano_greedy_equals_cpu"] = nano_tokens("cuda") == nano_tokens("cpu")
    except Glm5RayError as error:  # the ladder is measured all the same
        report["nano_greedy_equals_cpu"] = f"failed: {error}"
    print("nano: greedy tokens on cuda equal the cpu's:", report["nano_greedy_equals_cpu"], flush=True)
    save()
    measure(report, arguments, save)
    print("seconds to load:", report["load_s"], "and to a first token:", report["first_token_s"])
    print("conc  prefill_s  total_s  tpot_ms    first  decode_tok_s")
    for row in report["one_h200"]:
        line = "{conc:4d} {prefill_s:10.3f} {total_s:8.3f} {tpot_ms:8.3f} {first_tpot_ms:8.3f} {decode_tok_s:13.1f}"
        print(f"{row['conc']:4d} {row['error']}" if "error" in row else line.format(**row))
    print("prefill of 8,192 tokens:", report.get("prefill_8192_s"), "s")


if __name__ == "__main__":
    main()
