"""The operations that FlashInfer serves (extra ``gpu``, exactly 0.7.4); the only importer of ``flashinfer``.

Chosen by name alone (``kernels.mla_attention: flashinfer``): what a device needs for it is said by :func:`load`, which
also compiles FlashInfer's modules, so that no step does.

- ``mla_attention`` on sm_90: its fa3 kernel over bf16 rows. Selected positions are pages of one token there.
- ``mla_attention`` on sm_120: ``SparseMLASm120Wrapper`` over the FP8 rows of :mod:`glm5ray.kernels.cache_rows`, always
  by selected slots: without a selection, those of all positions that a token sees.
- ``experts`` on sm_120: ``cutlass_fused_moe``, weights and activations in NVFP4, so another function than the
  reference's, as ``triton_w4a4``.

What ran on which hardware: docs/flashinfer.md. Shape suffixes in :mod:`glm5ray.kernels.interface`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import flashinfer.fused_moe
import flashinfer.mla
import torch
from flashinfer.mla import MLAPlanMetadata

from glm5ray.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from glm5ray.kernels.interface import ForwardBatch, Nvfp4ExpertWeights

CAPABILITIES = {"mla_attention": (9, 12), "experts": (12,)}
"""Operation -> major compute capabilities that it runs on."""
LATENT_DIM, ROPE_DIM = 512, 64
"""Of GLM-5, and of the kernels that are compiled."""
WORKSPACE_BYTES = 128 * 2**20
"""FlashInfer's advice for the fa3 kernel's partial results."""
PLANNED_TOKENS = 1024
"""Tokens with selections that one fa3 plan takes: its planner ends at 16,384 tiles of work."""
INPUT_SCALE, HIDDEN_SCALE = 16.0, 4.0
"""Global scales of activations in NVFP4, which FlashInfer wants to be given: a group's E4M3 scale is ``amax / 6`` times
it, with full precision for an amax from 0.006 to 168 (inputs, behind a norm) and from 0.023 to 672 (between the two
products). They are constant, so that a token's numbers do not depend on its neighbours."""


def load(op: str) -> None:
    """Compiles what ``op`` needs on this device, minutes the first time on a machine (FlashInfer keeps the result on
    disk). Raises :class:`ConfigError` on a device that cannot run it."""
    major, minor = torch.cuda.get_device_capability()
    if major not in CAPABILITIES[op]:
        needed = " or ".join(f"{m}.x" for m in CAPABILITIES[op])
        raise ConfigError(
            f"kernels.{op} is 'flashinfer', which needs compute capability {needed} for it, and this device has "
            f"{major}.{minor}; remove the setting"
        )
    if op == "experts":
        from flashinfer.fused_moe.core import get_cutlass_fused_moe_module

        get_cutlass_fused_moe_module(f"{major * 10 + minor}")
    elif major == 9:
        from flashinfer.mla._batch_mla._backends._fa_common import get_batch_mla_module

        bf16 = torch.bfloat16
        get_batch_mla_module("fa3", bf16, bf16, bf16, torch.int32, LATENT_DIM, ROPE_DIM, False)
    else:
        from flashinfer.mla._sparse_mla_sm120._api import get_sparse_mla_sm120_module

        get_sparse_mla_sm120_module()


@functools.cache
def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


@dataclass(slots=True)
class AttentionPlan:
    """Of one step."""

    batch: ForwardBatch
    dense: Any = None
    """fa3's wrapper, planned by the first layer: heads and scale are not known before."""
    selected: list[tuple[Any, Tensor, Tensor]] | None = None
    """For each run of tokens fa3's wrapper, the slots that it reads, and where they stand among the selected; ditto."""
    visible: tuple[Tensor, Tensor] | None = None
    """sm_120: (slots of all visible positions, how many), for layers without a selection."""


