"""The CUDA C++ experts: compiled for each device on a machine without one, and the choice of what serves a batch. On a
GPU, against the reference; ``scripts/check_experts_cuda.py`` does that at GLM-5's sizes."""

from __future__ import annotations

import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton

from glm5ray.kernels import reference
from glm5ray.kernels.cuda import compiler
from glm5ray.kernels.cuda import experts_nvfp4 as cuda
from glm5ray.kernels.cuda.compiler import CompileError, compile_cubin
from glm5ray.kernels.cuda.experts_nvfp4 import MAX_SORTED_EXPERTS, TABLE, Shape
from glm5ray.kernels.nvfp4_fragments import pack_experts
from glm5ray.kernels.triton.variant import SHARED_BYTES
from tests.kernels.nvfp4_experts import make_nvfp4_experts

needs_nvcc = pytest.mark.skipif(compiler.find_nvcc() is None, reason="no nvcc: not on the path, CUDA_HOME or a package")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
RESERVED = {90: 1024, 120: 1024}
"""Bytes of a block's shared memory that the driver keeps."""
SM_SHARED_BYTES = {90: 233_472, 120: 102_400}
REGISTERS = 65_536
TINY = 'extern "C" __global__ void nothing() {}\n'


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GLM5RAY_CACHE_DIR", str(tmp_path))
    return tmp_path


def dump(cubin: bytes, what: str, folder: Path) -> str:
    file = folder / "dumped"
    file.write_bytes(cubin)
    return subprocess.run([CUOBJDUMP, what, file], check=True, capture_output=True, text=True, timeout=60).stdout


