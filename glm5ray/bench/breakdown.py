"""Where the time of a step goes, operation by operation of the kernel table.

Every operation is put between two marks. On a GPU these are events of its stream, and each step waits for the GPU to
finish a pause that is longer than the step's launches: the GPU then finds all of the step in its queue, so that what is
between two marks is the work and not the way of the next launch from Python. On a CPU marks are the clock. What no
operation covers (the embedding, sums of residuals, the sampler, copies) is the row ``rest``.

Steps run eagerly: a CUDA graph has no marks inside. Its kernels are the same, so it takes the sum of the rows, or less
by what launches overlap."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from glm5ray.bench.decode_batch import DecodeBatch, pages_for
from glm5ray.kernels.interface import Kernels
from glm5ray.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from glm5ray.config import EngineConfig

WARM_UP_STEPS = 3
PAUSE_CYCLES = 120_000_000
"""Of a GPU's clock, 60 ms at 2 GHz: a step of GLM-5's 78 layers is some 2,500 launches of 10 to 20 us from Python."""


class Marks:
    """Times of spans on one device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []
        self._depth = 0

    def span(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """``function(...)`` between two marks; inside another span it counts as a part of that."""
        self._depth += 1
        begin = self._mark() if self._depth == 1 else None
        try:
            return function(*arguments, **options)
        finally:
            if self._depth == 1:
                self._spans.append((name, begin, self._mark()))
            self._depth -= 1

    def step(self, run: Callable[[], None]) -> tuple[float, dict[str, float], dict[str, int]]:
        """Milliseconds of ``run()``, and of each name in it; how often each name came."""
        self._spans.clear()
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda._sleep(PAUSE_CYCLES)
        begin = self._mark()
        run()
        end = self._mark()
        if self._on_gpu:
            torch.cuda.synchronize()
        times: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for name, first, last in self._spans:
            times[name] += self._between(first, last)
            counts[name] += 1
        return self._between(begin, end), times, counts

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) if self._on_gpu else (last - first) * 1e3


class _Marked:
    """An operation whose calls are spans; ``plan`` is one of its own."""

    def __init__(self, name: str, operation: Any, marks: Marks) -> None:
        self._name, self._operation, self._marks = name, operation, marks

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._marks.span(self._name, self._operation, *arguments, **options)

    def __getattr__(self, part: str) -> Any:
        value = getattr(self._operation, part)
        if not callable(value):
            return value
        name = f"{self._name}.plan" if part == "plan" else self._name
        return lambda *arguments, **options: self._marks.span(name, value, *arguments, **options)


def mark_kernels(model: nn.Module, marks: Marks) -> None:
    """From now on every operation of ``model`` is a span."""
    tables: dict[int, Kernels] = {}
    for module in model.modules():
        table = getattr(module, "kernels", None)
        if isinstance(table, Kernels):
            if id(table) not in tables:
                marked: dict[str, Any] = {f.name: _Marked(f.name, getattr(table, f.name), marks) for f in fields(table)}
                tables[id(table)] = Kernels(**marked)
            module.kernels = tables[id(table)]  # type: ignore[assignment]


def run_breakdown(
    config: EngineConfig, concurrency: Sequence[int], prompt_tokens: int, steps: int
) -> list[dict[str, Any]]:
    """One row for each number of sequences: ``step_ms`` of a decode step with ``prompt_tokens`` and a few more behind
    each, and ``ops``: name, ``calls`` a step, ``ms`` a step, ``share`` of the step; means of ``steps`` steps.

    Loads the model once more, without graphs. Raises :class:`ConfigError` if it does not fit."""
    new_tokens, page_size = WARM_UP_STEPS + steps + 1, config.cache.page_size
    num_pages = max(concurrency) * pages_for(prompt_tokens + new_tokens, page_size)
    config = replace(
        config,
        runner=replace(config.runner, cuda_graphs=False),
        cache=replace(config.cache, num_pages=num_pages),
        scheduler=replace(
            config.scheduler, max_model_len="auto", max_num_seqs=max(*concurrency, config.scheduler.max_num_seqs)
        ),
    )
    worker = Worker.load(config)
    marks = Marks(next(worker.model.parameters()).device)
    mark_kernels(worker.model, marks)
    rows, next_step = [], 0
    for count in concurrency:
        batch = DecodeBatch(
            worker,
            count,
            prompt_tokens,
            new_tokens=new_tokens,
            first_step=next_step,
            prompt_tokens=config.scheduler.max_num_batched_tokens,
        )
        for _ in range(WARM_UP_STEPS):
            batch.decode()
        rows.append({"conc": count, "context": batch.length, **mean_step(marks, batch.decode, steps)})
        batch.drop()
        next_step = batch.step_id
    return rows


def mean_step(marks: Marks, run: Callable[[], None], steps: int) -> dict[str, Any]:
    """``step_ms`` and ``ops`` of ``run()``, as :func:`run_breakdown` has them: means of ``steps`` calls."""
    total, times, counts = 0.0, defaultdict(float), defaultdict(int)
    for _ in range(steps):
        elapsed, by_name, calls = marks.step(run)
        total += elapsed
        for name, milliseconds in by_name.items():
            times[name] += milliseconds
            counts[name] += calls[name]
    named = [(name, counts[name] / steps, milliseconds) for name, milliseconds in times.items()]
    named.sort(key=lambda row: -row[2])
    named.append(("rest", 0, total - sum(times.values())))
    ops = [
        {"op": name, "calls": calls, "ms": round(ms / steps, 4), "share": round(ms / total, 4)}
        for name, calls, ms in named
    ]
    return {"step_ms": round(total / steps, 4), "ops": ops}
