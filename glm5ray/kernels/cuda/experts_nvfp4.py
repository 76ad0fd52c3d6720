"""Routed experts in NVFP4 for few tokens, in CUDA C++ (``csrc/experts_nvfp4.cu``); for many, Triton's. Both read the
same packed weights.

Few tokens leave nothing to gain from wide tiles: the weights must come as fast as memory gives them, each decoded once.
A persistent grid does that; its size depends on the device only, and nothing waits for the host, so that a CUDA graph
captured once serves every routing."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from glm5ray.kernels.cuda.compiler import CSRC, CompileError, compile_cubin
from glm5ray.kernels.cuda.driver import DriverError, Module, address, launch
from glm5ray.kernels.interface import Nvfp4ExpertWeights
from glm5ray.kernels.nvfp4_fragments import pack_experts
from glm5ray.kernels.triton import experts_nvfp4 as triton_experts
from glm5ray.kernels.triton.device import capability, num_processors
from glm5ray.kernels.triton.expert_rows import Rows, sort_rows

if TYPE_CHECKING:
    from torch import Tensor

    from glm5ray.kernels.nvfp4_fragments import FragmentExperts

log = logging.getLogger(__name__)

MAX_UNSORTED_TOKENS = 4
"""Up to so many, rows stay in order of assignments: an expert that two of them share is read twice, which costs less
than a launch that sorts."""


MAX_SORTED_EXPERTS = 360
"""The counts of 32 warps for so many fit into 48 KiB."""


class Shape(NamedTuple):
    """How the two products are compiled. A warp's unit of work is ROW_TILES tiles of 16 weight rows and up to
    8 MAX_COLUMNS tokens; its ring has STAGES of DEPTH times 64 columns; BLOCKS of WARPS stand on a processor.

    A processor should have no room for another block: the second product starts while the first one ends, and its
    blocks would crowd onto the processors that have done first."""

    ROW_TILES: int
    MAX_COLUMNS: int
    DEPTH: int
    STAGES: int
    WARPS: int
    BLOCKS: int
    AHEAD: int = 1
    """Whether a warp reads tokens a step before it needs them, for which it has 8 registers for 8 tokens."""

    @property
    def name(self) -> str:
        return "r{}_c{}_d{}_s{}_w{}_b{}_a{}".format(*self)

    @property
    def ring_bytes(self) -> int:
        return self.WARPS * self.STAGES * self.ROW_TILES * self.DEPTH * (512 + 64)

    def shared_bytes(self, entries: int) -> int:
        """Of a block; entries: experts, or assignments if these are not sorted."""
        return self.ring_bytes + 4 * 4 * (entries + 1)


TABLE: dict[int, tuple[tuple[int, Shape], ...]] = {
    90: (
        (1, Shape(1, 1, 4, 4, 8, 2)),
        (128, Shape(2, 1, 2, 3, 12, 2)),
        (576, Shape(4, 3, 2, 3, 12, 1)),
        (896, Shape(4, 4, 2, 4, 8, 1)),
        (1088, Shape(4, 5, 2, 4, 8, 1, 0)),
    ),
    120: (
        (128, Shape(2, 1, 2, 3, 12, 1)),
        (576, Shape(4, 3, 1, 3, 12, 1)),
        (1024, Shape(4, 4, 1, 4, 8, 1)),
    ),
}
"""Capability -> (tokens, what serves up to so many), in order; more are Triton's. On sm_90 as measured best
(docs/experiments/0011), on sm_120 within its shared memory, unmeasured."""


class _Work(ctypes.Structure):
    _fields_ = [
        ("ids", ctypes.c_void_p),
        ("row_start", ctypes.c_void_p),
        ("assignments", ctypes.c_int),
        ("choices", ctypes.c_int),
        ("first_expert", ctypes.c_int),
        ("experts", ctypes.c_int),
    ]


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("words", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("factor", ctypes.c_void_p),
        ("row_tiles", ctypes.c_int),
        ("columns", ctypes.c_int),
    ]


class _GateUp(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("assignment", ctypes.c_void_p), ("hidden", ctypes.c_void_p)]


class _Down(ctypes.Structure):
    _fields_ = [("hidden", ctypes.c_void_p), ("out", ctypes.c_void_p)]


def source(shapes: tuple[Shape, ...]) -> str:
    """The kernels of these shapes, as one text."""
    lines = ["EXPERTS({}, {}, {}, {}, {}, {}, {}, {})".format(shape.name, *shape) for shape in shapes]
    return "\n".join([(CSRC / "experts_nvfp4.cu").read_text("utf-8"), *lines, ""])


class Kernels:
    """The compiled kernels on one device."""

    def __init__(self, shapes: tuple[Shape, ...], device: torch.device, arch: int) -> None:
        self._module = Module(compile_cubin(source(shapes), arch), device)
        self._combine, self._sort = self._module.kernel("combine"), self._module.kernel("sort_rows")
        self._pairs = {}
        for shape in shapes:
            most = shape.shared_bytes(4096)
            limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
            names = f"gate_up_{shape.name}", f"down_{shape.name}"
            self._pairs[shape] = tuple(self._module.kernel(name, min(most, limit - 1024)) for name in names)

    def run(
        self, x_TM: Tensor, ids_TA: Tensor, weights_TA: Tensor, experts: FragmentExperts, shape: Shape, out_TM: Tensor
    ) -> None:
        tokens, choices = ids_TA.shape
        num_experts, M, F = len(experts.down_global), experts.hidden_size, experts.moe_intermediate_size
        x_TM, ids_TA, weights_TA = x_TM.contiguous(), ids_TA.contiguous(), weights_TA.contiguous()
        rows = None
        if tokens > MAX_UNSORTED_TOKENS:
            rows = self.sort_rows(ids_TA, experts.first_expert, num_experts)
        hidden_XF, rows_XM = x_TM.new_empty(ids_TA.numel(), F), x_TM.new_empty(ids_TA.numel(), M)
        row_start = address(rows.row_start_E1 if rows else None)
        work = _Work(address(ids_TA), row_start, ids_TA.numel(), choices, experts.first_expert, num_experts)
        gate_up = _Matrix(*map(address, (experts.gate_up_words, experts.gate_up_scales, experts.gate_up_global)))
        gate_up.row_tiles, gate_up.columns = F // 8, M
        down = _Matrix(*map(address, (experts.down_words, experts.down_scales, experts.down_global)))
        down.row_tiles, down.columns = M // 16, F
        by_row = _GateUp(address(x_TM), address(rows.assignment_X if rows else None), address(hidden_XF))
        grid, threads = (num_processors(x_TM) * shape.BLOCKS, 1), shape.WARPS * 32
        shared_bytes = shape.shared_bytes(num_experts if rows else ids_TA.numel())
        gate_up_kernel, down_kernel = self._pairs[shape]
        launch(
            gate_up_kernel, grid, threads, (work, gate_up, by_row), shared_bytes=shared_bytes, early=rows is not None
        )
        to_rows = _Down(address(hidden_XF), address(rows_XM))
        launch(down_kernel, grid, threads, (work, down, to_rows), shared_bytes=shared_bytes, early=True)
        sizes = map(ctypes.c_int, (M, choices, experts.first_expert, num_experts))
        pointers = map(address, (rows_XM, rows.row_TA if rows else None, weights_TA, ids_TA, out_TM))
        launch(self._combine, (-(-M // (8 * 128)), tokens), 128, (*pointers, *sizes), early=True)

    def sort_rows(self, ids_TA: Tensor, first_expert: int, num_experts: int) -> Rows:
        """As :func:`glm5ray.kernels.triton.expert_rows.sort_rows` without tiles, in one launch; ids are contiguous."""
        if num_experts > MAX_SORTED_EXPERTS:
            return sort_rows(ids_TA, first_expert, num_experts, ())

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=ids_TA.device)

        rows = Rows(new(ids_TA.numel()), new(*ids_TA.shape), new(num_experts + 1), new(0), new(0))
        pointers = map(address, (ids_TA, rows.assignment_X, rows.row_TA, rows.row_start_E1))
        sizes = map(ctypes.c_int, (ids_TA.numel(), first_expert, num_experts))
        launch(self._sort, (1, 1), 1024, (*pointers, *sizes), shared_bytes=33 * 4 * (num_experts + 1))
        return rows


def load(_: str) -> None:
    """Compiles the kernels for the current device, seconds the first time on a machine."""
    device = torch.device("cuda", torch.cuda.current_device())
    kernels_on(device, capability(torch.empty(0, device=device)))


@cache
def kernels_on(device: torch.device, arch: int) -> Kernels | None:
    """``None``, and a warning, if they cannot be compiled for this device or loaded."""
    table = TABLE.get(arch)
    if table is None:
        log.warning("CUDA C++ experts have no shapes for sm_%d; all batches go to Triton's", arch)
        return None
    try:
        return Kernels(tuple(shape for _, shape in table), device, arch)
    except (CompileError, DriverError) as error:  # an older driver may not know the compiler's machine code
        log.warning("CUDA C++ experts are not used, all batches go to Triton's: %s", error)
        return None


def shape_for(tokens: int, arch: int, experts: FragmentExperts) -> Shape | None:
    """``None``: Triton's turn."""
    for most, shape in TABLE.get(arch, ()):
        if tokens <= most:
            return shape if fits(shape, experts) else None
    return None


