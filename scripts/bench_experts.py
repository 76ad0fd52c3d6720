#!/usr/bin/env python3
"""Times the NVFP4 experts of one layer at GLM-5's sizes on the GPU, after checking them against torch in fp32.

    python scripts/bench_experts.py [--provider cuda] [--tokens 1 64] [--variants] [--json FILE]

Random weights, uniform routing, a layer from the router's choice to the weighted sum inside a CUDA graph. The last line
is JSON: per number of tokens ms a layer, TFLOP/s of the products and TB/s of the weights; ``--variants`` also tries
other shapes (CUDA C++) or tiles (Triton)."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TypeAlias

import torch

from glm5ray.kernels.cuda import experts_nvfp4 as cuda
from glm5ray.kernels.nvfp4_fragments import FragmentExperts, unpack_matrix
from glm5ray.kernels.triton import experts_nvfp4
from glm5ray.kernels.triton.device import capability
from glm5ray.quantization.nvfp4 import dequantize_nvfp4

HIDDEN, INTERMEDIATE, EXPERTS, CHOICES = 6144, 2048, 256, 8

Run: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, FragmentExperts], torch.Tensor]
"""(x, ids, weights, experts) -> out"""


def random_experts(num_experts: int, first_expert: int = 0) -> FragmentExperts:
    def words(rows: int, columns: int) -> torch.Tensor:
        shape = (num_experts, rows // 16, columns // 64, 32, 4)
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")

    def scales(rows: int, columns: int) -> torch.Tensor:
        shape = (num_experts, rows // 16, columns // 64, 32, 2)
        return torch.randint(0x28, 0x40, shape, dtype=torch.uint8, device="cuda").view(torch.int16).squeeze(-1)

    return FragmentExperts(
        gate_up_words=words(2 * INTERMEDIATE, HIDDEN),
        gate_up_scales=scales(2 * INTERMEDIATE, HIDDEN),
        gate_up_global=torch.rand(num_experts, 2, device="cuda") * 0.01 + 0.005,
        down_words=words(HIDDEN, INTERMEDIATE),
        down_scales=scales(HIDDEN, INTERMEDIATE),
        down_global=torch.rand(num_experts, device="cuda") * 0.01 + 0.005,
        first_expert=first_expert,
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
    )


def random_step(tokens: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(tokens, num_experts, device="cuda").topk(CHOICES).indices
    return x, ids, torch.rand(tokens, CHOICES, device="cuda")


def expected(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: FragmentExperts) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32, device="cuda")
    one = torch.ones((), device="cuda")
    for e in range(len(experts.down_global)):
        token, choice = torch.where(ids == experts.first_expert + e)
        rows = dequantize_nvfp4(*unpack_matrix(experts.gate_up_words[e], experts.gate_up_scales[e]), one)
        gate, up = (x[token].float() @ rows.T).unflatten(1, (-1, 2, 8)).unbind(2)
        gate, up = (half.flatten(1) * g for half, g in zip((gate, up), experts.gate_up_global[e], strict=True))
        down = dequantize_nvfp4(*unpack_matrix(experts.down_words[e], experts.down_scales[e]), experts.down_global[e])
        result = (gate * torch.sigmoid(gate) * up) @ down.T
        out.index_add_(0, token, result * weights[token, choice, None])
    return out


def check(run: Run) -> float:
    """Largest relative error (norms) over numbers of tokens; every tile width occurs, and other ranks' experts do."""
    torch.manual_seed(0)
    experts, worst = random_experts(12, first_expert=2), 0.0
    for tokens in (1, 7, 24, 130, 500, 700):
        x, ids, weights = random_step(tokens, 16)
        actual = run(x, ids, weights, experts).float()
        want = expected(x, ids, weights, experts)
        error = float((actual - want).norm() / want.norm().clamp(min=1e-30))
        again = run(x, ids, weights, experts).float()
        print(f"check tokens={tokens} relative error {error:.5f} same again {torch.equal(actual, again)}", flush=True)
        assert torch.equal(actual, again), "two runs differ"
        worst = max(worst, error)
    assert worst < 0.01, f"relative error {worst}"
    return worst


def time_ms(run: Run, tokens: int, experts: FragmentExperts, repeats: int, steps: int = 4) -> tuple[float, dict]:
    """(median ms of a layer inside a CUDA graph, ms by kernel). The graph has several steps with routings of their own,
    so that few tokens too find no weights in the cache."""
    inputs = [random_step(tokens, EXPERTS) for _ in range(steps)]
    run(*inputs[0], experts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x, ids, weights in inputs:
            run(x, ids, weights, experts)
    times = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / steps)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    parts: dict[str, float] = {}
    for event in profile.key_averages():
        if not event.self_device_time_total:
            continue
        name = event.key.split("_r")[0][:24]
        parts[name] = parts.get(name, 0.0) + event.self_device_time_total / 1e3 / steps
    return sorted(times[1:])[repeats // 2], {k: round(v, 4) for k, v in parts.items()}


def measure(run: Run, tokens: int, experts: FragmentExperts, label: str, repeats: int = 7) -> dict[str, object]:
    ms, parts = time_ms(run, tokens, experts, repeats)
    flop = 2 * tokens * CHOICES * 3 * HIDDEN * INTERMEDIATE
    touched = EXPERTS * (1 - (1 - CHOICES / EXPERTS) ** tokens)
    size = touched * 3 * HIDDEN * INTERMEDIATE * 9 / 16
    row = {"label": label, "tokens": tokens, "ms": round(ms, 4), "tflops": round(flop / ms / 1e9, 1)}
    row |= {"weights_tb_per_s": round(size / ms / 1e9, 3), "parts_ms": parts}
    print(json.dumps(row), flush=True)
    return row


def triton_run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: FragmentExperts) -> torch.Tensor:
    return experts_nvfp4.run_experts(x, ids, weights, experts, arch=capability(x))


