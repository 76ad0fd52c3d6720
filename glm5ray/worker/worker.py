"""Worker: one rank. Loads its shard, allocates its pages, and computes one step at a time."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from glm5ray.errors import ConfigError
from glm5ray.kernels.select import reason_against_fixed_batches, select_kernels
from glm5ray.model.cache import PagedCache, kv_dtype
from glm5ray.model.checkpoint_folder import resolve_checkpoint
from glm5ray.model.dummy import dummy_state, route_uniformly
from glm5ray.model.glm5 import Glm5
from glm5ray.model.packed import packs_experts
from glm5ray.model.weights import ShardSpec, load_shard
from glm5ray.model_config import ModelConfig
from glm5ray.parallel import ParallelContext
from glm5ray.worker.batch import Mirror
from glm5ray.worker.launched import LaunchedStep
from glm5ray.worker.logprobs import score_tokens
from glm5ray.worker.memory import capacity_of, log_plan, plan_rank, require_room, usable_bytes
from glm5ray.worker.runner import DecodeRunner
from glm5ray.worker.sampler import Sampler
from glm5ray.worker.transfers import ReadBack, to_device
from glm5ray.worker.warm_up import warm_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from glm5ray.config import EngineConfig
    from glm5ray.protocol import Capacity, StepInput, StepOutput
    from glm5ray.worker.batch import Decode, MirrorSequence, Step
    from glm5ray.worker.logprobs import Scores

logger = logging.getLogger(__name__)

SCORING_ROWS = 256
"""Prompt positions whose logits are held at once: at GLM-5's vocabulary, 160 MB."""


