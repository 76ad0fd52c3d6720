"""Tiny random GLM-5 models of Hugging Face transformers: the oracle of the model's tests.

``transformers`` builds the model; its weights, under nearly our own names, become ours. Used by tests of the model,
of weights and of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from glm5ray.kernels.select import select_kernels
from glm5ray.model.glm5 import Glm5
from glm5ray.model_config import ModelConfig
from glm5ray.parallel import ParallelContext

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "index_head_dim": 20,
    "index_n_heads": 13,
    "index_topk": 24,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "indexer_types": ["full"] * 4,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
}
"""No two sizes that could be confused are equal; thirteen index heads, so that
hardly any index score is exactly 0: of tied ones transformers selects any."""

INDEX_SHARE: dict[str, Any] = {
    "num_hidden_layers": 6,
    "indexer_types": ["full", "full", "shared", "full", "shared", "shared"],
}
"""GLM-5.2: shared layers take the selection of the full layer before them."""


def hf_config(**changes: Any) -> GlmMoeDsaConfig:
    """The tiny configuration with some fields changed. ``num_hidden_layers`` alone makes all layers full."""
    values = {**TINY, **changes}
    if "num_hidden_layers" in changes and "indexer_types" not in changes:
        values["indexer_types"] = ["full"] * changes["num_hidden_layers"]
    return GlmMoeDsaConfig(**values, attn_implementation="eager")


def hf_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> GlmMoeDsaForCausalLM:
    """A seeded model whose norms, biases and selection biases are random too: a dropped one must show."""
    torch.manual_seed(seed)
    model = GlmMoeDsaForCausalLM(hf_config(**changes)).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.uniform_(-0.3, 0.3)
            elif "norm" in name and name.endswith("bias"):
                tensor.normal_(std=0.3)
            elif "norm" in name:
                tensor.uniform_(0.5, 1.5)
    return model if dtype == torch.float32 else to_dtype(model, dtype)


class SelectionGaps(TorchFunctionMode):
    """While it is active: ``smallest``, the least distance between a selected index score and one that was not.

    Below rounding, which token transformers selects is chance, and its logits are no oracle.
    """

    def __init__(self, index_topk: int) -> None:
        super().__init__()
        self.index_topk = index_topk
        self.smallest = float("inf")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk and args[1] == self.index_topk < args[0].shape[-1]:
            ordered = args[0].sort(dim=-1, descending=True).values
            gap = (ordered[..., self.index_topk - 1] - ordered[..., self.index_topk]).min()
            self.smallest = min(self.smallest, float(gap))
        return func(*args, **kwargs or {})


def to_dtype(model: GlmMoeDsaForCausalLM, dtype: torch.dtype) -> GlmMoeDsaForCausalLM:
    """A copy in ``dtype``, with the parameters that transformers keeps in fp32 left so when it loads a checkpoint."""
    copy = GlmMoeDsaForCausalLM(model.config).eval().to(dtype)
    copy.model.rotary_emb.float()
    state = model.state_dict()
    for name, tensor in [*copy.named_parameters(), *copy.named_buffers()]:
        if name in state:
            keep = name.endswith(("gate.weight", "e_score_correction_bias", "indexer.weights_proj.weight"))
            # rounded first in any case: a checkpoint stores the weights (not the selection bias) in dtype
            rounded = state[name] if name.endswith("e_score_correction_bias") else state[name].to(dtype)
            tensor.data = rounded.float() if keep else rounded.to(tensor.dtype)
    return copy


def model_config(config: GlmMoeDsaConfig) -> ModelConfig:
    """Our reading of transformers' configuration, through the same ``config.json``."""
    values = config.to_dict()
    values["dtype"] = "float32"
    return ModelConfig.from_dict(values)


def our_state(model: GlmMoeDsaForCausalLM) -> dict[str, Tensor]:
    """The weights under our names, which are the same; transformers stacks the experts as we do."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def our_model(
    model: GlmMoeDsaForCausalLM,
    *,
    dtype: torch.dtype = torch.float32,
    kernels: Mapping[str, str] | None = None,
    parallel: ParallelContext | None = None,
) -> Glm5:
    """The same weights in our model, with transformers' norm epsilon."""
    ours = Glm5(
        model_config(model.config),
        select_kernels(kernels or {}, "cpu"),
        parallel or ParallelContext(),
        dtype=dtype,
        norm_eps="huggingface",
    )
    ours.load_state_dict(our_state(model), strict=True, assign=True)
    ours.prepare()
    return ours
