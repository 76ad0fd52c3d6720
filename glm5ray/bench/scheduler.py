"""What the scheduler costs per step when all sequences decode, without a model: ``glm5ray bench scheduler``.

A step of a real engine waits for this time wherever it is not hidden behind the device, so it is measured alone:
``schedule()`` and ``update()`` with the events that it returns, on one core.
"""

from __future__ import annotations

import gc
import time
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

from glm5ray.bench.report import environment
from glm5ray.config import SchedulerSection
from glm5ray.protocol import Capacity, GenerateRequest, SamplingParams, StepInput, StepOutput
from glm5ray.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from glm5ray.protocol import TokenEvent

PAGE_SIZE = 64
VOCAB_SIZE = 154_880
EOS_TOKEN_IDS = (154_820, 154_827, 154_829)
RARE_GC_THRESHOLD = 50_000
WARM_UP_STEPS = 64
"""After these every sequence has opened a page at least once."""


def run_scheduler_bench(
    num_seqs: Sequence[int] = (64, 256, 1024, 2048),
    steps: int = 256,
    repetitions: int = 5,
    prompt_tokens: int = 128,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Times ``steps`` decode steps for each number of sequences, ``repetitions`` times over.

    ``results`` has, for each number, medians over the steps in microseconds, of the repetition whose ``step_us`` is
    least: what else runs on the machine adds time and never takes any away. ``spread_us`` is the least and the largest
    of those medians. The garbage collector is as it is by default; ``step_us_rare_gc`` is the same with a threshold
    that lets it run every fiftieth step or so instead of in each: every event is an object that it counts.
    """
    results = []
    for count in num_seqs:
        runs, rare_gc_us = [], []
        for repetition in range(repetitions):
            runs.append(_one_run(count, steps, prompt_tokens))
            with _rare_garbage_collection():
                rare_gc_us.append(_one_run(count, steps, prompt_tokens)["step_us"])
            if progress is not None:
                progress(f"{count} sequences, {repetition + 1} of {repetitions}: {runs[-1]['step_us']:.0f} us per step")
        best = min(runs, key=lambda run: run["step_us"])
        all_steps = [run["step_us"] for run in runs]
        spread = [min(all_steps), max(all_steps)]
        results.append({"num_seqs": count, **best, "spread_us": spread, "step_us_rare_gc": min(rare_gc_us)})
    return {
        "benchmark": "scheduler",
        "steps": steps,
        "repetitions": repetitions,
        "prompt_tokens": prompt_tokens,
        "page_size": PAGE_SIZE,
        "results": results,
        **environment(packages=("glm5ray",)),
    }


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(RARE_GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _one_run(num_seqs: int, steps: int, prompt_tokens: int) -> dict[str, float]:
    scheduler = _all_decoding(num_seqs, prompt_tokens, WARM_UP_STEPS + steps)
    schedule_us, update_us, step_us = [], [], []
    for number in range(WARM_UP_STEPS + steps):
        before = time.perf_counter_ns()
        step = scheduler.schedule()
        scheduled = time.perf_counter_ns()
        assert step is not None, "nothing to schedule"
        assert step.total_tokens == num_seqs, f"{step.total_tokens} tokens in a step of {num_seqs} decodes"
        output = _answer(step, number)
        answered = time.perf_counter_ns()
        events = scheduler.update(step, output)
        updated = time.perf_counter_ns()
        _check(events, num_seqs)
        if number >= WARM_UP_STEPS:
            schedule_us.append((scheduled - before) / 1e3)
            update_us.append((updated - answered) / 1e3)
            step_us.append(schedule_us[-1] + update_us[-1])
    names = ("schedule_us", "update_us", "step_us")
    return {name: round(median(times), 1) for name, times in zip(names, (schedule_us, update_us, step_us), strict=True)}


def waiting_scheduler(num_seqs: int, prompt_tokens: int, num_steps: int) -> Scheduler:
    """A scheduler whose first step computes the prompts of ``num_seqs`` sequences, which differ in length by up to one
    page, and which then decode for at least ``num_steps`` steps."""
    longest = prompt_tokens + PAGE_SIZE + num_steps + 2
    capacity = Capacity(
        num_pages=num_seqs * (longest // PAGE_SIZE + 2),
        page_size=PAGE_SIZE,
        max_model_len=longest,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=EOS_TOKEN_IDS,
    )
    config = SchedulerSection(max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * (prompt_tokens + PAGE_SIZE))
    scheduler = Scheduler(config, capacity)
    for i in range(num_seqs):
        prompt = tuple((i * 7919 + at * 31) % VOCAB_SIZE for at in range(prompt_tokens + i % PAGE_SIZE))
        sampling = SamplingParams(max_tokens=num_steps + 2)
        scheduler.add(GenerateRequest(request_id=f"cmpl-{i:08d}", prompt_token_ids=prompt, sampling=sampling))
    return scheduler


def _all_decoding(num_seqs: int, prompt_tokens: int, num_steps: int) -> Scheduler:
    """The same behind the prompts."""
    scheduler = waiting_scheduler(num_seqs, prompt_tokens, num_steps)
    step = scheduler.schedule()
    assert step is not None, "nothing to schedule"
    assert len(step.seq_ids) == num_seqs, f"{len(step.seq_ids)} of {num_seqs} sequences were admitted"
    _check(scheduler.update(step, _answer(step, 0)), num_seqs)
    return scheduler


def _answer(step: StepInput, number: int) -> StepOutput:
    """A sample for every slice: new integers, as decoding a message makes them, and no stop token."""
    token_ids = [(seq_id * 104_729 + number * 1_299_709) % 150_000 for seq_id in step.seq_ids]
    return StepOutput(epoch=step.epoch, step_id=step.step_id, seq_ids=step.seq_ids.copy(), token_ids=token_ids)


def _check(events: list[TokenEvent], num_seqs: int) -> None:
    assert len(events) == num_seqs, f"{len(events)} events for {num_seqs} sequences"
    assert all(len(event.token_ids) == 1 for event in events), "an event without a token"
