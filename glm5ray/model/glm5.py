"""GLM-5 (``glm_moe_dsa``): latent attention over pages, the sparse indexer, experts, and the layer for multi-token
prediction.

Read it from top to bottom: Indexer, MLA, MLP, MoE, DecoderLayer, MTP, Glm5. ``docs/model.md`` has the formulas and
where each is computed. Parameters have the checkpoint's names. The arithmetic is in the kernel table; this file says
what follows what, which weights are fused, and which results are summed over ranks. Shape suffixes as in
:mod:`glm5ray.kernels.interface`; Q: q_lora_rank [2048]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from glm5ray.kernels.interface import ExpertWeights, Nvfp4ExpertWeights, RouterSettings
from glm5ray.model.beside import Beside
from glm5ray.model.expert_parallel import run_across_ranks
from glm5ray.model.layers import LayerNorm, Linear, RMSNorm, VocabEmbedding, fuse, parameter
from glm5ray.model.packed import packed_shapes
from glm5ray.parallel import shard_size

if TYPE_CHECKING:
    from torch import Tensor

    from glm5ray.kernels.interface import ForwardBatch, Kernels
    from glm5ray.model.cache import PagedCache
    from glm5ray.model_config import ModelConfig
    from glm5ray.parallel import ParallelContext

HF_LATENT_NORM_EPS = 1e-6
"""transformers builds the two latent norms with its class default, other engines with ``rms_norm_eps`` (1e-5)."""

INDEX_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Build:
    """What every module is made from."""

    config: ModelConfig
    kernels: Kernels
    parallel: ParallelContext
    dtype: torch.dtype
    latent_eps: float
    packed_experts: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one step share."""

    batch: ForwardBatch
    rope_TR: Tensor
    select_plan: Any | None
    """``None``: every context fits index_topk, so every token attends to all it may see."""
    attention_plan: Any
    prompts_plan: Any | None
    """``None``: attention of all tokens is computed in absorbed form."""
    padded_T1: Tensor | None
    """bool; ``None``: no row is padded."""


class Indexer(nn.Module):
    """Scores the cached tokens and selects those that attention reads (full layers only)."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        self.kernels = build.kernels
        self.num_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, self.num_heads * self.head_dim, build.dtype)
        self.wk = Linear(config.hidden_size, self.head_dim, build.dtype)
        self.k_norm = LayerNorm(self.head_dim, INDEX_NORM_EPS, build.dtype)
        self.weights_proj = Linear(config.hidden_size, self.num_heads, torch.float32)

    def append(self, step: Step, k_TI: Tensor, keys_NI: Tensor) -> None:
        """Writes the tokens' index keys; done in every step, also when nothing is selected in it."""
        norm = self.k_norm
        self.kernels.append_index_keys(
            k_TI, norm.weight, norm.bias, norm.eps, step.rope_TR, step.batch.slots_T, keys_NI
        )

    def select(self, step: Step, q_TJI: Tensor, w_TJ: Tensor, keys_NI: Tensor) -> Tensor:
        """Slots [T, K] of the selected tokens. q_TJI is rotated in place."""
        self.kernels.rope(q_TJI, step.rope_TR)
        return self.kernels.select_tokens.run(step.select_plan, q_TJI, w_TJ, keys_NI)


