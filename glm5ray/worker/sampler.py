"""Logits -> token ids.

Order of operations, vLLM's: bias and allowed tokens, ``min_tokens``, penalties, temperature, min-p, top-k, top-p, draw.
Log-probabilities are those of the raw logits.

A draw needs one uniform number, which is a hash of (seed, index among the request's answers, position in the output):
nothing of it depends on the neighbours in the batch, on chunking or on preemption, so the same seed gives the same
tokens.

Shapes: L sampled rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from glm5ray.worker.transfers import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from glm5ray.worker.batch import MirrorSequence

MIN_TEMPERATURE = 1e-5
"""Below this the draw is greedy: dividing the logits by less would overflow."""

SAMPLED_NUMBERS = 2**24
"""Logits that are worked on at once: sorting them takes about 1 GB."""

SamplingKind = Literal["greedy", "drawn", "limited"]
"""Of a whole step: all rows greedy; some drawn; some drawn with top-k, top-p or min-p."""

_MASK64 = (1 << 64) - 1


def uniform(seeds_L: list[int], indexes_L: list[int], positions_L: list[int]) -> np.ndarray:
    """Uniform numbers in [0, 1), float64 multiples of 2^-32, one for each (seed, index, position).

    Two rounds of the finaliser of SplitMix64 (Steele, Lea, Flood 2014), the second keyed by the position.
    """
    seeds = np.array([s & _MASK64 for s in seeds_L], dtype=np.uint64)
    streams = np.array(indexes_L, dtype=np.uint64) + np.uint64(1)
    counters = np.array(positions_L, dtype=np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        key = _splitmix(seeds + streams * np.uint64(0x9E3779B97F4A7C15))
        bits = _splitmix(key + counters * np.uint64(0xD1B54A32D192ED03))
    return (bits >> np.uint64(32)).astype(np.float64) * 2.0**-32


def _splitmix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class _Penalties:
    """Token counts of one sequence: ``output_V`` int32, and which tokens stand in its prompt (bool)."""

    __slots__ = ("output_V", "prompt_V")

    def __init__(self, sequence: MirrorSequence, vocab_size: int, device: torch.device) -> None:
        tokens = torch.from_numpy(sequence.token_ids)
        prompt, output = tokens[: sequence.num_prompt_tokens], tokens[sequence.num_prompt_tokens :]
        self.output_V = torch.bincount(output, minlength=vocab_size).to(torch.int32).to(device)
        self.prompt_V = torch.zeros(vocab_size, dtype=torch.bool)
        self.prompt_V[prompt] = True
        self.prompt_V = self.prompt_V.to(device)


class Sampler:
    """Chooses the next token of each row; keeps the output counts of the sequences that have penalties."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.device = device
        self._penalties: dict[int, _Penalties] = {}
        self._plain_greedy: dict[int, bool] = {}

    def add(self, sequence: MirrorSequence) -> None:
        """A sequence that came (or came back) to this worker."""
        params = sequence.sampling
        penalised = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        if penalised:
            self._penalties[sequence.seq_id] = _Penalties(sequence, self.vocab_size, self.device)
        self._plain_greedy[sequence.seq_id] = (
            params.temperature < MIN_TEMPERATURE
            and not penalised
            and not params.logit_bias
            and params.allowed_token_ids is None
            and params.min_tokens == 0
        )

    def drop(self, sequence: MirrorSequence) -> None:
        """A sequence that left."""
        self._penalties.pop(sequence.seq_id, None)
        self._plain_greedy.pop(sequence.seq_id)

    def kind(self, sequences: list[MirrorSequence]) -> SamplingKind | None:
        """What a fixed batch must compute to sample as :meth:`sample` does; ``None``: some row needs :meth:`sample`
        itself, or log-probabilities."""
        kind: SamplingKind = "greedy"
        for sequence in sequences:
            params = sequence.sampling
            ends = params.min_tokens > 0 and sequence.num_output_tokens <= params.min_tokens
            if params.logit_bias or params.allowed_token_ids is not None or params.logprobs is not None or ends:
                return None
            if sequence.seq_id in self._penalties:
                return None
            if params.temperature >= MIN_TEMPERATURE:
                limits = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
                kind = "limited" if limits or kind == "limited" else "drawn"
        return kind

    def sample(self, logits_LV: Tensor, sequences: list[MirrorSequence]) -> Tensor:
        """``logits_LV`` fp32 (left as it is) -> int64 [L]; row i is the next token of ``sequences[i]``, whose
        ``num_tokens`` already counts it."""
        if all(self._plain_greedy[sequence.seq_id] for sequence in sequences):
            return logits_LV.argmax(dim=-1)
        logits_LV = logits_LV.clone()
        for row, sequence in enumerate(sequences):
            if not self._plain_greedy[sequence.seq_id]:
                self._mask(logits_LV[row], sequence)
        self._penalise(logits_LV, sequences)
        token_ids_L = logits_LV.argmax(dim=-1)
        drawn = [i for i, sequence in enumerate(sequences) if sequence.sampling.temperature >= MIN_TEMPERATURE]
        if drawn:
            rows = self._integers(drawn)
            token_ids_L[rows] = self._draw(logits_LV[rows], [sequences[i] for i in drawn])
        for row, sequence in enumerate(sequences):
            if (counts := self._penalties.get(sequence.seq_id)) is not None:
                counts.output_V[token_ids_L[row]] += 1
        return token_ids_L

    def _mask(self, logits_V: Tensor, sequence: MirrorSequence) -> None:
        """Bias, allowed tokens and min_tokens, in place."""
        params = sequence.sampling
        if params.logit_bias:
            bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
            logits_V[self._integers(list(params.logit_bias))] += to_device(bias, self.device)
        if params.allowed_token_ids is not None:
            ids = self._integers(params.allowed_token_ids)
            allowed = logits_V[ids]
            logits_V.fill_(-torch.inf)
            logits_V[ids] = allowed
        if sequence.num_output_tokens <= params.min_tokens:  # this token is number num_output_tokens
            ends = params.stop_token_ids + (() if params.ignore_eos else self.eos_token_ids)
            if ends:
                logits_V[self._integers(ends)] = -torch.inf

    def _penalise(self, logits_LV: Tensor, sequences: list[MirrorSequence]) -> None:
        """Repetition, frequency and presence penalties, in place."""
        found = [(i, s) for i, s in enumerate(sequences) if s.seq_id in self._penalties]
        for part in parts_of(len(found), self.vocab_size) if found else ():
            self._penalise_part(logits_LV, found[part])

    def _penalise_part(self, logits_LV: Tensor, found: list[tuple[int, MirrorSequence]]) -> None:
        rows = self._integers([i for i, _ in found])
        counts = [self._penalties[s.seq_id] for _, s in found]
        output_LV = torch.stack([c.output_V for c in counts])
        seen_LV = (output_LV > 0) | torch.stack([c.prompt_V for c in counts])
        x_LV = logits_LV[rows]
        repetition = self._column([s.sampling.repetition_penalty for _, s in found])
        x_LV = torch.where(seen_LV, torch.where(x_LV > 0, x_LV / repetition, x_LV * repetition), x_LV)
        x_LV -= self._column([s.sampling.frequency_penalty for _, s in found]) * output_LV
        x_LV -= self._column([s.sampling.presence_penalty for _, s in found]) * (output_LV > 0)
        logits_LV[rows] = x_LV

    def _column(self, values: Sequence[float]) -> Tensor:
        return to_device(np.array(values, dtype=np.float32), self.device)[:, None]

    def _integers(self, values: Sequence[int]) -> Tensor:
        return to_device(np.array(values, dtype=np.int64), self.device)

    def _draw(self, logits_LV: Tensor, sequences: list[MirrorSequence]) -> Tensor:
        """One token of each row."""
        params = [sequence.sampling for sequence in sequences]
        seeds = []
        for sequence in sequences:
            seed = sequence.sampling.seed
            assert seed is not None, f"sequence {sequence.seq_id} reached the sampler without a seed"
            seeds.append(signed(seed))
        top_k = [p.top_k if p.top_k > 0 else self.vocab_size for p in params]
        has_top = any(p.top_k > 0 or p.top_p < 1.0 for p in params)
        return draw(
            logits_LV,
            Draws(
                temperature_L1=self._column([p.temperature for p in params]),
                min_p_L1=self._column([p.min_p for p in params]) if any(p.min_p > 0.0 for p in params) else None,
                top_k_L1=self._column(top_k) if has_top else None,
                top_p_L1=self._column([p.top_p for p in params]) if has_top else None,
                seeds_L=self._integers(seeds),
                indexes_L=self._integers([s.index for s in sequences]),
                positions_L=self._integers([s.num_output_tokens - 1 for s in sequences]),
            ),
        )


