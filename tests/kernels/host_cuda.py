"""CUDA C++ of :mod:`glm5ray.kernels.cuda` compiled for the CPU (``host_cuda.h``), and launched there as on a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

COMPILER = shutil.which("g++") if sys.platform == "linux" else None
HEADER = Path(__file__).with_name("host_cuda.h")
KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(([^)]*)\)')


class Launch(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("grid_x", "grid_y", "threads", "shared_bytes", "seed")]


def without_assembly(source: str) -> str:
    """Without the functions that are written in it; the header has them under the same names."""
    kept, at = [], 0
    for found in re.finditer(r"(template <[^>]*>\n)?__device__ __forceinline__ [^;{]*?\{", source):
        if found.start() < at:
            continue
        depth, end = 1, found.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(source[end], 0)
            end += 1
        if "asm" in re.findall(r"\w+", source[found.start() : end]):
            kept.append(source[at : found.start()])
            at = end
    kept.append(source[at:])
    return "".join(kept)


class HostKernels:
    """All kernels of a source; ``seed`` decides in which order lanes go on."""

    def __init__(self, source: str, folder: Path, seed: int = 0) -> None:
        assert COMPILER is not None
        self.seed = seed
        text = without_assembly(source)
        text = re.sub(r"typedef [^;]*;\n", "", text)
        text = re.sub(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];", r"\1* \2 = (\1*)host_shared;", text)
        text = f'#include "{HEADER}"\n{text}\n'
        expanded = self._run(["-E", "-P", "-x", "c++", "-"], text)
        runners = []
        for name, parameters in re.findall(r'extern "C"\s+void\s+(\w+)\(([^)]*)\)\s*\{', expanded):
            names = ", ".join(re.findall(r"(\w+)\s*(?:,|$)", parameters))
            runners.append(
                f'extern "C" void run_{name}(Launch launch, {parameters}) '
                f"{{ run_kernel(launch, [=]() mutable {{ {name}({names}); }}); }}"
            )
        assert runners
        library = folder / f"host-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
        options = ["-std=c++17", "-O2", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-shared", "-fPIC"]
        self._run([*options, "-x", "c++", "-o", str(library), "-"], "\n".join([text, *runners]))
        self._library = ctypes.CDLL(str(library))

    @staticmethod
    def _run(options: list[str], text: str) -> str:
        assert COMPILER is not None
        done = subprocess.run(
            [COMPILER, *options], input=text, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int],
        threads: int,
        arguments: Any,
        *,
        shared_bytes: int = 0,
        early: bool = False,
    ) -> None:
        """As :func:`glm5ray.kernels.cuda.driver.launch`, of a kernel by its name."""
        self.seed += 1
        getattr(self._library, f"run_{kernel}")(Launch(*grid, threads, shared_bytes, self.seed), *arguments)
