"""Products of few rows in CUDA C++: compiled for each device on a machine without one, and the choice of what serves
which. On a GPU against fp32 products; ``scripts/bench_linear.py`` does that for GLM-5's weights."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton

from glm5ray.kernels import cuda_ops, triton_ops
from glm5ray.kernels.cuda import compiler, linear_few
from glm5ray.kernels.cuda.compiler import compile_cubin
from glm5ray.kernels.cuda.linear_few import CAPABILITIES, MAX_OUTPUTS, MAX_TOKENS, THREADS, Shape, shape_for
from glm5ray.kernels.interface import RouterSettings
from glm5ray.kernels.reference import route

needs_nvcc = pytest.mark.skipif(compiler.find_nvcc() is None, reason="no nvcc: not on the path, CUDA_HOME or a package")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
BF16 = torch.bfloat16


def dump(cubin: bytes, what: str, folder: Path) -> str:
    file = folder / "dumped"
    file.write_bytes(cubin)
    return subprocess.run([CUOBJDUMP, what, file], check=True, capture_output=True, text=True, timeout=60).stdout


@needs_nvcc
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_shape_compiles_and_reads_ahead(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM5RAY_CACHE_DIR", str(tmp_path))
    cubin = compile_cubin(linear_few.source(), capability)
    usage = re.findall(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", dump(cubin, "--dump-resource-usage", tmp_path)
    )
    assert {name for name, *_ in usage} == {shape.name for shape in linear_few.shapes()}
    for name, registers, stack, _ in usage:
        assert int(stack) == 0, f"{name} spills"
        assert 2 * THREADS * int(registers) <= 65_536, f"{name}: two blocks do not fit"
    code = dict(re.findall(r"Function : (\w+)\n(.*?)(?=Function :|\Z)", dump(cubin, "--dump-sass", tmp_path), re.S))
    for shape in linear_few.shapes():
        before, _, _ = code[shape.name].partition("ACQBULK")  # griddepcontrol.wait
        loads = re.findall(r"LDG\.E\.NA\S*128", before)
        assert len(loads) == shape.rows * shape.chunks, f"{shape.name}: weights are not read before the wait"


def test_widths_of_glm5_and_of_its_parts() -> None:
    weights = {(2752, 6144): 3, (16384, 2048): 1, (6144, 16384): 8, (6144, 12288): 6, (6144, 8192): 4, (6144, 4096): 2}
    for (outputs, width), chunks in weights.items():
        found = shape_for(torch.empty(2, width, dtype=BF16), torch.empty(1, width, dtype=BF16))
        assert found == Shape("bf16", 2, chunks), (outputs, width)
    assert shape_for(torch.empty(1, 6144, dtype=BF16), torch.empty(256, 6144)) == Shape("fp32", 1, 6)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.empty(0, 2048, dtype=BF16), torch.empty(3, 2048, dtype=BF16)),
        (torch.empty(MAX_TOKENS["bf16"] + 1, 2048, dtype=BF16), torch.empty(3, 2048, dtype=BF16)),
        (torch.empty(1, 2048), torch.empty(3, 2048)),
        (torch.empty(1, 2048, dtype=BF16), torch.empty(MAX_OUTPUTS + 1, 2048, dtype=BF16, device="meta")),
        (torch.empty(1, 2000, dtype=BF16), torch.empty(3, 2000, dtype=BF16)),
        (torch.empty(1, 10240, dtype=BF16), torch.empty(3, 10240, dtype=BF16)),
        (torch.empty(2048, 2, dtype=BF16).T, torch.empty(3, 2048, dtype=BF16)),
        (torch.empty(2, 2052, dtype=BF16)[:, :2048], torch.empty(3, 2048, dtype=BF16)),
        (torch.empty(1, 2056, dtype=BF16)[:, 1:2049], torch.empty(3, 2048, dtype=BF16)),
        (torch.empty(1, 2048, dtype=BF16), torch.empty(3, 4096, dtype=BF16)[:, :2048]),
        (torch.empty(1, 1024, dtype=BF16), torch.empty(3, 1024)),
    ],
    ids=[
        "none",
        "many",
        "fp32",
        "vocabulary",
        "no whole chunks",
        "no such width",
        "columns",
        "stride",
        "begin",
        "rows",
        "fp32 router",
    ],
)
def test_what_is_the_librarys(x: torch.Tensor, weight: torch.Tensor) -> None:
    assert shape_for(x, weight) is None


def test_what_is_not_served_is_tritons() -> None:
    """Exactly: there is no GPU here."""
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    assert torch.equal(cuda_ops.linear(x, weight), triton_ops.linear(x, weight))
    if torch.cuda.is_available():
        return
    settings = RouterSettings(
        num_experts_per_tok=2, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0
    )
    gate, bias = torch.randn(6, 64), torch.randn(6)
    ids, weights = cuda_ops.route(x, gate, bias, settings)
    expected_ids, expected = route(x, gate, bias, settings)
    assert torch.equal(ids.sort(1).values, expected_ids.sort(1).values)
    torch.testing.assert_close(weights.sort(1).values, expected.sort(1).values)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", range(1, MAX_TOKENS["bf16"] + 1))
@pytest.mark.parametrize(
    ("outputs", "width"), [(7, 2048), (2752, 6144), (33, 4096), (100, 8192), (50, 12288), (9, 16384)]
)
def test_against_fp32_products(outputs: int, width: int, tokens: int) -> None:
    generator = torch.Generator("cuda").manual_seed(outputs)
    weight = torch.empty(outputs, width, device="cuda").normal_(0.0, width**-0.5, generator=generator).bfloat16()
    x = torch.empty(tokens, width + 8, device="cuda").normal_(generator=generator).bfloat16()[:, 8:]
    found = cuda_ops.linear(x, weight)
    torch.testing.assert_close(found.float(), x.float() @ weight.float().T, rtol=2**-7, atol=1e-3)
    assert torch.equal(found, cuda_ops.linear(x, weight)), "another result in a second run"
    alone = torch.cat([cuda_ops.linear(x[t : t + 1], weight) for t in range(tokens)])
    assert torch.equal(found, alone), "a row alone has another result"
