"""Attention and selection of prompts at GLM-5's sizes: absorbed or not, and every tile, checked and timed on a GPU.

    python scripts/bench_prompts.py [--json FILE] [--limit SECONDS] [--compile PART/PARTS]

Each way is run on the same random step: its result is compared with fp32 products of some tokens (attention), or with
the same scores computed by torch (selection; whole numbers, so that they are exact and often equal), then the median
of five runs is taken. ``--compile 0/4`` runs a quarter of the cases once and times nothing: several such processes fill
the compiler's cache at the same time. TFLOP/s count the products that the way computes, of visible positions only.

The exit status is 1 if one is wrong."""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from bench_attention_kernels import TOPK, C, H, I, J, R, U, V, angles, batch_of, normal

from glm5ray.bench.report import environment
from glm5ray.kernels import triton_ops
from glm5ray.kernels.cache_rows import split_keys
from glm5ray.kernels.triton import index_scores, indexer, mla_prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from glm5ray.kernels.interface import ForwardBatch

STEPS: dict[str, list[tuple[int, int]]] = {
    "8192": [(0, 8192)],
    "8192 after 8192": [(8192, 8192)],
    "4 x 2048": [(0, 2048)] * 4,
    "32 x 256": [(0, 256)] * 32,
    "7 x 1024, 256 decodes at 1500": [(0, 1024)] * 7 + [(1500, 1)] * 256,
    "decode 1 x 32768": [(32767, 1)],
    "decode 16 x 32768": [(32767, 1)] * 16,
    "decode 1 x 131072": [(131071, 1)],
}
ATTEND_TILES = [(128, 64, 8, 2), (64, 32, 4, 2), (128, 32, 8, 3)]
SCORE_TILES = [(8, 64, 8, 2, 32), (4, 128, 8, 3, 1), (4, 128, 8, 2, 16), (4, 64, 4, 2, 32), (2, 128, 4, 2, 16)]
DECODE_TILES = [(1, 128, 4, 3, 1), (1, 128, 4, 3, 4), (1, 64, 4, 3, 8)]
"""The first are those that are chosen."""
SCALE = 256**-0.5


class Case(NamedTuple):
    step: str
    what: str
    run: Callable[[], Any]
    check: Callable[[Any], float]
    """Relative error, or tokens with another selection."""
    flop: float


@cache
def inputs(step: str) -> dict[str, Any]:
    torch.manual_seed(7)
    batch, num_slots = batch_of(STEPS[step], torch.Generator().manual_seed(3))
    tokens = len(batch.slots_T)
    made: dict[str, Any] = {"batch": batch, "tokens": tokens, "rope": angles(tokens)}
    made["index_q"] = torch.randint(-2, 3, (tokens, J, I), device="cuda").bfloat16()
    made["index_w"] = torch.randint(-2, 4, (tokens, J), device="cuda").float()
    made["keys"] = torch.randint(-1, 2, (num_slots, I), device="cuda").bfloat16()
    plan = triton_ops.select_tokens.plan(batch, TOPK)
    made["selected"] = None
    if plan is not None:
        made["selected"] = triton_ops.select_tokens.run(plan, made["index_q"], made["index_w"], made["keys"])
    if not step.startswith("decode"):
        made["q"], made["rows"] = normal(tokens, H, U + R), normal(num_slots, C + R)
        made["w_uk"], made["w_uv"] = normal(H, U + V, C, scale=C**-0.5).split([U, V], dim=1)
    return made


