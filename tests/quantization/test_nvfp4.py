"""NVFP4 against ModelOpt (golden file) and compressed-tensors (its own code), to the bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from glm5ray.quantization.nvfp4 import (
    dequantize_nvfp4,
    dequantize_nvfp4_inverse,
    nvfp4_scale_2,
    quantize_nvfp4,
)

GOLDEN = Path(__file__).parent.parent / "golden"
GOLDENS = load_file(GOLDEN / "nvfp4.safetensors")
CASES = sorted({name.partition(".")[0] for name in GOLDENS})


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("case", CASES)
def test_quantises_as_modelopt(case: str) -> None:
    quantized = quantize_nvfp4(GOLDENS[f"{case}.weight"], scale_2=GOLDENS.get(f"{case}.given_scale_2"))
    assert same_bits(quantized.scale_2.reshape(1), GOLDENS[f"{case}.scale_2"].reshape(1))
    assert same_bits(quantized.scale, GOLDENS[f"{case}.scale"])
    assert same_bits(quantized.packed, GOLDENS[f"{case}.packed"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_dequantises_as_modelopt(case: str, dtype: torch.dtype) -> None:
    parts = [GOLDENS[f"{case}.{part}"] for part in ("packed", "scale", "scale_2")]
    assert same_bits(dequantize_nvfp4(*parts, dtype), GOLDENS[f"{case}.{str(dtype).removeprefix('torch.')}"])


def test_goldens_reach_the_corners() -> None:
    scales = torch.cat([GOLDENS[f"{case}.scale"].float().flatten() for case in CASES])
    codes = torch.cat([GOLDENS[f"{case}.packed"].flatten() for case in CASES])
    assert {2.0**-9, 1.0, 448.0} <= set(scales.tolist())
    assert set(codes.bitwise_and(15).tolist()) == set((codes >> 4).tolist()) == set(range(16))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_goldens_are_what_modelopt_makes() -> None:
    pytest.importorskip("requests", reason="modelopt imports it without declaring it")
    spec = importlib.util.spec_from_file_location("make_nvfp4", GOLDEN / "make_nvfp4.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.make()
    assert made.keys() == GOLDENS.keys()
    assert [name for name in made if not same_bits(made[name].reshape(-1), GOLDENS[name].reshape(-1))] == []


def test_dequantises_as_compressed_tensors() -> None:
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    scheme: QuantizationScheme = preset_name_to_scheme("NVFP4", ["Linear"])
    generator = torch.Generator().manual_seed(1)
    packed = torch.randint(0, 256, (24, 64), generator=generator, dtype=torch.uint8)
    scale = torch.rand(24, 8, generator=generator).mul(400).to(torch.float8_e4m3fn)
    for global_scale in (torch.tensor([3.7]), torch.tensor([123456.7]), torch.tensor([1e-3])):
        state = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": global_scale}
        theirs = NVFP4PackedCompressor.decompress(state, scheme)["weight"]
        # Equal as numbers; theirs keeps the sign of code 8 as -0.0.
        assert torch.equal(dequantize_nvfp4_inverse(packed, scale, global_scale, theirs.dtype), theirs)


def test_both_conventions_hold_the_same_weight() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))
    quantized = quantize_nvfp4(weight)
    inverse = dequantize_nvfp4_inverse(quantized.packed, quantized.scale, quantized.global_scale)
    torch.testing.assert_close(inverse, quantized.dequantize(), rtol=1e-6, atol=0)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 9), groups=st.integers(1, 5), exponent=st.integers(-30, 30))
def test_error_is_within_half_a_code(seed: int, rows: int, groups: int, exponent: int) -> None:
    """Each value is at most half the distance of two codes away, plus what rounding the group's scale to E4M3 clips
    off."""
    weight = torch.randn(rows, groups * 16, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    quantized = quantize_nvfp4(weight)
    step = (quantized.scale.float() * quantized.scale_2).repeat_interleave(16, dim=1)
    code = (weight / step).abs()
    half_gap = torch.where(code < 2, 0.25, torch.where(code < 4, 0.5, 1.0))
    clipped = (code - 6).clamp_min(0)
    error = (quantized.dequantize() - weight).abs() / step
    assert bool((error <= torch.maximum(half_gap, clipped) * 1.0001).all())


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_quantising_again_changes_nothing(seed: int) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    once = quantize_nvfp4(weight)
    twice = quantize_nvfp4(once.dequantize(), scale_2=once.scale_2)
    assert torch.equal(twice.dequantize(), once.dequantize())


def test_all_zero_weight_reads_back_as_zero() -> None:
    quantized = quantize_nvfp4(torch.zeros(4, 32))
    assert torch.equal(quantized.dequantize(), torch.zeros(4, 32))
    assert bool(torch.isfinite(quantized.scale.float()).all())


@pytest.mark.parametrize("shape", [(4, 24), (16,), (2, 4, 16)])
def test_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        quantize_nvfp4(torch.ones(shape))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_refuses_values_without_a_scale(bad: float) -> None:
    weight = torch.ones(2, 16)
    weight[1, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        nvfp4_scale_2(weight)
