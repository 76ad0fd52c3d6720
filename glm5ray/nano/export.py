"""Between the training's stacked BF16 weights and a Hugging Face checkpoint folder with NVFP4 experts, both ways.

The folder looks like nvidia/GLM-5.2-NVFP4: ModelOpt's layout, only the routed experts of the main layers quantised, the
MTP layer stored as layer `num_hidden_layers` in BF16, the router's bias in F32.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from glm5ray.nano import data, tokenizer
from glm5ray.nano.model import Experts, Glm5Nano, MoE, NanoConfig, from_config
from glm5ray.quantization.nvfp4 import dequantize_nvfp4, nvfp4_scale_2, quantize_nvfp4

PRODUCER = {"name": "glm5ray", "version": "nano"}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


# ---- writing ------------------------------------------------------------------------------------------------------


def export(work: Path, out: Path) -> dict[str, Any]:
    """bf16.safetensors and the tokenizer of `work` become the checkpoint folder `out`; returns sizes in bytes."""
    model = load_bf16(work / "bf16.safetensors")
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((work / name).read_bytes())
    tensors = checkpoint_tensors(model, calibrate(model, work))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    _write(out / "config.json", hf_config(config) | {"quantization_config": quantization_config(config)})
    _write(out / "hf_quant_config.json", hf_quant_config(config))
    _write(out / "generation_config.json", generation_config())
    return {"bytes": (out / "model.safetensors").stat().st_size, "tensors": len(tensors)}


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def checkpoint_tensors(model: Glm5Nano, input_amax: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors under the names and shapes of the real checkpoints."""
    config, tensors = model.config, dict[str, Tensor]()
    for name, tensor in model.state_dict().items():
        match = re.fullmatch(r"(model\.layers\.(\d+)\.mlp\.experts)\.(gate_up_proj|down_proj)", name)
        if match is None:
            keep_f32 = name.endswith("e_score_correction_bias")
            tensors[name] = tensor.float() if keep_f32 else tensor.bfloat16()
            continue
        prefix, layer, kind = match.groups()
        for expert in range(config.n_routed_experts):
            projections = tensor[expert].chunk(2) if kind == "gate_up_proj" else (tensor[expert],)
            names = PROJECTIONS[:2] if kind == "gate_up_proj" else PROJECTIONS[2:]
            amax = input_amax.get(f"{layer}.{kind}")
            for projection, weight in zip(names, projections, strict=True):
                base = f"{prefix}.{expert}.{projection}"
                if amax is None:  # the MTP layer is not quantised
                    tensors[f"{base}.weight"] = weight.bfloat16()
                    continue
                scale_2 = nvfp4_scale_2(tensor[expert])  # gate and up share one
                tensors |= quantised(base, weight, scale_2, amax[expert])
    return {name: tensor.contiguous().clone() for name, tensor in sorted(tensors.items())}


def quantised(base: str, weight: Tensor, scale_2: Tensor, input_amax: Tensor) -> dict[str, Tensor]:
    """The four tensors that ModelOpt stores for one projection."""
    packed = quantize_nvfp4(weight, scale_2=scale_2)
    return {
        f"{base}.weight": packed.packed,
        f"{base}.weight_scale": packed.scale,
        f"{base}.weight_scale_2": packed.scale_2.reshape(()),
        f"{base}.input_scale": (input_amax / (6 * 448)).float().reshape(()),
    }


@torch.no_grad()
def calibrate(model: Glm5Nano, work: Path) -> dict[str, Tensor]:
    """Largest |input| [E] of each routed expert's projections in the main layers, over some generated examples.

    An expert that none of them reaches gets its layer's largest.
    """
    from tokenizers import Tokenizer

    amax: dict[str, Tensor] = {}

    def watch(layer: int) -> Any:
        def hook(module: Experts, args: tuple[Tensor, Tensor], output: Tensor) -> None:
            x, weights = args
            gate, up = module.gate_up_proj.chunk(2, dim=1)
            inner = nn.functional.silu(x @ gate.flatten(0, 1).T) * (x @ up.flatten(0, 1).T)
            chosen = weights > 0  # [tokens, E]
            per_token = {"gate_up_proj": x.abs().amax(-1, keepdim=True).expand_as(weights),
                         "down_proj": inner.abs().unflatten(-1, (weights.shape[-1], -1)).amax(-1)}  # fmt: skip
            for kind, values in per_token.items():
                seen = (values * chosen).amax(0)
                name = f"{layer}.{kind}"
                amax[name] = torch.maximum(amax[name], seen) if name in amax else seen

        return hook

    layers = model.layers[:-1]
    handles = [
        layer.mlp.experts.register_forward_hook(watch(i))
        for i, layer in enumerate(layers)
        if isinstance(layer.mlp, MoE)
    ]
    encode, rng = Tokenizer.from_file(str(work / "tokenizer.json")).encode, Random(7)
    for task in data.TASKS:
        for _ in range(8):
            example = data.generate(task, rng, size=200)
            model(torch.tensor([encode(example.prompt + example.completion).ids]))
    for handle in handles:
        handle.remove()
    return {name: torch.where(values > 0, values, values.max()) for name, values in amax.items()}


