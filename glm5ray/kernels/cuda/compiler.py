"""CUDA C++ to machine code, at load: by NVRTC, which comes with torch, or else by ``nvcc``; kept on disk.

The sources (``glm5ray/kernels/csrc``) include no headers, so that NVRTC needs nothing else installed."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

CSRC = Path(__file__).parents[1] / "csrc"
NVCC_SECONDS = 300


class CompileError(RuntimeError):
    """No compiler is there, or it refused the source. Says which, and what would help."""


def cache_folder() -> Path:
    """``$GLM5RAY_CACHE_DIR``, else ``glm5ray`` in the user's folder for caches."""
    named = os.environ.get("GLM5RAY_CACHE_DIR")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "glm5ray"


def compile_cubin(source: str, capability: int) -> bytes:
    """Machine code for one compute capability (90, 120); needs no GPU. From the cache, if the same text was compiled
    before. Raises :class:`CompileError`.

    Processes that start together may each compile it: seconds of each, and whoever is last replaces the same file."""
    key = hashlib.sha256(f"{capability}\n{source}".encode()).hexdigest()[:32]
    path = cache_folder() / f"sm_{capability}-{key}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    begin = time.monotonic()
    nvrtc = _load_nvrtc()
    code = _compile_by_nvcc(source, capability) if nvrtc is None else _compile_by_nvrtc(nvrtc, source, capability)
    by = "nvcc" if nvrtc is None else "nvrtc"
    log.info("compiled %d bytes for sm_%d by %s in %.1f s", len(code), capability, by, time.monotonic() - begin)
    _keep(path, code)
    return code


def _keep(path: Path, code: bytes) -> None:
    """Whole or not at all; a folder that cannot be written costs the next start a compilation."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        Path(file.name).replace(path)
    except OSError as error:
        log.warning("the compiled kernels were not kept in %s: %s", path.parent, error)


def _load_nvrtc() -> ctypes.CDLL | None:
    major = (torch.version.cuda or "13").partition(".")[0]
    names = [f"libnvrtc.so.{major}", "libnvrtc.so"]
    beside_torch = Path(torch.__file__).parents[1] / "nvidia"
    folders = [beside_torch / f"cu{major}" / "lib", beside_torch / "cuda_nvrtc" / "lib"]
    folders.append(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64")
    for path in (*(folder / name for folder in folders for name in names), *names):
        if not isinstance(path, Path) or path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError:
                continue
    return None


def _compile_by_nvrtc(nvrtc: ctypes.CDLL, source: str, capability: int) -> bytes:
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(name: str, *arguments: Any) -> None:
        status = getattr(nvrtc, name)(*arguments)
        if status:
            raise CompileError(f"{name}: {nvrtc.nvrtcGetErrorString(status).decode()}")

    def text(what: str) -> bytes:
        size = ctypes.c_size_t()
        call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    program = ctypes.c_void_p()
    call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"glm5ray.cu", 0, None, None)
    try:
        options = [f"--gpu-architecture=sm_{capability}".encode(), b"--std=c++17"]
        try:
            call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
        except CompileError as error:
            raise CompileError(f"{error}: {text('ProgramLog').decode(errors='replace')[:2000]}") from None
        return text("CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def find_nvcc() -> str | None:
    """On the path, in ``$CUDA_HOME``, or as a package beside torch."""
    packaged = sorted((Path(torch.__file__).parents[1] / "nvidia").glob("cu*/bin/nvcc"))
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    candidates = [shutil.which("nvcc"), str(home), *map(str, packaged)]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def _compile_by_nvcc(source: str, capability: int) -> bytes:
    nvcc = find_nvcc()
    if nvcc is None:
        raise CompileError("neither libnvrtc (it comes with torch for CUDA) nor nvcc was found; CUDA_HOME may name it")
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "glm5ray.cu", Path(folder) / "glm5ray.cubin"
        file.write_text(source, "utf-8")
        command = [nvcc, f"-arch=sm_{capability}", "-std=c++17", "-cubin", "-o", str(out), str(file)]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=NVCC_SECONDS)
        except subprocess.TimeoutExpired:
            raise CompileError(f"{nvcc} took more than {NVCC_SECONDS} s") from None
        if done.returncode:
            raise CompileError(f"{nvcc} refused the source: {done.stderr[:2000]}")
        return out.read_bytes()
