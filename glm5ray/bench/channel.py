"""What a step costs on its way to the ranks and back, without a model: ``glm5ray bench channel``.

A real scheduler plans steps in which every sequence decodes; an executor answers with fixed tokens. What runs through
actors is compared with the same loop in this process. Neither imports Ray here: the caller brings the executors.
"""

from __future__ import annotations

import time
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from glm5ray.bench.report import environment
from glm5ray.bench.scheduler import VOCAB_SIZE, WARM_UP_STEPS, waiting_scheduler
from glm5ray.engine.executor import FakeExecutor
from glm5ray.protocol import Capacity

if TYPE_CHECKING:
    from glm5ray.engine.executor import Executor

_PROMPT_TOKENS = 128
_UNUSED = Capacity(num_pages=1, page_size=1, max_model_len=1, vocab_size=VOCAB_SIZE, eos_token_ids=())


def run_channel_bench(executor: Executor, *, num_ranks: int, num_seqs: int = 256, steps: int = 1000) -> dict[str, Any]:
    """Times ``steps`` decode steps of ``num_seqs`` sequences through ``executor``, which has started and answers a
    token for each, and then through a :class:`FakeExecutor`.

    For both: ``channel_us``, from ``submit()`` to the output (encoded, sent, received, answered and back), and
    ``step_us``, with ``schedule()`` and ``update()``; p50, p90 and p99 in microseconds. ``overhead_us`` is the
    difference of the two ``step_us``."""
    actors = _measure(executor, num_seqs, steps)
    in_process = _measure(FakeExecutor(_UNUSED, lambda request_id, index, position: 17), num_seqs, steps)
    overhead = {name: round(actors["step_us"][name] - in_process["step_us"][name], 1) for name in ("p50", "p90", "p99")}
    return {
        "benchmark": "channel",
        "ranks": num_ranks,
        "sequences": num_seqs,
        "steps": steps,
        "actors": actors,
        "in_process": in_process,
        "overhead_us": overhead,
        **environment(packages=("glm5ray", "ray", "pyzmq", "msgpack")),
    }


def _measure(executor: Executor, num_seqs: int, steps: int) -> dict[str, Any]:
    scheduler = waiting_scheduler(num_seqs, _PROMPT_TOKENS, WARM_UP_STEPS + steps)
    channel_us, step_us = [], []
    for number in range(1 + WARM_UP_STEPS + steps):
        begin = time.perf_counter_ns()
        step = scheduler.schedule()
        assert step is not None, "nothing to schedule"
        scheduled = time.perf_counter_ns()
        output = executor.submit(step).result()
        answered = time.perf_counter_ns()
        events = scheduler.update(step, output)
        end = time.perf_counter_ns()
        assert len(events) == num_seqs, f"{len(events)} events for {num_seqs} sequences"
        if number > WARM_UP_STEPS:  # the first step computes the prompts
            channel_us.append((answered - scheduled) / 1e3)
            step_us.append((end - begin) / 1e3)
    return {
        "channel_us": _percentiles(channel_us),
        "step_us": _percentiles(step_us),
        "steps_per_s": round(1e6 * steps / sum(step_us), 1),
        "tokens_per_s": round(1e6 * steps * num_seqs / sum(step_us)),
    }


def _percentiles(times: list[float]) -> dict[str, float]:
    cuts = quantiles(times, n=100, method="inclusive")
    return {name: round(cuts[at - 1], 1) for name, at in (("p50", 50), ("p90", 90), ("p99", 99))}
