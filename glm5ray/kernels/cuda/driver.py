"""Loading machine code and launching its kernels, through the CUDA driver's own interface."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@cache
def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class DriverError(RuntimeError):
    """The driver refused a call; names the call."""


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_libcuda(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _libcuda().cuGetErrorString(status, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'?').decode()}")


class Module:
    """Kernels of one cubin on one device. Never unloaded: captured graphs may hold its kernels."""

    def __init__(self, cubin: bytes, device: torch.device) -> None:
        self._handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # the device's context is there, and this thread's
            _call("cuModuleLoadData", ctypes.byref(self._handle), cubin)

    def kernel(self, name: str, dynamic_shared_bytes: int = 0) -> ctypes.c_void_p:
        """A handle; launches may give it as much shared memory."""
        function = ctypes.c_void_p()
        _call("cuModuleGetFunction", ctypes.byref(function), self._handle, name.encode())
        if dynamic_shared_bytes:
            _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_BYTES, dynamic_shared_bytes)
        return function


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_EARLY = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)


def launch(
    kernel: ctypes.c_void_p,
    grid: tuple[int, int],
    threads: int,
    arguments: Sequence[Any],
    *,
    shared_bytes: int = 0,
    early: bool = False,
) -> None:
    """On torch's current stream; arguments are ``ctypes`` objects, structures included. early: it may start before the
    kernel before it ends, for whose results it waits itself (``griddepcontrol``)."""
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    config = _Config(
        grid=(*grid, 1),
        block=(threads, 1, 1),
        shared_bytes=shared_bytes,
        stream=torch.cuda.current_stream().cuda_stream,
        attributes=ctypes.pointer(_EARLY),
        num_attributes=int(early),
    )
    _call("cuLaunchKernelEx", ctypes.byref(config), kernel, pointers, None)


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
