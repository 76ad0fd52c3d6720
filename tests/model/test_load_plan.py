"""The memory plan against the published sums of the 744B models, and against what loading really allocates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5ray.errors import ConfigError
from glm5ray.model.cache import PagedCache
from glm5ray.model.load_plan import kv_bytes_per_token, plan_memory, plan_weights
from glm5ray.model.name_table import ModelPart, ShardSpec, checkpoint_weights, mtp_weights, parameter_shapes
from glm5ray.model.tiny import write_tiny
from glm5ray.model.weights import load_shard
from glm5ray.model_config import ModelConfig

CONFIGS = Path(__file__).parent.parent / "golden" / "configs"
TP8 = ShardSpec(tp_size=8)
RTX_PRO_6000_BYTES = int(0.93 * 97_887 * 2**20)

ROUTED_ONLY: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": [
        "lm_head",
        "model.embed_tokens",
        *(f"model.layers.{i}.*" for i in range(3)),
        *(f"model.layers.{i}.{name}*" for i in range(3, 78) for name in ("self_attn", "mlp.shared_experts")),
        "model.layers.78*",
    ],
}
"""The exclude list of GLM-5.1-NVFP4 and 5.2-NVFP4. Layer 1 must not cover layers 10 to 19."""

ALL_MLPS: dict[str, Any] = {
    "quant_algo": "NVFP4",
    "exclude_modules": ["lm_head", *(f"model.layers.{i}.self_attn*" for i in range(78)), "model.layers.78*"],
}

FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [
        "lm_head",
        *(f"model.layers.{i}.self_attn.indexers_proj" for i in range(79)),
        "model.layers.78.eh_proj",
    ],
}


def model(name: str, quantization: dict[str, Any] | None = None) -> ModelConfig:
    values = json.loads((CONFIGS / f"{name}.json").read_text())
    return ModelConfig.from_dict({**values, "quantization_config": quantization})


def float32_extra(config: ModelConfig, *, with_mtp: bool = False) -> int:
    """What router and index head weights take more in float32, as we hold them, than in bfloat16, as the sums count
    them."""
    specs = checkpoint_weights(config, with_mtp=with_mtp, experts=range(0))
    return sum(2 * spec.shape[0] * spec.shape[1] for spec in specs if spec.keep_float32 and len(spec.shape) == 2)


def stored_gb(config: ModelConfig, shard: ShardSpec | None = None, *, with_mtp: bool = False) -> float:
    """GB (10**9) of a rank's weights as they lie in the files."""
    plan = plan_weights(config, shard, with_mtp=with_mtp, keep_quantized=True)
    return (plan.total_bytes - float32_extra(config, with_mtp=with_mtp)) / 1e9


@pytest.mark.parametrize(
    ("name", "num_parameters", "with_mtp", "num_tensors"),
    [
        ("GLM-5", 743_911_218_432, 753_864_139_008, 59_870),
        ("GLM-5.2", 743_377_019_904, 753_329_940_480, 59_585),
    ],
)
def test_published_totals(name: str, num_parameters: int, with_mtp: int, num_tensors: int) -> None:
    config = model(name)
    plan = plan_weights(config, with_mtp=True)
    assert plan.num_parameters == with_mtp
    assert plan.num_parameters - plan.parameters_by_part[ModelPart.MTP] == num_parameters
    names = [spec.name for spec in checkpoint_weights(config, with_mtp=True)]
    assert len(names) == len(set(names)) == num_tensors
    assert len(list(mtp_weights(config))) == 791


def test_published_parts() -> None:
    parts = plan_weights(model("GLM-5"), with_mtp=True).parameters_by_part
    assert parts[ModelPart.ATTENTION] == 78 * 165_022_208
    assert parts[ModelPart.INDEXER] == 78 * 9_371_904
    assert parts[ModelPart.DENSE_MLP] == 3 * 226_492_416
    assert parts[ModelPart.ROUTED_EXPERTS] == 75 * 9_663_676_416
    assert parts[ModelPart.SHARED_EXPERTS] == 75 * 37_748_736
    assert parts[ModelPart.ROUTER] == 75 * (1_572_864 + 256)
    assert parts[ModelPart.EMBEDDING] == parts[ModelPart.HEAD] == 951_582_720
    assert parts[ModelPart.MTP] == 9_952_920_576


@pytest.mark.parametrize(
    ("name", "quantization", "gigabytes", "mtp_gigabytes"),
    [
        ("GLM-5.2", ROUTED_ONLY, 444.889, 19.906),
        ("GLM-5", ROUTED_ONLY, 445.958, 19.906),
        ("GLM-5", ALL_MLPS, 440.911, 19.906),
        ("GLM-5.2", FP8, 745.584, 10.033),
        ("GLM-5", FP8, 746.130, 10.033),
    ],
)
def test_published_checkpoint_bytes(
    name: str, quantization: dict[str, Any], gigabytes: float, mtp_gigabytes: float
) -> None:
    config = model(name, quantization)
    main = stored_gb(config)
    assert main == pytest.approx(gigabytes, abs=6e-4)
    assert stored_gb(config, with_mtp=True) - main == pytest.approx(mtp_gigabytes, abs=6e-4)


@pytest.mark.parametrize(("name", "gigabytes", "with_mtp"), [("GLM-5.2", 58.36, 61.03), ("GLM-5", 59.43, 62.10)])
def test_published_bytes_per_gpu(name: str, gigabytes: float, with_mtp: float) -> None:
    config = model(name, ROUTED_ONLY)
    assert stored_gb(config, TP8) == pytest.approx(gigabytes, abs=6e-3)
    assert stored_gb(config, TP8, with_mtp=True) == pytest.approx(with_mtp, abs=6e-3)
    whole_experts = stored_gb(config, ShardSpec(tp_size=8, tp_rank=7, ep_size=8, ep_rank=7))
    assert whole_experts == pytest.approx(gigabytes, abs=6e-3)