class MLA(nn.Module):
    """Multi-head latent attention in absorbed form: W_UK goes into the query and W_UV into the output, so the cache
    holds latents. Prompts may be computed otherwise (:class:`glm5ray.kernels.interface.MlaPrompts`)."""

    def __init__(self, build: Build, *, has_indexer: bool) -> None:
        super().__init__()
        config, dtype = build.config, build.dtype
        self.kernels, self.parallel = build.kernels, build.parallel
        self.num_heads = shard_size(config.num_attention_heads, build.parallel.tp_size, "num_attention_heads")
        self.nope_dim, self.value_dim, self.latent_dim = config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
        self.scale = config.qk_head_dim**-0.5
        hidden, latent_row = config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim
        self.q_a_proj = Linear(hidden, config.q_lora_rank, dtype)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, build.latent_eps, dtype)
        self.q_b_proj = Linear(config.q_lora_rank, self.num_heads * config.qk_head_dim, dtype)
        self.kv_a_proj_with_mqa = Linear(hidden, latent_row, dtype)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, build.latent_eps, dtype)
        self.kv_b_proj = Linear(config.kv_lora_rank, self.num_heads * (self.nope_dim + self.value_dim), dtype)
        self.o_proj = Linear(self.num_heads * self.value_dim, hidden, dtype)
        self.indexer = Indexer(build) if has_indexer else None

    def prepare(self) -> None:
        """Fuses the projections that share an input, and splits kv_b_proj by head into W_UK and W_UV (views)."""
        from_hidden, from_query = [self.q_a_proj, self.kv_a_proj_with_mqa], [self.q_b_proj]
        self.num_query_rows = self.q_b_proj.weight.shape[0]
        self.fuses_index_weights = False
        if self.indexer is not None:
            from_hidden.append(self.indexer.wk)
            from_query.append(self.indexer.wq_b)
            weights_proj = self.indexer.weights_proj
            weights_proj.weight.data = weights_proj.weight.data.float()
            if self.q_a_proj.weight.dtype == torch.float32:  # else it stays apart: its product is computed in fp32
                from_hidden.append(weights_proj)
                self.fuses_index_weights = True
        self.hidden_splits = [layer.weight.shape[0] for layer in from_hidden]
        self.from_hidden_OM = fuse(from_hidden)
        self.from_query_OQ = fuse(from_query)
        kv_b_HXC = self.kv_b_proj.weight.data.view(self.num_heads, self.nope_dim + self.value_dim, self.latent_dim)
        self.w_uk_HUC, self.w_uv_HVC = kv_b_HXC.split([self.nope_dim, self.value_dim], dim=1)

    def forward(
        self, x_TM: Tensor, step: Step, rows_NL: Tensor, keys_NI: Tensor | None, selected_TK: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(output [T, M], the selection used). ``selected_TK`` comes from the layer before; a layer with an indexer
        makes a new one."""
        kernels = self.kernels
        q_a_TQ, kv_TL, *for_index = kernels.linear(x_TM, self.from_hidden_OM).split(self.hidden_splits, dim=-1)
        norm = self.kv_a_layernorm
        kernels.append_latent(kv_TL, norm.weight, norm.eps, step.rope_TR, step.batch.slots_T, rows_NL)
        q_a_TQ = kernels.rms_norm(q_a_TQ, self.q_a_layernorm.weight, self.q_a_layernorm.eps)
        selects = self.indexer is not None and step.select_plan is not None
        # With nothing to select, the index queries are not computed: their rows stand last in the fused weight.
        q_TO = kernels.linear(q_a_TQ, self.from_query_OQ if selects else self.from_query_OQ[: self.num_query_rows])

        if self.indexer is not None:
            assert keys_NI is not None, "a full layer without index keys in the cache"
            self.indexer.append(step, for_index[0], keys_NI)
            selected_TK = None
            if selects:
                index_q_TJI = q_TO[:, self.num_query_rows :].unflatten(
                    -1, (self.indexer.num_heads, self.indexer.head_dim)
                )
                w_TJ = (
                    for_index[1]
                    if self.fuses_index_weights
                    else kernels.linear(x_TM.float(), self.indexer.weights_proj.weight)
                )
                selected_TK = self.indexer.select(step, index_q_TJI, w_TJ, keys_NI)

        q_THD = q_TO[:, : self.num_query_rows].unflatten(-1, (self.num_heads, -1))
        o_TX = self._attend(q_THD, step, rows_NL, selected_TK)
        return self.parallel.all_reduce(kernels.linear(o_TX, self.o_proj.weight)), selected_TK

    def _attend(self, q_THD: Tensor, step: Step, rows_NL: Tensor, selected_TK: Tensor | None) -> Tensor:
        """[T, H * V]"""
        kernels = self.kernels
        w_uk_HUC, w_uv_HVC = self.w_uk_HUC, self.w_uv_HVC
        if step.prompts_plan is not None:
            return kernels.mla_prompts.run(
                step.prompts_plan, q_THD, rows_NL, selected_TK, w_uk_HUC, w_uv_HVC, step.rope_TR, self.scale
            )
        q_THL = kernels.mla_query(q_THD, w_uk_HUC, step.rope_TR)
        o_THC = kernels.mla_attention.run(step.attention_plan, q_THL, rows_NL, selected_TK, self.scale, self.latent_dim)
        return kernels.mla_output(o_THC, w_uv_HVC)


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, columns split over the tensor-parallel ranks: the result is this rank's part
    of a sum."""

    def __init__(self, build: Build, width: int, what: str) -> None:
        super().__init__()
        self.kernels = build.kernels
        hidden, width = build.config.hidden_size, shard_size(width, build.parallel.tp_size, what)
        self.gate_proj = Linear(hidden, width, build.dtype)
        self.up_proj = Linear(hidden, width, build.dtype)
        self.down_proj = Linear(width, hidden, build.dtype)

    def prepare(self) -> None:
        self.gate_up_OM = fuse([self.gate_proj, self.up_proj])

    def forward(self, x_TM: Tensor) -> Tensor:
        hidden_TF = self.kernels.silu_and_mul(self.kernels.linear(x_TM, self.gate_up_OM))
        return self.kernels.linear(hidden_TF, self.down_proj.weight)


class DenseMLP(MLP):
    """The MLP of the first layers."""

    def __init__(self, build: Build) -> None:
        super().__init__(build, build.config.intermediate_size, "intermediate_size")
        self.parallel = build.parallel

    def forward(self, x_TM: Tensor) -> Tensor:
        return self.parallel.all_reduce(super().forward(x_TM))


class Router(nn.Module):
    """Weight and selection bias of the gate, in fp32 whatever the model's dtype: in bf16 the bias loses its meaning."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        self.weight = parameter(config.n_routed_experts, config.hidden_size, dtype=torch.float32)
        self.e_score_correction_bias = parameter(config.n_routed_experts, dtype=torch.float32)

    def prepare(self) -> None:
        self.weight.data = self.weight.data.float()
        self.e_score_correction_bias.data = self.e_score_correction_bias.data.float()


class RoutedExperts(nn.Module):
    """This rank's experts, stacked; of each the columns that this rank holds. They may stay in NVFP4."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        config, parallel = build.config, build.parallel
        self.kernels = build.kernels
        num_experts = self.num_experts = shard_size(config.n_routed_experts, parallel.ep_size, "n_routed_experts")
        width = shard_size(config.moe_intermediate_size, parallel.expert_tp_size, "moe_intermediate_size")
        self.first_expert = parallel.ep_rank * num_experts
        self.is_packed = build.packed_experts
        shapes = {
            "gate_up_proj": (num_experts, 2 * width, config.hidden_size),
            "down_proj": (num_experts, config.hidden_size, width),
        }
        for stack, stack_shape in shapes.items():
            if self.is_packed:
                for suffix, (shape, dtype) in packed_shapes(stack_shape, stack).items():
                    self.register_parameter(f"{stack}_{suffix}", parameter(*shape, dtype=dtype))
            else:
                self.register_parameter(stack, parameter(*stack_shape, dtype=build.dtype))

    def prepare(self) -> None:
        if self.is_packed:
            self._prepare_packed()
            return
        held = {name: value.data for name, value in self.named_parameters(recurse=False)}
        self.weights = self.kernels.experts.pack(
            ExpertWeights(gate_up_EFM=held["gate_up_proj"], down_EMF=held["down_proj"], first_expert=self.first_expert)
        )
        # the parameters become the packed tensors, so that nothing is held twice
        self.gate_up_proj.data, self.down_proj.data = self.weights.gate_up_EFM, self.weights.down_EMF

    def _prepare_packed(self) -> None:
        held = {name: value.data for name, value in self.named_parameters(recurse=False)}
        self.weights = self.kernels.experts.pack(
            Nvfp4ExpertWeights(
                gate_up_packed=held["gate_up_proj_packed"],
                gate_up_scales=held["gate_up_proj_scales"],
                gate_up_global=held["gate_up_proj_global"],
                down_packed=held["down_proj_packed"],
                down_scales=held["down_proj_scales"],
                down_global=held["down_proj_global"],
                first_expert=self.first_expert,
            )
        )
        for name in list(self._parameters):  # what the provider keeps of them, ``weights`` holds
            delattr(self, name)

    def forward(self, x_TM: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """The part of these experts [T, M]; ids are those of the whole model."""
        return self.kernels.experts.run(x_TM, ids_TA, weights_TA, self.weights)


class MoE(nn.Module):
    """The router chooses experts for each token; shared experts see every token."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        self.kernels, self.parallel = build.kernels, build.parallel
        self.settings = RouterSettings(
            num_experts_per_tok=config.num_experts_per_tok,
            n_group=config.n_group,
            topk_group=config.topk_group,
            norm_topk_prob=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
        )
        self.gate = Router(build)
        self.experts = RoutedExperts(build)
        shared_width = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = MLP(build, shared_width, "moe_intermediate_size") if shared_width else None
        self.dummy_ids_TA: Tensor | None = None
        """Experts of each row of a step in place of those chosen (:func:`glm5ray.model.dummy.route_uniformly`)."""

    def forward(self, x_TM: Tensor, padded_T1: Tensor | None = None) -> Tensor:
        """padded_T1: rows that need no experts, so that no weights are read for their sake."""
        if self.parallel.ep_size > 1:
            return self._forward_across_ranks(x_TM)
        shared = None if self.shared_experts is None else Beside(self.shared_experts, x_TM)
        ids_TA, weights_TA = self._route(x_TM)
        if padded_T1 is not None:
            ids_TA = ids_TA.masked_fill(padded_T1, -1)
        out_TM = self.experts(x_TM, ids_TA, weights_TA)
        if shared is not None:  # both are parts over the same ranks: one sum
            out_TM.add_(shared.result())
        return self.parallel.all_reduce(out_TM)

    def _forward_across_ranks(self, x_TM: Tensor) -> Tensor:
        """Every rank routes its share of the rows. Where shared experts are not split, it computes those for its share
        alone, too."""
        parallel, experts = self.parallel, self.experts
        x_YM = x_TM[parallel.own_rows(len(x_TM))]
        out_YM = run_across_ranks(parallel, experts, x_YM, *self._route(x_YM), experts.num_experts)
        if self.shared_experts is None:
            return parallel.gather_rows(out_YM, len(x_TM))
        if parallel.tp_size == 1:
            return parallel.gather_rows(out_YM.add_(self.shared_experts(x_YM)), len(x_TM))
        return parallel.gather_rows(out_YM, len(x_TM)) + parallel.all_reduce(self.shared_experts(x_TM))

    def _route(self, x_TM: Tensor) -> tuple[Tensor, Tensor]:
        ids_TA, weights_TA = self.kernels.route(
            x_TM, self.gate.weight, self.gate.e_score_correction_bias, self.settings
        )
        return ids_TA if self.dummy_ids_TA is None else self.dummy_ids_TA[: len(x_TM)], weights_TA


class DecoderLayer(nn.Module):
    """Attention, then MLP or MoE, each behind a norm and beside a residual."""

    def __init__(self, build: Build, *, has_indexer: bool, is_sparse: bool) -> None:
        super().__init__()
        config = build.config
        self.kernels = build.kernels
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, build.dtype)
        self.self_attn = MLA(build, has_indexer=has_indexer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, build.dtype)
        self.mlp = MoE(build) if is_sparse else DenseMLP(build)

    def forward(
        self,
        residual_TM: Tensor,
        update_TM: Tensor,
        step: Step,
        rows_NL: Tensor,
        keys_NI: Tensor | None,
        selected_TK: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """(what is still to be added to ``residual_TM``, the selection). ``update_TM`` is that of the layer before;
        so each addition is one pass together with the norm behind it. ``residual_TM`` is changed in place."""
        norm = self.input_layernorm
        x_TM = self.kernels.add_rms_norm(residual_TM, update_TM, norm.weight, norm.eps)
        update_TM, selected_TK = self.self_attn(x_TM, step, rows_NL, keys_NI, selected_TK)
        norm = self.post_attention_layernorm
        x_TM = self.kernels.add_rms_norm(residual_TM, update_TM, norm.weight, norm.eps)
        update_TM = self.mlp(x_TM, step.padded_T1) if isinstance(self.mlp, MoE) else self.mlp(x_TM)
        return update_TM, selected_TK


class SharedHead(nn.Module):
    """The norm behind an MTP layer; the head itself is the model's own."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.norm = RMSNorm(build.config.hidden_size, build.config.rms_norm_eps, build.dtype)


class MTPLayer(DecoderLayer):
    """Predicts the token after the next from a hidden state and the next token. It always has its own indexer and
    experts."""

    def __init__(self, build: Build) -> None:
        super().__init__(build, has_indexer=True, is_sparse=True)
        config = build.config
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps, build.dtype)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps, build.dtype)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size, build.dtype)
        self.shared_head = SharedHead(build)

    def join(self, embedding_TM: Tensor, hidden_TM: Tensor) -> Tensor:
        """The layer's input [T, M]; the embedding stands before the hidden state in eh_proj's columns."""
        e_TM = self.kernels.rms_norm(embedding_TM, self.enorm.weight, self.enorm.eps)
        h_TM = self.kernels.rms_norm(hidden_TM, self.hnorm.weight, self.hnorm.eps)
        return self.kernels.linear(torch.cat([e_TM, h_TM], dim=-1), self.eh_proj.weight)


