#!/usr/bin/env python3
"""Output tokens per second of this engine beside transformers' ``generate``, same weights, same prompts, same machine,
one run.

    .venv/bin/python scripts/bench_vs_transformers.py --out docs/experiments/0002-cpu-throughput.json

The model is tiny and random, in fp32: what is compared is the engines' overhead and their CPU arithmetic. Repetitions
of the two are interleaved. Prompts have equal lengths, which is transformers' best case: it pads nothing. The last line
is one JSON object.

That both compute the same is checked first, on the same sizes but with index_topk above the length. In the measured
model the indexer has four heads, and a position at which all four are below zero scores exactly 0: many positions tie,
the two break ties differently (here the lower position wins; transformers leaves it to topk), and random weights turn
that into other tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from transformers import GlmMoeDsaForCausalLM

from glm5ray.bench.report import environment
from glm5ray.config import config_from_dict
from glm5ray.engine.llm import LLM
from glm5ray.engine.results import RequestResult
from glm5ray.model.tiny import write_tiny
from glm5ray.protocol import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 1,
    "intermediate_size": 512,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_topk": 64,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
}


def hugging_face(model: Any, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    """(seconds, new tokens of each prompt)"""
    ids = torch.tensor(prompts)
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    return time.perf_counter() - started, out[:, ids.shape[1] :].tolist()


def ours(llm: LLM, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    """(seconds, new tokens of each prompt)"""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    started = time.perf_counter()
    results = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    tokens = []
    for result in results:
        if not isinstance(result, RequestResult):
            raise result.error
        tokens.append(list(result.choices[0].token_ids))
    return seconds, tokens


def measure(llm: LLM, model: Any, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One row: medians of interleaved repetitions, after a warm-up of both."""
    rng = Random(arguments.seed + batch)
    prompts = [[rng.randrange(SIZES["vocab_size"]) for _ in range(arguments.prompt_tokens)] for _ in range(batch)]
    ours(llm, prompts, 4)
    hugging_face(model, prompts, 4)
    seconds: dict[str, list[float]] = {"glm5ray": [], "transformers": []}
    for _ in range(arguments.repetitions):
        seconds["glm5ray"].append(ours(llm, prompts, arguments.new_tokens)[0])
        seconds["transformers"].append(hugging_face(model, prompts, arguments.new_tokens)[0])
    count = batch * arguments.new_tokens
    rates = {name: count / median(values) for name, values in seconds.items()}
    return {
        "conc": batch,
        "glm5ray_out_tok_s": round(rates["glm5ray"], 1),
        "transformers_out_tok_s": round(rates["transformers"], 1),
        "ratio": round(rates["glm5ray"] / rates["transformers"], 2),
    }


@contextmanager
def both(seed: int, **changes: int) -> Iterator[tuple[LLM, Any]]:
    """This engine and transformers on one seeded checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "tiny"
        write_tiny(checkpoint, format="fp32", style="glm5", seed=seed, with_mtp=False, sizes={**SIZES, **changes})
        model = GlmMoeDsaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        config = config_from_dict({"model": {"path": str(checkpoint), "norm_eps": "huggingface"}})
        config = replace(config, cache=replace(config.cache, prefix_caching=False))
        with LLM(config=config) as llm:
            yield llm, model


def same_answers(arguments: argparse.Namespace, batch: int = 8) -> str:
    """How many of ``batch`` greedy answers are the same, token for token."""
    rng = Random(arguments.seed)
    prompts = [[rng.randrange(SIZES["vocab_size"]) for _ in range(arguments.prompt_tokens)] for _ in range(batch)]
    with both(arguments.seed, index_topk=SIZES["max_position_embeddings"]) as (llm, model):
        first = ours(llm, prompts, arguments.new_tokens)[1]
        second = hugging_face(model, prompts, arguments.new_tokens)[1]
    return f"{sum(a == b for a, b in zip(first, second, strict=True))}/{batch}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,8,32,64")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the report here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    same = same_answers(arguments)
    print(f"same greedy answers without selection: {same}", file=sys.stderr, flush=True)
    rows = []
    with both(arguments.seed) as (llm, model):
        for batch in map(int, arguments.concurrency.split(",")):
            rows.append(measure(llm, model, batch, arguments))
            print(rows[-1], file=sys.stderr, flush=True)
    report = {
        "benchmark": "glm5ray beside transformers generate, CPU",
        "model": SIZES,
        "workload": {name: getattr(arguments, name) for name in ("prompt_tokens", "new_tokens", "repetitions", "seed")},
        "threads": arguments.threads,
        "same_greedy_answers_without_selection": same,
        "environment": environment(("glm5ray", "torch", "transformers")),
        "results": rows,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
