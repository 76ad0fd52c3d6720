"""The unfinished requests and their sequences, and which of these wait for a sibling."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from glm5ray.scheduler.sequence import State

if TYPE_CHECKING:
    from glm5ray.scheduler.sequence import Sequence


class LiveRequests:
    """The answers to one request (``n``) share its prompt. Where there is a prefix cache the first computes it, and the
    others are *parked* until its pages can be found."""

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}
        """seq_id -> sequence."""
        self.stop_ids: Counter[int] = Counter()
        """Every token that ends some live sequence."""
        self.num_parked = 0
        self._of_request: dict[str, list[Sequence]] = {}
        self._parked: dict[str, deque[Sequence]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._of_request

    def __len__(self) -> int:
        """Sequences, not requests."""
        return len(self.sequences)

    def of(self, request_id: str) -> list[Sequence]:
        """The unfinished sequences of a request, by index."""
        return list(self._of_request.get(request_id, ()))

    def add(self, siblings: list[Sequence], *, park: bool) -> list[Sequence]:
        """Takes in the answers of one request; returns those that wait for nobody."""
        request_id = siblings[0].request_id
        self._of_request[request_id] = siblings.copy()
        for seq in siblings:
            self.sequences[seq.seq_id] = seq
            self.stop_ids.update(seq.stop_ids)
        if not park or len(siblings) == 1:
            return siblings
        self._parked[request_id] = deque(siblings[1:])
        self.num_parked += len(siblings) - 1
        for seq in siblings[1:]:
            seq.state = State.PARKED
        return siblings[:1]

    def remove(self, seq: Sequence) -> Sequence | None:
        """``seq`` is finished. If all that is left of its request is parked, returns the one that computes the prompt
        now."""
        del self.sequences[seq.seq_id]
        for token in seq.stop_ids:
            self.stop_ids[token] -= 1
            if not self.stop_ids[token]:
                del self.stop_ids[token]
        siblings = self._of_request[seq.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._of_request[seq.request_id]
        parked = self._parked.get(seq.request_id)
        if parked is None:
            return None
        if seq.state is State.PARKED:
            parked.remove(seq)
            self.num_parked -= 1
        leader = None
        if parked and len(parked) == len(siblings):
            leader = parked.popleft()
            self.num_parked -= 1
        if not parked:
            del self._parked[seq.request_id]
        return leader

    def unpark(self, request_id: str) -> deque[Sequence]:
        """The prompt is computed: the siblings that waited for it."""
        siblings = self._parked.pop(request_id, deque())
        self.num_parked -= len(siblings)
        return siblings

    def check(self) -> None:
        """That the tables agree, and that nobody waits for a sibling in vain."""
        of_requests = sorted(seq.seq_id for seqs in self._of_request.values() for seq in seqs)
        assert of_requests == sorted(self.sequences), f"requests hold {of_requests}, alive are {sorted(self.sequences)}"
        stop_ids = Counter(token for seq in self.sequences.values() for token in seq.stop_ids)
        assert stop_ids == self.stop_ids, f"stop tokens {stop_ids}, counted {self.stop_ids}"
        parked = sorted(seq.seq_id for seqs in self._parked.values() for seq in seqs)
        states = sorted(seq.seq_id for seq in self.sequences.values() if seq.state is State.PARKED)
        assert parked == states, f"parked are {parked}, in state PARKED {states}"
        assert len(parked) == self.num_parked, f"{len(parked)} parked, {self.num_parked} counted"
        for request_id, seqs in self._parked.items():
            assert 0 < len(seqs) < len(self._of_request[request_id]), f"nobody leads {request_id!r}"
