"""FlashInfer without a GPU: its Python runs, as installed, and what its compiled modules would compute is computed here
in plain torch, from its documents and with the helpers of its own references.

So a call that FlashInfer's signatures or checks refuse fails, and so does one whose tensors mean something else to
FlashInfer than to us. What the compiled code itself does stays untested."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import flashinfer.fused_moe.core as moe_core
import torch
from flashinfer.mla._batch_mla._backends import _fa_common, fa3_backend
from flashinfer.mla._sparse_mla_sm120 import _prepared
from flashinfer.trace.templates.gemm import _unswizzle_batched_sf_128x4
from flashinfer.trace.templates.moe import _unpack_fp4_e2m1
from torch import Tensor

from glm5ray.kernels import flashinfer_ops
from glm5ray.quantization.nvfp4 import quantize_nvfp4

if TYPE_CHECKING:
    import pytest

MASK_NONE, MASK_CAUSAL = 0, 1


def pretend_sm120(monkeypatch: pytest.MonkeyPatch, *, rounds_activations: bool = False) -> None:
    """The device of tensors on the CPU is an sm_120."""
    monkeypatch.setattr(flashinfer_ops, "_major", lambda device: 12)
    monkeypatch.setattr(_prepared, "wrapper_run", sparse_mla)
    monkeypatch.setattr(moe_core, "get_compute_capability", lambda device: (12, 0))
    monkeypatch.setattr(moe_core, "device_support_pdl", lambda device: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    module = MoeModule(rounds_activations)
    monkeypatch.setattr(moe_core, "get_cutlass_fused_moe_module", lambda arch: module)


def pretend_sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of tensors on the CPU is an H200."""
    monkeypatch.setattr(flashinfer_ops, "_major", lambda device: 9)
    monkeypatch.setattr(_fa_common, "get_compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(_fa_common, "is_sm90a_supported", lambda device: True)
    monkeypatch.setattr(_fa_common, "get_device_sm_count", lambda device: 132)
    monkeypatch.setattr(_fa_common, "_get_fa_shared_memory_limits", lambda device: (233_472, 232_448))
    monkeypatch.setattr(fa3_backend, "get_batch_mla_module", lambda *key: Fa3Module())
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))


def sparse_mla(
    wrapper: Any, q: Tensor, cache: Tensor, indices: Tensor, output: Tensor, scale: float, **options: Any
) -> None:
    """``SparseMLASm120Wrapper.run`` for GLM's rows: 512 e4m3, 4 fp32 scales, 64 bf16 in 656 bytes; physical slots."""
    assert wrapper._kv_scale_format == "arbitrary_fp32"
    assert (wrapper._d_v, q.dtype, output.dtype) == (512, torch.bfloat16, torch.bfloat16)
    assert cache.dtype == torch.uint8
    assert cache.ndim == 3
    assert cache.shape[2] == 656
    assert indices.dtype == torch.int32
    assert indices.is_contiguous()
    lengths = options.pop("topk_length")
    assert lengths.dtype == torch.int32
    assert {name: value for name, value in options.items() if value is not None} == {
        "return_lse": False,
        "lse_scale": 1.0,
    }
    assert len(q) <= 64 or indices.shape[1] % 64 == 0  # of the kernel for many tokens
    rows = cache.reshape(-1, 656)
    latent = rows[:, :512].view(torch.float8_e4m3fn).float().view(-1, 4, 128)
    latent = (latent * rows[:, 512:528].contiguous().view(torch.float32)[:, :, None]).flatten(1)
    keys = torch.cat([latent, rows[:, 528:].contiguous().view(torch.bfloat16).float()], dim=1)
    for t in range(len(q)):
        slots = indices[t, : int(lengths[t])]
        slots = slots[slots >= 0].long()
        weights = torch.softmax(q[t].float() @ keys[slots].T * scale, dim=-1)
        output[t] = (weights @ latent[slots]).bfloat16()