class Backbone(nn.Module):
    """Everything under the checkpoint's prefix ``model.``"""

    def __init__(self, build: Build, *, with_mtp: bool) -> None:
        super().__init__()
        config = build.config
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, build.dtype, build.parallel)
        layers: list[DecoderLayer] = [
            DecoderLayer(build, has_indexer=indexer == "full", is_sparse=mlp == "sparse")
            for indexer, mlp in zip(config.indexer_types, config.mlp_layer_types, strict=True)
        ]
        layers += [MTPLayer(build) for _ in range(config.num_nextn_predict_layers if with_mtp else 0)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build.dtype)


class Glm5(nn.Module):
    """The model of one rank.

    It is made on the meta device. Weights arrive by ``load_state_dict(state, strict=True, assign=True)``; then
    :meth:`prepare` must be called once. All methods that compute run under ``torch.inference_mode``.

    norm_eps: epsilon of the two latent norms; ``checkpoint``: ``rms_norm_eps``, as engines have it; ``huggingface``:
    1e-6, as transformers. Raises :class:`ConfigError` if the sizes cannot be split over the ranks."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        parallel: ParallelContext,
        *,
        dtype: torch.dtype,
        norm_eps: Literal["checkpoint", "huggingface"] = "checkpoint",
        with_mtp: bool = False,
        packed_experts: bool = False,
    ) -> None:
        super().__init__()
        latent_eps = HF_LATENT_NORM_EPS if norm_eps == "huggingface" else config.rms_norm_eps
        build = Build(config, kernels, parallel, dtype, latent_eps, packed_experts)
        self.config, self.kernels, self.parallel = config, kernels, parallel
        self.model = Backbone(build, with_mtp=with_mtp)
        self.lm_head = Linear(config.hidden_size, self.model.embed_tokens.num_rows, dtype)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Derives what the forward pass reads from the loaded weights. Peak memory: one fused weight beside its
        parts."""
        for module in self.modules():
            if isinstance(module, MLA | MLP | Router | RoutedExperts):
                module.prepare()
        pairs_P = torch.arange(
            0, self.config.qk_rope_head_dim, 2, dtype=torch.float32, device=self.lm_head.weight.device
        )
        self.inv_freq_P = 1.0 / self.config.rope_theta ** (pairs_P / self.config.qk_rope_head_dim)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: PagedCache) -> Tensor:
        """fp32 logits [rows asked for, vocab_size]; the tokens' KV is written to their slots."""
        hidden_TM = self.forward_hidden(batch, cache)
        return self.compute_logits(hidden_TM[batch.logits_rows_L]).float()

    @torch.inference_mode()
    def forward_hidden(self, batch: ForwardBatch, cache: PagedCache) -> Tensor:
        """Hidden states behind the last norm [T, M]; the tokens' KV is written to their slots."""
        step = self._step(batch)
        update_TM = self.model.embed_tokens(batch.token_ids_T)
        residual_TM = torch.zeros_like(update_TM)
        selected_TK = None
        for i in range(self.config.num_hidden_layers):
            update_TM, selected_TK = self.model.layers[i](
                residual_TM, update_TM, step, cache.latent[i], cache.index_keys[i], selected_TK
            )
        return self.kernels.add_rms_norm(residual_TM, update_TM, self.model.norm.weight, self.model.norm.eps)

    @torch.inference_mode()
    def join_step(self) -> None:
        """Takes part in a step in which this rank has no tokens, and others do: its experts are needed."""
        weight = self.lm_head.weight
        x_TM = torch.empty(0, self.config.hidden_size, dtype=weight.dtype, device=weight.device)
        for layer in self.model.layers[: self.config.num_hidden_layers]:
            if isinstance(layer, DecoderLayer) and isinstance(layer.mlp, MoE):
                layer.mlp(x_TM)

    @torch.inference_mode()
    def compute_logits(self, hidden_LM: Tensor) -> Tensor:
        """[L, vocab_size] in the model's type, on every rank."""
        return self.parallel.all_gather(self.kernels.linear(hidden_LM, self.lm_head.weight), -1)

    @torch.inference_mode()
    def mtp_forward(self, batch: ForwardBatch, hidden_TM: Tensor, cache: PagedCache, mtp_layer: int = 0) -> Tensor:
        """Hidden states behind ``shared_head.norm`` [T, M], for :meth:`compute_logits` or for the next draft.

        hidden_TM: behind ``model.norm`` (or of the draft before) at the batch's positions. The batch's token ids are
        shifted left by one: row p carries the token at position p + 1, while positions and slots stay those of p."""
        index = self.config.num_hidden_layers + mtp_layer
        layer = self.model.layers[index]
        assert isinstance(layer, MTPLayer), f"layer {index} is no MTP layer"
        update_TM = layer.join(self.model.embed_tokens(batch.token_ids_T), hidden_TM)
        residual_TM = torch.zeros_like(update_TM)
        update_TM, _ = layer(
            residual_TM, update_TM, self._step(batch), cache.latent[index], cache.index_keys[index], None
        )
        norm = layer.shared_head.norm
        return self.kernels.add_rms_norm(residual_TM, update_TM, norm.weight, norm.eps)

    def _step(self, batch: ForwardBatch) -> Step:
        angle_TP = batch.positions_T[:, None].float() * self.inv_freq_P
        rope_TR = torch.stack([angle_TP.cos(), angle_TP.sin()], dim=-1).flatten(-2)
        topk = self.config.index_topk
        return Step(
            batch,
            rope_TR,
            self.kernels.select_tokens.plan(batch, topk),
            self.kernels.mla_attention.plan(batch, topk),
            self.kernels.mla_prompts.plan(batch, topk),
            batch.positions_T[:, None] < 0 if batch.has_padding else None,
        )