@dataclass(frozen=True, slots=True)
class Draws:
    """What the draws of a step need, on the device: in a CUDA graph, tensors that are filled before each replay."""

    temperature_L1: Tensor
    """At least :data:`MIN_TEMPERATURE`, fp32 as the others."""
    min_p_L1: Tensor | None
    """``None``: no row has one."""
    top_k_L1: Tensor | None
    """The vocabulary's size where a row has none; ``None``, and then so is ``top_p_L1``: no row has either."""
    top_p_L1: Tensor | None
    seeds_L: Tensor
    """int64, the 64 bits of the seed."""
    indexes_L: Tensor
    positions_L: Tensor
    """int64, of the token in the output."""

    def of(self, rows: slice) -> Draws:
        """Those of some rows."""
        return Draws(
            temperature_L1=self.temperature_L1[rows],
            min_p_L1=None if self.min_p_L1 is None else self.min_p_L1[rows],
            top_k_L1=None if self.top_k_L1 is None else self.top_k_L1[rows],
            top_p_L1=None if self.top_p_L1 is None else self.top_p_L1[rows],
            seeds_L=self.seeds_L[rows],
            indexes_L=self.indexes_L[rows],
            positions_L=self.positions_L[rows],
        )


def draw(logits_LV: Tensor, draws: Draws) -> Tensor:
    """int64 [L], a token of each row, by its inverse distribution function in order of token id.

    Launches only: no copy from or to the host, no shape that depends on data, so that a CUDA graph may hold it. Rows
    are taken in parts, since sorting needs many times the memory of the logits.
    """
    parts = [_draw_part(logits_LV[rows], draws.of(rows)) for rows in parts_of(*logits_LV.shape)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def parts_of(num_rows: int, vocab_size: int) -> list[slice]:
    """The rows in parts of at most :data:`SAMPLED_NUMBERS` logits; at least one part, and one row in it."""
    count = max(1, SAMPLED_NUMBERS // vocab_size)
    return [slice(first, first + count) for first in range(0, max(1, num_rows), count)]


def _draw_part(logits_LV: Tensor, draws: Draws) -> Tensor:
    logits_LV = logits_LV / draws.temperature_L1
    if draws.min_p_L1 is not None:
        floor_L1 = draws.min_p_L1.log() + logits_LV.amax(dim=-1, keepdim=True)
        logits_LV = logits_LV.masked_fill(logits_LV < floor_L1, -torch.inf)
    if draws.top_k_L1 is not None and draws.top_p_L1 is not None:
        logits_LV = keep_top(logits_LV, draws.top_k_L1, draws.top_p_L1)
    cdf_LV = logits_LV.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    u_L = uniform_on_device(draws.seeds_L, draws.indexes_L, draws.positions_L)
    # u <= 1 - 2^-32, so u * total < total, and the first entry above it has a probability above 0
    drawn_L = torch.searchsorted(cdf_LV, u_L[:, None] * cdf_LV[:, -1:], right=True).squeeze(-1)
    return drawn_L.clamp_(max=logits_LV.shape[-1] - 1)  # only rows of NaN, which fail, can exceed it


def uniform_on_device(seeds_L: Tensor, indexes_L: Tensor, positions_L: Tensor) -> Tensor:
    """:func:`uniform` of int64 tensors, float64 [L]: products of int64 wrap to the same 64 bits."""
    key_L = _splitmix_on_device(seeds_L + (indexes_L + 1) * signed(0x9E3779B97F4A7C15))
    bits_L = _splitmix_on_device(key_L + (positions_L + 1) * signed(0xD1B54A32D192ED03))
    return _shifted(bits_L, 32).double() * 2.0**-32


def _splitmix_on_device(z_L: Tensor) -> Tensor:
    z_L = (z_L ^ _shifted(z_L, 30)) * signed(0xBF58476D1CE4E5B9)
    z_L = (z_L ^ _shifted(z_L, 27)) * signed(0x94D049BB133111EB)
    return z_L ^ _shifted(z_L, 31)


def _shifted(z_L: Tensor, count: int) -> Tensor:
    """To the right, as of unsigned numbers."""
    return (z_L >> count) & ((1 << (64 - count)) - 1)


def signed(number: int) -> int:
    """The int64 of the same 64 bits."""
    number &= _MASK64
    return number - (1 << 64) if number >> 63 else number


def keep_top(logits_LV: Tensor, top_k_L1: Tensor, top_p_L1: Tensor) -> Tensor:
    """``logits_LV`` with -inf outside the ``top_k`` largest, and outside the smallest set of those whose probability
    reaches
    ``top_p``. Ties go to the lower token id; the most probable token always stays."""
    sorted_LV, order_LV = logits_LV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_LV.shape[-1], device=logits_LV.device)
    sorted_LV = sorted_LV.masked_fill(rank_V >= top_k_L1, -torch.inf)
    probs_LV = sorted_LV.softmax(dim=-1)
    before_LV = probs_LV.cumsum(dim=-1) - probs_LV
    outside_LV = (before_LV >= top_p_L1) & (rank_V > 0) & (top_p_L1 < 1.0)
    sorted_LV = sorted_LV.masked_fill(outside_LV, -torch.inf)
    return torch.empty_like(logits_LV).scatter_(-1, order_LV, sorted_LV)