class Fa3Module:
    """The compiled fa3 kernel and its planner."""

    def plan(self, *arguments: Any) -> Any:
        _, _, _, offsets, page_offsets, lengths, num_heads, latent_dim, causal = arguments
        assert {x.dtype for x in (offsets, page_offsets, lengths)} == {torch.int32}
        assert (latent_dim, causal) in ((512, True), (512, False))
        return offsets.tolist(), page_offsets.tolist(), lengths.tolist(), num_heads

    def run(self, *arguments: Any) -> None:
        _, _, plan, q_nope, q_pe, latent, rope, pages, out, lse, mask, num_heads, page_size, scale, *_ = arguments
        offsets, page_offsets, lengths, planned_heads = plan
        assert num_heads == planned_heads == q_nope.shape[1]
        assert lse is None
        assert latent.shape[1] == rope.shape[1] == page_size
        for i, length in enumerate(lengths):
            first, last = offsets[i], offsets[i + 1]
            held = pages[page_offsets[i] : page_offsets[i + 1]].long()
            rows, keys = latent[held].flatten(0, 1)[:length].float(), rope[held].flatten(0, 1)[:length].float()
            scores = torch.einsum("thc,sc->hts", q_nope[first:last].float(), rows)
            scores = (scores + torch.einsum("thr,sr->hts", q_pe[first:last].float(), keys)) * scale
            if mask == MASK_CAUSAL:
                position = torch.arange(length - (last - first), length)
                scores = scores.masked_fill(torch.arange(length) > position[:, None], -torch.inf)
            out[first:last] = torch.einsum("hts,sc->thc", scores.softmax(-1), rows).to(out.dtype)


class MoeModule:
    """The compiled CUTLASS kernels for NVFP4 weights: which tensor means what, and that the input is rounded."""

    def __init__(self, rounds_activations: bool) -> None:
        self._rounds = rounds_activations

    def cutlass_fused_moe(
        self,
        output: Tensor,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        fc1: Tensor,
        fc1_biases: None,
        fc2: Tensor,
        fc2_biases: None,
        output_dtype: torch.dtype,
        quant_scales: list[Tensor],
        *no_inputs: Any,
        **options: Any,
    ) -> list[Tensor]:
        ep_size, ep_rank = no_inputs[10:12]
        assert options["enable_alltoall"] is options["use_fused_finalize"] is False
        assert options["nvfp4_4over6_code"] == 0
        assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
        assert (fc1.dtype, fc2.dtype) == (torch.int64, torch.int64)
        num_experts, hidden, width = fc2.shape[0], fc1.shape[2] * 16, fc2.shape[2] * 16
        assert int(ids.max()) < num_experts * ep_size
        in_scale, fc1_scales, fc1_factor, mid_scale, fc2_scales, fc2_factor = quant_scales
        assert fc1_scales.shape == (num_experts, 2 * width, hidden // 64)
        assert fc2_scales.shape == (num_experts, hidden, width // 64)
        w1 = self._matrix(fc1, fc1_scales, 2 * width, hidden)
        w2 = self._matrix(fc2, fc2_scales, hidden, width)
        total = torch.zeros(output.shape)
        x = self._round(x.float(), in_scale)
        for e in range(num_experts):
            token, choice = torch.where(ids == ep_rank * num_experts + e)
            linear, gate = (x[token] @ w1[e].T * fc1_factor[e]).chunk(2, dim=-1)
            middle = self._round(torch.nn.functional.silu(gate) * linear, mid_scale[e])
            total.index_add_(0, token, middle @ w2[e].T * fc2_factor[e] * weights[token, choice, None])
        output.copy_(total)
        return [output]

    @staticmethod
    def _matrix(packed: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
        """Without its factor."""
        codes = _unpack_fp4_e2m1(packed.view(torch.uint8))
        grid = _unswizzle_batched_sf_128x4(scales.view(torch.uint8).flatten(), len(packed), rows, columns // 16)
        return codes * grid.contiguous().view(torch.float8_e4m3fn).float().repeat_interleave(16, dim=-1)

    def _round(self, x: Tensor, global_scale: Tensor) -> Tensor:
        """As the kernels hold it: in NVFP4, times the global scale that the factors take back."""
        if not self._rounds:
            return x * global_scale
        return quantize_nvfp4(x, scale_2=1 / global_scale).dequantize() * global_scale
