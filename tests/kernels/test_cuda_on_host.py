"""The CUDA C++ kernels against the reference without a GPU: every lane is run on the CPU (``host_cuda.h``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("triton")

from glm5ray.kernels import reference
from glm5ray.kernels.cuda import experts_nvfp4 as experts_module
from glm5ray.kernels.cuda import linear_few
from glm5ray.kernels.cuda.compiler import CSRC
from glm5ray.kernels.cuda.experts_nvfp4 import Shape
from glm5ray.kernels.nvfp4_fragments import pack_experts
from tests.kernels import host_cuda
from tests.kernels.host_cuda import HostKernels
from tests.kernels.nvfp4_experts import make_nvfp4_experts

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++")

SHAPES = (Shape(1, 1, 4, 2, 2, 1), Shape(2, 1, 2, 3, 3, 2), Shape(4, 3, 2, 3, 2, 1), Shape(4, 5, 2, 4, 2, 1, 0))
"""Of each kind that the table has, with fewer warps."""


@pytest.fixture(scope="module")
def host_experts(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(experts_module.source(SHAPES), tmp_path_factory.mktemp("experts"))


@pytest.fixture
def kernels(host_experts: HostKernels, monkeypatch: pytest.MonkeyPatch) -> experts_module.Kernels:
    """The real launches, of kernels by name."""
    monkeypatch.setattr(experts_module, "launch", host_experts.launch)
    made: Any = object.__new__(experts_module.Kernels)
    made._combine, made._sort = "combine", "sort_rows"
    made._pairs = {shape: (f"gate_up_{shape.name}", f"down_{shape.name}") for shape in SHAPES}
    return made


@pytest.mark.parametrize("tokens", [1, 4, 5, 21])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("routing", ["random", "one expert"])
def test_experts(kernels: experts_module.Kernels, shape: Shape, tokens: int, routing: str) -> None:
    """Experts 1 to 4 of a model of seven; up to four tokens rows are not sorted."""
    plain = make_nvfp4_experts(4, 512, 256, first_expert=1)
    packed = pack_experts(plain)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 512, generator=generator).bfloat16()
    ids = torch.rand(tokens, 7, generator=generator).argsort(1)[:, :3]
    if routing == "one expert":
        ids[:, 0], ids[:, 1:] = 2, -1
    weights = torch.rand(tokens, 3, generator=generator)
    out = torch.full_like(x, torch.nan)
    kernels.run(x, ids, weights, packed, shape, out)
    expected = reference.experts.run(x.float(), ids, weights, plain)
    torch.testing.assert_close(out.float(), expected, rtol=2**-6, atol=2**-7 * float(expected.abs().max()))
    again = torch.empty_like(x)
    kernels.run(x, ids, weights, packed, shape, again)
    assert torch.equal(out, again), "another order of lanes gave other bits"


@pytest.mark.parametrize(("tokens", "num_experts"), [(5, 3), (300, 64)])
def test_rows_are_sorted_by_expert_and_stably(kernels: experts_module.Kernels, tokens: int, num_experts: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, num_experts + 4, (tokens, 4), generator=generator)
    rows = kernels.sort_rows(ids, 2, num_experts)
    local = (ids - 2).flatten()
    local[(local < 0) | (local >= num_experts)] = num_experts
    order = local.argsort(stable=True)
    assert torch.equal(rows.assignment_X.long(), order)
    assert torch.equal(rows.row_TA.flatten().long(), order.argsort())
    expected = torch.searchsorted(local[order], torch.arange(num_experts + 1))
    assert torch.equal(rows.row_start_E1.long(), expected)


@pytest.fixture(scope="module")
def host_linear(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(linear_few.source(), tmp_path_factory.mktemp("linear"))


@pytest.mark.parametrize("shape", list(linear_few.shapes()), ids=lambda shape: shape.name)
def test_products_of_few_rows(
    host_linear: HostKernels, shape: linear_few.Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of x between others; outputs that are no whole blocks."""
    monkeypatch.setattr(linear_few, "launch", host_linear.launch)
    kernels: Any = object.__new__(linear_few.Kernels)
    kernels._kernels = {shape: shape.name}
    dtype = torch.bfloat16 if shape.weight == "bf16" else torch.float32
    width = shape.chunks * linear_few.THREADS * 16 // dtype.itemsize
    generator = torch.Generator().manual_seed(width)
    weight = torch.empty(2 * shape.rows + 1, width).normal_(0.0, width**-0.5, generator=generator).to(dtype)
    x = torch.randn(shape.tokens, width + 16, generator=generator).bfloat16()[:, 8 : width + 8]
    found = kernels.run(shape, x, weight)
    expected = x.double() @ weight.double().T
    exact = {"rtol": 2**-8, "atol": 1e-5} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found.double(), expected, **exact)
    assert torch.equal(found, kernels.run(shape, x, weight)), "another order of lanes gave other bits"


def test_all_of_the_assembly_is_stood_in_for(tmp_path: Path) -> None:
    """What is left out are functions by name, so a new one without a stand-in does not compile."""
    for file in CSRC.glob("*.cu"):
        source = file.read_text("utf-8")
        left = host_cuda.without_assembly(source)
        assert "asm" not in left
        assert left.count("__global__") == source.count("__global__")
    with pytest.raises(AssertionError, match="strange"):
        HostKernels(
            '__device__ __forceinline__ int strange() { int v; asm("mov %0, 1;" : "=r"(v)); return v; }\n'
            'extern "C" __global__ void kernel(int* out) { *out = strange(); }\n',
            tmp_path,
        )