@pytest.mark.parametrize(
    ("name", "latent", "index", "with_mtp", "expected"),
    [
        ("GLM-5.2", "bfloat16", "fp8", False, 92_628),
        ("GLM-5.2", "bfloat16", "fp8", True, 93_912),
        ("GLM-5.2", "fp8_ds", "fp8", False, 53_940),
        ("GLM-5.2", "fp8_ds", "fp8", True, 54_728),
        ("GLM-5.2", "fp8", "fp8", False, 47_700),
        ("GLM-5.2", "fp8", "fp8", True, 48_408),
        ("GLM-5.2", "bfloat16", "bfloat16", False, 95_232),
        ("GLM-5", "bfloat16", "fp8", False, 100_152),
        ("GLM-5", "fp8_ds", "fp8", False, 61_464),
        ("GLM-5", "fp8", "fp8", False, 55_224),
    ],
)
def test_published_kv_bytes_per_token(name: str, latent: Any, index: Any, with_mtp: bool, expected: int) -> None:
    assert kv_bytes_per_token(model(name), latent=latent, index=index, with_mtp=with_mtp) == expected


@pytest.mark.parametrize(
    ("name", "latent", "with_mtp", "tokens"),
    [
        ("GLM-5.2", "fp8_ds", False, 688e3),
        ("GLM-5.2", "fp8_ds", True, 629e3),
        ("GLM-5.2", "bfloat16", False, 400e3),
        ("GLM-5.2", "bfloat16", True, 367e3),
        ("GLM-5", "fp8_ds", False, 586e3),
        ("GLM-5", "bfloat16", False, 360e3),
    ],
)
def test_published_capacity_of_eight_gpus(name: str, latent: Any, with_mtp: bool, tokens: float) -> None:
    """To within 1 %: the weights that we hold in float32 take some of the published room."""
    plan = plan_memory(
        model(name, ROUTED_ONLY),
        TP8,
        memory_bytes=RTX_PRO_6000_BYTES,
        page_size=64,
        latent=latent,
        index="fp8",
        with_mtp=with_mtp,
        keep_quantized=True,
    )
    assert plan.num_tokens == pytest.approx(tokens, rel=0.01)
    assert plan.weights.total_bytes + plan.kv_bytes <= RTX_PRO_6000_BYTES


def test_weights_that_do_not_fit_are_an_error_with_the_sizes() -> None:
    with pytest.raises(ConfigError, match=r"weights of a rank take 1384.88 GiB"):
        plan_memory(model("GLM-5.2"), ShardSpec(), memory_bytes=RTX_PRO_6000_BYTES, page_size=64)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (ShardSpec(tp_size=3), "tp_size is 3; it must divide the model's num_attention_heads, which is 64"),
        (ShardSpec(tp_size=64), "tp_size is 64; it must divide"),
        (ShardSpec(ep_size=7), "ep_size is 7; it must divide the model's n_routed_experts, which is 256"),
    ],
)
def test_sizes_that_do_not_divide(shard: ShardSpec, message: str) -> None:
    config = (
        model("GLM-5.2")
        if shard.tp_size != 64
        else ModelConfig.from_dict({**json.loads((CONFIGS / "GLM-5.2.json").read_text()), "vocab_size": 154881})
    )
    with pytest.raises(ConfigError, match=message):
        plan_weights(config, shard)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_ranks_outside_their_group(rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match="tp_"):
        ShardSpec(tp_rank=rank, tp_size=size)


@pytest.mark.parametrize("shard", [ShardSpec(), ShardSpec(1, 2), ShardSpec(1, 2, 1, 2), ShardSpec(ep_size=4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plan_is_what_loading_allocates(tmp_path: Path, shard: ShardSpec, dtype: torch.dtype) -> None:
    write_tiny(tmp_path / "tiny", format="nvfp4", style="glm5.2")
    config = ModelConfig.from_checkpoint(tmp_path / "tiny")
    parameters = load_shard(tmp_path / "tiny", config, shard, dtype=dtype, with_mtp=True)
    plan = plan_weights(config, shard, dtype=str(dtype).removeprefix("torch."), with_mtp=True)
    assert plan.total_bytes == sum(tensor.nbytes for tensor in parameters.values())
    assert plan.num_parameters == sum(tensor.numel() for tensor in parameters.values())
    shapes = parameter_shapes(config, shard, with_mtp=True)
    assert list(shapes) == list(parameters)
    for name, (shape, keep_float32) in shapes.items():
        assert parameters[name].shape == shape
        assert parameters[name].dtype == (torch.float32 if keep_float32 else dtype)


@pytest.mark.parametrize("with_mtp", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_bytes_are_the_cache_s(dtype: Any, with_mtp: bool) -> None:
    config = model("GLM-5.2")
    page = PagedCache.bytes_per_page(config, 64, getattr(torch, dtype), with_mtp=with_mtp)
    assert page == 64 * kv_bytes_per_token(config, latent=dtype, index=dtype, with_mtp=with_mtp)


@pytest.mark.parametrize("name", ["GLM-5.2", "GLM-5"])
def test_fp8_kv_bytes_are_the_cache_s(name: str) -> None:
    config = model(name)
    page = PagedCache.bytes_per_page(config, 64, torch.float8_e4m3fn, with_mtp=True)
    assert page == 64 * kv_bytes_per_token(config, latent="fp8_ds", index="fp8", with_mtp=True)


def test_planning_starts_without_torch() -> None:
    code = "import sys, glm5ray.model.load_plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
