#!/usr/bin/env python3
"""Whether the CUDA C++ experts are right at GLM-5's sizes, on the GPU that is here.

    python scripts/check_experts_cuda.py [--all-shapes] [--json FILE]

Weights are random, quantised and packed as at load; the reference is :mod:`glm5ray.kernels.reference` in fp32 on the
GPU. Each case runs twice over memory filled with NaN: results must be the same bits, finite, and near the reference;
and the same bits from a CUDA graph.
Exits with 1 if one is not. The last line is JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from bench_experts import all_shapes

from glm5ray.bench.report import environment
from glm5ray.kernels import reference
from glm5ray.kernels.cuda import experts_nvfp4 as cuda
from glm5ray.kernels.interface import Nvfp4ExpertWeights
from glm5ray.kernels.triton.device import capability
from glm5ray.quantization.nvfp4 import quantize_nvfp4

HIDDEN, INTERMEDIATE, EXPERTS, CHOICES, FIRST = 6144, 2048, 24, 8, 3
TOKENS = (1, 2, 4, 5, 8, 9, 17, 40, 64, 65, 131, 300, 512, 1000)
ROUTINGS = ("uniform", "one expert", "uneven", "elsewhere")
LARGEST_ERROR = 0.01
"""Of a token's row, relative: the hidden vector and each expert's result are rounded to BF16."""


def make_experts(hidden: int, intermediate: int) -> Nvfp4ExpertWeights:
    def quantized(rows: int, columns: int):
        weight = torch.randn(EXPERTS * rows, columns, device="cuda") * columns**-0.5
        made = quantize_nvfp4(weight)
        packed, scales = (x.view(torch.uint8).unflatten(0, (EXPERTS, rows)) for x in (made.packed, made.scale))
        return packed.contiguous(), scales.view(torch.float8_e4m3fn), made.scale_2.reshape(())

    gate_up, down = quantized(2 * intermediate, hidden), quantized(hidden, intermediate)
    factors = torch.rand(EXPERTS, 3, device="cuda") + 0.5
    return Nvfp4ExpertWeights(
        gate_up_packed=gate_up[0],
        gate_up_scales=gate_up[1],
        gate_up_global=(gate_up[2] * factors[:, :2]).contiguous(),
        down_packed=down[0],
        down_scales=down[1],
        down_global=(down[2] * factors[:, 2]).contiguous(),
        first_expert=FIRST,
    )


def make_ids(tokens: int, routing: str) -> torch.Tensor:
    total = EXPERTS + 2 * FIRST
    odds = torch.rand(tokens, total, device="cuda")
    if routing == "uneven":
        odds *= torch.linspace(0.2, 1, total, device="cuda") ** 4
    ids = odds.topk(CHOICES).indices
    if routing == "one expert":
        ids[:, 0] = FIRST + EXPERTS - 1
        ids[:, 1:] = -1
    if routing == "elsewhere":
        ids = torch.where(ids % 2 == 0, 0, FIRST + EXPERTS)
    return ids


def check(run, tokens: int, routing: str, plain: Nvfp4ExpertWeights, packed) -> dict[str, object]:
    ids, weights = make_ids(tokens, routing), torch.rand(tokens, CHOICES, device="cuda")
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    results = []
    for _ in range(2):
        poison = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 24, 1 << 22, 1 << 20, 1 << 16)]
        del poison
        results.append(run(x, ids, weights, packed))
    want = reference.experts.run(x.float(), ids, weights, plain)
    error = ((results[0].float() - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-9)).max()
    is_same, is_finite = torch.equal(*results), bool(torch.isfinite(results[0]).all())
    is_right = is_same and is_finite and float(error) < LARGEST_ERROR
    row = {"tokens": tokens, "routing": routing, "error": float(error), "same_again": is_same, "finite": is_finite}
    return row | {"right": is_right}


def check_graph(tokens: int, packed) -> dict[str, object]:
    """A captured layer against plain launches, bit for bit, three replays with routings of their own."""
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids, weights = make_ids(tokens, "uniform"), torch.rand(tokens, CHOICES, device="cuda")
    cuda.experts.run(x, ids, weights, packed)
    graph, is_same = torch.cuda.CUDAGraph(), True
    with torch.cuda.graph(graph):
        result = cuda.experts.run(x, ids, weights, packed)
    for _ in range(3):
        ids.copy_(make_ids(tokens, "uneven"))
        result.fill_(float("nan"))
        graph.replay()
        is_same &= torch.equal(result, cuda.experts.run(x, ids, weights, packed))
    return {"tokens": tokens, "routing": "graph", "error": 0.0, "same_again": is_same, "right": is_same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all-shapes", action="store_true", help="those of bench_experts.py, too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    plain = make_experts(HIDDEN, INTERMEDIATE)
    packed = cuda.experts.pack(plain)
    cuda.load("experts")
    arch, device = capability(packed.down_global), packed.down_global.device
    if cuda.kernels_on(device, arch) is None:
        sys.exit("the kernels did not compile: see the warning above")
    cases = [("table", cuda.experts.run, tokens, routing) for tokens in TOKENS for routing in ROUTINGS]
    if arguments.all_shapes:
        shapes = all_shapes()
        kernels = cuda.Kernels(shapes, device, arch)
        for shape in shapes:

            def run(x, ids, weights, experts, shape=shape):
                out = torch.full_like(x, float("nan"))
                kernels.run(x, ids, weights, experts, shape, out)
                return out

            cases += [(shape.name, run, tokens, "uniform") for tokens in (1, 9, 131, 300)]
            cases += [(shape.name, run, 131, "one expert")]
    rows = [{"shape": name} | check(run, tokens, routing, plain, packed) for name, run, tokens, routing in cases]
    rows += [{"shape": "table"} | check_graph(tokens, packed) for tokens in (1, 16, 64, 512, 1024)]
    wrong = [row for row in rows if not row["right"]]
    for row in wrong[:20]:
        print("WRONG", row)
    print(f"{len(rows)} cases, {len(wrong)} wrong, largest error {max(float(row['error']) for row in rows):.5f}")
    report = {"device": torch.cuda.get_device_name(), "environment": environment(), "cases": rows}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
