"""Products of a few rows with a weight that is not quantised, in CUDA C++ (``csrc/linear_few.cu``); all others are the
vendor's library's.

With one or two tokens a step nothing is reused: the time is that of reading the weights, and what is between. The
library splits a sum over blocks and adds it up in a second launch, and its kernels begin when those before have ended;
here all of a sum is in one block, and the weights are on their way before that."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from glm5ray.kernels import triton_ops
from glm5ray.kernels.cuda.compiler import CSRC, CompileError, compile_cubin
from glm5ray.kernels.cuda.driver import DriverError, Module, address, launch
from glm5ray.kernels.triton.device import capability
from glm5ray.kernels.triton.router import choose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from glm5ray.kernels.interface import Nvfp4Weight, RouterSettings

log = logging.getLogger(__name__)

MAX_TOKENS = {"bf16": 2, "fp32": 4}
"""By the weight's type: from there on adding up over threads takes longer than the library's matrix units (measured,
docs/experiments/0015-products-of-few-rows.md)."""
MAX_OUTPUTS = 65_536
"""For more (the vocabulary) the library reads as fast, and begins once."""
THREADS = 256
CAPABILITIES = (90, 120)
ROWS = {1: 8, 2: 6, 3: 4, 4: 4, 6: 2, 8: 2}
"""Chunks of 16 bytes that a thread reads of a row -> rows of a block: 8 to 16 reads are in flight."""


class Shape(NamedTuple):
    """How a product is compiled."""

    weight: str
    """``bf16`` or ``fp32``, the type of the result, too; x is bf16."""
    tokens: int
    chunks: int

    @property
    def rows(self) -> int:
        return ROWS[self.chunks]

    @property
    def name(self) -> str:
        return f"linear_{self.weight}_t{self.tokens}_c{self.chunks}"

    @property
    def line(self) -> str:
        kind = {"bf16": "u16", "fp32": "float"}[self.weight]
        return f"LINEAR({self.name.removeprefix('linear_')}, {kind}, {kind}, {self.tokens}, {self.chunks}, {self.rows})"


def shapes() -> Iterator[Shape]:
    """All that are compiled: GLM-5's widths and what tensor parallelism leaves of them; of the router its own."""
    for tokens in range(1, MAX_TOKENS["bf16"] + 1):
        yield from (Shape("bf16", tokens, chunks) for chunks in ROWS)
    yield from (Shape("fp32", tokens, 6) for tokens in range(1, MAX_TOKENS["fp32"] + 1))


def shape_for(x_TX: Tensor, weight_OX: Tensor) -> Shape | None:
    """``None``: the library's turn."""
    tokens, width = x_TX.shape
    kind = {torch.bfloat16: "bf16", torch.float32: "fp32"}.get(weight_OX.dtype)
    if kind is None or not 0 < tokens <= MAX_TOKENS[kind] or x_TX.dtype != torch.bfloat16:
        return None
    chunks, rest = divmod(width * weight_OX.element_size(), 16 * THREADS)
    if rest or chunks not in ROWS or (kind == "fp32" and chunks != 6) or len(weight_OX) > MAX_OUTPUTS:
        return None
    is_aligned = x_TX.stride(0) % 8 == 0 and x_TX.data_ptr() % 16 == 0 and weight_OX.data_ptr() % 16 == 0
    return Shape(kind, tokens, chunks) if is_aligned and x_TX.stride(1) == 1 and weight_OX.is_contiguous() else None


def source() -> str:
    """All shapes, as one text."""
    return "\n".join([(CSRC / "linear_few.cu").read_text("utf-8"), *(shape.line for shape in shapes()), ""])


class Kernels:
    """The compiled kernels on one device."""

    def __init__(self, device: torch.device, arch: int) -> None:
        module = Module(compile_cubin(source(), arch), device)
        self._kernels = {shape: module.kernel(shape.name) for shape in shapes()}

    def run(self, shape: Shape, x_TX: Tensor, weight_OX: Tensor) -> Tensor:
        """[T, O], of the weight's type."""
        outputs = len(weight_OX)
        out_TO = torch.empty(len(x_TX), outputs, dtype=weight_OX.dtype, device=x_TX.device)
        pointers = map(address, (x_TX, weight_OX, out_TO))
        launch(
            self._kernels[shape],
            (-(-outputs // shape.rows), 1),
            THREADS,
            (*pointers, ctypes.c_int(outputs), ctypes.c_longlong(x_TX.stride(0))),
            early=True,
        )
        return out_TO


@cache
def kernels_on(device: torch.device, arch: int) -> Kernels | None:
    """``None``, and a warning, if they cannot be compiled for this device or loaded."""
    if arch not in CAPABILITIES:
        return None
    try:
        return Kernels(device, arch)
    except (CompileError, DriverError) as error:  # an older driver may not know the compiler's machine code
        log.warning("CUDA C++ products of few rows are not used, all are the library's: %s", error)
        return None


def kernels_for(x: Tensor) -> Kernels | None:
    """Those of x's device; ``None``, too, if that is no GPU."""
    return kernels_on(x.device, capability(x)) if x.is_cuda else None


def load(_: str) -> None:
    """Compiles the kernels for the current device, seconds the first time on a machine."""
    device = torch.device("cuda", torch.cuda.current_device())
    kernels_on(device, capability(torch.empty(0, device=device)))


def linear(x_TX: Tensor, weight_OX: Tensor | Nvfp4Weight) -> Tensor:
    """:class:`glm5ray.kernels.interface.Linear`"""
    if isinstance(weight_OX, torch.Tensor) and x_TX.dtype == weight_OX.dtype:
        shape = shape_for(x_TX, weight_OX)
        kernels = kernels_for(x_TX) if shape else None
        if kernels is not None and shape is not None:
            return kernels.run(shape, x_TX, weight_OX)
    return triton_ops.linear(x_TX, weight_OX)


def route(x_TM: Tensor, gate_EM: Tensor, bias_E: Tensor, settings: RouterSettings) -> tuple[Tensor, Tensor]:
    """:class:`glm5ray.kernels.interface.Route`"""
    shape = shape_for(x_TM, gate_EM)
    kernels = kernels_for(x_TM) if shape else None
    if kernels is None or shape is None:
        return triton_ops.route(x_TM, gate_EM, bias_E, settings)
    return choose(kernels.run(shape, x_TM, gate_EM)[None], bias_E, settings)
