"""Steps computed before the first request, so that no request waits for a compiler.

A kernel is compiled, and loaded on the device, when it is first called; which ones a step calls depends on its tokens,
on what they see and on whether it samples. So a few steps of every kind are computed on rows that are written nowhere:
all tokens of a step read page 0 and have no slot of their own."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from glm5ray.kernels.interface import ForwardBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from glm5ray.model.cache import PagedCache
    from glm5ray.model.glm5 import Glm5

logger = logging.getLogger(__name__)

DECODES = 48
"""In a step that mixes them with a prompt."""

Slices = list[tuple[int, int]]
"""(start, tokens) of each."""


def warm_up(
    model: Glm5, cache: PagedCache, *, max_num_tokens: int, max_num_seqs: int, max_model_len: int, page_size: int
) -> None:
    """Computes the steps of :func:`kinds_of_steps`. The cache is left as it is."""
    started = time.perf_counter()
    kinds = list(kinds_of_steps(max_num_tokens, max_num_seqs, max_model_len, model.config.index_topk))
    for slices in kinds:
        batch = _batch(slices, page_size, cache.device)
        with torch.inference_mode():
            hidden_TM = model.forward_hidden(batch, cache)
            hidden_LM = hidden_TM[batch.logits_rows_L]
            model.kernels.pick_tokens(hidden_LM, model.compute_logits(hidden_LM))
    if cache.device.type == "cuda":
        torch.cuda.synchronize()
    logger.info("warmed up steps=%d seconds=%.1f", len(kinds), time.perf_counter() - started)


def kinds_of_steps(max_num_tokens: int, max_num_seqs: int, max_model_len: int, index_topk: int) -> Iterator[Slices]:
    """Largest first, so that later ones find memory: whole prompts, short ones, prompts beside decodes, prompts behind
    a context from which is selected, and decodes alone."""
    tokens = max_num_tokens
    while tokens > 0:
        longest = min(tokens, max_model_len)
        yield [(0, longest)]
        short = min(tokens, 256, max_model_len)
        yield [(0, short)] * min(tokens // short, max_num_seqs)
        num_decodes = min(DECODES, max_num_seqs - 1, tokens - 1)
        if num_decodes > 0:
            yield [(short - 1, 1)] * num_decodes + [(0, min(tokens - num_decodes, max_model_len))]
        start = max_model_len - longest
        if start + longest > index_topk and start > 0:
            yield [(min(start, 2 * index_topk), longest)]
        tokens //= 4
    tokens = min(max_num_seqs, max_num_tokens)
    while tokens > 0:
        yield [(min(255, max_model_len - 1), 1)] * tokens
        tokens //= 4


def _batch(slices: Slices, page_size: int, device: torch.device) -> ForwardBatch:
    counts = torch.tensor([count for _, count in slices])
    slice_T = torch.repeat_interleave(torch.arange(len(slices)), counts)
    positions_T = torch.cat([torch.arange(start, start + count) for start, count in slices])
    max_visible = max(start + count for start, count in slices)
    num_tokens = len(slice_T)
    return ForwardBatch(
        token_ids_T=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions_T=positions_T.to(device),
        slots_T=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        slice_T=slice_T.int().to(device),
        page_table_SP=torch.zeros(len(slices), -(-max_visible // page_size), dtype=torch.int32, device=device),
        starts=tuple(start for start, _ in slices),
        num_tokens=tuple(count for _, count in slices),
        page_size=page_size,
        max_visible=max_visible,
        logits_rows_L=(counts.cumsum(0) - 1).to(device),
    )
