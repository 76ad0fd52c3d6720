"""A dense layer in NVFP4 against the reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from glm5ray.kernels import reference
from glm5ray.kernels.interface import Nvfp4Weight
from glm5ray.kernels.tolerances import assert_close
from glm5ray.kernels.triton_ops import linear
from glm5ray.quantization.nvfp4 import quantize_nvfp4

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(tokens: int, outputs: int, columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tokens)
    made = quantize_nvfp4(torch.randn(outputs, columns, generator=generator) * columns**-0.5)
    weight = Nvfp4Weight(
        packed_OX=made.packed.to(DEVICE), scales_OG=made.scale.to(DEVICE), global_scale=made.scale_2.to(DEVICE)
    )
    x = torch.randn(tokens, columns, generator=generator).to(DEVICE, dtype)
    actual = linear(x, weight)
    assert actual.dtype == dtype
    assert_close("linear", actual, reference.linear(x, weight), dtype)
    exact = x.float().cpu() @ made.dequantize().T  # the reference decodes as the quantiser does
    torch.testing.assert_close(reference.linear(x, weight).float().cpu(), exact, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "outputs", "columns"), [(0, 16, 32), (1, 48, 64), (17, 33, 272), (65, 70, 80)])
def test_linear(tokens: int, outputs: int, columns: int, dtype: torch.dtype) -> None:
    check(tokens, outputs, columns, dtype)


def test_a_tensor_goes_to_the_library() -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_real_sizes(tokens: int) -> None:
    check(tokens, 12288, 6144, torch.bfloat16)
