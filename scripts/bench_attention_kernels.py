"""Checks and times what a GPU step is made of besides the experts, at GLM-5's sizes, on the GPU that is here.

    python scripts/bench_attention_kernels.py [--json FILE] [--sweep]

Each op is first compared with the reference on the same device, then timed in a CUDA graph over several layers' worth
of buffers (more than the L2 holds, where an op reads that much). Bytes are the fewest that the op must move, FLOP
those of its products."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glm5ray.kernels import reference, triton_ops
from glm5ray.kernels.cache_rows import index_page_bytes, latent_row_bytes
from glm5ray.kernels.interface import ForwardBatch, RouterSettings
from glm5ray.kernels.triton import mla

if TYPE_CHECKING:
    from collections.abc import Callable

H, U, R, C, V, J, I, M, E, A, Q = 64, 192, 64, 512, 256, 32, 128, 6144, 256, 8, 2048  # noqa: E741
PAGE, TOPK = 64, 2048
SETTINGS = RouterSettings(
    num_experts_per_tok=A, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5
)
DEVICE = "cuda"
LAYERS = 6


@dataclass
class Row:
    op: str
    case: str
    us: float
    bytes: float
    flop: float
    note: str = ""

    def show(self) -> str:
        return (
            f"{self.op:16} {self.case:26} {self.us:9.1f} us {self.bytes / self.us / 1e6:6.2f} TB/s "
            f"{self.flop / self.us / 1e6:7.1f} TFLOP/s {self.note}"
        )


def batch_of(slices: list[tuple[int, int]], generator: torch.Generator) -> tuple[ForwardBatch, int]:
    counts = [-(-(start + tokens) // PAGE) for start, tokens in slices]
    pages = torch.randperm(sum(counts), generator=generator).tolist()
    width = max(counts)
    table = []
    for count in counts:
        table.append(pages[:count] + [-1] * (width - count))
        pages = pages[count:]
    starts = torch.tensor([start for start, _ in slices])
    sizes = torch.tensor([tokens for _, tokens in slices])
    owner = torch.repeat_interleave(torch.arange(len(slices)), sizes)
    first = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    positions = torch.arange(int(sizes.sum())) - first + starts[owner]
    table_SP = torch.tensor(table, dtype=torch.int32)
    slots = table_SP[owner, positions // PAGE].long() * PAGE + positions % PAGE
    return ForwardBatch(
        token_ids_T=torch.zeros(len(positions), dtype=torch.int64, device=DEVICE),
        positions_T=positions.to(DEVICE),
        slots_T=slots.to(DEVICE),
        slice_T=owner.int().to(DEVICE),
        page_table_SP=table_SP.to(DEVICE),
        starts=tuple(start for start, _ in slices),
        num_tokens=tuple(tokens for _, tokens in slices),
        page_size=PAGE,
        max_visible=int((starts + sizes).max()),
        logits_rows_L=torch.zeros(0, dtype=torch.int64, device=DEVICE),
    ), sum(counts) * PAGE


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def angles(tokens: int) -> Tensor:
    angle = torch.rand(tokens, R // 2, device=DEVICE) * 6.28
    return torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(-2)


def timed(calls: list[Callable[[], Any]]) -> float:
    """Microseconds of one call: all of them in one graph, the median of ten replays."""
    for call in calls[:1]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))


def latent_rows(num_slots: int, is_fp8: bool) -> Tensor:
    if not is_fp8:
        return normal(num_slots, C + R, scale=0.5)
    rows = torch.zeros(num_slots, latent_row_bytes(C, R), dtype=torch.uint8, device=DEVICE)
    for first in range(0, num_slots, 65536):
        slots = torch.arange(first, min(first + 65536, num_slots), device=DEVICE)
        kv, weight = normal(len(slots), C + R, scale=0.5), torch.ones(C, device=DEVICE, dtype=torch.bfloat16)
        triton_ops.append_latent(kv, weight, 1e-5, angles(len(slots)), slots, rows)
    return rows


def index_keys(num_slots: int, is_fp8: bool) -> Tensor:
    if not is_fp8:
        return normal(num_slots, I)
    keys = torch.zeros(num_slots // PAGE, index_page_bytes(PAGE, I), dtype=torch.uint8, device=DEVICE)
    slots = torch.arange(num_slots, device=DEVICE)
    one = torch.ones(I, device=DEVICE, dtype=torch.bfloat16)
    triton_ops.append_index_keys(normal(num_slots, I), one, one * 0, 1e-6, angles(num_slots), slots, keys)
    return keys


class Bench:
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.errors: dict[str, float] = {}
        self.generator = torch.Generator().manual_seed(0)

    def add(self, op: str, case: str, calls: list[Callable[[], Any]], num_bytes: float, flop: float = 0.0) -> None:
        row = Row(op, case, timed(calls), num_bytes, flop)
        self.rows.append(row)
        print(row.show(), flush=True)

    # --- correctness ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        torch.manual_seed(0)
        x, weight = normal(33, M), normal(M)
        self._compare("rms_norm", triton_ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
        sums = [normal(33, M)] * 2
        sums = [sums[0].clone(), sums[0].clone()]
        got = triton_ops.add_rms_norm(sums[0], x, weight, 1e-5)
        self._compare("add_rms_norm", got, reference.add_rms_norm(sums[1], x, weight, 1e-5))
        assert torch.equal(sums[0], sums[1])
        wide = normal(33, 24576)
        self._compare("silu_and_mul", triton_ops.silu_and_mul(wide), reference.silu_and_mul(wide))
        q, w_kv = normal(33, H, U + R), normal(H, U + V, C, scale=0.07)
        self._compare(
            "mla_query",
            triton_ops.mla_query(q, w_kv[:, :U], turn := angles(33)),
            reference.mla_query(q, w_kv[:, :U], turn),
        )
        o = normal(33, H, C)
        self._compare("mla_output", triton_ops.mla_output(o, w_kv[:, U:]), reference.mla_output(o, w_kv[:, U:]))
        gate, bias = normal(E, M, scale=0.02, dtype=torch.float32), normal(E, scale=0.1, dtype=torch.float32)
        for tokens in (5, 300):
            x = normal(tokens, M)
            ids, weights = triton_ops.route(x, gate, bias, SETTINGS)
            wanted, expected = reference.route(x, gate, bias, SETTINGS)
            same = (ids.sort(-1).values == wanted.sort(-1).values).all(-1)
            self.errors[f"route {tokens}: rows with another choice"] = float((~same).float().mean())
            self._compare(f"route {tokens}", weights[same].sort(-1).values, expected[same].sort(-1).values)
        self._check_cache()
        self._check_attention()
        self._check_selection()

    def _compare(self, what: str, actual: Tensor, expected: Tensor) -> None:
        self.errors[what] = error(actual, expected)

    def _check_cache(self) -> None:
        kv, weight, slots, turn = normal(40, C + R), normal(C), torch.randperm(128, device=DEVICE)[:40], angles(40)
        slots[7] = -1
        for is_fp8 in (False, True):
            shape = (128, latent_row_bytes(C, R)) if is_fp8 else (128, C + R)
            caches = [torch.zeros(shape, dtype=torch.uint8 if is_fp8 else kv.dtype, device=DEVICE) for _ in range(2)]
            for ops, rows in zip((triton_ops, reference), caches, strict=True):
                ops.append_latent(kv, weight, 1e-5, turn, slots, rows)
            equal = (caches[0] == caches[1]).float().mean()
            self.errors[f"append_latent fp8={is_fp8}: numbers that differ"] = float(1 - equal)
        k, one = normal(40, I), normal(I)
        for is_fp8 in (False, True):
            shape = (2, index_page_bytes(PAGE, I)) if is_fp8 else (128, I)
            caches = [torch.zeros(shape, dtype=torch.uint8 if is_fp8 else k.dtype, device=DEVICE) for _ in range(2)]
            for ops, keys in zip((triton_ops, reference), caches, strict=True):
                ops.append_index_keys(k, one, one, 1e-6, turn, slots, keys)
            equal = (caches[0] == caches[1]).float().mean()
            self.errors[f"append_index_keys fp8={is_fp8}: numbers that differ"] = float(1 - equal)

    def _check_attention(self) -> None:
        batch, num_slots = batch_of([(2500, 1), (0, 40), (63, 2), (4000, 3), (130, 1)], self.generator)
        tokens = len(batch.slots_T)
        plan = reference.select_tokens.plan(batch, TOPK)
        chosen = reference.select_tokens.run(
            plan, normal(tokens, J, I), normal(tokens, J, dtype=torch.float32), normal(num_slots, I)
        )
        for heads in (64, 8):
            for is_fp8 in (False, True):
                for selected in (None, chosen):
                    rows, q = latent_rows(num_slots, is_fp8), normal(tokens, heads, C + R)
                    handle = triton_ops.mla_attention.plan(batch, TOPK)
                    got = triton_ops.mla_attention.run(handle, q, rows, selected, 1 / 16, C)
                    expected = reference.mla_attention.run(batch, q, rows, selected, 1 / 16, C)
                    self._compare(f"mla_attention {heads} fp8={is_fp8} selected={selected is not None}", got, expected)

    def _check_selection(self) -> None:
        batch, num_slots = batch_of([(2500, 1), (0, 10), (20000, 3), (30000, 1), (2040, 12)], self.generator)
        tokens = len(batch.slots_T)
        w = torch.randint(-2, 3, (tokens, J), device=DEVICE).float()
        q = torch.randint(-3, 4, (tokens, J, I), device=DEVICE).bfloat16()
        keys = torch.randint(-1, 2, (num_slots, I), device=DEVICE).bfloat16()
        got = triton_ops.select_tokens.run(triton_ops.select_tokens.plan(batch, TOPK), q, w, keys)
        expected = reference.select_tokens.run(reference.select_tokens.plan(batch, TOPK), q, w, keys)
        same = got.sort(-1).values == expected.sort(-1).values
        self.errors["select_tokens: rows with another choice"] = float((~same.all(-1)).float().mean())
        keys, q, w = index_keys(num_slots, True), normal(tokens, J, I), normal(tokens, J, dtype=torch.float32)
        got = triton_ops.select_tokens.run(triton_ops.select_tokens.plan(batch, TOPK), q, w, keys)
        expected = reference.select_tokens.run(reference.select_tokens.plan(batch, TOPK), q, w, keys)
        same = got.sort(-1).values == expected.sort(-1).values
        self.errors["select_tokens fp8: share of another choice"] = float((~same).float().mean())

    # --- time -------------------------------------------------------------------------------------------------------

    def small(self, tokens: int) -> None:
        case = f"T={tokens}"
        turn, slots = angles(tokens), torch.arange(tokens, device=DEVICE)
        x, weight, residual = normal(tokens, M), normal(M), normal(tokens, M)
        self.add(
            "rms_norm", f"{case} 2048", [lambda: triton_ops.rms_norm(x[:, :Q], weight[:Q], 1e-5)] * 8, 4 * tokens * Q
        )
        self.add("add_rms_norm", case, [lambda: triton_ops.add_rms_norm(residual, x, weight, 1e-5)] * 8, 8 * tokens * M)
        wide = normal(tokens, 4096)
        self.add("silu_and_mul", f"{case} 2048", [lambda: triton_ops.silu_and_mul(wide)] * 8, 6 * tokens * Q)
        kv, rows = normal(tokens, C + R), normal(tokens, C + R)
        self.add(
            "append_latent", case, [lambda: triton_ops.append_latent(kv, weight[:C], 1e-5, turn, slots, rows)] * 8,
            4 * tokens * (C + R),
        )  # fmt: skip
        k, keys = normal(tokens, I), normal(tokens, I)
        self.add(
            "append_index", case,
            [lambda: triton_ops.append_index_keys(k, weight[:I], weight[:I], 1e-6, turn, slots, keys)] * 8,
            4 * tokens * I,
        )  # fmt: skip
        q, o = normal(tokens, H, U + R), normal(tokens, H, C)
        w_kv = [normal(H, U + V, C, scale=0.07) for _ in range(LAYERS)]
        self.add(
            "mla_query", case, [lambda w=w: triton_ops.mla_query(q, w[:, :U], turn) for w in w_kv],
            2 * H * (U * C + tokens * (U + 2 * R + C)), 2 * tokens * H * U * C,
        )  # fmt: skip
        self.add(
            "mla_output", case, [lambda w=w: triton_ops.mla_output(o, w[:, U:]) for w in w_kv],
            2 * H * (V * C + tokens * (V + C)), 2 * tokens * H * V * C,
        )  # fmt: skip
        gates = [normal(E, M, scale=0.02, dtype=torch.float32) for _ in range(LAYERS)]
        bias = normal(E, dtype=torch.float32)
        self.add(
            "route", case, [lambda g=g: triton_ops.route(x, g, bias, SETTINGS) for g in gates],
            4 * E * M + 2 * tokens * M, 2 * tokens * E * M,
        )  # fmt: skip

    def attention(
        self, name: str, slices: list[tuple[int, int]], *, selects: bool = False, is_fp8: bool = False,
        layers: int = LAYERS,
    ) -> None:  # fmt: skip
        batch, num_slots = batch_of(slices, self.generator)
        tokens = len(batch.slots_T)
        caches = [latent_rows(num_slots, is_fp8) for _ in range(layers)]
        q = normal(tokens, H, C + R)
        visible = batch.positions_T + 1
        selected = None
        if selects:
            visible = visible.clamp(max=TOPK)
            selected = self._random_selection(batch)
        handle = triton_ops.mla_attention.plan(batch, TOPK)
        pairs = float(visible.sum())
        distinct = float(sum(min(s + n, TOPK) if selects else s + n for s, n in slices))
        row = caches[0].shape[1] * caches[0].element_size()
        self.add(
            "mla_attention",
            name + " selected" * selects + " fp8" * is_fp8,
            [lambda rows=rows: triton_ops.mla_attention.run(handle, q, rows, selected, 1 / 16, C) for rows in caches],
            distinct * row + tokens * H * (2 * C + R) * 2,
            2 * pairs * H * (2 * C + R),
        )

    def _random_selection(self, batch: ForwardBatch) -> Tensor:
        tokens = len(batch.slots_T)
        selected = torch.full((tokens, TOPK), -1, dtype=torch.int32, device=DEVICE)
        for first in range(0, tokens, 512):
            at = slice(first, min(first + 512, tokens))
            visible = batch.positions_T[at, None] + 1
            noise = torch.rand(at.stop - at.start, batch.max_visible, device=DEVICE)
            noise.masked_fill_(torch.arange(batch.max_visible, device=DEVICE) >= visible, -1)
            width = min(TOPK, batch.max_visible)
            place = noise.topk(width, dim=-1).indices
            hidden = place >= visible
            place = place.masked_fill(hidden, 2**30).sort(-1).values
            hidden = place == 2**30
            place = place.masked_fill(hidden, 0)
            pages = batch.page_table_SP[batch.slice_T[at].long()].gather(1, place // PAGE)
            selected[at, :width] = (pages * PAGE + place % PAGE).masked_fill(hidden, -1).int()
        return selected

    def selection(self, name: str, slices: list[tuple[int, int]], *, is_fp8: bool, layers: int) -> None:
        batch, num_slots = batch_of(slices, self.generator)
        tokens = len(batch.slots_T)
        caches = [index_keys(num_slots, is_fp8) for _ in range(layers)]
        q, w = normal(tokens, J, I), normal(tokens, J, dtype=torch.float32)
        plan = triton_ops.select_tokens.plan(batch, TOPK)
        pairs = float((batch.positions_T + 1).sum())
        self.add(
            "select_tokens", name + " fp8" * is_fp8,
            [lambda keys=keys: triton_ops.select_tokens.run(plan, q, w, keys) for keys in caches],
            sum(s + n for s, n in slices) * (132 if is_fp8 else 256), 2 * pairs * J * I,
        )  # fmt: skip


TILES = [(64, 32, 8, 3), (64, 32, 8, 4), (64, 64, 8, 2), (32, 32, 8, 3), (16, 32, 4, 3), (16, 64, 4, 3)]


def sweep(bench: Bench, deadline: float) -> list[dict[str, Any]]:
    """The tiles of attention at one decode and one prefill."""
    results = []
    chosen = mla.choose_tile
    for tile in TILES:
        if time.monotonic() > deadline:
            break
        mla.choose_tile = lambda *_, tile=tile: mla.Tile(*tile)
        for name, slices, selects in (
            ("64 x 2048", [(2047, 1)] * 64, False),
            ("1 x 301", [(300, 1)], False),
            ("64 x 301", [(300, 1)] * 64, False),
            ("1024 x 301", [(300, 1)] * 1024, False),
            ("8192 at once", [(0, 8192)], True),
        ):
            try:
                bench.attention(f"{name} {tile}", slices, selects=selects, layers=2)
                results.append({"tile": tile, "case": name, "selects": selects, "us": bench.rows[-1].us})
            except Exception as failure:  # noqa: BLE001 - a tile that does not compile is a result
                print("failed", tile, name, repr(failure)[:300], flush=True)
                results.append({"tile": tile, "case": name, "selects": selects, "error": repr(failure)[:300]})
    mla.choose_tile = chosen
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=150.0)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    bench = Bench()
    bench.check()
    for what, value in bench.errors.items():
        print(f"{what:60} {value:.2e}", flush=True)
    jobs: list[Callable[[], None]] = []
    decodes = [(t, c) for c in (300, 2047) for t in (1, 10, 64, 256, 1024) if t * c <= 1024 * 300]
    jobs += [lambda t=t, c=c: bench.attention(f"{t} x {c + 1}", [(c, 1)] * t) for t, c in decodes]
    jobs += [
        lambda: bench.attention("64 x 2048", [(2047, 1)] * 64, is_fp8=True),
        lambda: bench.attention("64 x 2048", [(2047, 1)] * 64, selects=True),
        lambda: bench.attention("32 x 256 at once", [(0, 256)] * 32, layers=2),
        lambda: bench.attention("8192 at once", [(0, 8192)], selects=True, layers=2),
        lambda: bench.attention("1 x 131072", [(131071, 1)], selects=True),
        lambda: bench.selection("1 x 32768", [(32767, 1)], is_fp8=False, layers=6),
        lambda: bench.selection("1 x 131072", [(131071, 1)], is_fp8=False, layers=3),
        lambda: bench.selection("1 x 131072", [(131071, 1)], is_fp8=True, layers=3),
        lambda: bench.selection("16 x 32768", [(32767, 1)] * 16, is_fp8=False, layers=2),
        lambda: bench.selection("8192 at once", [(0, 8192)], is_fp8=False, layers=2),
        *(lambda t=t: bench.small(t) for t in (1, 64, 1024, 8192)),
    ]
    for job in jobs:
        if time.monotonic() < deadline:
            job()
    swept = sweep(bench, deadline) if arguments.sweep else []
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "errors": bench.errors,
        "rows": [vars(row) for row in bench.rows],
        "sweep": swept,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    print("---")
    for row in bench.rows:
        print(row.show())


if __name__ == "__main__":
    main()
