"""Whether the tiles of the NVFP4 experts give the same, right and finite numbers, on the GPU that is here.

    python scripts/check_expert_tiles.py [--trials 12] [--candidate 0] [--json FILE]

One layer of GLM-5 (256 experts, hidden 6,144, intermediate 2,048, top 8), random weights. Each trial draws a step with
uniform routing and runs it twice; a row counts as bad if the two results differ in a bit or are not finite. The first
step of each tile is held against torch in fp32: the largest relative error of a row. Token counts are those at which
most experts take the named width (docs/experiments/0008-gpu-ladder.md). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from bench_experts import EXPERTS, expected, random_experts, random_step

from glm5ray.bench.report import environment
from glm5ray.kernels.triton import experts_nvfp4
from glm5ray.kernels.triton.device import capability
from glm5ray.kernels.triton.experts_nvfp4 import Tile, run_experts

if TYPE_CHECKING:
    from glm5ray.kernels.nvfp4_fragments import FragmentExperts

TOKENS = {64: 1536, 128: 2560, 256: 7168}
"""Width -> tokens of a step: 48, 80 and 224 an expert."""
CANDIDATES = [
    (64, Tile(8, False, 8, 3)),
    (64, Tile(8, False, 4, 3)),
    (64, Tile(4, False, 4, 3)),
    (128, Tile(8, False, 8, 3)),
    (128, Tile(8, False, 8, 4)),
    (128, Tile(8, False, 4, 4)),
    (256, Tile(8, False, 8, 4)),
    (256, Tile(4, False, 4, 4)),
]


def try_tile(experts: FragmentExperts, tokens: int, trials: int) -> tuple[int, float]:
    """(bad rows, largest relative error of a row in the first step)"""
    bad, error = 0, 0.0
    for trial in range(trials):
        torch.manual_seed(trial)
        x, ids, weights = random_step(tokens, EXPERTS)
        first, again = (run_experts(x, ids, weights, experts, arch=capability(x)) for _ in range(2))
        bad += int(((first != again) | ~torch.isfinite(first)).any(dim=1).sum())
        if trial == 0:
            want = expected(x, ids, weights, experts)
            error = float(((first - want).norm(dim=1) / want.norm(dim=1)).nan_to_num(float("inf")).max())
    return bad, error


def time_ms(experts: FragmentExperts, tokens: int) -> float:
    x, ids, weights = random_step(tokens, EXPERTS)
    times = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run_experts(x, ids, weights, experts, arch=capability(x))
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[1:])[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--candidate", type=int, choices=range(len(CANDIDATES)), help="only this one")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    experts, chosen = random_experts(EXPERTS), experts_nvfp4.tile_of
    arch = capability(experts.down_global)
    rows = []
    for width, tile in CANDIDATES if arguments.candidate is None else [CANDIDATES[arguments.candidate]]:
        experts_nvfp4.tile_of = lambda w, a, width=width, tile=tile: tile if w == width else chosen(w, a)
        bad, error = try_tile(experts, TOKENS[width], arguments.trials)
        rows.append(
            {
                "width": width,
                **tile._asdict(),
                "is_chosen": tile == chosen(width, arch),
                "rows": TOKENS[width] * arguments.trials,
                "bad_rows": bad,
                "largest_relative_error": error if error < float("inf") else None,
                "ms": round(time_ms(experts, TOKENS[width]), 3),
            }
        )
        print(rows[-1], flush=True)
    report = {"device": torch.cuda.get_device_name(), "environment": environment(), "tiles": rows}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
