"""The definition of right: every operation in the plainest torch there is, fp32 inside, one sequence after another.

Never optimised. Shape suffixes and contracts in :mod:`glm5ray.kernels.interface`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from glm5ray.kernels.cache_rows import quantise_index, split_keys, split_rows, write_keys, write_latent
from glm5ray.kernels.interface import ExpertWeights, Nvfp4Weight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from glm5ray.kernels.interface import ForwardBatch, RoutedExperts, RouterSettings


def nvfp4_values(packed_OX: Tensor, scales_OG: Tensor, global_scale: Tensor) -> Tensor:
    """fp32 [O, X] of what :class:`glm5ray.kernels.interface.Nvfp4Weight` describes."""
    magnitude = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=packed_OX.device)
    codes_OX = torch.stack([packed_OX & 15, packed_OX >> 4], dim=-1).flatten(1).long()
    values_OX = torch.cat([magnitude, -magnitude])[codes_OX]
    return values_OX * (scales_OG.float() * global_scale).repeat_interleave(16, dim=1)


def linear(x_TX: Tensor, weight_OX: Tensor | Nvfp4Weight) -> Tensor:
    if isinstance(weight_OX, Nvfp4Weight):
        weight_OX = nvfp4_values(weight_OX.packed_OX, weight_OX.scales_OG, weight_OX.global_scale)
    return (x_TX.float() @ weight_OX.float().T).to(x_TX.dtype)


def rms_norm(x_TX: Tensor, weight_X: Tensor, eps: float) -> Tensor:
    x = x_TX.float()
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return normed.to(x_TX.dtype) * weight_X


def add_rms_norm(residual_TX: Tensor, x_TX: Tensor, weight_X: Tensor, eps: float) -> Tensor:
    residual_TX.add_(x_TX)
    return rms_norm(residual_TX, weight_X, eps)


def silu_and_mul(gate_up_TX: Tensor) -> Tensor:
    gate, up = gate_up_TX.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up_TX.dtype)


def rope(x_TJX: Tensor, rope_TR: Tensor) -> None:
    cos_T1P, sin_T1P = rope_TR[:, None, 0::2], rope_TR[:, None, 1::2]
    width = rope_TR.shape[-1]
    even, odd = x_TJX[..., 0:width:2].float(), x_TJX[..., 1:width:2].float()
    rotated_even, rotated_odd = even * cos_T1P - odd * sin_T1P, odd * cos_T1P + even * sin_T1P
    x_TJX[..., 0:width:2] = rotated_even.to(x_TJX.dtype)
    x_TJX[..., 1:width:2] = rotated_odd.to(x_TJX.dtype)


def append_latent(
    kv_TL: Tensor, weight_C: Tensor, eps: float, rope_TR: Tensor, slots_T: Tensor, rows_NL: Tensor
) -> None:
    c_TC, k_pe_TR = kv_TL.split([weight_C.shape[0], rope_TR.shape[-1]], dim=-1)
    k_pe_T1R = k_pe_TR[:, None].clone()
    rope(k_pe_T1R, rope_TR)
    written_T = slots_T >= 0
    write_latent(rows_NL, slots_T[written_T], rms_norm(c_TC, weight_C, eps)[written_T], k_pe_T1R[written_T, 0])


def append_index_keys(
    k_TI: Tensor, weight_I: Tensor, bias_I: Tensor, eps: float, rope_TR: Tensor, slots_T: Tensor, keys_NI: Tensor
) -> None:
    k = k_TI.float()
    centred = k - k.mean(-1, keepdim=True)
    normed = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps)
    key_T1I = (normed * weight_I.float() + bias_I.float()).to(k_TI.dtype)[:, None]
    rope(key_T1I, rope_TR)
    written_T = slots_T >= 0
    write_keys(keys_NI, slots_T[written_T], key_T1I[written_T, 0])


def mla_query(q_THD: Tensor, w_uk_HUC: Tensor, rope_TR: Tensor) -> Tensor:
    q_nope_THU, q_pe_THR = q_THD.split([w_uk_HUC.shape[1], rope_TR.shape[-1]], dim=-1)
    q_pe_THR = q_pe_THR.clone()
    rope(q_pe_THR, rope_TR)
    q_latent_THC = torch.einsum("thu,huc->thc", q_nope_THU.float(), w_uk_HUC.float())
    return torch.cat([q_latent_THC.to(q_THD.dtype), q_pe_THR], dim=-1)


def mla_output(o_THC: Tensor, w_uv_HVC: Tensor) -> Tensor:
    return torch.einsum("thc,hvc->thv", o_THC.float(), w_uv_HVC.float()).to(o_THC.dtype).flatten(1)


def pick_tokens(hidden_LM: Tensor, logits_LW: Tensor) -> Tensor:
    hidden_L, logits_L = hidden_LM.isfinite().all(-1), logits_LW.isfinite().all(-1)
    return torch.stack([logits_LW.argmax(-1), hidden_L.long(), logits_L.long()])


def _tokens(batch: ForwardBatch) -> Iterator[tuple[int, Tensor]]:
    """For each row of T: (row, slots of all positions not behind its own)."""
    row = 0
    for pages_P, start, num_tokens in zip(batch.page_table_SP, batch.starts, batch.num_tokens, strict=True):
        for position in range(start, start + num_tokens):
            seen = torch.arange(position + 1, device=pages_P.device)
            yield row, pages_P[seen // batch.page_size].long() * batch.page_size + seen % batch.page_size
            row += 1


class SelectTokens:
    """:class:`glm5ray.kernels.interface.SelectTokens`"""

    def plan(self, batch: ForwardBatch, index_topk: int) -> tuple[ForwardBatch, int] | None:
        contexts = [start + num_tokens for start, num_tokens in zip(batch.starts, batch.num_tokens, strict=True)]
        return (batch, index_topk) if max(contexts, default=0) > index_topk else None

    def run(self, plan: tuple[ForwardBatch, int], q_TJI: Tensor, w_TJ: Tensor, keys_NI: Tensor) -> Tensor:
        batch, index_topk = plan
        selected_TK = torch.full((q_TJI.shape[0], index_topk), -1, dtype=torch.int32, device=q_TJI.device)
        keys = split_keys(keys_NI, q_TJI.shape[-1])
        if keys.scales_Ps is not None:
            q_TJI, scale_TJ = quantise_index(q_TJI)
            w_TJ = w_TJ.float() * scale_TJ
        for row, slots_s in _tokens(batch):
            dots_Js = torch.relu(q_TJI[row].float() @ keys.gather(slots_s).T)
            score_s = (w_TJ[row].float()[:, None] * dots_Js).sum(0)
            best = torch.sort(score_s, descending=True, stable=True).indices[:index_topk]
            selected_TK[row, : len(best)] = slots_s[best].int()
        return selected_TK


class MlaAttention:
    """:class:`glm5ray.kernels.interface.MlaAttention`"""

    def plan(self, batch: ForwardBatch, index_topk: int) -> ForwardBatch:
        return batch

    def run(
        self,
        plan: ForwardBatch,
        q_THL: Tensor,
        rows_NL: Tensor,
        selected_TK: Tensor | None,
        scale: float,
        value_dim: int,
    ) -> Tensor:
        o_THC = q_THL.new_zeros(*q_THL.shape[:2], value_dim)
        rows = split_rows(rows_NL, value_dim, q_THL.shape[-1] - value_dim)
        for row, slots_s in _tokens(plan):
            if selected_TK is not None:
                slots_s = selected_TK[row][selected_TK[row] >= 0]
            rows_sL = rows.gather(slots_s)
            p_Hs = torch.softmax(q_THL[row].float() @ rows_sL.T * scale, dim=-1)
            o_THC[row] = (p_Hs @ rows_sL[:, :value_dim]).to(q_THL.dtype)
        return o_THC


class MlaPrompts:
    """:class:`glm5ray.kernels.interface.MlaPrompts`: always the absorbed form."""

    def plan(self, batch: ForwardBatch, index_topk: int) -> None:
        return None

    def run(
        self,
        plan: ForwardBatch,
        q_THD: Tensor,
        rows_NL: Tensor,
        selected_TK: Tensor | None,
        w_uk_HUC: Tensor,
        w_uv_HVC: Tensor,
        rope_TR: Tensor,
        scale: float,
    ) -> Tensor:
        q_THL = mla_query(q_THD, w_uk_HUC, rope_TR)
        return mla_output(mla_attention.run(plan, q_THL, rows_NL, selected_TK, scale, w_uk_HUC.shape[2]), w_uv_HVC)


def route(x_TM: Tensor, gate_EM: Tensor, bias_E: Tensor, settings: RouterSettings) -> tuple[Tensor, Tensor]:
    score_TE = torch.sigmoid(x_TM.float() @ gate_EM.float().T)
    choice_TE = score_TE + bias_E.float()
    choice_TGe = choice_TE.unflatten(-1, (settings.n_group, -1))
    group_TG = choice_TGe.topk(min(2, choice_TGe.shape[-1]), dim=-1).values.sum(-1)
    is_in_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter_(
        1, group_TG.topk(settings.topk_group, dim=-1).indices, True
    )
    choice_TE = choice_TGe.masked_fill(~is_in_TG[..., None], float("-inf")).flatten(1)
    ids_TA = torch.sort(choice_TE, dim=-1, descending=True, stable=True).indices[:, : settings.num_experts_per_tok]
    weights_TA = score_TE.gather(1, ids_TA)
    if settings.norm_topk_prob:
        weights_TA = weights_TA / (weights_TA.sum(-1, keepdim=True) + 1e-20)
    return ids_TA, weights_TA * settings.routed_scaling_factor


def num_experts(experts: RoutedExperts) -> int:
    return len(experts.gate_up_EFM if isinstance(experts, ExpertWeights) else experts.gate_up_packed)


def expert_values(experts: RoutedExperts, e: int) -> tuple[Tensor, Tensor]:
    """(gate_up fp32 [2F, M], down fp32 [M, F]) of the e-th of these experts."""
    if isinstance(experts, ExpertWeights):
        return experts.gate_up_EFM[e].float(), experts.down_EMF[e].float()
    gate_and_up = zip(
        experts.gate_up_packed[e].chunk(2), experts.gate_up_scales[e].chunk(2), experts.gate_up_global[e], strict=True
    )
    down_MF = nvfp4_values(experts.down_packed[e], experts.down_scales[e], experts.down_global[e])
    return torch.cat([nvfp4_values(*half) for half in gate_and_up]), down_MF


class Experts:
    """:class:`glm5ray.kernels.interface.Experts`"""

    def pack(self, experts: RoutedExperts) -> RoutedExperts:
        return experts

    def run(self, x_TM: Tensor, ids_TA: Tensor, weights_TA: Tensor, experts: RoutedExperts) -> Tensor:
        out_TM = torch.zeros_like(x_TM, dtype=torch.float32)
        for e in range(num_experts(experts)):
            token_n, choice_n = torch.where(ids_TA == experts.first_expert + e)
            gate_up_FM, down_MF = expert_values(experts, e)
            gate_nF, up_nF = (x_TM[token_n].float() @ gate_up_FM.T).chunk(2, dim=-1)
            hidden_nF = gate_nF * torch.sigmoid(gate_nF) * up_nF
            result_nM = hidden_nF @ down_MF.T
            out_TM.index_add_(0, token_n, result_nM * weights_TA[token_n, choice_n, None])
        return out_TM.to(x_TM.dtype)


select_tokens = SelectTokens()
mla_attention = MlaAttention()
mla_prompts = MlaPrompts()
experts = Experts()
