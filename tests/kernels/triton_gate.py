"""The gate's compiler, run as a process of its own: in the tests' process kernels may be interpreted.

``python tests/kernels/triton_gate.py CAPABILITY [--slow]`` writes one JSON line a variant."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import sys
import traceback
from typing import TYPE_CHECKING, Any

import triton

from glm5ray.kernels import triton as folder
from glm5ray.kernels.triton.variant import Variant, compile_variant

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

MATRIX_INSTRUCTION = re.compile(r"(?:mma\.sync|wgmma\.mma_async)\S*")
"""Of the PTX only these are reported."""


def modules() -> Iterator[ModuleType]:
    for info in pkgutil.iter_modules(folder.__path__):
        yield importlib.import_module(f"{folder.__name__}.{info.name}")


def variants_of(module: ModuleType) -> list[Variant]:
    return list(module.variants()) if hasattr(module, "variants") else []


def jit_functions(module: ModuleType) -> dict[str, Any]:
    """Those that the module itself defines."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, triton.JITFunction)}
    return {name: value for name, value in found.items() if value.fn.__module__ == module.__name__}


def unnamed_kernels() -> list[str]:
    """Functions that no variant compiles and no other function names."""
    functions = [(module, name, fn) for module in modules() for name, fn in jit_functions(module).items()]
    named = {id(variant.fn) for module in modules() for variant in variants_of(module)}
    missing = []
    for module, name, fn in functions:
        callers = [other for _, _, other in functions if other is not fn and re.search(rf"\b{name}\b", other.src)]
        if id(fn) not in named and not callers:
            missing.append(f"{module.__name__}.{name}")
    return missing


def reports(capability: int, slow: bool) -> Iterator[dict[str, Any]]:
    for module in modules():
        for variant in variants_of(module):
            if capability not in variant.capabilities or variant.is_slow_to_compile > slow:
                continue
            report: dict[str, Any] = {"module": module.__name__.rpartition(".")[2], "variant": variant.name}
            try:
                compiled = compile_variant(variant, capability)
                report |= compiled._asdict() | {"ptx": sorted(set(MATRIX_INSTRUCTION.findall(compiled.ptx)))}
            except Exception:  # noqa: BLE001 - whatever the compiler raises is this variant's report
                report["error"] = traceback.format_exc(limit=-3)
            yield report


def main() -> None:
    print(json.dumps({"unnamed": unnamed_kernels()}))  # noqa: T201
    for report in reports(int(sys.argv[1]), "--slow" in sys.argv):
        print(json.dumps(report), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
