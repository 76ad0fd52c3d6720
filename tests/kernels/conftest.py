"""Every test of an operation runs for each usable provider but the reference itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from glm5ray.kernels.select import PROVIDERS, select_kernels

if TYPE_CHECKING:
    from glm5ray.kernels.interface import Kernels


@pytest.fixture(params=[p.name for p in PROVIDERS if "cpu" in p.devices and p.name != "reference"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return select_kernels({"default": request.param}, "cpu")
