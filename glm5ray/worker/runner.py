"""Decode steps from fixed, padded batches: as CUDA graphs, or, to test the padding on any device, as plain calls.

A step is two graphs: embedding to hidden states, for a number of rows and a bound of what one of them sees; then
logits and sampling, for the same number of rows and what its rows ask for. Apart, they are a sum of kinds, not a
product. What no graph serves, the worker computes eagerly.

Shapes: B rows of the batch, padded ones included; M hidden size; V vocabulary."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch

from glm5ray.kernels.interface import ForwardBatch
from glm5ray.worker.fixed_batch import FixedBuffers
from glm5ray.worker.sampler import MIN_TEMPERATURE, Draws, SamplingKind, draw

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from glm5ray.model.cache import PagedCache
    from glm5ray.model.glm5 import Glm5
    from glm5ray.protocol import StepInput
    from glm5ray.worker.batch import Decode, Mirror
    from glm5ray.worker.fixed_batch import Views

logger = logging.getLogger(__name__)

LEAST_BOUND = 512
"""Positions: a smaller bound would save nothing."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a step leaves on the device, valid for what is queued before the next step."""

    token_ids_L: Tensor | None
    """int64, of each sequence; ``None``: they are to be sampled from the logits."""
    logits_LV: Tensor | None
    """Of the model's type; ``None``: they are sampled from already."""
    is_finite_2L: Tensor
    """int64: whether the hidden state is finite, and the logits are."""


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, then two a doubling, up to ``most`` and ``most`` itself: padding stays below a third from
    16 rows on."""
    sizes, size = [1, 2, 4, 8, 16, 24], 32
    while size < most:
        sizes += [size, size + size // 2]
        size *= 2
    return sorted({size for size in sizes if size < most} | {most})


def visible_bounds(index_topk: int, max_model_len: int) -> list[int]:
    """Bounds of what a token sees, factors of 4 apart. ``index_topk`` is one of them: whether to select is decided by
    the bound as it is by the context itself."""
    bounds = [index_topk]
    while bounds[0] // 4 >= LEAST_BOUND:
        bounds.insert(0, bounds[0] // 4)
    while bounds[-1] < max_model_len:
        bounds.append(4 * bounds[-1])
    return sorted({min(bound, max_model_len) for bound in bounds})


class DecodeRunner:
    """Computes decode steps of up to ``max_rows`` sequences. With ``captured`` on a CUDA device from graphs, for which
    :meth:`warm_up` must have run; else by the same code on the same buffers."""

    def __init__(
        self, model: Glm5, cache: PagedCache, mirror: Mirror, *, max_rows: int, max_model_len: int, captured: bool
    ) -> None:
        self._model, self._cache, self._mirror = model, cache, mirror
        self._captured = captured
        self._vocab_size = model.config.vocab_size
        self._sizes = batch_sizes(max_rows)
        self._bounds = visible_bounds(model.config.index_topk, max_model_len)
        device = cache.device
        dtype = model.lm_head.weight.dtype
        self._buffers = FixedBuffers(max_rows, self._pages(self._bounds[-1]), mirror.spare_row, device)
        self._hidden_BM = torch.zeros(max_rows, model.config.hidden_size, dtype=dtype, device=device)
        self._logits_BV = torch.zeros(max_rows, self._vocab_size, dtype=dtype, device=device)
        self._results = torch.zeros(3 * max_rows, dtype=torch.int64, device=device)
        self._forward_graphs: dict[tuple[int, int], Callable[[], None]] = {}
        self._sample_graphs: dict[tuple[int, SamplingKind | None], Callable[[], None]] = {}
        self.num_fixed_steps = 0
        """Steps that :meth:`run` computed."""
        self.num_eager_steps = 0
        """Steps that :meth:`take` left to the worker."""

    def take(self, step: StepInput) -> Decode | None:
        """``step`` as :meth:`run` wants it, its tokens counted in the mirror; ``None``: it is to be computed eagerly,
        and nothing has changed."""
        decode = None
        if len(step.seq_ids) <= self._sizes[-1] and self._is_ready(len(step.seq_ids), max(step.starts) + 1):
            decode = self._mirror.decode(step)
        if decode is None:
            self.num_eager_steps += 1
        else:
            self.num_fixed_steps += 1
        return decode

    @torch.inference_mode()
    def run(self, decode: Decode, kind: SamplingKind | None) -> Decoded:
        """Queues the step. With ``kind`` its tokens are sampled, too, and are the rows' last ones in the mirror."""
        count = len(decode.sequences)
        size, bound = self._variant(count, decode.max_visible)
        views = self._buffers.views(size, self._pages(bound))
        self._buffers.fill(views, decode, self._vocab_size)
        if self._captured:
            self._forward_graphs[size, bound]()
        else:
            starts = (*decode.positions_S.tolist(), *[-1] * (size - count))
            self._forward(views, size, bound, starts)
        if self._captured and (size, kind) in self._sample_graphs:
            self._sample_graphs[size, kind]()
        else:
            self._sample(views, size, kind)
        results_3L = self._results[: 3 * size].view(3, size)[:, :count]
        return Decoded(
            token_ids_L=None if kind is None else results_3L[0],
            logits_LV=self._logits_BV[:count] if kind is None else None,
            is_finite_2L=results_3L[1:],
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Captures all graphs, largest first, into one pool of memory: one runs at a time, so the smaller ones use what
        the largest needs. A graph for which there is no memory is left out, and logged."""
        if not self._captured:
            return
        started = time.perf_counter()
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        for size in reversed(self._sizes):
            for bound in reversed(self._bounds):
                views = self._buffers.views(size, self._pages(bound))
                self._buffers.fill(views, None, self._vocab_size)
                body = _bind(self._forward, views, size, bound, (-1,) * size)
                if graph := _capture(body, pool, stream, f"rows={size} visible={bound}"):
                    self._forward_graphs[size, bound] = graph
            views = self._buffers.views(size, self._pages(self._bounds[0]))
            self._buffers.fill(views, None, self._vocab_size)
            for kind in (None, *get_args(SamplingKind)):
                body = _bind(self._sample, views, size, kind)
                if graph := _capture(body, pool, stream, f"rows={size} sampling={kind}"):
                    self._sample_graphs[size, kind] = graph
        logger.info(
            "captured forward_graphs=%d sample_graphs=%d seconds=%.1f",
            len(self._forward_graphs),
            len(self._sample_graphs),
            time.perf_counter() - started,
        )

    def _forward(self, views: Views, size: int, bound: int, starts: tuple[int, ...]) -> None:
        """Hidden states of a batch. ``starts`` are for kernels that loop on the host, which no graph holds."""
        inputs = views.device
        last_token_B = self._mirror.last_token_R[inputs["rows"]]
        batch = ForwardBatch(
            token_ids_T=torch.where(inputs["token_ids"] >= 0, inputs["token_ids"], last_token_B),
            positions_T=inputs["positions"],
            slots_T=inputs["slots"],
            slice_T=inputs["slices"],
            page_table_SP=views.device_table_BP,
            starts=starts,
            num_tokens=(1,) * size,
            page_size=self._mirror.page_size,
            max_visible=bound,
            logits_rows_L=torch.arange(size, device=self._results.device),
            has_padding=size > 1,
        )
        self._hidden_BM[:size].copy_(self._model.forward_hidden(batch, self._cache))

    def _sample(self, views: Views, size: int, kind: SamplingKind | None) -> None:
        """The next token of each row, to the results and to the mirror, and flags; ``None``: logits and flags."""
        inputs, hidden_BM = views.device, self._hidden_BM[:size]
        logits_BV = self._model.compute_logits(hidden_BM)
        results_3B = self._results[: 3 * size].view(3, size)
        results_3B.copy_(self._model.kernels.pick_tokens(hidden_BM, logits_BV))
        if kind is None:
            self._logits_BV[:size].copy_(logits_BV)
            return
        ids_B = results_3B[0]
        if kind != "greedy":
            temperature_B1 = inputs["temperature"][:, None]
            is_greedy_B1 = temperature_B1 < MIN_TEMPERATURE
            limited = kind == "limited"
            draws = Draws(
                temperature_L1=torch.where(is_greedy_B1, 1.0, temperature_B1),
                min_p_L1=inputs["min_p"][:, None] if limited else None,
                top_k_L1=inputs["top_k"][:, None] if limited else None,
                top_p_L1=inputs["top_p"][:, None] if limited else None,
                seeds_L=inputs["seeds"],
                indexes_L=inputs["indexes"],
                positions_L=inputs["output_positions"],
            )
            ids_B.copy_(torch.where(is_greedy_B1[:, 0], ids_B, draw(logits_BV.float(), draws)))
        self._mirror.last_token_R[inputs["rows"]] = ids_B

    def _variant(self, count: int, visible: int) -> tuple[int, int]:
        return self._sizes[bisect_left(self._sizes, count)], self._bounds[bisect_left(self._bounds, visible)]

    def _is_ready(self, count: int, visible: int) -> bool:
        return not self._captured or self._variant(count, visible) in self._forward_graphs

    def _pages(self, bound: int) -> int:
        return -(-bound // self._mirror.page_size)


def _bind(body: Callable[..., None], *args: Any) -> Callable[[], None]:
    return lambda: body(*args)


def _capture(body: Callable[[], None], pool: Any, stream: torch.cuda.Stream, what: str) -> Callable[[], None] | None:
    """The graph's replay; ``None`` if the device's memory does not suffice."""
    started = time.perf_counter()
    graph = torch.cuda.CUDAGraph()
    try:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            body()  # compiles kernels and makes the libraries' workspaces, which a capture must not
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            body()
    except torch.OutOfMemoryError as error:
        logger.warning("no memory for the graph %s; such steps run eagerly: %s", what, error)
        return None
    logger.info("captured %s seconds=%.2f", what, time.perf_counter() - started)
    return graph.replay