def with_shape(kernels: cuda.Kernels, shape: cuda.Shape) -> Run:
    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: FragmentExperts) -> torch.Tensor:
        out = torch.empty_like(x)
        kernels.run(x, ids, weights, experts, shape, out)
        return out

    return run


SHAPES = {
    (1, 2, 4): [(1, 1, 4, 4, 8, 2), (2, 1, 2, 3, 12, 2)],
    (10, 16, 64, 128): [(2, 1, 2, 3, 12, 2), (2, 2, 2, 4, 12, 1)],
    (64, 128, 256): [(4, 2, 2, 3, 12, 1), (2, 2, 2, 4, 12, 1)],
    (256, 384, 512): [(4, 3, 2, 3, 12, 1), (4, 3, 2, 3, 12, 1, 0)],
    (512, 768, 1024, 1536): [
        (4, 4, 2, 4, 8, 1),
        (4, 4, 1, 6, 12, 1, 0),
        (4, 5, 2, 4, 8, 1, 0),
        (4, 5, 1, 8, 8, 1, 0),
        (4, 6, 1, 8, 8, 1, 0),
    ],
}
"""Tokens -> shapes to try there."""


def all_shapes() -> tuple[cuda.Shape, ...]:
    return tuple(dict.fromkeys(cuda.Shape(*shape) for several in SHAPES.values() for shape in several))


def try_shapes(experts: FragmentExperts, seconds: float) -> list[dict[str, object]]:
    begin, rows = time.monotonic(), []
    shapes = all_shapes()
    kernels = cuda.Kernels(shapes, experts.down_global.device, capability(experts.down_global))
    for numbers, several in SHAPES.items():
        for shape in several:
            for tokens in numbers:
                if time.monotonic() - begin > seconds:
                    return rows
                run = with_shape(kernels, cuda.Shape(*shape))
                rows.append(measure(run, tokens, experts, cuda.Shape(*shape).name, 3))
    return rows


def try_tiles(experts: FragmentExperts, seconds: float) -> list[dict[str, object]]:
    """Other tiles of Triton's."""
    begin, rows = time.monotonic(), []
    chosen_tile, chosen_widths = experts_nvfp4.tile_of, dict(experts_nvfp4.WIDTHS)
    # width -> (fragment tiles, mma.sync, warps, stages)
    tiles = {16: (4, True, 1, 4), 32: (4, True, 1, 4), 64: (8, False, 8, 3), 128: (8, False, 4, 4)}
    tiles |= {256: (8, False, 8, 4)}
    trials = [
        (2048, (256, 128, 64, 32, 16), tiles | {128: (4, False, 4, 4)}),
        (2048, (256, 128, 64, 32, 16), tiles | {64: (4, False, 4, 4)}),
        (2048, (64, 32, 16), tiles),
        (8192, (256, 128, 64, 32), tiles),
    ]
    for tokens, widths, trial in trials:
        if time.monotonic() - begin > seconds:
            break
        experts_nvfp4.WIDTHS[90] = widths
        experts_nvfp4.tile_of = lambda width, arch, trial=trial: experts_nvfp4.Tile(*trial[width])
        try:
            rows.append(measure(triton_run, tokens, experts, " ".join(f"{w}:{trial[w]}" for w in widths), 3))
        except Exception as error:  # noqa: BLE001 - a tile that does not fit is a result too
            print(f"failed: {widths} {trial}: {str(error)[:200]}", flush=True)
    experts_nvfp4.tile_of = chosen_tile
    experts_nvfp4.WIDTHS.update(chosen_widths)
    return rows


RUNS: dict[str, Run] = {"cuda": cuda.experts.run, "triton": triton_run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--provider", choices=RUNS, default="cuda")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 10, 64, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--seconds", type=float, default=90.0, help="for the variants")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    run = RUNS[options.provider]
    error = check(run)
    experts = random_experts(EXPERTS)
    size = sum(getattr(experts, f.name).nbytes for f in fields(experts) if "words" in f.name or "scales" in f.name)
    rows = [measure(run, tokens, experts, options.provider) for tokens in options.tokens]
    if options.variants:
        rows += (try_shapes if options.provider == "cuda" else try_tiles)(experts, options.seconds)
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "weights_bytes": size}
    report |= {"error": error, "rows": rows}
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