def slots_of(batch: ForwardBatch, token: int) -> Tensor:
    seen = torch.arange(int(batch.positions_T[token]) + 1, device="cuda")
    pages = batch.page_table_SP[int(batch.slice_T[token])]
    return pages[seen // batch.page_size].long() * batch.page_size + seen % batch.page_size


def some_tokens(tokens: int) -> list[int]:
    return sorted({0, tokens - 1, *range(5, tokens, max(1, tokens // 24))})


def attention_error(step: str, out_TX: Tensor) -> float:
    """Of some tokens, against fp32 products of the same bf16 numbers."""
    given = inputs(step)
    off, size = 0.0, 0.0
    for t in some_tokens(given["tokens"]):
        slots = slots_of(given["batch"], t) if given["selected"] is None else given["selected"][t]
        rows = given["rows"][slots[slots >= 0].long()].float()
        q = given["q"][t : t + 1].clone()
        triton_ops.rope(q[..., U:], given["rope"][t : t + 1])
        q = q[0].float()
        score = torch.einsum("hu,huc,sc->hs", q[:, :U], given["w_uk"].float(), rows[:, :C]) + q[:, U:] @ rows[:, C:].T
        o = (score * SCALE).softmax(-1) @ rows[:, :C]
        expected = torch.einsum("hc,hvc->hv", o, given["w_uv"].float()).flatten()
        off += float((out_TX[t].float() - expected).square().sum())
        size += float(expected.square().sum())
    return (off / size) ** 0.5


def selection_errors(step: str, selected_TK: Tensor) -> float:
    """Of some tokens, how many selected other slots than the lowest positions of the highest scores."""
    given, wrong = inputs(step), 0
    for t in some_tokens(given["tokens"]):
        slots = slots_of(given["batch"], t)
        score = torch.relu(given["index_q"][t].float() @ given["keys"][slots].float().T).T @ given["index_w"][t]
        best = torch.sort(score, descending=True, stable=True).indices[:TOPK]
        wrong += sorted(slots[best].tolist()) != sorted(s for s in selected_TK[t].tolist() if s >= 0)
    return float(wrong)


def absorbed(step: str) -> Tensor:
    given = inputs(step)
    q = triton_ops.mla_query(given["q"], given["w_uk"], given["rope"])
    plan = triton_ops.mla_attention.plan(given["batch"], TOPK)
    return triton_ops.mla_output(
        triton_ops.mla_attention.run(plan, q, given["rows"], given["selected"], SCALE, C), given["w_uv"]
    )


def expanded(step: str, tile: tuple[int, ...]) -> Tensor:
    given = inputs(step)
    mla_prompts.choose_tile = lambda *_: mla_prompts.Tile(*tile)
    plan = mla_prompts.mla_prompts.plan(given["batch"], TOPK)
    q, selected = given["q"].clone(), given["selected"]
    return mla_prompts.mla_prompts.run(
        plan, q, given["rows"], selected, given["w_uk"], given["w_uv"], given["rope"], SCALE
    )


def select(step: str, tile: tuple[int, ...]) -> Tensor:
    given = inputs(step)
    op = indexer.SelectTokens(lambda *_: index_scores.Tile(*tile))
    return op.run(op.plan(given["batch"], TOPK), given["index_q"], given["index_w"], given["keys"])


def score_only(step: str, tile: tuple[int, ...]) -> None:
    given = inputs(step)
    most = max(1, indexer.MAX_SCORES // given["batch"].max_visible)
    scores = torch.empty(min(given["tokens"], most), given["batch"].max_visible, device="cuda")
    keys = split_keys(given["keys"], I)
    for first in range(0, given["tokens"], most):
        part = scores[: given["tokens"] - first]
        index_scores.launch_score(
            given["batch"], index_scores.Tile(*tile), given["index_q"], given["index_w"], keys, part, first
        )


def cases() -> Iterator[Case]:
    for step in STEPS:
        seen = sum(count * (2 * start + count + 1) / 2 for start, count in STEPS[step])
        read = sum(min(start + i + 1, TOPK) for start, count in STEPS[step] for i in range(count))
        selects = max(start + count for start, count in STEPS[step]) > TOPK
        for tile in (DECODE_TILES if step.startswith("decode") else SCORE_TILES) if selects else []:
            flop = 2.0 * J * I * seen
            yield Case(
                step,
                f"select {tile}",
                lambda a=(step, tile): select(*a),
                lambda x, s=step: selection_errors(s, x),
                flop,
            )
            yield Case(step, f"scores {tile}", lambda a=(step, tile): score_only(*a), lambda _: 0.0, flop)
        if step.startswith("decode"):
            continue
        check = lambda x, s=step: attention_error(s, x)  # noqa: E731
        products = sum(count for _, count in STEPS[step]) * H * 2.0 * (U + V) * C
        yield Case(step, "absorbed", lambda s=step: absorbed(s), check, 2.0 * H * (2 * C + R) * read + products)
        if not any(mla_prompts._gains(*one, TOPK, selects) for one in STEPS[step]):
            continue
        for tile in ATTEND_TILES if step in ("8192", "4 x 2048") else ATTEND_TILES[:1]:
            yield Case(
                step,
                f"expanded {tile}",
                lambda a=(step, tile): expanded(*a),
                check,
                2.0 * H * (U + R + V) * seen + products,
            )


def milliseconds(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def profile(run: Callable[[], Any]) -> dict[str, float]:
    """Kernel -> milliseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return {e.key[:60]: round(e.device_time_total / 1e3, 3) for e in profiler.key_averages() if e.device_time_total > 5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("prompts.json"))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which no further case is begun")
    parser.add_argument("--compile", default="")
    arguments = parser.parse_args()
    began = time.perf_counter()
    if arguments.compile:
        part, parts = map(int, arguments.compile.split("/"))
        for i, case in enumerate(cases()):
            if i % parts == part and time.perf_counter() - began < arguments.limit:
                attempt(case.run)
        return
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "environment": environment(), "rows": []}
    for case in cases():
        if time.perf_counter() - began > arguments.limit:
            break
        row: dict[str, Any] = {"step": case.step, "what": case.what}
        result = attempt(case.run)
        if isinstance(result, str):
            row["failed"] = result
        else:
            ms = milliseconds(case.run)
            row |= {"error": round(case.check(result), 5), "ms": round(ms, 4), "tflops": round(case.flop / ms / 1e9, 1)}
            if case.step == "8192" and (case.what == "absorbed" or str(ATTEND_TILES[0]) in case.what):
                row["kernels_ms"] = profile(case.run)
        report["rows"].append(row)
        print({k: v for k, v in row.items() if k != "kernels_ms"}, flush=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    wrong = [row for row in report["rows"] if not is_right(row)]
    print("wrong:" if wrong else "right", *wrong)
    raise SystemExit(int(bool(wrong)))


def is_right(row: dict[str, Any]) -> bool:
    """Of attention, an error of rounding to bf16; of a selection, none."""
    if "failed" in row or row["error"] != row["error"]:
        return False
    return row["error"] < 0.015 if row["what"].startswith(("absorbed", "expanded")) else row["error"] == 0


def attempt(run: Callable[[], Any]) -> Any:
    """The result, or why there is none: a tile may need more than the GPU has."""
    try:
        result = run()
        torch.cuda.synchronize()
    except (RuntimeError, importlib.import_module("triton").runtime.errors.OutOfResources) as error:
        return f"{type(error).__name__}: {error}"[:200]
    return result


if __name__ == "__main__":
    main()