def check_shapes(shapes: list[Shape], capability: int, folder: Path) -> None:
    cubin = compile_cubin(cuda.source(tuple(shapes)), capability)
    usage = re.findall(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", dump(cubin, "--dump-resource-usage", folder)
    )
    by_name = {name: tuple(map(int, numbers)) for name, *numbers in usage}
    assert {"combine", "sort_rows"} < set(by_name)
    sass = loops(dump(cubin, "--dump-sass", folder))
    for shape in shapes:
        for kernel in (f"gate_up_{shape.name}", f"down_{shape.name}"):
            registers, stack, static = by_name[kernel]
            assert stack == 0, f"{kernel} spills {stack} bytes"
            block = shape.shared_bytes(256) + static
            assert block <= SHARED_BYTES[capability], kernel
            assert shape.BLOCKS * block <= SM_SHARED_BYTES[capability], kernel
            assert shape.BLOCKS * shape.WARPS * 32 * (-(-registers // 8) * 8) <= REGISTERS, kernel
            check_loops(sass[kernel], shape)


def loops(sass: str) -> dict[str, list[list[str]]]:
    """Of each function the instructions of its loops that multiply and contain no other such loop."""
    found: dict[str, list[list[str]]] = {}
    for name, text in re.findall(r"Function : (\w+)\n(.*?)(?=Function :|\Z)", sass, re.S):
        code = [(int(at, 16), op) for at, op in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)]
        index = {at: i for i, (at, _) in enumerate(code)}
        spans = []
        for i, (at, op) in enumerate(code):
            target = re.search(r"BRA\S* .*?0x([0-9a-f]+)", op)
            if target and int(target[1], 16) <= at and int(target[1], 16) in index:
                spans.append((index[int(target[1], 16)], i))
        bodies = [(a, b) for a, b in spans if any("HMMA" in op for _, op in code[a : b + 1])]
        inner = [s for s in bodies if not any(s != o and s[0] <= o[0] and o[1] <= s[1] for o in bodies)]
        found[name] = [[op for _, op in code[a : b + 1]] for a, b in inner]
    return found


def check_loops(bodies: list[list[str]], shape: Shape) -> None:
    """The walls of docs/adr/0016: instructions, and those of the integer units, for a weight."""
    weights = shape.ROW_TILES * shape.DEPTH * 32  # of a lane, in one turn
    columns = [sum("HMMA" in op for op in body) / (weights // 8) for body in bodies]
    assert set(columns) == set(range(1, shape.MAX_COLUMNS + 1)), "a loop for each count of token columns"
    for column in set(columns):
        body = min((body for body, c in zip(bodies, columns, strict=True) if c == column), key=len)
        assert not any("LDL" in op or "STL" in op for op in body)
        # that finds the next unit is in the loop too, and runs once in tens of turns; mma runs on units of its own
        others = len(body) - weights // 8 * column - 100
        assert others <= 2.9 * weights, f"{others / weights} instructions for a weight"
        logical = sum(op.split(".")[0].split()[-1] in ("LOP3", "SHF", "PRMT") for op in body) - 12
        assert logical <= 1.1 * weights, f"{logical / weights} logical operations for a weight"


@needs_nvcc
@pytest.mark.parametrize("capability", sorted(TABLE))
def test_every_shape_compiles_and_fits(capability: int, own_cache: Path) -> None:
    check_shapes([shape for _, shape in TABLE[capability]], capability, own_cache)


@needs_nvcc
def test_machine_code_is_kept(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile_cubin(TINY, 90)
    assert [file.suffix for file in own_cache.iterdir()] == [".cubin"]
    monkeypatch.setattr(compiler, "find_nvcc", lambda: None)
    monkeypatch.setattr(compiler, "_load_nvrtc", lambda: None)
    assert compile_cubin(TINY, 90) == code
    with pytest.raises(CompileError, match=r"neither libnvrtc .* nor nvcc was found; CUDA_HOME may name it"):
        compile_cubin(TINY, 120)


@needs_nvcc
def test_a_folder_that_cannot_be_written_is_no_error(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (own_cache / "file").touch()
    monkeypatch.setenv("GLM5RAY_CACHE_DIR", str(own_cache / "file"))
    assert compile_cubin(TINY, 90)
    assert "were not kept" in caplog.text


@needs_nvcc
def test_what_the_compiler_says_is_in_the_error() -> None:
    with pytest.raises(CompileError, match=r"(?s)refused the source.*nonsense"):
        compile_cubin("nonsense", 90)


def test_without_kernels_all_is_tritons(caplog: pytest.LogCaptureFixture) -> None:
    assert cuda.kernels_on(torch.device("cpu"), 89) is None
    assert "no shapes for sm_89" in caplog.text


@pytest.mark.parametrize("capability", sorted(TABLE))
def test_few_tokens_are_cudas_and_sizes_that_do_not_come_out_even_tritons(capability: int) -> None:
    table = TABLE[capability]
    assert all(a < b for (a, _), (b, _) in pairwise(table))
    real, small = pack_experts(make_nvfp4_experts(1, 512, 256)), pack_experts(make_nvfp4_experts(1, 192, 64))
    assert [cuda.shape_for(most, capability, real) for most, _ in table] == [shape for _, shape in table]
    assert cuda.shape_for(table[-1][0] + 1, capability, real) is None
    assert cuda.shape_for(1, capability, small) is None


def test_counts_of_the_sort_fit_into_shared_memory() -> None:
    assert 33 * 4 * (MAX_SORTED_EXPERTS + 1) + 4 * 32 <= 48 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 5, 30, 200])
def test_against_the_reference(tokens: int) -> None:
    plain = make_nvfp4_experts(6, 512, 256, first_expert=1)
    packed = pack_experts(
        type(plain)(**{f: v.cuda() if isinstance(v := getattr(plain, f), torch.Tensor) else v for f in plain.__slots__})
    )
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, 512, generator=generator).bfloat16()
    ids = torch.rand(tokens, 9, generator=generator).argsort(1)[:, :4] - 1
    weights = torch.rand(tokens, 4, generator=generator)
    actual, again = (cuda.experts.run(x.cuda(), ids.cuda(), weights.cuda(), packed) for _ in range(2))
    expected = reference.experts.run(x.float(), ids, weights, plain)
    assert torch.equal(actual, again)
    torch.testing.assert_close(actual.float().cpu(), expected, rtol=2**-6, atol=2**-7 * float(expected.abs().max()))
