"""FP8 with 128 x 128 blocks against the definition, element by element, and transformers' own dequantisation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5ray.quantization.fp8_block import dequantize_fp8_block, quantize_fp8_block


def random_fp8(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return weight, torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) + 1e-3


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (576, 200), (1, 1), (130, 384), (257, 129)])
def test_scale_multiplies_its_block_and_partial_blocks_too(rows: int, columns: int) -> None:
    weight, scale_inv = random_fp8(rows, columns)
    found = dequantize_fp8_block(weight, scale_inv)
    for n in {0, rows // 2, 127, 128, rows - 1} & set(range(rows)):
        for k in {0, columns // 2, 127, 128, columns - 1} & set(range(columns)):
            assert found[n, k] == weight[n, k].float() * scale_inv[n // 128, k // 128]
    assert found.shape == (rows, columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantises_as_transformers(dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight, scale_inv = random_fp8(384, 256)
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scale_inv, dtype)
    assert torch.equal(dequantize_fp8_block(weight, scale_inv, dtype), theirs)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 300), columns=st.integers(1, 300), exponent=st.integers(-20, 20))
def test_error_is_within_half_a_step(seed: int, rows: int, columns: int, exponent: int) -> None:
    """E4M3 has three bits of mantissa: half a step is 1/16 of a normal value, and of a subnormal one 2**-10 of the
    scale."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    quantized, scale_inv = quantize_fp8_block(weight)
    scale = torch.ones(rows, columns) * dequantize_fp8_block(
        torch.ones(rows, columns).to(torch.float8_e4m3fn), scale_inv
    )
    error = (dequantize_fp8_block(quantized, scale_inv) - weight).abs()
    assert bool((error <= (weight.abs() / 16 + scale * 2**-10) * 1.0001).all())


def test_all_zero_block_reads_back_as_zero() -> None:
    quantized, scale_inv = quantize_fp8_block(torch.zeros(200, 100))
    assert torch.equal(dequantize_fp8_block(quantized, scale_inv), torch.zeros(200, 100))
    assert torch.equal(scale_inv, torch.ones(2, 1))


def test_refuses_nan() -> None:
    weight = torch.zeros(200, 100)
    weight[150, 3] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_fp8_block(weight)
