"""Attention of GLM-5's 64 heads over BF16 rows in CUDA C++ (``csrc/mla_decode.cu``), for decodes on sm_90; all else is
Triton's.

Triton's products of 64 rows over eight warps are computed by both warpgroups alike
(docs/experiments/0006-attention-kernels.md); here the warps share them out."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import TYPE_CHECKING

import torch

from glm5ray.kernels.cuda.compiler import CSRC, CompileError, compile_cubin
from glm5ray.kernels.cuda.driver import DriverError, Module, address, launch
from glm5ray.kernels.triton.device import capability, num_processors
from glm5ray.kernels.triton.mla import LOG2_E, MlaAttention, count_parts, join_parts

if TYPE_CHECKING:
    from torch import Tensor

    from glm5ray.kernels.triton.mla import AttentionPlan

log = logging.getLogger(__name__)

HEADS, LATENT, ROPE = 64, 512, 64
POSITIONS, THREADS = 64, 256
SHARED_BYTES = 2 * HEADS * (LATENT + ROPE) + 2 * 2 * POSITIONS * (LATENT + ROPE) + 2 * HEADS * POSITIONS + 3 * 4 * HEADS
"""Queries, two tiles of rows, weights; tops and what sums shrink by. More than a block has on sm_120."""
CAPABILITIES = (90,)
MAX_TOKENS = 65_535
"""Blocks of a grid's second dimension."""


class _Batch(ctypes.Structure):
    _fields_ = [
        ("positions", ctypes.c_void_p),
        ("slice", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("selected", ctypes.c_void_p),
        ("table_stride", ctypes.c_int),
        ("selected_stride", ctypes.c_int),
        ("most_selected", ctypes.c_int),
        ("page_size", ctypes.c_int),
    ]


class _Query(ctypes.Structure):
    _fields_ = [
        ("q", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("token_stride", ctypes.c_int),
        ("head_stride", ctypes.c_int),
        ("row_stride", ctypes.c_longlong),
        ("parts", ctypes.c_int),
        ("scale_log2", ctypes.c_float),
    ]


def source() -> str:
    return (CSRC / "mla_decode.cu").read_text("utf-8")


class Kernel:
    """The compiled kernel on one device."""

    def __init__(self, device: torch.device, arch: int) -> None:
        self._kernel = Module(compile_cubin(source(), arch), device).kernel("mla_decode", SHARED_BYTES)

    def run(
        self, plan: AttentionPlan, q_THL: Tensor, rows_NL: Tensor, selected_TK: Tensor | None, scale: float
    ) -> Tensor:
        """[T, H, C]"""
        batch, tokens = plan.batch, len(q_THL)
        o_THC = torch.empty(tokens, HEADS, LATENT, dtype=q_THL.dtype, device=q_THL.device)
        longest = batch.max_visible if selected_TK is None else min(batch.max_visible, selected_TK.shape[1])
        parts = count_parts(tokens, longest, POSITIONS, num_processors(q_THL))
        partial, lse = None, None
        if parts > 1:
            partial = torch.empty(tokens, parts, HEADS, LATENT, dtype=torch.float32, device=q_THL.device)
            lse = torch.empty(tokens, parts, HEADS, dtype=torch.float32, device=q_THL.device)
        given = _Batch(*map(address, (batch.positions_T, batch.slice_T, batch.page_table_SP, selected_TK)))
        given.table_stride, given.page_size = batch.page_table_SP.stride(0), batch.page_size
        if selected_TK is not None:
            given.selected_stride, given.most_selected = selected_TK.stride(0), selected_TK.shape[1]
        query = _Query(*map(address, (q_THL, rows_NL, o_THC, partial, lse)))
        query.token_stride, query.head_stride, query.row_stride = *q_THL.stride()[:2], rows_NL.stride(0)
        query.parts, query.scale_log2 = parts, scale * LOG2_E
        launch(self._kernel, (parts, tokens), THREADS, (given, query), shared_bytes=SHARED_BYTES)
        if partial is not None and lse is not None:
            join_parts(partial, lse, o_THC)
        return o_THC


def serves(q_THL: Tensor, rows_NL: Tensor, value_dim: int) -> bool:
    """Whether the kernel takes these: GLM-5's sizes, BF16, rows at multiples of 16 bytes."""
    aligned = all(x.data_ptr() % 16 == 0 for x in (q_THL, rows_NL)) and all(
        stride % 8 == 0 for stride in (*q_THL.stride()[:2], rows_NL.stride(0))
    )
    is_size = q_THL.shape[1:] == (HEADS, LATENT + ROPE) and value_dim == LATENT
    types = (q_THL.dtype, rows_NL.dtype)
    return is_size and aligned and types == (torch.bfloat16,) * 2 and 0 < len(q_THL) <= MAX_TOKENS


@cache
def kernel_on(device: torch.device, arch: int) -> Kernel | None:
    """``None``, and a warning, if it cannot be compiled for this device or loaded."""
    if arch not in CAPABILITIES:
        log.warning("CUDA C++ attention is for sm_90; on sm_%d all is Triton's", arch)
        return None
    try:
        return Kernel(device, arch)
    except (CompileError, DriverError) as error:
        log.warning("CUDA C++ attention is not used, all is Triton's: %s", error)
        return None


class CudaMlaAttention(MlaAttention):
    """:class:`glm5ray.kernels.interface.MlaAttention`"""

    def run(
        self,
        plan: AttentionPlan,
        q_THL: Tensor,
        rows_NL: Tensor,
        selected_TK: Tensor | None,
        scale: float,
        value_dim: int,
    ) -> Tensor:
        is_decode = max(plan.batch.num_tokens, default=0) == 1
        if q_THL.is_cuda and is_decode and serves(q_THL, rows_NL, value_dim):
            kernel = kernel_on(q_THL.device, capability(q_THL))
            if kernel is not None:
                return kernel.run(plan, q_THL, rows_NL, selected_TK, scale)
        return super().run(plan, q_THL, rows_NL, selected_TK, scale, value_dim)


mla_attention = CudaMlaAttention()


def load(_: str) -> None:
    """Compiles the kernel for the current device, if there is one."""
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        kernel_on(device, capability(torch.empty(0, device=device)))
