"""The tensors behind page numbers.

Each layer keeps one row per token: the normed latent and the rotated rope key, side by side (C + R numbers). Each
layer with an indexer keeps one index key more. All of them are indexed by the same slots, ``page * page_size +
offset``, so that one page number stands for ``page_size`` tokens in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from glm5ray.model_config import ModelConfig


class PagedCache:
    """KV of all layers. ``latent[layer]`` is [N, C + R]; ``index_keys[layer]`` is [N, index_head_dim] or ``None`` in
    a shared layer.

    N is ``num_pages * page_size``. With ``with_mtp``, the MTP layers' entries follow the others'. The memory starts
    as zeros: it may be read (and masked) before it is written."""

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        with_mtp: bool = False,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        num_slots = num_pages * page_size

        def rows(width: int) -> Tensor:
            return torch.zeros(num_slots, width, dtype=dtype, device=device)

        full = index_key_layers(config, with_mtp=with_mtp)
        self.latent: list[Tensor] = [rows(config.kv_lora_rank + config.qk_rope_head_dim) for _ in full]
        self.index_keys: list[Tensor | None] = [rows(config.index_head_dim) if is_full else None for is_full in full]

    @property
    def device(self) -> torch.device:
        return self.latent[0].device

    def zero_slots(self, slots: Tensor) -> None:
        """Clears these slots (int64 [n]) in every layer: what a failed sequence wrote must not outlive it."""
        for rows in self.latent:
            rows[slots] = 0
        for keys in self.index_keys:
            if keys is not None:
                keys[slots] = 0

    @staticmethod
    def bytes_per_page(config: ModelConfig, page_size: int, dtype: torch.dtype, *, with_mtp: bool = False) -> int:
        """Bytes of one page over all layers, the same on every rank: the latent has one head, so it is not split."""
        full = index_key_layers(config, with_mtp=with_mtp)
        latent_width = config.kv_lora_rank + config.qk_rope_head_dim
        numbers_per_token = len(full) * latent_width + sum(full) * config.index_head_dim
        return page_size * numbers_per_token * dtype.itemsize


def index_key_layers(config: ModelConfig, *, with_mtp: bool) -> list[bool]:
    """Per layer, whether it keeps index keys: the full ones, and every MTP layer (IndexShare never reaches those)."""
    num_mtp = config.num_nextn_predict_layers if with_mtp else 0
    return [kind == "full" for kind in config.indexer_types] + [True] * num_mtp