def hf_config(config: NanoConfig) -> dict[str, Any]:
    """config.json in the style of GLM-5.2, its traps included: `head_dim` is not the size of any head's RoPE part."""
    ids = special_ids()
    kinds = ["full" if config.is_full(i) else "shared" for i in range(config.num_hidden_layers)]
    dense = config.first_k_dense_replace
    values = asdict(config)
    theta = values.pop("rope_theta")
    return {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16", **values,
        "attention_bias": False, "attention_dropout": 0.0, "ep_size": 1, "head_dim": config.qk_nope_head_dim,
        "hidden_act": "silu", "initializer_range": 0.02, "index_share_for_mtp_iteration": True,
        "index_topk_pattern": None, "indexer_types": kinds, "max_position_embeddings": 4096,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (config.num_hidden_layers - dense), "moe_layer_freq": 1,
        "moe_router_dtype": "float32", "n_group": 1, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_key_value_heads": config.num_attention_heads, "num_nextn_predict_layers": 1, "pretraining_tp": 1,
        "qk_head_dim": config.qk_nope_head_dim + config.qk_rope_head_dim, "rope_interleave": True,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"}, "scoring_func": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "use_cache": True,
        "eos_token_id": ids, "pad_token_id": ids[0], "transformers_version": "5.12.0",
    }  # fmt: skip


def special_ids() -> list[int]:
    """Ids of the three end-of-sequence tokens."""
    return [tokenizer.FIRST_SPECIAL_ID + tokenizer.SPECIAL_TOKENS.index(token) for token in tokenizer.EOS_TOKENS]


def generation_config() -> dict[str, Any]:
    """generation_config.json; the sampling defaults are GLM-5.2's."""
    ids = special_ids()
    return {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "eos_token_id": ids, "pad_token_id": ids[0]}


def excluded(config: NanoConfig) -> list[str]:
    """Glob patterns of what is not quantised, as ModelOpt lists them for GLM-5.2."""
    layers = range(config.first_k_dense_replace, config.num_hidden_layers)
    parts = [f"model.layers.{i}.{part}*" for i in layers for part in ("self_attn", "mlp.shared_experts")]
    dense = [f"model.layers.{i}.*" for i in range(config.first_k_dense_replace)]
    return ["lm_head", "model.embed_tokens", *dense, *parts, f"model.layers.{config.num_hidden_layers}*"]


def quantization_config(config: NanoConfig) -> dict[str, Any]:
    """`quantization_config` of config.json."""
    four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "config_groups": {"group_0": {"input_activations": four_bits, "weights": four_bits, "targets": ["Linear"]}},
        "ignore": excluded(config),
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": PRODUCER,
        "quant_algo": "NVFP4",
        "quant_method": "modelopt",
    }


def hf_quant_config(config: NanoConfig) -> dict[str, Any]:
    """hf_quant_config.json."""
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    return {"producer": PRODUCER, "quantization": quantization | {"exclude_modules": excluded(config)}}


# ---- reading ------------------------------------------------------------------------------------------------------


def stacked_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors in fp32, experts dequantised and stacked under transformers' names."""
    stored = load_file(folder / "model.safetensors")
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in stored.items():
        match = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight", name)
        if match is not None:
            base = name.removesuffix(".weight")
            if tensor.dtype == torch.uint8:
                tensor = dequantize_nvfp4(tensor, stored[f"{base}.weight_scale"], stored[f"{base}.weight_scale_2"])
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor.float()
        elif not name.endswith(("_scale", "_scale_2")):
            yield name, tensor.float()
    for prefix, parts in experts.items():
        count = 1 + max(expert for expert, _ in parts)
        pairs = [torch.cat([parts[e, "gate_proj"], parts[e, "up_proj"]]) for e in range(count)]
        yield f"{prefix}.gate_up_proj", torch.stack(pairs)
        yield f"{prefix}.down_proj", torch.stack([parts[e, "down_proj"] for e in range(count)])


def load_nano(folder: Path) -> Glm5Nano:
    """The compact model, fp32, MTP layer included."""
    model = Glm5Nano(from_config(json.loads((folder / "config.json").read_text()))).eval()
    model.load_state_dict(dict(stacked_tensors(folder)))
    return model


def load_bf16(path: Path) -> Glm5Nano:
    """The compact model, fp32, from the training's bf16.safetensors."""
    model = Glm5Nano(NanoConfig()).eval()
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})
    return model


def load_transformers(folder: Path, **changes: Any) -> Any:
    """transformers' GlmMoeDsaForCausalLM, fp32, without the MTP layer; `changes` override the configuration."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    values = json.loads((folder / "config.json").read_text())
    for name in ("quantization_config", "architectures", "dtype", "transformers_version"):
        values.pop(name)
    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**values | changes)).float().eval()
    mtp = f"model.layers.{values['num_hidden_layers']}."
    model.load_state_dict({name: t for name, t in stacked_tensors(folder) if not name.startswith(mtp)})
    model.set_experts_implementation("grouped_mm")  # twice as fast as the default loop on two cores
    return model
