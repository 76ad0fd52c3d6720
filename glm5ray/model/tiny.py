"""Seeded tiny checkpoints in every format that :mod:`glm5ray.model.weights` reads, for tests, demonstrations and
benchmarks."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from safetensors.torch import save_file

from glm5ray.errors import ConfigError, nearest
from glm5ray.model.byte_tokenizer import EOS_TOKEN_ID, MIN_VOCAB_SIZE, write_byte_tokenizer
from glm5ray.model.name_table import ModelPart, WeightSpec, checkpoint_weights
from glm5ray.model.safetensors_reader import INDEX_NAME
from glm5ray.model_config import ModelConfig
from glm5ray.quantization.fp8_block import quantize_fp8_block
from glm5ray.quantization.nvfp4 import nvfp4_scale_2, quantize_nvfp4

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

TinyFormat = Literal["bf16", "fp32", "fp8", "nvfp4", "nvfp4-all", "nvfp4-ct"]
"""nvfp4: routed experts only, as GLM-5.1 and 5.2; nvfp4-all: all MLPs, as GLM-5; nvfp4-ct: all MLPs, as
compressed-tensors."""
TinyStyle = Literal["glm5", "glm5.2"]
"""glm5: every layer selects for itself; glm5.2: IndexShare, with three layers that reuse an earlier selection."""

_MLP_PARTS = {ModelPart.DENSE_MLP, ModelPart.SHARED_EXPERTS, ModelPart.ROUTED_EXPERTS}
_INPUT_AMAX = 8.0
"""Stands for the calibrated largest activation in ``input_scale``."""

_CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": [EOS_TOKEN_ID],
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 16,
    "indexer_rope_interleave": True,
    "intermediate_size": 128,
    "kv_lora_rank": 32,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "pad_token_id": EOS_TOKEN_ID,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 32,
    "vocab_size": 272,
}

_GLM52_CONFIG: dict[str, Any] = {
    "head_dim": 192,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "moe_router_dtype": "float32",
    "num_hidden_layers": 6,
}


def write_tiny(
    out: Path,
    *,
    format: TinyFormat = "bf16",
    seed: int = 0,
    style: TinyStyle = "glm5",
    with_mtp: bool = True,
    sizes: Mapping[str, Any] | None = None,
    num_shards: int = 2,
) -> None:
    """Writes a random model of the GLM-5 family to the new folder ``out``: weights, config and a tokenizer of bytes.

    ``sizes`` changes fields of ``config.json``. One shard is written as ``model.safetensors``, more with an index.
    The same seed and sizes give the same weights before they are rounded to the format, with and without MTP.

    Raises :class:`ConfigError` for an unknown format, style or field, or a folder that is not empty.
    """
    _check_choice("format", format, get_args(TinyFormat))
    _check_choice("style", style, get_args(TinyStyle))
    if num_shards < 1:
        raise ConfigError(f"num_shards is {num_shards}; it must be above 0")
    values = _config_values(style, sizes or {})
    if not with_mtp:
        values["num_nextn_predict_layers"] = 0
    values["dtype"] = "float32" if format == "fp32" else "bfloat16"
    config = ModelConfig.from_dict(values, where="the tiny model's config")
    if config.vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"vocab_size is {config.vocab_size}; the tokenizer of bytes needs {MIN_VOCAB_SIZE}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is no empty folder; name a new one")
    specs = list(checkpoint_weights(config, with_mtp=with_mtp))
    tensors = _stored_tensors(format, specs, _random_weights(specs, seed))
    out.mkdir(parents=True, exist_ok=True)
    _write_shards(out, tensors, num_shards)
    _write_json(out / "config.json", {**values, **_quantization_fields(format, specs)})
    if format.startswith("nvfp4") and format != "nvfp4-ct":
        quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
        quantization["exclude_modules"] = _exclude_list(format, specs)
        _write_json(out / "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": quantization})
    eos = {"eos_token_id": values["eos_token_id"], "pad_token_id": values["pad_token_id"]}
    _write_json(out / "generation_config.json", {"temperature": 1.0, "top_p": 0.95, **eos})
    write_byte_tokenizer(out, config.max_position_embeddings)


def _config_values(style: TinyStyle, sizes: Mapping[str, Any]) -> dict[str, Any]:
    values = {**_CONFIG, **(_GLM52_CONFIG if style == "glm5.2" else {})}
    known = {**values, "indexer_types": None, "mlp_layer_types": None, "rope_theta": None}
    for name in sizes:
        if name not in known:
            raise ConfigError(f"a model of the GLM-5 family has no size {name}{nearest(name, known)}")
    values |= sizes
    if style == "glm5.2" and "indexer_types" not in sizes:
        config = ModelConfig.from_dict(values, where="the tiny model's config")
        values["indexer_types"] = list(config.indexer_types)
        values["mlp_layer_types"] = list(config.mlp_layer_types)
    return values


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(known)}{nearest(value, known)}")


def _random_weights(specs: list[WeightSpec], seed: int) -> dict[str, Tensor]:
    """float32; scaled so that activations keep their size and the logits spread enough for a clear winner."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for spec in specs:
        noise = torch.randn(spec.shape, generator=generator)
        if spec.part is ModelPart.EMBEDDING:
            weights[spec.name] = noise
        elif spec.name.endswith("bias"):
            weights[spec.name] = 0.1 * noise
        elif len(spec.shape) == 1:
            weights[spec.name] = 1.0 + 0.1 * noise
        else:
            gain = 2.0 if spec.part is ModelPart.HEAD else 1.0
            weights[spec.name] = noise * (gain / math.sqrt(spec.shape[1]))
    return weights