class Worker:
    """A model, its cache, and the mirror of the sequences that it works on. Steps come in order, one at a time."""

    def __init__(
        self, model: Glm5, cache: PagedCache, capacity: Capacity, *, max_num_seqs: int, epoch: int = 0
    ) -> None:
        self.capacity = capacity
        self._model = model
        self._cache = cache
        self._epoch = epoch
        self._next_step_id = 0
        device = torch.device(cache.device)
        self._mirror = Mirror(capacity, max_num_seqs, device)
        self._sampler = Sampler(capacity.vocab_size, capacity.eos_token_ids, device)
        self.runner: DecodeRunner | None = None
        """Decode steps from fixed batches, after :meth:`use_fixed_batches`."""

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        parallel: ParallelContext | None = None,
        *,
        epoch: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Worker:
        """Reads this rank's shard of ``config.model.path`` and allocates its pages. ``progress(done_bytes,
        total_bytes)``. Steps of another incarnation than ``epoch`` will be refused.

        Raises :class:`CheckpointError` or :class:`ConfigError`.
        """
        parallel = parallel or ParallelContext()
        folder = resolve_checkpoint(config.model.path)
        model_config = ModelConfig.from_checkpoint(folder)
        device = pick_device(config.model.device)
        dtype = pick_dtype(config.model.dtype, model_config, device)
        packed = packs_experts(config.model.weights, model_config, device, str(dtype).removeprefix("torch."))
        shard = ShardSpec(parallel.tp_rank, parallel.tp_size, parallel.ep_rank, parallel.ep_size)
        memory_bytes = usable_bytes(config, device)
        plan = plan_rank(
            config,
            model_config,
            shard,
            device=device,
            dtype=str(dtype).removeprefix("torch."),
            packed_experts=packed,
            memory_bytes=memory_bytes,
        )
        log_plan(plan, memory_bytes)
        capacity = capacity_of(plan, model_config, config.scheduler)
        model = Glm5(
            model_config,
            select_kernels(config.kernels, device, frozenset({"experts"} if packed else ())),
            parallel,
            dtype=dtype,
            norm_eps=config.model.norm_eps,
            packed_experts=packed,
        )
        started = time.perf_counter()
        if config.model.load_format == "dummy":
            state = dummy_state(model, device)
        else:
            state = load_shard(
                folder, model_config, shard, dtype=dtype, device=device, packed_experts=packed, progress=progress
            )
        model.load_state_dict(state, strict=True, assign=True)
        del state
        model.prepare()
        if config.model.dummy_routing == "uniform":
            limits = config.scheduler
            route_uniformly(model, max(limits.max_num_batched_tokens, limits.max_num_seqs) * parallel.dp_size, device)
        if device.startswith("cuda"):
            torch.cuda.empty_cache()  # what packing freed counts as room for pages
        logger.info("loaded model=%s seconds=%.1f", folder, time.perf_counter() - started)
        if device.startswith("cuda"):
            require_room(plan)
        row = kv_dtype(config.cache.kv_dtype, dtype)
        cache = PagedCache(model_config, capacity.num_pages, capacity.page_size, row, device)
        worker = cls(model, cache, capacity, max_num_seqs=config.scheduler.max_num_seqs, epoch=epoch)
        worker._make_ready(config, _reason_against_fixed_batches(config, parallel, device, packed))
        return worker

    def _make_ready(self, config: EngineConfig, reason_against_graphs: str | None) -> None:
        """Graphs and warm-up, as the config has them."""
        runner, limits = config.runner, config.scheduler
        if runner.cuda_graphs and reason_against_graphs is None:
            self.use_fixed_batches(
                min(runner.max_graph_seqs, limits.max_num_seqs), captured=runner.cuda_graphs != "emulate"
            )
        elif runner.cuda_graphs:
            logger.info("decode steps run eagerly, without CUDA graphs: %s", reason_against_graphs)
        if runner.warm_up and self.is_asynchronous:
            self.warm_up(limits.max_num_batched_tokens, limits.max_num_seqs)

    @property
    def model(self) -> Glm5:
        """What it computes with; for those who look into it."""
        return self._model

    @property
    def cache(self) -> PagedCache:
        """Its rows; for those who look into them."""
        return self._cache

    def use_fixed_batches(self, max_rows: int, *, captured: bool) -> None:
        """From now on decode steps of up to ``max_rows`` sequences are computed by a :class:`DecodeRunner`;
        ``captured``: from CUDA graphs, which this captures."""
        self.runner = DecodeRunner(
            self._model,
            self._cache,
            self._mirror,
            max_rows=max_rows,
            max_model_len=self.capacity.max_model_len,
            captured=captured,
        )
        self.runner.warm_up()

    def warm_up(self, max_num_tokens: int, max_num_seqs: int) -> None:
        """:func:`glm5ray.worker.warm_up.warm_up`; on all ranks at once."""
        warm_up(
            self._model,
            self._cache,
            max_num_tokens=max_num_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=self.capacity.max_model_len,
            page_size=self.capacity.page_size,
        )

    @property
    def is_asynchronous(self) -> bool:
        """Whether :meth:`launch` returns before the step is computed."""
        return self._cache.device.type == "cuda"

    def execute(self, step: StepInput) -> StepOutput:
        """Computes one step: forward, sample, and what was asked of the prompt. Asserts the order of steps."""
        return self.launch(step).output()

    @torch.inference_mode()
    def launch(self, step: StepInput) -> LaunchedStep:
        """:meth:`execute` without its end: on a GPU the step is queued behind those launched before, of which none
        needs to be done. Asserts the order of steps."""
        assert step.epoch == self._epoch, f"a step of epoch {step.epoch} reached a worker of epoch {self._epoch}"
        assert step.step_id == self._next_step_id, f"step {step.step_id} came where {self._next_step_id} was due"
        self._next_step_id += 1
        launched = LaunchedStep(step, ReadBack(self._cache.device), started_s=time.perf_counter())
        parallel = self._model.parallel
        assert len(step.parts) == (parallel.dp_size if parallel.dp_size > 1 else 0), f"{len(step.parts)} parts"
        part = step.parts[parallel.dp_rank] if step.parts else step
        dropped, new = self._mirror.apply(part)
        for sequence in dropped:
            self._sampler.drop(sequence)
        for sequence in new:
            self._sampler.add(sequence)
        if not part.seq_ids:
            if step.parts:
                self._model.join_step()
        elif self.runner is not None and (decode := self.runner.take(part)) is not None:
            self._launch_decode(decode, launched)
        else:
            self._launch_eagerly(self._mirror.build(part), launched)
        launched.read.close()
        return launched

    def _launch_eagerly(self, built: Step, launched: LaunchedStep) -> None:
        hidden_TH = self._model.forward_hidden(built.batch, self._cache)
        launched.slices = [
            (sequence.seq_id, count) for sequence, count in zip(built.sequences, built.batch.num_tokens, strict=True)
        ]
        launched.hidden_is_finite_T = launched.read.add(torch.isfinite(hidden_TH.sum(dim=-1, dtype=torch.float32)))
        for sequence, first, count, start in built.scoring:
            parts = self._score_prompt(sequence, hidden_TH[first : first + count], start)
            launched.prompt_scores.append((sequence.seq_id, [scores.read_back(launched.read) for scores in parts]))
        if not built.sampling:
            return
        hidden_LH = hidden_TH[built.batch.logits_rows_L]
        logits_LV = self._model.compute_logits(hidden_LH)
        greedy_L, _, is_finite_L = self._model.kernels.pick_tokens(hidden_LH, logits_LV)
        launched.logits_are_finite_L = launched.read.add(is_finite_L)
        if self._sampler.kind(built.sampling) != "greedy":
            self._choose(logits_LV, built.sampling, launched)
            return
        self._mirror.last_token_R[self._rows(built.sampling)] = greedy_L
        launched.sampled = [sequence.seq_id for sequence in built.sampling]
        launched.token_ids_L = launched.read.add(greedy_L)

    def _launch_decode(self, decode: Decode, launched: LaunchedStep) -> None:
        """A step of fixed size."""
        assert self.runner is not None
        sequences = decode.sequences
        done = self.runner.run(decode, self._sampler.kind(sequences))
        launched.from_graph = True
        launched.slices = [(sequence.seq_id, 1) for sequence in sequences]
        launched.hidden_is_finite_T, launched.logits_are_finite_L = launched.read.add(done.is_finite_2L)
        if done.logits_LV is not None:
            self._choose(done.logits_LV, sequences, launched)
        elif done.token_ids_L is not None:
            launched.sampled = [sequence.seq_id for sequence in sequences]
            launched.token_ids_L = launched.read.add(done.token_ids_L)

    def _choose(self, logits_LV: Tensor, sequences: list[MirrorSequence], launched: LaunchedStep) -> None:
        """The next token of each sequence, and the log-probabilities that were asked for."""
        logits_LV = logits_LV.float()
        token_ids_L = self._sampler.sample(logits_LV, sequences)
        self._mirror.last_token_R[self._rows(sequences)] = token_ids_L
        launched.sampled = [sequence.seq_id for sequence in sequences]
        launched.token_ids_L = launched.read.add(token_ids_L)
        for i, sequence in enumerate(sequences):
            if (num_top := sequence.sampling.logprobs) is not None:
                scores = score_tokens(logits_LV[i : i + 1], token_ids_L[i : i + 1], [num_top])
                launched.scores.append((sequence.seq_id, scores.read_back(launched.read)))

    def _rows(self, sequences: list[MirrorSequence]) -> Tensor:
        """int64, on the device."""
        rows = np.array([sequence.row for sequence in sequences], dtype=np.int64)
        return to_device(rows, self._cache.device)

    def _score_prompt(self, sequence: MirrorSequence, hidden_NH: Tensor, start: int) -> list[Scores]:
        """Log-probabilities of the prompt tokens that follow the positions ``start``..``start + N - 1``."""
        num_top = sequence.sampling.prompt_logprobs
        assert num_top is not None
        parts: list[Scores] = []
        for offset in range(0, len(hidden_NH), SCORING_ROWS):
            rows_NH = hidden_NH[offset : offset + SCORING_ROWS]
            at = start + offset + 1
            target_N = to_device(sequence.token_ids[at : at + len(rows_NH)], rows_NH.device)
            parts.append(score_tokens(self._model.compute_logits(rows_NH).float(), target_N, [num_top] * len(rows_NH)))
        return parts


