"""GLM-5 in one compact torch file, to train glm5-nano and to measure it: whole sequences, no cache, MTP included.

The math is that of transformers' `GlmMoeDsaForCausalLM` (tests hold the logits equal) plus the multi-token-prediction
layer, which transformers leaves out. Parameter names are the checkpoint's; only the routed experts are stacked, as
transformers stacks them. All experts run on all tokens and the router's weight, zero for those not chosen, scales them:
the same result as a dispatch, four times the arithmetic, and no gather, which on a GPU and a small model is faster.

Shapes: B rows, T tokens, D hidden, H heads, E experts, I expert width, R sampled query rows, V vocabulary.
"""

from collections.abc import Callable  # noqa: TC003
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class NanoConfig:
    """The checkpoint's config.json, the part the math needs; names as there."""

    vocab_size: int = 4096
    hidden_size: int = 192
    intermediate_size: int = 384
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    routed_scaling_factor: float = 2.5
    q_lora_rank: int = 64
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    index_n_heads: int = 4
    index_head_dim: int = 32
    index_topk: int = 64
    index_topk_freq: int = 4
    index_skip_topk_offset: int = 3
    first_k_dense_replace: int = 1
    rope_theta: float = 50000.0
    rms_norm_eps: float = 1e-5
    indexer_rope_interleave: bool = True

    def is_full(self, layer: int) -> bool:
        """Whether a layer has its own indexer; the MTP layer, last, always has."""
        if layer == self.num_hidden_layers:
            return True
        return max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0


@dataclass(slots=True)
class Trace:
    """What a forward pass leaves for the indexer's loss and for balancing the router."""

    rows: Tensor | None = None
    """[R] query positions at which attention is compared; None to skip."""
    losses: list[Tensor] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)
    """Per MoE layer [E]: share of tokens that chose the expert."""