class MlaAttention:
    """:class:`glm5ray.kernels.interface.MlaAttention`"""

    def plan(self, batch: ForwardBatch, index_topk: int) -> AttentionPlan:
        return AttentionPlan(batch)

    def run(
        self,
        plan: AttentionPlan,
        q_THL: Tensor,
        rows_NL: Tensor,
        selected_TK: Tensor | None,
        scale: float,
        value_dim: int,
    ) -> Tensor:
        if value_dim != LATENT_DIM or q_THL.shape[-1] != LATENT_DIM + ROPE_DIM or q_THL.dtype != torch.bfloat16:
            raise ConfigError(
                f"kernels.mla_attention is 'flashinfer', which takes bfloat16 and latents of {LATENT_DIM} + "
                f"{ROPE_DIM}; this model has {q_THL.dtype} and {value_dim} + {q_THL.shape[-1] - value_dim}"
            )
        if not len(q_THL):
            return q_THL.new_empty(0, q_THL.shape[1], value_dim)
        on_sm120 = _major(q_THL.device) == 12
        if on_sm120 != (rows_NL.dtype == torch.uint8):
            wanted, device = ("fp8", "sm_120") if on_sm120 else ("auto", "sm_90")
            raise ConfigError(f"kernels.mla_attention is 'flashinfer', which on {device} needs cache.kv_dtype={wanted}")
        if on_sm120:
            return _run_sparse_sm120(plan, q_THL, rows_NL, selected_TK, scale)
        if selected_TK is None:
            return _run_dense_fa3(plan, q_THL, rows_NL, scale)
        return _run_selected_fa3(plan, q_THL, rows_NL, selected_TK, scale)


def _run_sparse_sm120(
    plan: AttentionPlan, q_THL: Tensor, rows_NB: Tensor, selected_TK: Tensor | None, scale: float
) -> Tensor:
    """By slots, on FP8 rows [N, 656]."""
    if selected_TK is None:
        if plan.visible is None:
            plan.visible = visible_slots(plan.batch)
        slots_TK, counts_T = plan.visible
    else:
        slots_TK, counts_T = selected_TK, (selected_TK >= 0).sum(dim=1, dtype=torch.int32)
    o_THC = q_THL.new_empty(*q_THL.shape[:2], LATENT_DIM)
    _sparse_wrapper(q_THL.device).run(
        q=q_THL.contiguous(),
        kv_cache=rows_NB.view(-1, plan.batch.page_size, rows_NB.shape[1]),
        indices=slots_TK.contiguous(),
        output=o_THC,
        sm_scale=scale,
        topk_length=counts_T,
    )
    return o_THC


@functools.cache
def _sparse_wrapper(device: torch.device) -> Any:
    # GLM-5's rows have any scale, DeepSeek's only powers of two
    return flashinfer.mla.SparseMLASm120Wrapper(kv_scale_format="arbitrary_fp32", device=device)