def _reason_against_fixed_batches(
    config: EngineConfig, parallel: ParallelContext, device: str, packed: bool
) -> str | None:
    """Why decode steps cannot come from fixed batches; ``None``: they can. Raises :class:`ConfigError` if the config
    demands what cannot be (``cuda_graphs`` true or emulate)."""
    choice = config.runner.cuda_graphs
    captured = choice != "emulate"
    reason = None
    if parallel.tp_size * parallel.ep_size * parallel.dp_size > 1:
        reason = "several ranks compute a step together"
    elif captured and not device.startswith("cuda"):
        reason = f"the device is {device}"
    else:
        nvfp4_ops = frozenset({"experts"} if packed else ())
        reason = reason_against_fixed_batches(config.kernels, device, nvfp4_ops, captured=captured)
    if reason is not None and choice in (True, "emulate"):
        raise ConfigError(f"runner.cuda_graphs is {str(choice).lower()}, and {reason}; set runner.cuda_graphs=false")
    return reason


def pick_device(choice: str) -> str:
    """``auto`` -> cuda where there is one."""
    if choice == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device is 'cuda', but PyTorch finds no CUDA device here; set model.device=cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if choice == "auto" else choice


def pick_dtype(choice: str, model_config: ModelConfig, device: str) -> torch.dtype:
    """``auto`` -> float32 on a CPU, where bfloat16 is no faster, else the checkpoint's."""
    name = choice
    if choice == "auto":
        name = "float32" if device == "cpu" else model_config.dtype
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
