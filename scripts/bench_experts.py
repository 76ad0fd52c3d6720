#!/usr/bin/env python3
"""Times the NVFP4 experts of one layer at GLM-5's sizes on the GPU, after checking them against torch in fp32.

    python scripts/bench_experts.py [--tokens 512 8192] [--variants]

Random weights, uniform routing. The last line is JSON: per number of tokens ms a layer, TFLOP/s of the products and
TB/s of the weights; ``--variants`` also tries other tiles and other pipeline depths."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import fields

import torch

from glm5ray.kernels.nvfp4_fragments import FragmentExperts, unpack_matrix
from glm5ray.kernels.triton import experts_nvfp4
from glm5ray.kernels.triton.device import capability
from glm5ray.quantization.nvfp4 import dequantize_nvfp4

HIDDEN, INTERMEDIATE, EXPERTS, CHOICES = 6144, 2048, 256, 8


def random_experts(num_experts: int, first_expert: int = 0) -> FragmentExperts:
    def words(rows: int, columns: int) -> torch.Tensor:
        shape = (num_experts, rows // 16, columns // 64, 32, 4)
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")

    def scales(rows: int, columns: int) -> torch.Tensor:
        shape = (num_experts, rows // 16, columns // 64, 8, 2, 4)
        return torch.randint(0x28, 0x40, shape, dtype=torch.uint8, device="cuda").view(torch.int32).squeeze(-1)

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


def check() -> float:
    """Largest relative error (norms) over numbers of tokens; every tile width occurs, and other ranks' experts do."""
    torch.manual_seed(0)
    experts, worst = random_experts(12, first_expert=2), 0.0
    for tokens in (1, 7, 24, 130, 700):
        x, ids, weights = random_step(tokens, 16)
        actual = experts_nvfp4.run_experts(x, ids, weights, experts, arch=capability(x)).float()
        want = expected(x, ids, weights, experts)
        error = float((actual - want).norm() / want.norm().clamp(min=1e-30))
        again = experts_nvfp4.run_experts(x, ids, weights, experts, arch=capability(x)).float()
        print(f"check tokens={tokens} relative error {error:.5f} same again {torch.equal(actual, again)}", flush=True)
        assert torch.equal(actual, again), "two runs differ"
        worst = max(worst, error)
    assert worst < 0.01, f"relative error {worst}"
    return worst


def time_ms(tokens: int, experts: FragmentExperts, repeats: int) -> tuple[float, dict[str, float]]:
    """(median ms of a layer, ms by kernel)"""
    x, ids, weights = random_step(tokens, EXPERTS)

    def run() -> None:
        experts_nvfp4.run_experts(x, ids, weights, experts, arch=capability(x))

    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    parts: dict[str, float] = {}
    for event in profile.key_averages():
        name = event.key if "kernel" in event.key and "at::" not in event.key else "sort"
        parts[name[:24]] = parts.get(name[:24], 0.0) + event.self_device_time_total / 1e3
    return sorted(times)[len(times) // 2], {k: round(v, 4) for k, v in parts.items()}


def measure(tokens: int, experts: FragmentExperts, label: str, repeats: int = 7) -> dict[str, object]:
    ms, parts = time_ms(tokens, experts, repeats)
    flop = 2 * tokens * CHOICES * 3 * HIDDEN * INTERMEDIATE
    touched = EXPERTS * (1 - (1 - CHOICES / EXPERTS) ** tokens)
    size = touched * 3 * HIDDEN * INTERMEDIATE * 9 / 16
    row = {"label": label, "tokens": tokens, "ms": round(ms, 4), "tflops": round(flop / ms / 1e9, 1)}
    row |= {"weights_tb_per_s": round(size / ms / 1e9, 3), "parts_ms": parts}
    print(json.dumps(row), flush=True)
    return row


def try_variants(experts: FragmentExperts, seconds: float) -> list[dict[str, object]]:
    begin, rows = time.monotonic(), []
    chosen_tile, chosen_widths = experts_nvfp4.tile_of, dict(experts_nvfp4.WIDTHS)
    # (tokens, widths, {width: (fragment tiles, mma.sync, warps, stages)})
    narrow = {
        16: (8, True, 2, 4),
        32: (8, True, 2, 4),
        64: (4, True, 2, 4),
        128: (8, False, 8, 4),
        256: (8, False, 8, 4),
    }
    every = (256, 128, 64, 32, 16)
    trials = [
        (512, every, narrow),
        (512, every, narrow | {16: (8, True, 2, 6), 32: (8, True, 2, 6)}),
        (512, every, narrow | {16: (4, True, 1, 4), 32: (4, True, 1, 4)}),
        (512, every, narrow | {16: (4, True, 2, 5), 32: (4, True, 2, 5)}),
        (512, (128, 64, 32), narrow),
        (2048, every, narrow),
        (2048, every, narrow | {64: (8, False, 8, 5)}),
        (2048, every, narrow | {64: (4, True, 2, 3)}),
        (2048, every, narrow | {64: (8, False, 8, 3)}),
        (2048, (128, 64, 32, 16), narrow | {64: (4, False, 4, 4), 128: (4, False, 4, 4)}),
        (1024, every, narrow),
        (1024, every, narrow | {32: (8, True, 2, 3), 64: (4, True, 2, 3)}),
        (1024, every, narrow | {32: (4, True, 2, 4), 64: (2, True, 1, 4)}),
        (8192, every, narrow),
        (8192, (256, 128, 64, 32), narrow),
        (8192, (256, 128, 64), narrow),
        (8192, (256, 128, 64, 32), narrow | {256: (8, False, 8, 3)}),
        (8192, (256, 128, 64, 32), narrow | {128: (4, False, 4, 4)}),
        (256, (64, 32, 16), narrow),
        (64, (64, 32, 16), narrow),
        (10, (64, 32, 16), narrow),
    ]
    for tokens, widths, tiles in trials:
        if time.monotonic() - begin > seconds:
            break
        experts_nvfp4.WIDTHS[90] = widths
        experts_nvfp4.tile_of = lambda width, arch, tiles=tiles: experts_nvfp4.Tile(*tiles[width])
        try:
            rows.append(measure(tokens, experts, " ".join(f"{w}:{tiles[w]}" for w in widths), 3))
        except Exception as error:  # noqa: BLE001 - a tile that does not fit is a result too
            print(f"failed: {widths} {tiles}: {str(error)[:200]}", flush=True)
    experts_nvfp4.tile_of = chosen_tile
    experts_nvfp4.WIDTHS.update(chosen_widths)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="*", default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--seconds", type=float, default=90.0, help="for the variants")
    options = parser.parse_args()
    error = check()
    experts = random_experts(EXPERTS)
    size = sum(getattr(experts, f.name).nbytes for f in fields(experts) if "words" in f.name or "scales" in f.name)
    rows = [measure(tokens, experts, "chosen") for tokens in options.tokens]
    if options.variants:
        rows += try_variants(experts, options.seconds)
    device = torch.cuda.get_device_name()
    print(
        json.dumps({"device": device, "torch": torch.__version__, "weights_bytes": size, "error": error, "rows": rows})
    )


if __name__ == "__main__":
    main()
