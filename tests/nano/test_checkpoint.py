"""The shipped checkpoint folder has the names, shapes and dtypes of nvidia/GLM-5.2-NVFP4, scaled down."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from typing import Any

import pytest
from safetensors import safe_open

from glm5ray.nano.evaluate import CHECKPOINT

CONFIG: dict[str, Any] = json.loads((CHECKPOINT / "config.json").read_text())
LAYERS = CONFIG["num_hidden_layers"]


def stored() -> dict[str, tuple[str, list[int]]]:
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}


def linear(base: str, rows: int, columns: int, quantised: bool = False) -> dict[str, tuple[str, list[int]]]:
    if not quantised:
        return {f"{base}.weight": ("BF16", [rows, columns])}
    return {
        f"{base}.weight": ("U8", [rows, columns // 2]),
        f"{base}.weight_scale": ("F8_E4M3", [rows, columns // 16]),
        f"{base}.weight_scale_2": ("F32", []),
        f"{base}.input_scale": ("F32", []),
    }


def mlp(base: str, width: int, quantised: bool = False) -> dict[str, tuple[str, list[int]]]:
    hidden = CONFIG["hidden_size"]
    parts = linear(f"{base}.gate_proj", width, hidden, quantised) | linear(f"{base}.up_proj", width, hidden, quantised)
    return parts | linear(f"{base}.down_proj", hidden, width, quantised)


def attention(base: str, full: bool) -> dict[str, tuple[str, list[int]]]:
    c = CONFIG
    hidden, heads, nope, rope = c["hidden_size"], c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    tensors = linear(f"{base}.q_a_proj", c["q_lora_rank"], hidden)
    tensors |= linear(f"{base}.q_b_proj", heads * (nope + rope), c["q_lora_rank"])
    tensors |= linear(f"{base}.kv_a_proj_with_mqa", c["kv_lora_rank"] + rope, hidden)
    tensors |= linear(f"{base}.kv_b_proj", heads * (nope + c["v_head_dim"]), c["kv_lora_rank"])
    tensors |= linear(f"{base}.o_proj", hidden, heads * c["v_head_dim"])
    tensors |= {f"{base}.q_a_layernorm.weight": ("BF16", [c["q_lora_rank"]])}
    tensors |= {f"{base}.kv_a_layernorm.weight": ("BF16", [c["kv_lora_rank"]])}
    if full:
        size = c["index_head_dim"]
        tensors |= linear(f"{base}.indexer.wq_b", c["index_n_heads"] * size, c["q_lora_rank"])
        tensors |= linear(f"{base}.indexer.wk", size, hidden)
        tensors |= linear(f"{base}.indexer.weights_proj", c["index_n_heads"], hidden)
        tensors |= {f"{base}.indexer.k_norm.{part}": ("BF16", [size]) for part in ("weight", "bias")}
    return tensors


def wanted() -> dict[str, tuple[str, list[int]]]:
    hidden, experts = CONFIG["hidden_size"], CONFIG["n_routed_experts"]
    tensors = linear("model.embed_tokens", CONFIG["vocab_size"], hidden) | linear(
        "lm_head", CONFIG["vocab_size"], hidden
    )
    tensors["model.norm.weight"] = ("BF16", [hidden])
    for i in range(LAYERS + 1):
        base = f"model.layers.{i}"
        tensors |= attention(f"{base}.self_attn", i == LAYERS or CONFIG["indexer_types"][i] == "full")
        norms = ["input_layernorm", "post_attention_layernorm"]
        if i == LAYERS:
            norms += ["enorm", "hnorm", "shared_head.norm"]
            tensors |= linear(f"{base}.eh_proj", hidden, 2 * hidden)
        tensors |= {f"{base}.{norm}.weight": ("BF16", [hidden]) for norm in norms}
        if i < CONFIG["first_k_dense_replace"]:
            tensors |= mlp(f"{base}.mlp", CONFIG["intermediate_size"])
            continue
        tensors |= linear(f"{base}.mlp.gate", experts, hidden)
        tensors[f"{base}.mlp.gate.e_score_correction_bias"] = ("F32", [experts])
        tensors |= mlp(f"{base}.mlp.shared_experts", CONFIG["moe_intermediate_size"])
        for expert in range(experts):
            tensors |= mlp(f"{base}.mlp.experts.{expert}", CONFIG["moe_intermediate_size"], quantised=i < LAYERS)
    return tensors


def test_every_tensor_once_with_its_shape_and_dtype() -> None:
    assert stored() == wanted()


def test_size() -> None:
    assert (CHECKPOINT / "model.safetensors").stat().st_size <= 12_000_000


def test_index_share_follows_the_rule() -> None:
    freq, offset = CONFIG["index_topk_freq"], CONFIG["index_skip_topk_offset"]
    kinds = ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(LAYERS)]
    assert CONFIG["indexer_types"] == kinds
    assert set(kinds) == {"full", "shared"}


def test_exclude_list_matches_what_is_quantised() -> None:
    quant = json.loads((CHECKPOINT / "hf_quant_config.json").read_text())["quantization"]
    assert CONFIG["quantization_config"]["ignore"] == quant["exclude_modules"]
    for name, (dtype, shape) in stored().items():
        module = name.removesuffix(".weight")
        if (
            name.endswith(".weight") and len(shape) == 2 and not module.endswith(".mlp.gate")
        ):  # no Linear, as in the real one
            assert any(fnmatch(module, pattern) for pattern in quant["exclude_modules"]) == (dtype != "U8"), name


def test_scales_are_usable() -> None:
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        names = list(file.keys())
        for name in names:
            if name.endswith(("input_scale", "weight_scale_2")):
                value = float(file.get_tensor(name))
                assert 0 < value < 1, name
            if name.endswith("gate_proj.weight_scale_2"):
                assert value == float(file.get_tensor(name.replace("gate_proj", "up_proj")))


def test_router_bias_needs_fp32() -> None:
    """As in GLM-5.2, the bias lies near 7, where BF16 has steps of 1/32."""
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        bias = file.get_tensor(f"model.layers.{LAYERS - 1}.mlp.gate.e_score_correction_bias")
    assert len(set(bias.tolist())) > len(set(bias.bfloat16().tolist()))
    assert bias.mean() == pytest.approx(7, abs=0.5)


@pytest.mark.parametrize("name", ["README.md", "chat_template.jinja", "generation_config.json", "heldout.txt"])
def test_folder_is_whole(name: str) -> None:
    assert (CHECKPOINT / name).is_file()
