"""Each operation of the kernel table against its floor: the time that its bytes take at the rate of a copy, or its
arithmetic at the rate of a large matrix product, whichever is longer; both rates are measured here, in the same run.

``share`` is floor over time: 1 is as fast as this device can be. Before each call a buffer larger than the caches is
written, so that weights come from memory, as they do in a model of many layers."""

from __future__ import annotations

import os
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from glm5ray.bench.kernel_cases import CaseMaker
from glm5ray.bench.report import environment
from glm5ray.kernels.select import OPS, kernel_table, select_kernels
from glm5ray.model.checkpoint_folder import resolve_checkpoint
from glm5ray.model.packed import packs_experts
from glm5ray.model_config import ModelConfig
from glm5ray.worker.worker import pick_device, pick_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from glm5ray.config import EngineConfig

FLUSHED_BYTES = {"cuda": 2**28, "cpu": 2**26}
"""Written before each call: several times an H200's 50 MB of L2; what two cores share of an L3."""
COPIED_BYTES = {"cuda": 2**31, "cpu": 2**27}
PAUSE_CYCLES = 1_000_000
"""Of a GPU's clock: half a millisecond."""
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}
"""Of the square matrices whose product is the rate of arithmetic."""


class Timer:
    """Microseconds of calls on one device, from a cold cache."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._flushed = torch.empty(FLUSHED_BYTES[device], dtype=torch.int8, device=device)

    def measure(self, call: Callable[[], Any], repetitions: int) -> float:
        """Median of ``repetitions``, after one call that is not counted."""
        call()
        return median(self._once(call) for _ in range(repetitions))

    def _once(self, call: Callable[[], Any]) -> float:
        self._flushed.zero_()
        if not self._on_gpu:
            started = time.perf_counter()
            call()
            return (time.perf_counter() - started) * 1e6
        torch.cuda._sleep(PAUSE_CYCLES)  # the call is launched meanwhile
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3


def copy_rate(timer: Timer, device: str, repetitions: int) -> float:
    """Bytes a second, those read and those written."""
    source = torch.ones(COPIED_BYTES[device] // 2, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / timer.measure(lambda: target.copy_(source), repetitions) * 1e6


def product_rate(timer: Timer, device: str, dtype: torch.dtype, repetitions: int) -> float:
    """Operations a second of a product of large matrices of random numbers."""
    size = PRODUCT_SIZE[device]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / timer.measure(lambda: torch.mm(a, b, out=out), repetitions) * 1e6


@torch.inference_mode()
def run_kernels_bench(
    config: EngineConfig,
    *,
    tokens: Sequence[int] = (1, 64),
    context: int = 4096,
    ops: Sequence[str] = OPS,
    repetitions: int = 10,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """One report, a JSON object; ``results`` has a row for each operation and number of tokens, which decode, each with
    ``context`` tokens before it. Reads ``config.json`` of the model alone: inputs are random.

    Raises :class:`ConfigError` as loading a model does."""
    model_config = ModelConfig.from_checkpoint(resolve_checkpoint(config.model.path))
    device = pick_device(config.model.device)
    dtype = pick_dtype(config.model.dtype, model_config, device)
    packed = packs_experts(config.model.weights, model_config, device, str(dtype).removeprefix("torch."))
    nvfp4_ops = frozenset({"experts"} if packed else ())
    table = {row.op: row.provider for row in kernel_table(config.kernels, device, nvfp4_ops)}
    kernels = select_kernels(config.kernels, device, nvfp4_ops)
    timer = Timer(device)
    bandwidth = copy_rate(timer, device, repetitions)
    arithmetic = product_rate(timer, device, dtype, repetitions)
    results = []
    for count in tokens:
        maker = CaseMaker(
            model_config,
            tokens=count,
            context=context,
            device=device,
            dtype=dtype,
            packs_experts=packed,
            fp8_cache=config.cache.kv_dtype == "fp8",
        )
        for op in ops:
            case = maker.make(op)
            if case is None:
                continue
            elapsed = timer.measure(case.prepare(kernels), repetitions)
            floor = max(case.num_bytes / bandwidth, case.flops / arithmetic) * 1e6
            row = {
                "op": op,
                "provider": table[op],
                "tokens": count,
                "us": round(elapsed, 2),
                "floor_us": round(floor, 2),
                "share": round(floor / elapsed, 3),
                "gb_per_s": round(case.num_bytes / elapsed / 1e3, 1),
                "gflops": round(case.flops / elapsed / 1e3, 1),
            }
            results.append(row)
            if on_row is not None:
                on_row(row)
    return {
        "benchmark": "kernels",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads() if device == "cpu" else os.cpu_count(),
        "dtype": str(dtype).removeprefix("torch."),
        "context": context,
        "repetitions": repetitions,
        "copy_gb_per_s": round(bandwidth / 1e9, 1),
        "product_gflops": round(arithmetic / 1e9, 1),
        "environment": environment(),
        "config": config.to_dict(),
        "results": results,
    }
