"""How a token's row of the cache is laid out, and its FP8 form in plain torch.

Unquantised, a latent row is C + R numbers and an index key I numbers of the model's type. In FP8 (tensors of uint8):

- a latent row is one run of bytes: C e4m3 numbers, an fp32 scale for each :data:`LATENT_GROUP` of them, R bf16 numbers
  of the rope key; 656 bytes at GLM-5's sizes, which is the layout of DeepSeek's, FlashInfer's and vLLM's kernels
  (``fp8_ds_mla``). Rows begin at multiples of :data:`ROW_ALIGNMENT` bytes. Scales are any fp32 number: the largest
  magnitude of the group over 448.
- index keys lie page by page: the e4m3 numbers of all its tokens, then an fp32 scale a token; 132 bytes a token at
  GLM-5's sizes, the layout of DeepGEMM. Scales are powers of two.

Shape suffixes in :mod:`glm5ray.kernels.interface`; G: groups of a latent row."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

LATENT_GROUP = 128
"""Columns of the latent that share a scale."""
ROW_ALIGNMENT = 16
"""Bytes: kernels read rows 16 bytes at a time."""
E4M3_MAX = 448.0
LEAST_AMAX = 1e-4
"""A group of smaller numbers is scaled as if this were its largest: no scale is 0."""


def latent_row_bytes(latent_dim: int, rope_dim: int) -> int:
    """Of an FP8 latent row, padding included."""
    size = _key_offset(latent_dim) + 2 * rope_dim
    return -(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT


def _scales_offset(latent_dim: int) -> int:
    return -(-latent_dim // 4) * 4


def _key_offset(latent_dim: int) -> int:
    return _scales_offset(latent_dim) + 4 * -(-latent_dim // LATENT_GROUP)


class LatentRows(NamedTuple):
    """Views of a layer's latent rows."""

    latent_NC: Tensor
    """Of the model's type, or float8_e4m3fn."""
    scales_NG: Tensor | None
    """fp32; ``None``: not quantised."""
    key_NR: Tensor

    def gather(self, slots_X: Tensor) -> Tensor:
        """fp32 [X, C + R]"""
        latent_XC, key_XR = self.latent_NC[slots_X].float(), self.key_NR[slots_X].float()
        if self.scales_NG is not None:
            scales_XC = self.scales_NG[slots_X].repeat_interleave(LATENT_GROUP, dim=-1)[..., : latent_XC.shape[-1]]
            latent_XC = latent_XC * scales_XC
        return torch.cat([latent_XC, key_XR], dim=-1)


def split_rows(rows_NL: Tensor, latent_dim: int, rope_dim: int) -> LatentRows:
    """Views of ``rows_NL``: of the model's type [N, C + R], or uint8 [N, :func:`latent_row_bytes`]."""
    if rows_NL.dtype != torch.uint8:
        return LatentRows(rows_NL[:, :latent_dim], None, rows_NL[:, latent_dim:])
    scales, key = _scales_offset(latent_dim), _key_offset(latent_dim)
    return LatentRows(
        rows_NL[:, :latent_dim].view(torch.float8_e4m3fn),
        rows_NL[:, scales:key].view(torch.float32),
        rows_NL[:, key : key + 2 * rope_dim].view(torch.bfloat16),
    )


def finite(x: Tensor) -> Tensor:
    """``x`` as the cache may hold it: what is not finite becomes 0. A kernel may multiply rows that it masks, and 0
    times NaN is NaN, so one sequence that fails would take those with it that get its pages."""
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def write_latent(rows_NL: Tensor, slots_T: Tensor, latent_TC: Tensor, key_TR: Tensor) -> None:
    """Rows of the tokens, quantised if ``rows_NL`` is, and :func:`finite`."""
    rows = split_rows(rows_NL, latent_TC.shape[1], key_TR.shape[1])
    latent_TC, key_TR = finite(latent_TC), finite(key_TR)
    rows.key_NR[slots_T] = key_TR.to(rows.key_NR.dtype)
    if rows.scales_NG is None:
        rows.latent_NC[slots_T] = latent_TC
    else:
        latent_TC, scales_TG = quantise_latent(latent_TC)
        rows.latent_NC.view(torch.uint8)[slots_T] = latent_TC.view(torch.uint8)
        rows.scales_NG[slots_T] = scales_TG


def quantise_latent(latent_TC: Tensor) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn [T, C], fp32 scales [T, G])"""
    tokens, width = latent_TC.shape
    groups = -(-width // LATENT_GROUP)
    padded = torch.nn.functional.pad(latent_TC.float(), (0, groups * LATENT_GROUP - width))
    padded = padded.view(tokens, groups, LATENT_GROUP)
    scale_TG1 = padded.abs().amax(-1, keepdim=True).clamp(min=LEAST_AMAX) / E4M3_MAX
    scaled = (padded / scale_TG1).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return scaled.view(tokens, groups * LATENT_GROUP)[:, :width], scale_TG1[..., 0]


class IndexKeys(NamedTuple):
    """Views of a layer's index keys."""

    keys_PsI: Tensor
    """[pages, page_size, I], of the model's type or float8_e4m3fn."""
    scales_Ps: Tensor | None
    """fp32 [pages, page_size]; ``None``: not quantised."""

    def gather(self, slots_X: Tensor) -> Tensor:
        """fp32 [X, I]"""
        page_X, offset_X = slots_X // self.keys_PsI.shape[1], slots_X % self.keys_PsI.shape[1]
        keys_XI = self.keys_PsI[page_X, offset_X].float()
        return keys_XI if self.scales_Ps is None else keys_XI * self.scales_Ps[page_X, offset_X][..., None]


def index_page_bytes(page_size: int, head_dim: int) -> int:
    """Of a page of FP8 index keys."""
    return page_size * (head_dim + 4)


def split_keys(keys: Tensor, head_dim: int) -> IndexKeys:
    """Views of ``keys``: of the model's type [N, I] (one page of N, then), or uint8 [pages, page_size * (I + 4)]. FP8
    needs an I that 4 divides."""
    if keys.dtype != torch.uint8:
        return IndexKeys(keys[None], None)
    page_size = keys.shape[1] // (head_dim + 4)
    return IndexKeys(
        keys[:, : page_size * head_dim].view(torch.float8_e4m3fn).unflatten(1, (page_size, head_dim)),
        keys[:, page_size * head_dim :].view(torch.float32),
    )


def write_keys(keys: Tensor, slots_T: Tensor, key_TI: Tensor) -> None:
    """Index keys of the tokens, quantised if ``keys`` are, and :func:`finite`."""
    views = split_keys(keys, key_TI.shape[1])
    key_TI = finite(key_TI)
    page_T, offset_T = slots_T // views.keys_PsI.shape[1], slots_T % views.keys_PsI.shape[1]
    if views.scales_Ps is None:
        views.keys_PsI[page_T, offset_T] = key_TI
    else:
        key_TI, scale_T = quantise_index(key_TI)
        views.keys_PsI.view(torch.uint8)[page_T, offset_T] = key_TI.view(torch.uint8)
        views.scales_Ps[page_T, offset_T] = scale_T


def quantise_index(x_XI: Tensor) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn of x's shape, fp32 scales without the last dimension), the scheme of the published model for
    queries and keys: a scale a vector, the power of two at or above its largest magnitude over 448."""
    wide = x_XI.float()
    scale_X1 = (wide.abs().amax(-1, keepdim=True).clamp(min=LEAST_AMAX) / E4M3_MAX).log2().ceil().exp2()
    return (wide / scale_X1).to(torch.float8_e4m3fn), scale_X1[..., 0]
