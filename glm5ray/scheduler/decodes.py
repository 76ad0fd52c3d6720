"""The sequences that decode, in columns.

Each of them takes one slice of one token in every step, so the columns of one step become those of the next by adding
one to each start, and what will happen to a sequence is known ahead: it crosses into a new page every ``page_size``
steps, and it reaches its limit at a step that can be told when it begins. Both are kept in buckets by step, so that a
step touches one by one only the few sequences to which something happens. This is what makes 1,024 sequences cost
microseconds, not milliseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

from glm5ray.scheduler.sequence import State

if TYPE_CHECKING:
    from collections.abc import Collection

    from glm5ray.scheduler.sequence import Sequence


class DecodeRows(NamedTuple):
    """Columns of one step, a row for each decoding sequence, by rising ``seq_id``."""

    seq_ids: list[int]
    request_ids: list[str]
    indexes: list[int]
    outputs: list[list[int]]
    """The sequences' own lists: to append to."""

    def take(self, seq_id: int, tokens: list[int]) -> int | None:
        """Removes a row, here and in ``tokens``, and returns its token; ``None`` if there is no such row."""
        row = bisect_left(self.seq_ids, seq_id)
        if row == len(self.seq_ids) or self.seq_ids[row] != seq_id:
            return None
        for column in self:
            del column[row]
        return tokens.pop(row)


class DecodeBatch:
    """All sequences in state DECODE. ``starts`` are those of the step that comes next."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.seq_ids: list[int] = []
        self.starts: list[int] = []
        self.sequences: list[Sequence] = []
        self._request_ids: list[str] = []
        self._indexes: list[int] = []
        self._outputs: list[list[int]] = []
        self._by_phase: list[dict[int, Sequence]] = [{} for _ in range(page_size)]
        self._by_last_step: dict[int, dict[int, Sequence]] = {}

    def __len__(self) -> int:
        return len(self.seq_ids)

    def __repr__(self) -> str:
        return f"DecodeBatch({len(self)} sequences)"

    def add(self, seq: Sequence, start: int, step_id: int) -> None:
        """``seq`` decodes from step ``step_id``, the next one, on; its first slice there is at ``start``. O(log n)
        and a short move."""
        row = bisect_left(self.seq_ids, seq.seq_id)
        self.seq_ids.insert(row, seq.seq_id)
        self.starts.insert(row, start)
        self.sequences.insert(row, seq)
        self._request_ids.insert(row, seq.request_id)
        self._indexes.insert(row, seq.index)
        self._outputs.insert(row, seq.output)
        seq.state = State.DECODE
        seq.phase = (start - step_id) % self._page_size
        # The slice at position p samples token p + 1, and the last one is token max_len - 1.
        seq.last_step = step_id + seq.max_len - 2 - start
        self._by_phase[seq.phase][seq.seq_id] = seq
        self._by_last_step.setdefault(seq.last_step, {})[seq.seq_id] = seq

    def remove(self, seq: Sequence) -> None:
        """O(log n) and a short move."""
        row = bisect_left(self.seq_ids, seq.seq_id)
        assert self.seq_ids[row] == seq.seq_id, f"{seq!r} is not in {self!r}"
        columns = (self.seq_ids, self.starts, self.sequences, self._request_ids, self._indexes, self._outputs)
        for column in columns:
            del column[row]
        del self._by_phase[seq.phase][seq.seq_id]
        bucket = self._by_last_step[seq.last_step]
        del bucket[seq.seq_id]
        if not bucket:
            del self._by_last_step[seq.last_step]

    def start_of(self, seq: Sequence) -> int:
        """Where its next slice begins."""
        return self.starts[bisect_left(self.seq_ids, seq.seq_id)]

    def opening_page(self, step_id: int) -> Collection[Sequence]:
        """Sequences whose slice of the step is at the first slot of a page. A view: changes with ``remove``."""
        return self._by_phase[-step_id % self._page_size].values()

    def filling_page(self, step_id: int) -> Collection[Sequence]:
        """Sequences whose slice of the step is at the last slot of a page. A view."""
        return self._by_phase[(self._page_size - 1 - step_id) % self._page_size].values()

    def ending(self, step_id: int) -> Collection[Sequence]:
        """Sequences that reach their limit with the sample of the step. A view."""
        return self._by_last_step.get(step_id, {}).values()

    def rows(self) -> DecodeRows:
        """Copies of the columns: they live on while the step is in flight."""
        return DecodeRows(self.seq_ids.copy(), self._request_ids.copy(), self._indexes.copy(), self._outputs.copy())

    def advance(self) -> list[int]:
        """The starts of this step; the next ones are one further."""
        starts = self.starts
        self.starts = [start + 1 for start in starts]
        return starts

    def check(self, step_id: int) -> None:
        """That columns and buckets agree; ``step_id`` is the next step."""
        assert self.seq_ids == sorted(set(self.seq_ids)), f"rows out of order: {self.seq_ids}"
        assert self.seq_ids == [seq.seq_id for seq in self.sequences], "seq_ids and sequences differ"
        assert self._request_ids == [seq.request_id for seq in self.sequences], "request_ids and sequences differ"
        assert self._indexes == [seq.index for seq in self.sequences], "indexes and sequences differ"
        assert len(self._outputs) == len(self.starts) == len(self), f"columns of unequal length in {self!r}"
        for seq, start, output in zip(self.sequences, self.starts, self._outputs, strict=True):
            assert output is seq.output, f"{seq!r} has another output than its row"
            assert seq.state is State.DECODE, f"{seq!r} decodes"
            assert (start - step_id - seq.phase) % self._page_size == 0, f"{seq!r} at {start} has phase {seq.phase}"
            assert seq.last_step - step_id == seq.max_len - 2 - start, f"{seq!r} at {start} ends at {seq.last_step}"
            assert self._by_phase[seq.phase].get(seq.seq_id) is seq, f"{seq!r} is in no page bucket"
            assert self._by_last_step[seq.last_step].get(seq.seq_id) is seq, f"{seq!r} is in no limit bucket"
        for name, buckets in (("page", self._by_phase), ("limit", self._by_last_step.values())):
            size = sum(map(len, buckets))
            assert size == len(self), f"{size} entries in the {name} buckets for {len(self)} sequences"
