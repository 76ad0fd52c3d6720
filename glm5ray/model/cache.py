"""The tensors behind page numbers.

Each layer keeps one row per token: the normed latent and the rotated rope key, side by side (C + R numbers). Each
layer with an indexer keeps one index key more. All of them are indexed by the same slots, ``page * page_size +
offset``, so that one page number stands for ``page_size`` tokens in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from glm5ray.errors import ConfigError
from glm5ray.kernels.cache_rows import index_page_bytes, latent_row_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from glm5ray.model_config import ModelConfig


FP8 = torch.float8_e4m3fn


class PagedCache:
    """KV of all layers. ``latent[layer]`` is [N, C + R]; ``index_keys[layer]`` is [N, index_head_dim] or ``None`` in
    a shared layer.

    With ``dtype`` float8_e4m3fn both are FP8 rows with scales (uint8; :mod:`glm5ray.kernels.cache_rows`).
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

        is_fp8 = dtype == FP8
        latent_width = _latent_width(config, dtype)

        def rows(width: int) -> Tensor:
            return torch.zeros(num_slots, width, dtype=torch.uint8 if is_fp8 else dtype, device=device)

        def keys() -> Tensor:
            if not is_fp8:
                return rows(config.index_head_dim)
            page_bytes = index_page_bytes(page_size, config.index_head_dim)
            return torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=device)

        full = index_key_layers(config, with_mtp=with_mtp)
        self.latent: list[Tensor] = []
        self.index_keys: list[Tensor | None] = []
        for is_full in full:
            self.latent.append(rows(latent_width))
            self.index_keys.append(keys() if is_full else None)

    @property
    def device(self) -> torch.device:
        return self.latent[0].device

    @staticmethod
    def bytes_per_page(config: ModelConfig, page_size: int, dtype: torch.dtype, *, with_mtp: bool = False) -> int:
        """Bytes of one page over all layers, the same on every rank: the latent has one head, so it is not split."""
        full = index_key_layers(config, with_mtp=with_mtp)
        if dtype == FP8:
            index_bytes = index_page_bytes(page_size, config.index_head_dim)
            return len(full) * page_size * _latent_width(config, dtype) + sum(full) * index_bytes
        numbers_per_token = len(full) * _latent_width(config, dtype) + sum(full) * config.index_head_dim
        return page_size * numbers_per_token * dtype.itemsize


def kv_dtype(choice: str, dtype: torch.dtype) -> torch.dtype:
    """``cache.kv_dtype`` -> the type of rows; ``dtype`` is the model's."""
    return FP8 if choice == "fp8" else dtype


def _latent_width(config: ModelConfig, dtype: torch.dtype) -> int:
    """Numbers of a row; of an FP8 row, bytes."""
    if dtype != FP8:
        return config.kv_lora_rank + config.qk_rope_head_dim
    if config.index_head_dim % 4:
        raise ConfigError(
            f"cache.kv_dtype is fp8, which needs an index_head_dim that 4 divides; the model's is "
            f"{config.index_head_dim}: set cache.kv_dtype=auto"
        )
    return latent_row_bytes(config.kv_lora_rank, config.qk_rope_head_dim)


def index_key_layers(config: ModelConfig, *, with_mtp: bool) -> list[bool]:
    """Per layer, whether it keeps index keys: the full ones, and every MTP layer (IndexShare never reaches those)."""
    num_mtp = config.num_nextn_predict_layers if with_mtp else 0
    return [kind == "full" for kind in config.indexer_types] + [True] * num_mtp