def visible_slots(batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """(slots int32 [T, K] of the positions not behind each token's own, -1 behind the last; how many, int32 [T]), with
    K the batch's bound rounded up to a multiple of 64, as the kernel for many tokens wants it. On the device, no
    copy from it."""
    width = max(64, -(-batch.max_visible // 64) * 64)
    position_K = torch.arange(width, device=batch.positions_T.device)
    page_K = (position_K // batch.page_size).clamp(max=batch.page_table_SP.shape[1] - 1)
    page_TK = batch.page_table_SP[batch.slice_T.long()][:, page_K]
    slots_TK = page_TK * batch.page_size + (position_K % batch.page_size).int()
    is_seen_TK = position_K <= batch.positions_T[:, None]
    return torch.where(is_seen_TK, slots_TK, -1).int(), (batch.positions_T + 1).int()


def _run_dense_fa3(plan: AttentionPlan, q_THL: Tensor, rows_NL: Tensor, scale: float) -> Tensor:
    """Over whole pages, causal within a slice."""
    batch = plan.batch
    if plan.dense is None:
        lengths = [start + tokens for start, tokens in zip(batch.starts, batch.num_tokens, strict=True)]
        pages = [-(-length // batch.page_size) for length in lengths]
        column_P = torch.arange(batch.page_table_SP.shape[1], device=q_THL.device)
        held_SP = column_P < torch.tensor(pages, device=q_THL.device)[:, None]
        plan.dense = _planned_fa3(
            q_THL,
            counts=list(batch.num_tokens),
            pages=pages,
            indices=batch.page_table_SP[held_SP].int(),
            lengths=lengths,
            page_size=batch.page_size,
            scale=scale,
        )
    return plan.dense.run(query=q_THL.contiguous(), kv_cache=rows_NL.view(-1, batch.page_size, rows_NL.shape[1]))


def _run_selected_fa3(plan: AttentionPlan, q_THL: Tensor, rows_NL: Tensor, selected_TK: Tensor, scale: float) -> Tensor:
    """Every token is a sequence of one, its selected slots are pages of one. How many each has follows from its
    position, so the plan serves all layers; their slots are written over those of the layer before."""
    batch, width = plan.batch, selected_TK.shape[1]
    if plan.selected is None:
        seen = [p + 1 for s, n in zip(batch.starts, batch.num_tokens, strict=True) for p in range(s, s + n)]
        plan.selected = []
        for first in range(0, len(seen), PLANNED_TOKENS):
            lengths_T = torch.tensor([min(count, width) for count in seen[first : first + PLANNED_TOKENS]])
            at_X = (torch.arange(width) < lengths_T[:, None]).flatten().nonzero()[:, 0].to(q_THL.device)
            slots_X = torch.zeros(len(at_X), dtype=torch.int32, device=q_THL.device)
            wrapper = _planned_fa3(
                q_THL,
                counts=[1] * len(lengths_T),
                pages=lengths_T.tolist(),
                indices=slots_X,
                lengths=lengths_T.tolist(),
                page_size=1,
                scale=scale,
            )
            plan.selected.append((wrapper, slots_X, at_X))
    parts = []
    for index, (wrapper, slots_X, at_X) in enumerate(plan.selected):
        rows = slice(index * PLANNED_TOKENS, (index + 1) * PLANNED_TOKENS)
        slots_X.copy_(selected_TK[rows].flatten()[at_X])
        parts.append(wrapper.run(query=q_THL[rows].contiguous(), kv_cache=rows_NL[:, None]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _planned_fa3(
    q_THL: Tensor,
    *,
    counts: list[int],
    pages: list[int],
    indices: Tensor,
    lengths: list[int],
    page_size: int,
    scale: float,
) -> Any:
    """A wrapper for sequences of ``counts`` queries over ``lengths`` positions in ``pages`` pages each; ``indices``
    are these pages, and stay the caller's to change. Waits for the device."""
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(q_THL.device), backend="fa3")
    wrapper.plan(
        metadata=MLAPlanMetadata.csr(_offsets(counts), _offsets(pages), indices, torch.tensor(lengths).int()),
        num_heads=q_THL.shape[1],
        head_dim_ckv=LATENT_DIM,
        head_dim_kpe=ROPE_DIM,
        page_size=page_size,
        causal=page_size > 1,
        sm_scale=scale,
        q_data_type=q_THL.dtype,
        kv_data_type=q_THL.dtype,
    )
    return wrapper


def _offsets(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class CutlassExperts:
    """:class:`~glm5ray.kernels.interface.Nvfp4ExpertWeights` as ``cutlass_fused_moe`` reads them."""

    gate_up: Tensor
    """int64 [E, 2F, M/16]: 16 codes each; rows of up first, then those of the gate."""
    down: Tensor
    """int64 [E, M, F/16]"""
    quant_scales: list[Tensor]
    """Input scale, swizzled scales of gate_up, factors fp32 [E] of its product; the same three for down."""
    first_expert: int


def swizzle_scales(scales_EOG: Tensor) -> Tensor:
    """uint8 [E, O to a multiple of 128, G to a multiple of 4] of float8_e4m3fn or uint8 [E, O, G]: tiles of 128 x 4 one
    behind the other along G, in each the scales of rows r, r + 32, r + 64 and r + 96 side by side."""
    num_experts, rows, groups = scales_EOG.shape
    padding = (0, -groups % 4, 0, -rows % 128)
    padded = torch.nn.functional.pad(scales_EOG.view(torch.uint8), padding)
    tiles = padded.view(num_experts, padded.shape[1] // 128, 4, 32, padded.shape[2] // 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(padded.shape).contiguous()


class Experts:
    """:class:`glm5ray.kernels.interface.Experts`, with activations rounded to NVFP4."""

    def pack(self, experts: Nvfp4ExpertWeights) -> CutlassExperts:
        """Gate and up share one factor in FlashInfer, the gate's. Up's products, and so what the second product takes,
        come out wrong by the ratio of the two; that product's scale and factor make up for it exactly."""
        num_experts, width = experts.gate_up_packed.shape[0], experts.gate_up_packed.shape[1] // 2
        hidden = experts.down_packed.shape[1]
        if width % 64 or hidden % 128:
            raise ConfigError(
                f"kernels.experts is 'flashinfer', which needs a hidden_size of a multiple of 128 and 64 columns of "
                f"each expert on a rank; this rank has {hidden} and {width}"
            )
        gate, up = experts.gate_up_global.float().unbind(1)
        ratio = torch.where(gate == 0, 1.0, up / gate)  # a gate of zeros closes, whatever up is
        gate_scales, up_scales = experts.gate_up_scales.view(torch.uint8).chunk(2, dim=1)
        scales = [
            torch.tensor(INPUT_SCALE, device=gate.device),
            swizzle_scales(torch.cat([up_scales, gate_scales], dim=1)).view(torch.int32),
            gate / INPUT_SCALE,
            HIDDEN_SCALE * ratio,
            swizzle_scales(experts.down_scales).view(torch.int32),
            experts.down_global.float() / HIDDEN_SCALE,
        ]
        up_first = torch.empty_like(experts.gate_up_packed)
        for e in range(num_experts):  # one at a time: a layer's experts are gigabytes
            up_first[e, :width] = experts.gate_up_packed[e, width:]
            up_first[e, width:] = experts.gate_up_packed[e, :width]
        return CutlassExperts(
            gate_up=up_first.view(torch.int64),
            down=experts.down_packed.contiguous().view(torch.int64),
            quant_scales=scales,
            first_expert=experts.first_expert,
        )

    def run(self, x_TM: Tensor, ids_TA: Tensor, weights_TA: Tensor, experts: CutlassExperts) -> Tensor:
        out_TM = torch.empty_like(x_TM)
        if not len(x_TM):
            return out_TM
        # Experts of other ranks become those of a second rank, which is not here: FlashInfer leaves them out.
        num_experts = len(experts.down)
        local_TA = ids_TA - experts.first_expert
        is_here_TA = (local_TA >= 0) & (local_TA < num_experts)
        flashinfer.fused_moe.cutlass_fused_moe(
            input=x_TM,
            token_selected_experts=torch.where(is_here_TA, local_TA, num_experts).int(),
            token_final_scales=weights_TA.float(),
            fc1_expert_weights=experts.gate_up,
            fc2_expert_weights=experts.down,
            output_dtype=x_TM.dtype,
            quant_scales=experts.quant_scales,
            ep_size=2,
            ep_rank=0,
            output=out_TM,
            use_fused_finalize=False,  # its sums are atomic, in any order
            nvfp4_4over6=None,  # else an environment variable may change the rounding
        )
        return out_TM


mla_attention = MlaAttention()
experts = Experts()
