"""Formats by the tensors that are there, and what the configs of public checkpoints claim."""

from __future__ import annotations

from typing import Any

import pytest

from glm5ray.errors import CheckpointError
from glm5ray.quantization.formats import (
    FP8_BLOCK,
    NVFP4,
    NVFP4_INVERSE,
    PLAIN,
    detect_format,
    is_excluded,
    parse_claim,
)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ({"weight": "BF16"}, PLAIN),
        ({"weight": "F32", "input_scale": "F32"}, PLAIN),
        ({"weight": "F8_E4M3", "weight_scale_inv": "F32"}, FP8_BLOCK),
        ({"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32"}, NVFP4),
        ({"weight_packed": "U8", "weight_scale": "F8_E4M3", "weight_global_scale": "F32"}, NVFP4_INVERSE),
        ({}, PLAIN),
    ],
)
def test_format_follows_from_the_tensors(dtypes: dict[str, str], expected: object) -> None:
    assert detect_format(dtypes) is expected


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("model.layers.1.*", "model.layers.1.mlp.down_proj", True),
        ("model.layers.1.*", "model.layers.10.mlp.down_proj", False),
        ("model.layers.1", "model.layers.1.mlp.down_proj", True),
        ("model.layers.1", "model.layers.10.mlp.down_proj", False),
        ("model.layers.3.self_attn*", "model.layers.3.self_attn.o_proj", True),
        ("model.layers.3.self_attn*", "model.layers.33.self_attn.o_proj", False),
        ("model.layers.78*", "model.layers.78.eh_proj", True),
        ("lm_head", "lm_head", True),
        ("lm_head", "lm_head2", False),
        ("MODEL.*", "model.norm", False),
        (r"re:.*self_attn\..*", "model.layers.3.self_attn.o_proj", True),
        (r"re:.*mlp\.gate$", "model.layers.3.mlp.gate_proj", False),
    ],
)
def test_exclude_patterns(pattern: str, module: str, expected: bool) -> None:
    assert is_excluded(module, (pattern,)) is expected


def test_patterns_together_cover_what_each_covers_alone() -> None:
    patterns = ("lm_head", "model.layers.1.*", r"re:.*mlp\.gate$")
    for module in ("lm_head", "model.layers.1.mlp.up_proj", "model.layers.7.mlp.gate"):
        assert is_excluded(module, patterns)
    assert not is_excluded("model.layers.12.mlp.gate_proj", patterns)
    assert not is_excluded("lm_head", ())


def test_fp8_claim_knows_the_misspelt_name() -> None:
    claim = parse_claim(
        {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["model.layers.0.self_attn.indexers_proj"],
        }
    )
    assert claim.format_of("model.layers.0.self_attn.indexer.weights_proj") is PLAIN
    assert claim.format_of("model.layers.1.self_attn.indexer.weights_proj") is FP8_BLOCK
    assert claim.format_of("model.layers.0.self_attn.indexer.wk") is FP8_BLOCK


def test_claims_of_both_places_of_modelopt() -> None:
    inside = parse_claim({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]})
    beside = parse_claim({"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]})
    assert inside == beside
    assert parse_claim(None).format is PLAIN


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({"quant_method": "fp8"}, "weight_block_size is None"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo is 'FP8'"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size is 32"),
        ({"quant_algo": "NVFP4", "exclude_modules": "lm_head"}, "exclude_modules must be a list"),
        ({"quant_method": "compressed-tensors", "format": "mixed-precision"}, "format is 'mixed-precision'"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["re:("]},
            "no regular expression",
        ),
    ],
)
def test_schemes_that_this_engine_does_not_have(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_claim(quantization)


def test_stored_bytes_of_one_expert() -> None:
    """GLM-5's expert: 21,233,664 bytes of codes and scales and three scalars, as published with 8 bytes each, 4
    here."""
    gate_up, down = NVFP4.stored_bytes(2048, 6144), NVFP4.stored_bytes(6144, 2048)
    assert 2 * gate_up + down == 21_233_664 + 3 * 4
    assert FP8_BLOCK.stored_bytes(576, 6144) == 576 * 6144 + 5 * 48 * 4
