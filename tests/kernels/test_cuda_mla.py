"""Attention of decodes in CUDA C++: compiled for its device on a machine without one, and which kernel serves what.
Its numbers: ``test_cuda_on_host.py``, and on a GPU ``test_gpu.py``."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton

from glm5ray.kernels import triton_ops
from glm5ray.kernels.cuda import compiler, mla_decode
from glm5ray.kernels.cuda.compiler import compile_cubin
from glm5ray.kernels.triton.variant import SHARED_BYTES
from tests.kernels.shapes import Tensors, make_batch

BF16 = torch.bfloat16
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@pytest.mark.skipif(compiler.find_nvcc() is None, reason="no nvcc: not on the path, CUDA_HOME or a package")
@pytest.mark.parametrize("capability", mla_decode.CAPABILITIES)
def test_it_compiles_and_fits(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM5RAY_CACHE_DIR", str(tmp_path))
    file = tmp_path / "cubin"
    file.write_bytes(compile_cubin(mla_decode.source(), capability))
    command = [str(CUOBJDUMP), "--dump-resource-usage", str(file)]
    usage = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"Function mla_decode:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage)
    assert found is not None
    registers, stack, static = map(int, found.groups())
    assert stack == 0, "it spills"
    assert registers * mla_decode.THREADS <= 65_536
    # the driver keeps the static part, 1 KiB of it for itself, beside what a launch asks for
    assert SHARED_BYTES[capability] >= mla_decode.SHARED_BYTES
    assert static <= 1024


@pytest.mark.parametrize(
    ("q", "rows"),
    [
        (torch.empty(0, 64, 576, dtype=BF16), torch.empty(9, 576, dtype=BF16)),
        (torch.empty(2, 32, 576, dtype=BF16), torch.empty(9, 576, dtype=BF16)),
        (torch.empty(2, 64, 576), torch.empty(9, 576)),
        (torch.empty(2, 64, 576, dtype=BF16), torch.empty(9, 656, dtype=torch.uint8)),
        (torch.empty(2, 64, 580, dtype=BF16)[..., :576], torch.empty(9, 576, dtype=BF16)),
        (torch.empty(2, 64, 576, dtype=BF16), torch.empty(9, 577, dtype=BF16)[:, 1:]),
    ],
    ids=["none", "heads", "fp32", "fp8 rows", "stride", "begin"],
)
def test_what_is_tritons(q: torch.Tensor, rows: torch.Tensor) -> None:
    assert not mla_decode.serves(q, rows, 512)


def test_without_a_gpu_all_is_tritons() -> None:
    if torch.cuda.is_available():
        pytest.skip("with a GPU, kernels are compiled: test_gpu.py")
    batch, num_slots = make_batch(((20, 1), (3, 1)), 16)
    make = Tensors(torch.float32)
    q, rows = make.normal(2, 2, 24), make.normal(num_slots, 24)
    plan = mla_decode.mla_attention.plan(batch, 100)
    found = mla_decode.mla_attention.run(plan, q, rows, None, 0.2, 16)
    assert torch.equal(found, triton_ops.mla_attention.run(replace(plan), q, rows, None, 0.2, 16))
