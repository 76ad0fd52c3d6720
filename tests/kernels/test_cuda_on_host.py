"""The CUDA C++ kernels against the reference without a GPU: every lane is run on the CPU (``host_cuda.h``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("triton")

from glm5ray.kernels import reference
from glm5ray.kernels.cuda import experts_nvfp4 as experts_module
from glm5ray.kernels.cuda import linear_few, mla_decode
from glm5ray.kernels.cuda.compiler import CSRC
from glm5ray.kernels.cuda.driver import address
from glm5ray.kernels.cuda.experts_nvfp4 import Shape
from glm5ray.kernels.nvfp4_fragments import pack_experts
from glm5ray.kernels.triton import mla
from tests.kernels import host_cuda
from tests.kernels.host_cuda import HostKernels
from tests.kernels.nvfp4_experts import make_nvfp4_experts
from tests.kernels.shapes import Tensors, make_batch

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ on Linux")

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


@pytest.fixture(scope="module")
def host_mla(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(mla_decode.source(), tmp_path_factory.mktemp("mla"))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("index_topk", [1000, 96])
def test_decode_attention(host_mla: HostKernels, index_topk: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts on both sides of a tile, one token alone, a padded row; slots that no token may see hold NaN."""
    monkeypatch.setattr(mla_decode, "launch", host_mla.launch)
    monkeypatch.setattr(mla_decode, "count_parts", lambda *_: parts)
    joined = []
    monkeypatch.setattr(mla_decode, "join_parts", lambda *tensors: joined.append(tensors))
    batch, num_slots = make_batch(((0, 1), (62, 1), (63, 1), (64, 1), (150, 1)), 16)
    batch = replace(batch, positions_T=torch.cat([batch.positions_T, torch.tensor([-1])]))
    batch = replace(batch, slice_T=torch.cat([batch.slice_T, torch.tensor([0], dtype=torch.int32)]))
    tokens, make = len(batch.positions_T), Tensors(torch.bfloat16)
    rows = make.normal(num_slots, 576 + 8)[:, :576]
    seen = [slots for _, slots in reference._tokens(replace(batch, num_tokens=(1,) * 5))]
    unseen = torch.ones(num_slots, dtype=torch.bool).index_fill(0, torch.cat(seen), False)
    rows[unseen] = torch.nan
    selected = None
    if index_topk == 96:
        selected = torch.full((tokens, index_topk), -1, dtype=torch.int32)
        for t, slots in enumerate(seen):
            chosen = slots[torch.randperm(len(slots), generator=make.generator)][:index_topk]
            selected[t, : len(chosen)] = chosen.int()
    q = make.normal(tokens, 64, 576 + 8)[..., :576]
    assert mla_decode.serves(q, rows, 512)
    kernel: Any = object.__new__(mla_decode.Kernel)
    kernel._kernel = "mla_decode"
    found = kernel.run(mla.AttentionPlan(batch, index_topk), q, rows, selected, 576**-0.5)
    if parts > 1:
        ((partial, lse, out),) = joined
        assert out is found
        share = torch.exp2(lse - lse.amax(1, keepdim=True).clamp(min=-1e30))[..., None]
        found = ((partial * share).sum(1) / share.sum(1).clamp(min=1e-30)).bfloat16()
    for t, slots in enumerate(seen):
        used = slots if selected is None else selected[t][selected[t] >= 0].long()
        weights = (q[t].float() @ rows[used].float().T * 576**-0.5).softmax(-1)
        expected = weights @ rows[used, :512].float()
        torch.testing.assert_close(found[t].float(), expected, rtol=2**-6, atol=2e-2)
    assert not found[-1].any(), "a padded row sees nothing"


def test_sizes_of_attention_are_those_of_the_source(tmp_path: Path) -> None:
    names = ("SHARED_BYTES", "HEADS", "LATENT", "ROPE", "POSITIONS", "THREADS")
    lines = "".join(f"out[{i}] = {name};" for i, name in enumerate(names))
    kernel = f'extern "C" __global__ void sizes(int* out) {{ {lines} }}'
    found = torch.zeros(len(names), dtype=torch.int32)
    HostKernels(f"{mla_decode.source()}\n{kernel}\n", tmp_path).launch("sizes", (1, 1), 1, [address(found)])
    assert found.tolist() == [getattr(mla_decode, name) for name in names]
