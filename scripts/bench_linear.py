"""Products of few rows with GLM-5's weights, on the GPU that is here: CUDA C++ against the vendor's library.

    python scripts/bench_linear.py [--json FILE] [--tokens 1,2]

Each weight is checked first: against fp32 products of the same bf16 numbers, a row alone against the same row beside
others, and two runs against each other. Then one CUDA graph of several products with weights of their own, more than
the L2 holds, is replayed; a figure is the median of ten replays by the number of products, gaps included. ``share`` is
that of 4.29 TB/s, a device-to-device copy on an H200. Exits with 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from glm5ray.bench.report import environment
from glm5ray.kernels import triton_ops
from glm5ray.kernels.cuda import linear_few

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

WEIGHTS = {
    "q_a, kv_a, wk": (2752, 6144),
    "q_b": (16384, 2048),
    "o_proj": (6144, 16384),
    "gate, up of a dense MLP": (24576, 6144),
    "down of a dense MLP": (6144, 12288),
    "gate, up of a shared expert": (4096, 6144),
    "down of a shared expert": (6144, 2048),
    "router, fp32": (256, 6144),
    "lm_head": (154880, 6144),
    "o_proj, tp 2": (6144, 8192),
    "q_b, odd rows": (16381, 2048),
    "4,096 columns": (1000, 4096),
}
BYTES_AT_ONCE = 400e6
COPY_BYTES_PER_S = 4.29e12


def few(x: Tensor, weight: Tensor) -> Tensor:
    shape = linear_few.shape_for(x, weight)
    kernels = linear_few.kernels_on(x.device, torch.cuda.get_device_capability()[0] * 10)
    assert shape is not None
    assert kernels is not None
    return kernels.run(shape, x, weight)


def library(x: Tensor, weight: Tensor) -> Tensor:
    return triton_ops.linear(x.to(weight.dtype), weight)


def check(weight: Tensor, x: Tensor) -> list[str]:
    found, wrong = few(x, weight), []
    expected = x.float() @ weight.float().T
    error = float((found.float() - expected).norm() / expected.norm())
    if not error < (3e-3 if weight.dtype == torch.bfloat16 else 1e-5):
        wrong.append(f"relative error {error}")
    if not torch.equal(found, few(x, weight)):
        wrong.append("another result in a second run")
    if any(not torch.equal(found[t : t + 1], few(x[t : t + 1], weight)) for t in range(len(x))):
        wrong.append("a row alone has another result")
    return wrong


def microseconds(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor]) -> float:
    for weight in weights:
        product(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            product(x, weight)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(weights))
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("linear.json"))
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default="1,2")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "environment": environment(), "rows": []}
    failed = False
    for name, (outputs, width) in WEIGHTS.items():
        dtype = torch.float32 if "fp32" in name else torch.bfloat16
        size = outputs * width * dtype.itemsize
        count = max(2, min(16, round(BYTES_AT_ONCE / size)))
        weights = [torch.randn(outputs, width, device="cuda").mul_(width**-0.5).to(dtype) for _ in range(count)]
        for tokens in arguments.tokens:
            if linear_few.shape_for(torch.empty(tokens, width, dtype=torch.bfloat16), weights[0]) is None:
                continue  # the library's
            x = torch.randn(tokens, width, device="cuda").bfloat16()
            wrong = check(weights[0], x)
            failed |= bool(wrong)
            ours, theirs = microseconds(few, x, weights), microseconds(library, x, weights)
            row = {"weight": name, "shape": [outputs, width], "tokens": tokens, "wrong": wrong}
            row |= {"us": round(ours, 2), "library_us": round(theirs, 2)}
            row["share"] = round(size / COPY_BYTES_PER_S / (ours * 1e-6), 3)
            report["rows"].append(row)
            print(
                f"{name:28} {tokens} {ours:8.2f} us {theirs:8.2f} library {row['share']:6.1%} {wrong or ''}", flush=True
            )
        del weights
    arguments.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print("wrong" if failed else "right")
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