def fits(shape: Shape, experts: FragmentExperts) -> bool:
    """Whether units and stages come out even: GLM-5's sizes, and what tensor parallelism leaves of them."""
    M, F = experts.hidden_size, experts.moe_intermediate_size
    columns = 64 * shape.DEPTH
    return not (M % columns or F % columns or F // 8 % shape.ROW_TILES or M // 16 % shape.ROW_TILES)


class Nvfp4Experts:
    """:class:`~glm5ray.kernels.interface.Experts` in NVFP4."""

    def pack(self, experts: Nvfp4ExpertWeights) -> FragmentExperts:
        if not isinstance(experts, Nvfp4ExpertWeights):
            raise TypeError(f"cuda's experts are NVFP4; these are {type(experts).__name__}")
        return pack_experts(experts)

    def run(self, x_TM: Tensor, ids_TA: Tensor, weights_TA: Tensor, experts: FragmentExperts) -> Tensor:
        arch = capability(x_TM)
        shape = shape_for(len(x_TM), arch, experts) if x_TM.dtype == torch.bfloat16 else None
        kernels = kernels_on(x_TM.device, arch) if shape else None
        if kernels is None or shape is None or not len(x_TM):
            return triton_experts.run_experts(x_TM, ids_TA, weights_TA, experts, arch=arch)
        out_TM = torch.empty_like(x_TM, memory_format=torch.contiguous_format)
        kernels.run(x_TM, ids_TA, weights_TA, experts, shape, out_TM)
        return out_TM


experts = Nvfp4Experts()