def _is_quantized(format: TinyFormat, spec: WeightSpec) -> bool:
    if format == "fp8":
        return spec.is_linear and not spec.name.endswith(("indexer.weights_proj.weight", "eh_proj.weight"))
    if format == "nvfp4":
        return spec.part is ModelPart.ROUTED_EXPERTS and not spec.is_mtp
    return format in ("nvfp4-all", "nvfp4-ct") and spec.part in _MLP_PARTS and not spec.is_mtp


def _stored_tensors(format: TinyFormat, specs: list[WeightSpec], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for spec in specs:
        weight = weights[spec.name]
        if not _is_quantized(format, spec):
            in_float32 = format == "fp32" or spec.name.endswith("e_score_correction_bias")
            tensors[spec.name] = weight if in_float32 else weight.bfloat16()
        elif format == "fp8":
            tensors[spec.name], tensors[f"{spec.name}_scale_inv"] = quantize_fp8_block(weight)
        else:
            tensors |= _nvfp4_parts(format, spec, weights)
    return tensors


def _nvfp4_parts(format: TinyFormat, spec: WeightSpec, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    weight = weights[spec.name]
    if weight.shape[1] % 16:
        raise ConfigError(f"format {format}: {spec.name} has {weight.shape[1]} columns; NVFP4 needs a multiple of 16")
    parent, _, leaf = spec.module.rpartition(".")
    # gate and up share the scale of the whole tensor, as ModelOpt exports them.
    siblings = ("gate_proj", "up_proj") if leaf in ("gate_proj", "up_proj") else (leaf,)
    scale_2 = torch.stack([nvfp4_scale_2(weights[f"{parent}.{sibling}.weight"]) for sibling in siblings]).amax()
    quantized = quantize_nvfp4(weight, scale_2=scale_2)
    input_scale = torch.tensor(_INPUT_AMAX / (6 * 448))
    if format == "nvfp4-ct":
        return {
            f"{spec.module}.weight_packed": quantized.packed,
            f"{spec.module}.weight_scale": quantized.scale,
            f"{spec.module}.weight_global_scale": quantized.global_scale,
            f"{spec.module}.input_global_scale": (1.0 / input_scale).reshape(1),
        }
    return {
        f"{spec.module}.weight": quantized.packed,
        f"{spec.module}.weight_scale": quantized.scale,
        f"{spec.module}.weight_scale_2": quantized.scale_2.clone(),
        f"{spec.module}.input_scale": input_scale,
    }


def _quantization_fields(format: TinyFormat, specs: list[WeightSpec]) -> dict[str, Any]:
    """``quantization_config`` as the public checkpoints of each format have it; GLM-5's NVFP4 has none in
    config.json."""
    if format == "fp8":
        fields: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        fields["weight_block_size"] = [128, 128]
        fields["modules_to_not_convert"] = _exclude_list(format, specs)
        return {"quantization_config": fields}
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    group = {"weights": weights, "input_activations": {**weights}, "targets": ["Linear"]}
    if format == "nvfp4":
        fields = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": group}}
        fields["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
        fields["ignore"] = _exclude_list(format, specs)
        return {"quantization_config": fields}
    if format == "nvfp4-ct":
        fields = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
        fields["config_groups"] = {"group_0": group}
        fields["ignore"] = _exclude_list(format, specs)
        return {"quantization_config": fields}
    return {}


def _exclude_list(format: TinyFormat, specs: list[WeightSpec]) -> list[str]:
    """The list of modules that are not quantised, with the oddities of the real ones."""
    if format == "fp8":
        names = [spec.module for spec in specs if not _is_quantized(format, spec)]
        # The real lists call this layer by a name that it does not have.
        return [name.replace("indexer.weights_proj", "indexers_proj") for name in dict.fromkeys(names)]
    listed = ["lm_head", "model.embed_tokens"]
    mtp = [spec for spec in specs if spec.is_mtp]
    if format == "nvfp4-ct":
        listed = ["lm_head", r"re:.*self_attn\..*", r"re:.*mlp\.gate$"]
        return listed + [rf"re:model\.layers\.{layer}\..*" for layer in sorted({_layer(spec) for spec in mtp})]
    linears = [spec for spec in specs if spec.is_linear and not spec.is_mtp and not _is_quantized(format, spec)]
    if format == "nvfp4":
        dense = {_layer(spec) for spec in linears if spec.part is ModelPart.DENSE_MLP}
        listed += [f"model.layers.{layer}.*" for layer in sorted(dense)]
        sparse = sorted({_layer(spec) for spec in linears} - dense)
        listed += [f"model.layers.{layer}.{name}*" for layer in sparse for name in ("self_attn", "mlp.shared_experts")]
    else:
        listed += [spec.module for spec in linears]
    return listed + [f"model.layers.{layer}*" for layer in sorted({_layer(spec) for spec in mtp})]


def _layer(spec: WeightSpec) -> int:
    return int(spec.name.split(".")[2])


def _write_shards(out: Path, tensors: dict[str, Tensor], num_shards: int) -> None:
    if num_shards == 1:
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        return
    total = sum(tensor.nbytes for tensor in tensors.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(num_shards)]
    weight_map: dict[str, str] = {}
    done = 0
    for name, tensor in tensors.items():
        number = min(done * num_shards // total, num_shards - 1)
        shards[number][name] = tensor
        weight_map[name] = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        done += tensor.nbytes
    for number, shard in enumerate(shards):
        if shard:
            file = out / f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
            save_file(shard, file, metadata={"format": "pt"})
    _write_json(out / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", "utf-8")
