"""Throughput of the whole engine in one process, by concurrency.

The workload is that of the peers' figures: n prompts of random tokens arrive at once, greedy, end-of-sequence ignored.
``prefill_s`` is the wall time with one new token each, ``total_s`` with ``new_tokens + 1``;
``tpot_ms = (total_s - prefill_s) / new_tokens``; ``decode_tok_s`` and ``out_tok_s`` count tokens of all n prompts over
the decode time and over all of it.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

from glm5ray.bench.report import environment
from glm5ray.engine.llm import LLM
from glm5ray.engine.results import RequestFailure
from glm5ray.errors import ConfigError, Glm5RayError
from glm5ray.protocol import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from glm5ray.config import EngineConfig

BREAKDOWN_STEPS = 8
"""That its times are means of."""


def run_offline_bench(
    config: EngineConfig,
    *,
    concurrency: Sequence[int] = (1, 8, 32, 64),
    prompt_tokens: int = 64,
    new_tokens: int = 64,
    repetitions: int = 3,
    seed: int = 0,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    breakdown: bool = False,
) -> dict[str, Any]:
    """One report, a JSON object; ``results`` has a row for each concurrency, medians of ``repetitions`` after a
    warm-up. With ``breakdown`` it has that of :func:`glm5ray.bench.breakdown.run_breakdown`, too.

    Prefix caching is off, so that no repetition profits from the one before. Raises :class:`ConfigError` if the
    workload does not fit.
    """
    config = replace(config, cache=replace(config.cache, prefix_caching=False))
    with LLM(config=config) as llm:
        longest = prompt_tokens + new_tokens + 1
        if longest > llm.capacity.max_model_len:
            raise ConfigError(
                f"prompt_tokens {prompt_tokens} + new_tokens {new_tokens} + 1 is more than max_model_len, "
                f"{llm.capacity.max_model_len}"
            )
        results = []
        for number in concurrency:
            row = measure_row(llm, number, prompt_tokens, new_tokens, repetitions, seed)
            results.append(row)
            if on_row is not None:
                on_row(row)
        report = {
            "benchmark": "offline",
            "workload": {
                "prompt_tokens": prompt_tokens,
                "new_tokens": new_tokens + 1,
                "seed": seed,
                "repetitions": repetitions,
            },
            "environment": environment(),
            "config": config.to_dict(),
            "results": results,
        }
    if breakdown:
        from glm5ray.bench.breakdown import run_breakdown

        del llm
        gc.collect()  # two models may be more than a GPU has room for
        report["breakdown"] = run_breakdown(config, concurrency, prompt_tokens, BREAKDOWN_STEPS)
    return report


def measure_row(
    llm: LLM, number: int, prompt_tokens: int, new_tokens: int, repetitions: int, seed: int
) -> dict[str, Any]:
    """One row: ``number`` prompts at once; medians of ``repetitions``, after a warm-up."""
    prompts = random_prompts(llm, number, prompt_tokens, seed)
    timed(llm, prompts, min(4, new_tokens))
    prefill_s, total_s = [], []
    for _ in range(repetitions):
        prefill_s.append(timed(llm, prompts, 1))
        total_s.append(timed(llm, prompts, new_tokens + 1))
    return row_of(number, new_tokens, median(prefill_s), median(total_s))


def random_prompts(llm: LLM, number: int, prompt_tokens: int, seed: int) -> list[tuple[int, ...]]:
    """Of the whole vocabulary."""
    rng = Random(seed)
    vocab = llm.capacity.vocab_size
    return [tuple(rng.randrange(vocab) for _ in range(prompt_tokens)) for _ in range(number)]


def row_of(number: int, new_tokens: int, prefill: float, total: float) -> dict[str, Any]:
    """The peers' fields, of two times in seconds: with one new token, and with ``new_tokens + 1``."""
    decode = max(total - prefill, 1e-9)
    return {
        "conc": number,
        "prefill_s": round(prefill, 4),
        "total_s": round(total, 4),
        "tpot_ms": round(decode / new_tokens * 1e3, 3),
        "decode_tok_s": round(number * new_tokens / decode, 1),
        "out_tok_s": round(number * (new_tokens + 1) / total, 1),
    }


def attempt_row(llm: LLM, number: int, prompt_tokens: int, new_tokens: int, repetitions: int) -> dict[str, Any]:
    """A row of what the engine has not seen, without a warm-up: ``first_tpot_ms`` is of the first run, the other fields
    are medians of ``repetitions`` runs behind it, and ``tpot_ms_runs`` theirs. If the engine fails at it, ``{"conc",
    "error"}``, so that other rows are measured all the same."""
    try:
        prompts = random_prompts(llm, number, prompt_tokens, 0)
        runs = [(timed(llm, prompts, 1), timed(llm, prompts, new_tokens + 1)) for _ in range(1 + repetitions)]
    except (Glm5RayError, RuntimeError) as error:  # RuntimeError: what torch raises, no memory among it
        return {"conc": number, "error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    first, *later = (row_of(number, new_tokens, *run)["tpot_ms"] for run in runs)
    prefill_s, total_s = zip(*runs[1:], strict=True)
    done = row_of(number, new_tokens, median(prefill_s), median(total_s))
    return done | {"first_tpot_ms": first, "tpot_ms_runs": later}


def timed(llm: LLM, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> float:
    """Wall seconds until all prompts have ``max_tokens`` new tokens. A request that fails, or gets no answer, is an
    error, not a fast one."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    requests = [
        GenerateRequest(request_id=f"bench-{i}", prompt_token_ids=prompt, sampling=params)
        for i, prompt in enumerate(prompts)
    ]
    started = time.perf_counter()
    answered = set()
    for result in llm.run(requests):
        if isinstance(result, RequestFailure):
            raise result.error
        assert result.num_output_tokens == max_tokens, f"{result.num_output_tokens} tokens instead of {max_tokens}"
        answered.add(result.request_id)
    elapsed = time.perf_counter() - started
    assert len(answered) == len(prompts), f"{len(answered)} of {len(prompts)} requests were answered"
    return elapsed
