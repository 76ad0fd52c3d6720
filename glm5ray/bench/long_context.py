"""Steps behind long contexts, whose cache is filled with random rows instead of being computed.

What a decode must read grows with its context in two ways only: the index keys of all of it, and the latent rows that
are selected. The floor of a step is these bytes and those of the weights over the rate of a copy. Random keys make the
selection what it is at worst: rows scattered over all pages, none of them shared between sequences or layers."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from glm5ray.bench.breakdown import Marks, mark_kernels, mean_step
from glm5ray.bench.decode_batch import pages_for
from glm5ray.bench.kernels import Timer, copy_rate
from glm5ray.bench.report import environment
from glm5ray.errors import ConfigError
from glm5ray.model.glm5 import MoE
from glm5ray.protocol import NewSequence, SamplingParams, StepInput
from glm5ray.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from glm5ray.config import EngineConfig
    from glm5ray.model.cache import PagedCache
    from glm5ray.model.glm5 import Glm5
    from glm5ray.worker.launched import LaunchedStep

WARM_UP_STEPS = 3
BREAKDOWN_STEPS = 2
FILLED_TOGETHER = 2**16
"""Rows of random numbers at once."""
COPIES = 5


@dataclass(frozen=True, slots=True)
class Case:
    """``count`` sequences, each with ``context`` tokens, the last ``tokens`` of which a step computes."""

    context: int
    count: int
    tokens: int = 1

    @classmethod
    def parse(cls, text: str) -> Case:
        """``32768x8``: 8 decodes; ``8192x1:8192``: a prompt of 8,192 tokens. Raises :class:`ConfigError`."""
        sizes, _, tokens = text.partition(":")
        context, _, count = sizes.partition("x")
        try:
            case = cls(int(context), int(count or 1), int(tokens or 1))
        except ValueError:
            raise ConfigError(f"case {text!r} is not CONTEXTxCOUNT[:TOKENS], as 32768x8 or 8192x1:8192") from None
        if case.count < 1 or not 1 <= case.tokens <= case.context:
            raise ConfigError(f"case {text!r}: it needs a sequence, and between 1 and CONTEXT tokens to compute")
        return case


def fill_cache(worker: Worker) -> None:
    """Every row of the cache as the model's own operations write it, of normal numbers; the same in each run."""
    model, cache = worker.model, worker.cache
    config, dtype, device = model.config, model.lm_head.weight.dtype, cache.device
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device).normal_(generator=generator)

    num_slots = cache.num_pages * cache.page_size
    angle_TP = torch.rand(min(num_slots, FILLED_TOGETHER), config.qk_rope_head_dim // 2, device=device) * 6.28
    rope_TR = torch.stack([angle_TP.cos(), angle_TP.sin()], dim=-1).flatten(-2)
    one_C = torch.ones(config.kv_lora_rank, dtype=dtype, device=device)
    one_I = torch.ones(config.index_head_dim, dtype=dtype, device=device)
    for rows_NL, keys_NI in zip(cache.latent, cache.index_keys, strict=True):
        for first in range(0, num_slots, FILLED_TOGETHER):
            slots_T = torch.arange(first, min(first + FILLED_TOGETHER, num_slots), device=device)
            turn_TR = rope_TR[: len(slots_T)]
            kv_TL = normal(len(slots_T), config.kv_lora_rank + config.qk_rope_head_dim)
            model.kernels.append_latent(kv_TL, one_C, 1e-5, turn_TR, slots_T, rows_NL)
            if keys_NI is not None:
                k_TI = normal(len(slots_T), config.index_head_dim)
                model.kernels.append_index_keys(k_TI, one_I, one_I * 0, 1e-6, turn_TR, slots_T, keys_NI)


class CachedContexts:
    """The sequences of a case in a worker. The cache is taken to hold their tokens before those that a step computes;
    pages are scattered over it. ``step_id`` is the worker's next one, before and after."""

    def __init__(self, worker: Worker, case: Case, first_step: int) -> None:
        self.worker, self.case, self.step_id = worker, case, first_step
        self._generator = torch.Generator().manual_seed(case.context + case.count)
        self._length = 0

    def add(self, length: int) -> None:
        """All sequences, of ``length`` tokens, the last of which are not computed."""
        per_sequence = pages_for(self.case.context, self.worker.capacity.page_size)
        pages = torch.randperm(self.worker.capacity.num_pages, generator=self._generator).tolist()
        vocab = self.worker.capacity.vocab_size
        new = tuple(
            NewSequence(
                seq_id=i,
                request_id=str(i),
                index=0,
                token_ids=tuple(torch.randint(vocab, (length,), generator=self._generator).tolist()),
                num_prompt_tokens=length,
                sampling=SamplingParams(temperature=0.0, max_tokens=10_000, ignore_eos=True),
                pages=tuple(pages[i * per_sequence : (i + 1) * per_sequence]),
            )
            for i in range(self.case.count)
        )
        self._launch(seq_ids=[], starts=[], num_tokens=[], new_sequences=new).output()
        self._length = length

    def drop(self) -> None:
        self._launch(seq_ids=[], starts=[], num_tokens=[], dropped=list(range(self.case.count))).output()

    def launch(self, tokens: int = 1) -> LaunchedStep:
        """The last ``tokens`` of each sequence; each has one more afterwards."""
        start, count = self._length - tokens, self.case.count
        launched = self._launch(seq_ids=list(range(count)), starts=[start] * count, num_tokens=[tokens] * count)
        self._length += 1
        return launched

    def run(self, tokens: int = 1) -> None:
        output = self.launch(tokens).output()
        assert not output.failed, output.failed

    def _launch(self, **fields: Any) -> LaunchedStep:
        launched = self.worker.launch(StepInput(epoch=0, step_id=self.step_id, **fields))
        self.step_id += 1
        return launched


def weight_bytes(model: Glm5, count: int) -> float:
    """That a step of ``count`` tokens must read: all weights but the embedding's, and of the routed experts those that
    its rows have. Under ``model.dummy_routing=uniform`` they are known; else it is their mean over uniform choices."""
    config = model.config
    total = float(
        sum(
            parameter.nbytes
            for name, parameter in model.named_parameters()
            if "embed_tokens" not in name and ".experts." not in name
        )
    )
    for moe in (module for module in model.modules() if isinstance(module, MoE)):
        experts = config.n_routed_experts
        if moe.dummy_ids_TA is not None:
            hit = float(len(moe.dummy_ids_TA[:count].unique()))
        else:
            hit = experts * (1 - (1 - config.num_experts_per_tok / experts) ** count)
        numbers = 3 * config.hidden_size * config.moe_intermediate_size
        total += hit * numbers * (9 / 16 if moe.experts.is_packed else model.lm_head.weight.element_size())
    return total


def cache_bytes(model: Glm5, cache: PagedCache, case: Case) -> tuple[float, float]:
    """(latent rows, index keys) that a decode must read of the cache, over all layers."""
    topk, num_slots = model.config.index_topk, cache.num_pages * cache.page_size
    rows = case.count * min(case.context, topk)
    keys = case.count * case.context if case.context > topk else 0
    latent = sum(rows_NL.nbytes for rows_NL in cache.latent) / num_slots
    index = sum(keys_NI.nbytes for keys_NI in cache.index_keys if keys_NI is not None) / num_slots
    return rows * latent, keys * index


def run_long_context_bench(
    config: EngineConfig, cases: Sequence[Case], steps: int, *, breakdown: bool = True
) -> Iterator[dict[str, Any]]:
    """The report so far, again after each row that it gains.

    ``rows``: ``step_ms``, of decodes the mean of ``steps`` with the next always launched before the last is read, as
    the engine does; of prompts the median of ``steps``; and for decodes the bytes, ``floor_ms`` and how many floors the
    step took. ``ops`` of a row: a step launched operation by operation, as :mod:`glm5ray.bench.breakdown` has it.
    Contexts end at the case's length. Raises :class:`ConfigError` if a case does not fit."""
    worker = Worker.load(_sized(config, cases, steps))
    device = worker.cache.device
    fill_cache(worker)
    rate = copy_rate(Timer(device.type), device.type, COPIES)
    report: dict[str, Any] = {
        "benchmark": "long_context",
        "environment": environment(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "config": config.to_dict(),
        "contexts": "random rows in the cache, pages scattered",
        "copy_tb_per_s": round(rate / 1e12, 3),
        "rows": [],
    }
    next_step = 0
    for case in cases:
        sequences = CachedContexts(worker, case, next_step)
        row = _decodes(sequences, steps) if case.tokens == 1 else _prompts(sequences, steps)
        if case.tokens == 1:
            row |= _floor(worker, case, rate, row["step_ms"])
        report["rows"].append({"context": case.context, "conc": case.count, "tokens": case.tokens, **row})
        next_step = sequences.step_id
        yield report
    if not breakdown:
        return
    worker.runner = None
    marks = Marks(device)
    mark_kernels(worker.model, marks)
    for case, row in zip(cases, report["rows"], strict=True):
        sequences = CachedContexts(worker, case, next_step)
        sequences.add(case.context if case.tokens > 1 else case.context - WARM_UP_STEPS)
        sequences.run(case.tokens)
        if case.tokens > 1:  # what is computed once is computed again from the start
            sequences.drop()
            sequences.add(case.context)
        found = mean_step(marks, lambda s=sequences, n=case.tokens: s.run(n), 1 if case.tokens > 1 else BREAKDOWN_STEPS)
        row |= {"eager_ms": found["step_ms"], "ops": found["ops"]}
        sequences.drop()
        next_step = sequences.step_id
        yield report


def _decodes(sequences: CachedContexts, steps: int) -> dict[str, Any]:
    sequences.add(sequences.case.context - WARM_UP_STEPS - steps + 1)
    for _ in range(WARM_UP_STEPS):
        sequences.run()
    started = time.perf_counter()
    launched = sequences.launch()
    for _ in range(steps - 1):
        following = sequences.launch()
        output = launched.output()
        assert not output.failed, output.failed
        launched = following
    assert not launched.output().failed
    elapsed = time.perf_counter() - started
    sequences.drop()
    return {"step_ms": round(elapsed / steps * 1e3, 4), "from_graph": launched.from_graph}


def _prompts(sequences: CachedContexts, steps: int) -> dict[str, Any]:
    times = []
    for _ in range(1 + steps):
        sequences.add(sequences.case.context)
        started = time.perf_counter()
        sequences.run(sequences.case.tokens)
        times.append(time.perf_counter() - started)
        sequences.drop()
    return {"step_ms": round(median(times[1:]) * 1e3, 4)}


def _floor(worker: Worker, case: Case, rate: float, step_ms: float) -> dict[str, Any]:
    weights, (latent, index) = weight_bytes(worker.model, case.count), cache_bytes(worker.model, worker.cache, case)
    floor_ms = (weights + latent + index) / rate * 1e3
    return {
        "weights_mb": round(weights / 1e6, 3),
        "latent_mb": round(latent / 1e6, 3),
        "index_mb": round(index / 1e6, 3),
        "floor_ms": round(floor_ms, 4),
        "floors": round(step_ms / floor_ms, 3),
    }


def _sized(config: EngineConfig, cases: Sequence[Case], steps: int) -> EngineConfig:
    """With room for each case by itself, and nothing that another needs."""
    if not cases or steps < 1:
        raise ConfigError("a benchmark of long contexts needs a case and a step")
    short = [case for case in cases if case.tokens == 1 and case.context <= WARM_UP_STEPS + steps]
    if short:
        raise ConfigError(f"a context of {short[0].context} is too short for {steps} steps and {WARM_UP_STEPS} before")
    page_size = config.cache.page_size
    decodes = max((case.count for case in cases if case.tokens == 1), default=1)
    return replace(
        config,
        cache=replace(config.cache, num_pages=max(case.count * pages_for(case.context, page_size) for case in cases)),
        runner=replace(config.runner, max_graph_seqs=decodes),
        scheduler=replace(
            config.scheduler,
            max_model_len=max(case.context for case in cases),
            max_num_seqs=max(case.count for case in cases),
            max_num_batched_tokens=max(
                config.scheduler.max_num_batched_tokens, *(case.count * case.tokens for case in cases)
            ),
        ),
    )
