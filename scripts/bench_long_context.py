"""Decode and prompt steps of a 12-layer slice of GLM-5 behind long contexts, on the GPU that is here.

    python scripts/bench_long_context.py [--json FILE] [--cases 32768x1,131072x8,8192x1:8192] [--steps N]
        [--no-breakdown] [--set section.field=value]

The cache is filled with random rows; nothing computes the contexts (:mod:`glm5ray.bench.long_context`). A case is
CONTEXTxCOUNT, or CONTEXTxCOUNT:TOKENS where a step computes the last TOKENS of each context. For FP8 rows:
``--set cache.kv_dtype=fp8``. The report is written after each row."""

from __future__ import annotations

import argparse
import json
from importlib import resources
from pathlib import Path
from typing import Any

from glm5ray.bench.long_context import Case, run_long_context_bench
from glm5ray.config import load_config

SLICE = Path(str(resources.files("glm5ray"))) / "bench" / "slices" / "glm5-12l-nvfp4"
SETTINGS = [
    f"model.path={SLICE}",
    "model.load_format=dummy",
    "model.dummy_routing=uniform",
    "cache.prefix_caching=false",
]
CASES = "32768x1,131072x1,32768x8,131072x8,8192x1:8192"


def show(row: dict[str, Any]) -> None:
    line = f"context {row['context']:7d} x {row['conc']:3d}, {row['tokens']:5d} tokens each: {row['step_ms']:9.3f} ms"
    if "floors" in row:
        line += f" = {row['floors']:.2f} floors ({'graph' if row['from_graph'] else 'eager'})"
    print(line, flush=True)
    for op in row.get("ops", []):
        print(f"    {op['op']:24} {op['calls']:6.1f} calls {op['ms']:9.3f} ms {100 * op['share']:5.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("long-context.json"))
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--no-breakdown", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    cases = [Case.parse(text) for text in arguments.cases.split(",")]
    config = load_config(None, [*SETTINGS, *arguments.set])
    reports = run_long_context_bench(config, cases, arguments.steps, breakdown=not arguments.no_breakdown)
    for i, report in enumerate(reports):
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        show(report["rows"][i % len(cases)])


if __name__ == "__main__":
    main()
