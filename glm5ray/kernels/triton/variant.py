"""What a Triton kernel may be compiled as: said ahead, so that a machine without a GPU can compile all of it.

Every module of this folder that has kernels has ``variants() -> Iterator[Variant]``, which names each kernel and each
tile that the module may choose. The gate (``tests/kernels/test_triton_gate.py``) compiles them for each capability
and holds shared memory to what a block has there. A kernel is a ``@triton.jit`` function that is launched; those that
kernels call need no variant of their own.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

if TYPE_CHECKING:
    from collections.abc import Mapping

SHARED_BYTES = {90: 232_448, 120: 101_376}
"""Compute capability -> shared memory that one block can have: H100/H200, and RTX PRO 6000 Blackwell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way in which a kernel may be compiled."""

    name: str
    """Unique in its module: the kernel and the tile."""
    fn: Any
    """The ``@triton.jit`` function."""
    signature: Mapping[str, str]
    """Argument that is not in ``constants`` -> Triton's type: ``*bf16``, ``*u8``, ``*fp8e4nv``, ``*i64``, ``i32``,
    ``fp32`` ..."""
    constants: Mapping[str, Any]
    """The ``tl.constexpr`` arguments, and arguments that are always None."""
    num_warps: int = 4
    num_stages: int = 3
    unaligned: frozenset[str] = field(default_factory=frozenset)
    """Pointers, and integers, not known to be multiples of 16. All others are taken to be, as at a launch with GLM-5's
    sizes: what Triton derives from it (wide and asynchronous copies) decides the use of shared memory."""
    capabilities: tuple[int, ...] = (90, 120)
    """Those on which the module may choose it."""
    is_slow_to_compile: bool = False
    """Compiled by the gate's slow run only; for tiles beside one of the same kernel that is compiled always."""


class Compiled(NamedTuple):
    shared_bytes: int
    registers: int
    """A thread."""
    stack_bytes: int
    """A thread; spilled registers, mostly."""
    ptx: str


def compile_variant(variant: Variant, capability: int) -> Compiled:
    """Compiles ahead of time; needs no GPU. Triton keeps the result on disk, so that a second time is quick.

    Raises what Triton raises if it cannot be compiled, and ``ValueError`` if arguments are missing or unknown."""
    names = list(variant.fn.arg_names)
    given = [*variant.signature, *variant.constants]
    if sorted(given) != sorted(names):
        raise ValueError(f"{variant.name}: the kernel's arguments are {names}, the variant's {given}")
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    aligned = [
        i
        for i, name in enumerate(names)
        if name not in variant.unaligned and (signature[name].startswith("*") or signature[name] in ("i32", "i64"))
    ]
    source = ASTSource(
        fn=variant.fn,
        signature=signature,
        constexprs=dict(variant.constants),
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
    )
    registers, stack_bytes = _resource_usage(compiled.asm["cubin"])
    return Compiled(compiled.metadata.shared, registers, stack_bytes, compiled.asm["ptx"])


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a thread, as ``cuobjdump`` reads them; Triton's package brings it along."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, f"cuobjdump wrote no resource usage: {text!r}"
    return int(found[1]), int(found[2])