class RMSNorm(nn.Module):
    """fp32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = True) -> Tensor:
    """RoPE on the last dim of x [B, T, heads, d]; cos, sin [T, 1, d/2]. Interleaved pairs come out de-interleaved."""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Indexer(nn.Module):
    """Scores every earlier token for every query; the top `index_topk` are attended to."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        self.wq_b = nn.Linear(config.q_lora_rank, config.index_n_heads * config.index_head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, config.index_head_dim, bias=False)
        self.k_norm = nn.LayerNorm(config.index_head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(config.hidden_size, config.index_n_heads, bias=False)

    def forward(self, h: Tensor, q_resid: Tensor, cos: Tensor, sin: Tensor, rows: Tensor | None = None) -> Tensor:
        """Index scores [B, R or T, T] in fp32, before the causal mask."""
        config, rope = self.config, self.config.qk_rope_head_dim
        key = self.k_norm(self.wk(h)).unsqueeze(2)
        key = torch.cat([rotate(key[..., :rope], cos, sin, config.indexer_rope_interleave), key[..., rope:]], -1)
        if rows is not None:
            h, q_resid, cos, sin = h[:, rows], q_resid[:, rows], cos[rows], sin[rows]
        query = self.wq_b(q_resid).unflatten(-1, (config.index_n_heads, config.index_head_dim))
        query = torch.cat([rotate(query[..., :rope], cos, sin, config.indexer_rope_interleave), query[..., rope:]], -1)
        weights = self.weights_proj(h).float() * (config.index_n_heads * config.index_head_dim) ** -0.5
        scores = torch.einsum("brhd,btd->bhrt", query, key.squeeze(2).to(query.dtype)).float().relu()
        return torch.einsum("bhrt,brh->brt", scores, weights)


class Attention(nn.Module):
    """Multi-head latent attention over the tokens that an indexer chose."""

    def __init__(self, config: NanoConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        heads, nope, rope, v = (
            config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim,
        )  # fmt: skip
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, 1e-6)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, config.kv_lora_rank + rope, bias=False)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, 1e-6)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, heads * (nope + v), bias=False)
        self.o_proj = nn.Linear(heads * v, config.hidden_size, bias=False)
        self.indexer = Indexer(config) if config.is_full(layer) else None

    def project(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(query, key [B, H, T, nope + rope], value [B, H, T, v], q_resid [B, T, q_lora])."""
        config = self.config
        heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        q_resid = self.q_a_layernorm(self.q_a_proj(h))
        query = self.q_b_proj(q_resid).unflatten(-1, (heads, nope + rope))
        latent, key_rope = self.kv_a_proj_with_mqa(h).split([config.kv_lora_rank, rope], dim=-1)
        key_value = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, nope + config.v_head_dim))
        key_nope, value = key_value.split([nope, config.v_head_dim], dim=-1)
        query_rope = rotate(query[..., nope:], cos, sin)
        key_rope = rotate(key_rope.unsqueeze(2), cos, sin).expand(-1, -1, heads, -1)
        query = torch.cat([query[..., :nope], query_rope.to(query.dtype)], -1).transpose(1, 2)
        key = torch.cat([key_nope, key_rope.to(key_nope.dtype)], -1).transpose(1, 2)
        return query, key, value.transpose(1, 2), q_resid

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Attention with `mask` [B, T, T] (True: visible; None: dense causal)."""
        query, key, value, _ = self.project(h, cos, sin)
        return self.attend(query, key, value, mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Softmax attention and the output projection."""
        attn_mask = None if mask is None else mask.unsqueeze(1)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """The dense and the shared MLP."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores in fp32; the bias moves the choice only. It starts at 7, as GLM-5.2's: in BF16 it breaks."""

    e_score_correction_bias: Tensor

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.full((config.n_routed_experts,), 7.0))

    def forward(self, x: Tensor) -> Tensor:
        """Weights [..., E] of all experts, zero for those not chosen."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.config.num_experts_per_tok, dim=-1).indices
        kept = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        return kept / (kept.sum(-1, keepdim=True) + 1e-20) * self.config.routed_scaling_factor


class Experts(nn.Module):
    """Routed experts, stacked as in transformers, gate rows first. `fake_quant` puts NVFP4 rounding into training."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        experts, width, hidden = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.fake_quant: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj, self.down_proj
        if self.fake_quant is not None:
            gate_up, down = self.fake_quant(gate_up), self.fake_quant(down)
        if not self.training:
            return self.dispatch(x, weights)
        gate, up = gate_up.chunk(2, dim=1)
        inner = F.silu(F.linear(x, gate.flatten(0, 1))) * F.linear(x, up.flatten(0, 1))
        inner = inner.unflatten(-1, (*weights.shape[-1:], -1)) * weights.unsqueeze(-1).to(inner.dtype)
        return F.linear(inner.flatten(-2), down.transpose(0, 1).flatten(1))

    def dispatch(self, x: Tensor, weights: Tensor) -> Tensor:
        """The same sum, expert by expert over its own tokens: a quarter of the arithmetic, for measuring on a CPU."""
        out = torch.zeros_like(x)
        for expert in range(weights.shape[-1]):
            rows = weights[:, expert].nonzero().squeeze(-1)
            gate, up = F.linear(x[rows], self.gate_up_proj[expert]).chunk(2, dim=-1)
            inner = F.silu(gate) * up * weights[rows, expert, None]
            out.index_add_(0, rows, F.linear(inner, self.down_proj[expert]))
        return out


class MoE(nn.Module):
    """Routed experts plus the shared expert, which is always on and not scaled."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(config.hidden_size, config.moe_intermediate_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(output, load [E])."""
        weights = self.gate(x)
        load = (weights.detach() > 0).float().mean(tuple(range(x.dim() - 1)))
        return self.experts(x, weights) + self.shared_experts(x), load


class Layer(nn.Module):
    """A decoder layer. The last one, number `num_hidden_layers`, is the MTP layer, with a projection and norms more."""

    def __init__(self, config: NanoConfig, layer: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.self_attn = Attention(config, layer)
        dense = layer < config.first_k_dense_replace
        self.mlp = MLP(hidden, config.intermediate_size) if dense else MoE(config)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        if layer == config.num_hidden_layers:
            self.enorm, self.hnorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
            self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
            self.shared_head = nn.ModuleDict({"norm": RMSNorm(hidden, eps)})

    def feed_forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The second half of the layer, with its residual; x [tokens, D]."""
        h = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MoE):
            out, load = self.mlp(h)
            return x + out, load
        return x + self.mlp(h), None


class Glm5Nano(nn.Module):
    """`sparse` False gives dense attention: right below `index_topk` tokens, another function beyond."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers + 1))
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": layers,
                "norm": RMSNorm(config.hidden_size, config.rms_norm_eps),
            }
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.reset()

    @property
    def layers(self) -> list[Layer]:
        """All layers, the MTP layer last."""
        return [cast("Layer", layer) for layer in self.model["layers"].children()]

    @torch.no_grad()
    def reset(self) -> None:
        """Seeded by the caller: normal with 1/sqrt(fan-in), smaller where a branch returns to the residual."""
        depth = (2 * self.config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            std = parameter.shape[-1] ** -0.5
            std *= depth if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")) else 1.0
            std = 0.3 if "embed_tokens" in name else std
            std *= 0.5 if "lm_head" in name or "mlp.gate.weight" in name else 1.0
            nn.init.normal_(parameter, std=std)

    def rope(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, rope/2] in fp32."""
        dim = self.config.qk_rope_head_dim
        inverse = self.config.rope_theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
        angle = (torch.arange(length, device=device, dtype=torch.float32)[:, None] * inverse)[:, None]
        return angle.cos(), angle.sin()

    def forward(self, ids: Tensor, *, sparse: bool = True, trace: Trace | None = None) -> Tensor:
        """Hidden states [B, T, D] after the final norm."""
        x: Tensor = self.model["embed_tokens"](ids)
        return self.model["norm"](self.run(x, range(self.config.num_hidden_layers), sparse, trace or Trace()))

    def mtp(self, hidden: Tensor, next_ids: Tensor, *, sparse: bool = True, trace: Trace | None = None) -> Tensor:
        """Hidden states [B, T, D] that predict the token after next: row p sees the hidden state of p and token p+1."""
        layer = self.layers[-1]
        embedded = layer.enorm(self.model["embed_tokens"](next_ids))
        x = layer.eh_proj(torch.cat([embedded, layer.hnorm(hidden)], -1))
        last = self.config.num_hidden_layers
        return layer.shared_head["norm"](self.run(x, range(last, last + 1), sparse, trace or Trace()))

    def run(self, x: Tensor, layers: range, sparse: bool, trace: Trace) -> Tensor:
        """The decoder layers, one after the other; shared layers take the selection of the full layer before them."""
        cos, sin = self.rope(x.shape[1], x.device)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        mask: Tensor | None = None
        scores: Tensor | None = None
        targets: list[Tensor] = []
        for i in layers:
            layer = self.layers[i]
            h = layer.input_layernorm(x)
            query, key, value, q_resid = layer.self_attn.project(h, cos, sin)
            if layer.self_attn.indexer is not None:
                self.index_loss(scores, targets, trace)
                scores, targets, mask = None, [], None
                if sparse and x.shape[1] > self.config.index_topk:
                    mask = self.select(layer.self_attn.indexer, h, q_resid, cos, sin, causal)
                if trace.rows is not None:
                    visible = causal[trace.rows] if mask is None else mask[:, trace.rows]
                    raw: Tensor = layer.self_attn.indexer(h.detach(), q_resid.detach(), cos, sin, trace.rows)
                    scores = raw.masked_fill(~visible, float("-inf"))
            if trace.rows is not None:
                targets.append(attention_rows(query, key, trace.rows, causal if mask is None else mask))
            x = x + layer.self_attn.attend(query, key, value, mask)
            flat, load = layer.feed_forward(x.flatten(0, 1))
            x = flat.unflatten(0, x.shape[:2])
            if load is not None:
                trace.loads.append(load)
        self.index_loss(scores, targets, trace)
        return x

    @torch.no_grad()
    def select(
        self, indexer: nn.Module, h: Tensor, q_resid: Tensor, cos: Tensor, sin: Tensor, causal: Tensor
    ) -> Tensor:
        """Mask [B, T, T] of the `index_topk` best visible tokens of each query."""
        scores = indexer(h, q_resid, cos, sin).masked_fill(~causal, float("-inf"))
        chosen = scores.topk(self.config.index_topk, dim=-1, sorted=False).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True) & causal

    @staticmethod
    def index_loss(scores: Tensor | None, targets: list[Tensor], trace: Trace) -> None:
        """KL from the mean attention of the layers that share a selection to the softmax of the index scores."""
        if scores is None:
            return
        target = torch.stack(targets).mean(0)
        log_scores = scores.log_softmax(-1)
        trace.losses.append(
            (target * (target.clamp_min(1e-9).log() - log_scores).masked_fill(target == 0, 0)).sum(-1).mean()
        )


@torch.no_grad()
def attention_rows(query: Tensor, key: Tensor, rows: Tensor, visible: Tensor) -> Tensor:
    """Attention probabilities [B, R, T] of some query rows, averaged over heads."""
    scores = (query[:, :, rows] @ key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
    visible = visible[rows] if visible.dim() == 2 else visible[:, rows].unsqueeze(1)
    return scores.masked_fill(~visible, float("-inf")).softmax(-1).mean(1)


def from_config(values: dict[str, Any]) -> NanoConfig:
    """NanoConfig out of a config.json; the RoPE base is nested there."""
    known = {name: values[name] for name in asdict(NanoConfig()) if name in values}
    return NanoConfig(**known, rope_theta=values["rope_parameters"]["rope_theta"])
