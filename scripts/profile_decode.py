"""Kernels of one decode step of a slice of GLM-5, on the GPU that is here: names, counts, microseconds.

    python scripts/profile_decode.py [--json FILE] [--batches 1,64] [--context 256] [--set section.field=value]

For each batch: that many prompts of ``context`` random tokens, some decode steps to warm up, then ``STEPS`` steps under
torch's profiler (from CUDA graphs, unless ``--set runner.cuda_graphs=false``) and as many without it. ``busy_us`` is
the sum of the kernels' times a step, ``span_us`` from the first kernel's begin to the last one's end. Without the
profiler, ``wall_us`` is what a step takes if each is waited for, and ``queued_us`` if all are queued one behind the
other: what the GPU needs for one. The JSON holds the last step's kernels in their order, too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from glm5ray.bench.decode_batch import DecodeBatch
from glm5ray.bench.report import environment
from glm5ray.config import load_config
from glm5ray.worker.worker import Worker

SLICE = Path(str(resources.files("glm5ray"))) / "bench" / "slices" / "glm5-12l-nvfp4"
SETTINGS = [
    f"model.path={SLICE}",
    "model.load_format=dummy",
    "cache.prefix_caching=false",
    "runner.cuda_graphs=true",
]
STEPS = 8
WARM_UP_STEPS = 6
QUEUED_STEPS = 32
NEW_TOKENS = 2 * STEPS + WARM_UP_STEPS + 2 * QUEUED_STEPS + 8


def kernels_of(prof: profile) -> list[tuple[str, float, float]]:
    """(name, start, duration) in microseconds, by start."""
    found = [
        (event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in prof.events() or []
        if event.device_type == DeviceType.CUDA and event.time_range.elapsed_us() > 0
    ]
    return sorted(found, key=lambda kernel: kernel[1])


def measure(batch: DecodeBatch) -> dict[str, Any]:
    for _ in range(WARM_UP_STEPS):
        batch.decode()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(STEPS):
        batch.decode()
    wall_us = (time.perf_counter() - started) / STEPS * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    batch.decode(QUEUED_STEPS // 4)
    begin.record()
    batch.decode(QUEUED_STEPS)
    end.record()
    end.synchronize()
    queued_us = begin.elapsed_time(end) / QUEUED_STEPS * 1e3
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(STEPS):
            batch.decode()
        torch.cuda.synchronize()
    kernels = kernels_of(prof)
    times: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for name, _, elapsed in kernels:
        times[name] += elapsed / STEPS
        counts[name] += 1
    last = kernels[-(len(kernels) // STEPS) :]
    return {
        "batch": batch.count,
        "context": batch.length,
        "wall_us": round(wall_us, 1),
        "queued_us": round(queued_us, 1),
        "busy_us": round(sum(times.values()), 1),
        "span_us": round(last[-1][1] + last[-1][2] - last[0][1], 1) if last else None,
        "kernels": [
            {"name": name, "count": round(counts[name] / STEPS, 2), "us": round(total, 1)}
            for name, total in sorted(times.items(), key=lambda item: -item[1])
        ],
        "in_order": [(name[:60], round(start - last[0][1], 1), round(elapsed, 1)) for name, start, elapsed in last],
    }


def show(row: dict[str, Any], most: int) -> None:
    print(
        f"batch {row['batch']}, context {row['context']}: wall {row['wall_us']} us, queued {row['queued_us']} us, "
        f"kernels {row['busy_us']} us, "
        f"first to last {row['span_us']} us"
    )
    for kernel in row["kernels"][:most]:
        print(f"{kernel['us']:10.1f} {kernel['count']:8.2f} x {kernel['name'][:110]}")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("profile-decode.json"))
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default="1,64")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--most", type=int, default=30, help="kernels in a table")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    most = max(arguments.batches)
    room = arguments.context + NEW_TOKENS
    sizes = [f"scheduler.max_num_seqs={most}", f"runner.max_graph_seqs={most}", f"scheduler.max_model_len={room}"]
    sizes.append(f"cache.num_pages={most * -(-room // 64)}")
    settings = [*SETTINGS, *sizes, *arguments.set]
    worker = Worker.load(load_config(None, settings))
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "environment": environment(),
        "settings": settings,
        "steps": STEPS,
        "batches": [],
    }
    next_step = 0
    for count in arguments.batches:
        batch = DecodeBatch(worker, count, arguments.context, new_tokens=NEW_TOKENS, first_step=next_step)
        report["batches"].append(measure(batch))
        batch.drop()
        next_step = batch.step_id
        show(report["batches"][-1], arguments.most)
        arguments.json.write_text(json.dumps(report) + "\n", "utf-8")


if __name__ == "__main__":
    main()
