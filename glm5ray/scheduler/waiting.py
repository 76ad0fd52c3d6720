"""The order of waiting sequences. No operation looks at all of them, so 100,000 may wait."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from glm5ray.scheduler.sequence import Sequence


class WaitingQueue:
    """Most urgent first (lower ``priority``, then arrival), or, on request, the one that arrived first.

    Two heaps over the same members; an entry whose sequence has left is dropped when it comes to the top, or when such
    entries are the majority. A preempted sequence keeps its ``seq_id`` and with it its place.
    """

    def __init__(self) -> None:
        self._members: dict[int, Sequence] = {}
        self._by_urgency: list[tuple[int, int]] = []
        self._by_age: list[int] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._members

    def __repr__(self) -> str:
        return f"WaitingQueue({len(self)} waiting)"

    def sequences(self) -> Iterable[Sequence]:
        """In no particular order."""
        return self._members.values()

    def push(self, seq: Sequence) -> None:
        """O(log n)."""
        assert seq.seq_id not in self._members, f"{seq!r} waits already"
        self._members[seq.seq_id] = seq
        heappush(self._by_urgency, (seq.priority, seq.seq_id))
        heappush(self._by_age, seq.seq_id)
        if len(self._by_age) + len(self._by_urgency) > 4 * len(self._members) + 64:
            self._compact()

    def discard(self, seq: Sequence) -> None:
        """O(1)."""
        self._members.pop(seq.seq_id, None)

    def pop(self, *, oldest: bool = False) -> Sequence | None:
        """The most urgent sequence, or the one that arrived first; ``None`` if none waits. O(log n) over time."""
        while self._by_age if oldest else self._by_urgency:
            seq_id = heappop(self._by_age) if oldest else heappop(self._by_urgency)[1]
            seq = self._members.pop(seq_id, None)
            if seq is not None:
                return seq
        return None

    def _compact(self) -> None:
        self._by_urgency = [(seq.priority, seq.seq_id) for seq in self._members.values()]
        self._by_age = list(self._members)
        heapify(self._by_urgency)
        heapify(self._by_age)

    def check(self) -> None:
        """That every member can come up in both orders."""
        missing = self._members.keys() - set(self._by_age)
        missing |= self._members.keys() - {seq_id for _, seq_id in self._by_urgency}
        assert not missing, f"waiting sequences {sorted(missing)[:8]} are in no heap"
