"""Steps that the workers have and whose results are not in yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import TYPE_CHECKING, NamedTuple

from glm5ray.protocol import TokenEvent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from glm5ray.protocol import StepOutput
    from glm5ray.scheduler.decodes import DecodeRows
    from glm5ray.scheduler.sequence import Sequence


class Chunk(NamedTuple):
    """A slice of a sequence in PREFILL."""

    seq: Sequence
    start: int
    num_tokens: int
    is_last: bool
    """Reaches the last known token, so it samples."""


@dataclass(slots=True)
class Flight:
    """A step that workers have and whose result is not in yet."""

    step_id: int
    rows: DecodeRows
    chunks: list[Chunk]
    filling: list[Sequence]
    """Decodes whose slice fills a page."""
    single: set[int]
    """seq_ids whose sample needs more than being appended: the first or the last of a sequence."""
    void: set[int] = field(default_factory=set)
    """seq_ids that ended since: what the step says of them means nothing."""

    def suspects(self) -> Iterator[int]:
        """seq_ids that have a slice in the step and have not ended since."""
        seq_ids = chain(self.rows.seq_ids, (chunk.seq.seq_id for chunk in self.chunks))
        return (seq_id for seq_id in seq_ids if seq_id not in self.void)

    def tokens(self, output: StepOutput) -> list[int]:
        """Sampled tokens in the order of ``rows``, then of the last chunks; -1 for a failed sequence that has none."""
        seq_ids = self.rows.seq_ids + [chunk.seq.seq_id for chunk in self.chunks if chunk.is_last]
        if output.seq_ids == seq_ids:
            return output.token_ids.copy()
        by_id = dict(zip(output.seq_ids, output.token_ids, strict=True))
        missing = [seq_id for seq_id in seq_ids if seq_id not in by_id and seq_id not in output.failed]
        assert not missing, f"step {self.step_id} has no token for sequences {missing[:8]}"
        return [by_id.get(seq_id, -1) for seq_id in seq_ids]


def next_chunk(seq: Sequence, budget: int) -> Chunk:
    """The next tokens of a sequence in PREFILL, at most ``budget``."""
    start = seq.num_scheduled
    num_tokens = min(seq.num_tokens - start, budget)
    seq.num_scheduled += num_tokens
    return Chunk(seq, start, num_tokens, seq.num_scheduled == seq.num_tokens)


def token_events(rows: DecodeRows, tokens: list[int]) -> Iterator[TokenEvent]:
    """``TokenEvent(request_id, index, (token,))`` for each row. In columns, through C alone: the constructor takes
    twice the time, and this is the largest part of the cost of a step."""
    nones, empties = repeat(None), repeat(())
    rest = (nones, nones, empties, empties, repeat(0), nones, nones)
    assert len(rest) + 3 == len(TokenEvent._fields), f"columns for other fields than {TokenEvent._fields}"
    columns = zip(rows.request_ids, rows.indexes, zip(tokens, strict=True), *rest, strict=False)  # rest has no end
    return map(tuple.__new__, repeat(TokenEvent), columns)
