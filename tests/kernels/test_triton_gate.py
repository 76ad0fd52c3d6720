"""Every Triton kernel, with every tile it may choose, is compiled for sm_90 and sm_120 on a machine without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from glm5ray.kernels.triton.variant import SHARED_BYTES

MAX_STACK_BYTES = 64
"""A thread: a few spilled registers are no harm, more belong into a smaller tile."""
SECONDS = 600


def compile_all(capability: int, *options: str) -> list[dict[str, Any]]:
    root = Path(__file__).parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(root)}
    command = [sys.executable, str(Path(__file__).with_name("triton_gate.py")), str(capability), *options]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def problems(reports: list[dict[str, Any]], capability: int) -> list[str]:
    limit = SHARED_BYTES[capability]
    found = []
    for report in reports:
        name = f"{report['module']}.{report['variant']}"
        if "error" in report:
            found.append(f"{name} does not compile: {report['error']}")
        elif report["shared_bytes"] > limit:
            found.append(f"{name} needs {report['shared_bytes']} bytes of shared memory; a block has {limit}")
        elif report["stack_bytes"] > MAX_STACK_BYTES:
            found.append(f"{name} spills: {report['stack_bytes']} bytes of stack, {report['registers']} registers")
    return found


@pytest.mark.parametrize("capability", sorted(SHARED_BYTES))
def test_every_kernel_compiles(capability: int) -> None:
    unnamed, *reports = compile_all(capability)
    assert unnamed == {"unnamed": []}, "kernels that variants() does not name"
    assert problems(reports, capability) == []
    if capability == 120:
        check_sm120_instructions(reports)


@pytest.mark.slow
@pytest.mark.parametrize("capability", sorted(SHARED_BYTES))
def test_every_tile_compiles(capability: int) -> None:
    assert problems(compile_all(capability, "--slow")[1:], capability) == []


NATIVE_FP4 = re.compile(r"mma\.sync\.aligned\.m16n8k64\S*kind::mxf4nvf4\.block_scale")


def check_sm120_instructions(reports: list[dict[str, Any]]) -> None:
    """What is meant for the FP4 matrix units must have come to their instruction."""
    for report in reports:
        if "w4a4" in report["variant"]:
            assert any(map(NATIVE_FP4.match, report["ptx"])), (report["variant"], report["ptx"])
