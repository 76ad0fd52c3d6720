"""Both orders of the queue, against a plain list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from glm5ray.scheduler.sequence import Sequence
from glm5ray.scheduler.waiting import WaitingQueue
from tests.builders import make_request

if TYPE_CHECKING:
    from random import Random


def make_sequence(seq_id: int, priority: int = 0) -> Sequence:
    return Sequence(
        seq_id=seq_id,
        request=make_request(),
        index=0,
        max_len=12,
        page_size=4,
        stop_ids=frozenset(),
        priority=priority,
    )


@settings(deadline=None)
@given(st.randoms(use_true_random=False))
def test_it_agrees_with_a_sorted_list(rng: Random) -> None:
    queue, members = WaitingQueue(), []
    outside = [make_sequence(seq_id, rng.randint(-1, 1)) for seq_id in range(8)]
    for _ in range(rng.randint(1, 60)):
        if outside and rng.random() < 0.5:
            seq = outside.pop(rng.randrange(len(outside)))
            queue.push(seq)
            members.append(seq)
        elif members and rng.random() < 0.3:
            seq = members.pop(rng.randrange(len(members)))
            queue.discard(seq)
            outside.append(seq)
        else:
            oldest = rng.random() < 0.5
            expected = min(members, key=lambda s: s.seq_id if oldest else (s.priority, s.seq_id), default=None)
            assert queue.pop(oldest=oldest) is expected
            if expected is not None:
                members.remove(expected)
                outside.append(expected)
        queue.check()
        assert len(queue) == len(members)
        assert all(seq in queue for seq in members)


def test_those_who_left_take_no_room_for_long() -> None:
    queue = WaitingQueue()
    queue.push(make_sequence(0, priority=9))
    for seq_id in range(1, 5_000):
        queue.push(make_sequence(seq_id))
        queue.pop()
    assert len(queue._by_age) + len(queue._by_urgency) < 200
