"""StepInput + the worker's mirror of the sequences -> ForwardBatch.

The mirror is a set of *rows*, one per running sequence, in arrays that live as long as the worker: a step touches the
rows that it names and nothing else. Only sampled tokens are kept on the device (``last_token_R``), so that step n+1 can
be built before the host has seen what step n sampled.

Shapes: R rows of the mirror, S slices of a step, T tokens of a step, P pages of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from glm5ray.kernels.interface import ForwardBatch
from glm5ray.worker.transfers import stage

if TYPE_CHECKING:
    from glm5ray.protocol import Capacity, NewSequence, SamplingParams, StepInput


@dataclass(slots=True)
class MirrorSequence:
    """What the worker knows of one running sequence."""

    seq_id: int
    row: int
    index: int
    sampling: SamplingParams
    token_ids: np.ndarray
    """int64, the tokens it arrived with: the prompt and, after a preemption, what was generated before."""
    num_prompt_tokens: int
    num_tokens: int
    """All tokens so far, sampled ones included."""
    num_pages: int

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """A batch and which of its slices ask for what."""

    batch: ForwardBatch
    sequences: list[MirrorSequence]
    """Of each slice, in order."""
    sampling: list[MirrorSequence]
    """The sequences whose slice ends their known tokens; in order of the first rows of ``batch.logits_rows_L``."""
    scoring: list[tuple[MirrorSequence, int, int, int]]
    """(sequence, first row in T, rows, position of the first row): prompt positions whose next token is to be
    scored."""


@dataclass(frozen=True, slots=True)
class Decode:
    """A step in which every slice is one token and samples the next: what fills a fixed batch, on the host."""

    sequences: list[MirrorSequence]
    rows_S: np.ndarray
    """int64, rows of the mirror."""
    known_S: np.ndarray
    """int64, the tokens that the host has; -1 where only ``last_token_R`` has it."""
    positions_S: np.ndarray
    """int64"""
    slots_S: np.ndarray
    """int64"""
    page_table_SP: np.ndarray
    """int32, as many pages as the longest context has."""

    @property
    def max_visible(self) -> int:
        return int(self.positions_S.max()) + 1


class Mirror:
    """The worker's copy of the running sequences, changed by :meth:`apply` alone."""

    def __init__(self, capacity: Capacity, max_num_seqs: int, device: torch.device) -> None:
        self.page_size = capacity.page_size
        self.max_pages = -(-capacity.max_model_len // capacity.page_size)
        self.device = device
        self.sequences: dict[int, MirrorSequence] = {}
        # a sequence that is dropped and one that takes its place can meet in the one step that is in flight
        num_rows = 2 * max_num_seqs
        self._free_rows = list(range(num_rows - 1, -1, -1))
        # zeros, not -1: the system hands out the memory of a row when it is first used, and then the row is cleared
        self._page_table_RP = np.zeros((num_rows, self.max_pages), dtype=np.int32)
        self.spare_row = num_rows
        """No sequence's: padded rows of a fixed batch write the tokens there that they sample."""
        self.last_token_R = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)

    def apply(self, step: StepInput) -> tuple[list[MirrorSequence], list[MirrorSequence]]:
        """Takes over what changed; returns (dropped, new). A sequence that is unknown where it must be known is our
        bug."""
        dropped = [self.sequences.pop(seq_id) for seq_id in step.dropped]
        self._free_rows += [sequence.row for sequence in dropped]
        new = [self._add(sequence) for sequence in step.new_sequences]
        for seq_id, pages in step.new_pages.items():
            sequence = self.sequences[seq_id]
            end = sequence.num_pages + len(pages)
            self._page_table_RP[sequence.row, sequence.num_pages : end] = pages
            sequence.num_pages = end
        return dropped, new

    def _add(self, new: NewSequence) -> MirrorSequence:
        assert new.seq_id not in self.sequences, f"sequence {new.seq_id} is already known"
        row = self._free_rows.pop()
        self._page_table_RP[row] = -1
        self._page_table_RP[row, : len(new.pages)] = new.pages
        sequence = MirrorSequence(
            seq_id=new.seq_id,
            row=row,
            index=new.index,
            sampling=new.sampling,
            token_ids=np.array(new.token_ids, dtype=np.int64),
            num_prompt_tokens=new.num_prompt_tokens,
            num_tokens=len(new.token_ids),
            num_pages=len(new.pages),
        )
        self.sequences[new.seq_id] = sequence
        return sequence

    def build(self, step: StepInput) -> Step:
        """The tensors of ``step``, after :meth:`apply`; counts the tokens that this step will sample."""
        sequences = [self.sequences[seq_id] for seq_id in step.seq_ids]
        starts_S = np.array(step.starts, dtype=np.int64)
        counts_S = np.array(step.num_tokens, dtype=np.int64)
        ends_S = np.cumsum(counts_S)
        rows_S = np.array([sequence.row for sequence in sequences], dtype=np.int64)
        first_S = ends_S - counts_S
        positions_T = np.arange(ends_S[-1]) + np.repeat(starts_S - first_S, counts_S)
        slice_T = np.repeat(np.arange(len(sequences), dtype=np.int32), counts_S)
        rows_T = rows_S[slice_T]
        known_T = self._known_tokens(sequences, step, first_S, len(rows_T))
        pages_T = self._page_table_RP[rows_T, positions_T // self.page_size].astype(np.int64)
        assert pages_T.min() >= 0, f"step {step.step_id} writes a token where its sequence has no page"
        max_visible = int((starts_S + counts_S).max())
        max_pages = -(-max_visible // self.page_size)

        sampling, scoring = [], []
        sample_rows: list[int] = []
        for sequence, first, start, count in zip(
            sequences, first_S.tolist(), step.starts, step.num_tokens, strict=True
        ):
            end = start + count
            assert end <= sequence.num_tokens, (
                f"slice [{start}, {end}) of sequence {sequence.seq_id} is past its tokens"
            )
            if sequence.sampling.prompt_logprobs is not None and start < sequence.num_prompt_tokens - 1:
                scoring.append((sequence, first, min(count, sequence.num_prompt_tokens - 1 - start), start))
            if end == sequence.num_tokens:
                sampling.append(sequence)
                sample_rows.append(first + count - 1)
        inputs = stage(
            {
                "tokens": known_T,
                "positions": positions_T,
                "slots": pages_T * self.page_size + positions_T % self.page_size,
                "slices": slice_T,
                "rows": rows_T,
                "page_table": self._page_table_RP[rows_S, :max_pages],
                "logits_rows": np.array(sample_rows, dtype=np.int64),
            },
            self.device,
        )
        tokens_T = inputs["tokens"]
        if known_T.min() < 0:
            tokens_T = torch.where(tokens_T >= 0, tokens_T, self.last_token_R[inputs["rows"]])
        batch = ForwardBatch(
            token_ids_T=tokens_T,
            positions_T=inputs["positions"],
            slots_T=inputs["slots"],
            slice_T=inputs["slices"],
            page_table_SP=inputs["page_table"],
            starts=tuple(step.starts),
            num_tokens=tuple(step.num_tokens),
            page_size=self.page_size,
            max_visible=max_visible,
            logits_rows_L=inputs["logits_rows"],
        )
        for sequence in sampling:
            sequence.num_tokens += 1
        return Step(batch=batch, sequences=sequences, sampling=sampling, scoring=scoring)

    def decode(self, step: StepInput) -> Decode | None:
        """``step`` for a fixed batch, as :meth:`build` counts the tokens that it samples; ``None``, and nothing is
        counted, if a slice is more than one token or does not end its sequence."""
        sequences = [self.sequences[seq_id] for seq_id in step.seq_ids]
        pairs = list(zip(sequences, step.starts, strict=True))
        if max(step.num_tokens) > 1 or any(start + 1 != sequence.num_tokens for sequence, start in pairs):
            return None
        if any(s.sampling.prompt_logprobs is not None and start < s.num_prompt_tokens - 1 for s, start in pairs):
            return None
        rows_S = np.array([sequence.row for sequence in sequences], dtype=np.int64)
        positions_S = np.array(step.starts, dtype=np.int64)
        pages_S = self._page_table_RP[rows_S, positions_S // self.page_size].astype(np.int64)
        assert pages_S.min() >= 0, f"step {step.step_id} writes a token where its sequence has no page"
        known = [s.token_ids[start] if start < len(s.token_ids) else -1 for s, start in pairs]
        for sequence in sequences:
            sequence.num_tokens += 1
        return Decode(
            sequences=sequences,
            rows_S=rows_S,
            known_S=np.array(known, dtype=np.int64),
            positions_S=positions_S,
            slots_S=pages_S * self.page_size + positions_S % self.page_size,
            page_table_SP=self._page_table_RP[rows_S, : -(-(int(positions_S.max()) + 1) // self.page_size)],
        )

    def _known_tokens(
        self, sequences: list[MirrorSequence], step: StepInput, first_S: np.ndarray, num_tokens: int
    ) -> np.ndarray:
        """Tokens of the step that the sequences arrived with; -1 where only the device has it, the last one sampled."""
        known_T = np.full(num_tokens, -1, dtype=np.int64)
        for sequence, first, start, count in zip(
            sequences, first_S.tolist(), step.starts, step.num_tokens, strict=True
        ):
            known = sequence.token_ids[start : start + count]
            known_T[first : first + len(known)] = known
            assert len(known) == count or len(known) == count - 1 == 0, (
                f"sequence {sequence.seq_id}: {count} tokens that only the device has"
            )
        return known_T
