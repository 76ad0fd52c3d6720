"""Both ends of the step channel without Ray: what does not fit is a clear error at once, never an endless wait."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import msgpack
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5ray.actors.channel import LOOPBACK, SILENCE_MS, Line, RankEnd, SchedulerEnd
from glm5ray.errors import ChannelError
from glm5ray.protocol import (
    PROTOCOL_VERSION,
    Hello,
    StepInput,
    StepOutput,
    encode_hello,
    encode_output,
    encode_step,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EPOCH, RANK = 7, 3
LONG_S = 20.0
"""A wait that only a defect makes this long."""


def step(step_id: int, epoch: int = EPOCH) -> StepInput:
    return StepInput(epoch=epoch, step_id=step_id, seq_ids=[1, 2], starts=[0, 4], num_tokens=[4, 1], dropped=[9])


def answer(step_id: int, epoch: int = EPOCH, num_tokens: int = 2) -> StepOutput:
    ids = list(range(num_tokens))
    return StepOutput(epoch=epoch, step_id=step_id, seq_ids=ids, token_ids=ids)


@pytest.fixture
def scheduler() -> Iterator[SchedulerEnd]:
    with closing(SchedulerEnd(RANK, EPOCH, LOOPBACK, max_message_bytes=4096)) as end:
        yield end


@pytest.fixture
def rank(scheduler: SchedulerEnd) -> Iterator[RankEnd]:
    with closing(RankEnd(scheduler.line, RANK, EPOCH, max_message_bytes=4096)) as end:
        assert scheduler.has_hello(LONG_S)
        yield end


class RawPeer:
    """Has a rank's keys, and says what it likes."""

    def __init__(self, line: Line, *, with_keys: bool = True) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        if with_keys:
            self.socket.curve_serverkey, self.socket.curve_publickey, self.socket.curve_secretkey = line[1:]
        self.socket.connect(line.address)

    def send(self, data: bytes) -> None:
        with suppress(zmq.Again):  # of a connection that was refused
            self.socket.send(data, zmq.DONTWAIT)

    def close(self) -> None:
        self.socket.close(0)


def test_steps_and_answers_come_in_order(scheduler: SchedulerEnd, rank: RankEnd) -> None:
    assert scheduler.receive(step(0), 0.01) is None
    assert rank.receive(0.01) is None
    scheduler.send(encode_step(step(0)))
    scheduler.send(encode_step(step(1)))
    assert rank.receive(LONG_S) == step(0)
    rank.send(answer(0))
    assert rank.receive(LONG_S) == step(1)
    assert rank.num_waiting == 0
    rank.send(answer(1))
    assert scheduler.receive(step(0), LONG_S) == answer(0)
    assert scheduler.receive(step(1), LONG_S) == answer(1)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (step(0, epoch=6), "a step of epoch 6 came to a rank of epoch 7"),
        (step(1), "step 1 came where step 0 was due"),
    ],
)
def test_a_step_that_is_not_the_next_is_refused(
    scheduler: SchedulerEnd, rank: RankEnd, sent: StepInput, message: str
) -> None:
    scheduler.send(encode_step(sent))
    with pytest.raises(ChannelError, match=message):
        rank.receive(LONG_S)


def test_a_gap_and_a_repetition_are_refused(scheduler: SchedulerEnd, rank: RankEnd) -> None:
    scheduler.send(encode_step(step(0)))
    assert rank.receive(LONG_S) == step(0)
    scheduler.send(encode_step(step(2)))
    with pytest.raises(ChannelError, match="step 2 came where step 1 was due"):
        rank.receive(LONG_S)
    scheduler.send(encode_step(step(0)))
    with pytest.raises(ChannelError, match="step 0 came where step 1 was due"):
        rank.receive(LONG_S)


@pytest.mark.parametrize("late", [answer(0, epoch=6), answer(1)])
def test_an_answer_to_another_step_is_refused(scheduler: SchedulerEnd, rank: RankEnd, late: StepOutput) -> None:
    rank.send(late)
    with pytest.raises(ChannelError, match=r"rank 3 answered step \d of epoch \d, not step 0 of epoch 7"):
        scheduler.receive(step(0), LONG_S)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (encode_hello(Hello(6, RANK)), "rank 3 of epoch 6 came where rank 3 of epoch 7 was due"),
        (encode_hello(Hello(EPOCH, 0)), "rank 0 of epoch 7 came where rank 3 of epoch 7 was due"),
        (msgpack.packb([PROTOCOL_VERSION + 1, "hello", EPOCH, RANK, "more"]), "of protocol version"),
        (encode_output(answer(0)), "cannot be read"),
        (b"", "cannot be read"),
    ],
)
def test_only_the_rank_itself_is_greeted(scheduler: SchedulerEnd, said: bytes, message: str) -> None:
    with closing(RawPeer(scheduler.line)) as peer:
        peer.send(said)
        with pytest.raises(ChannelError, match=message):
            scheduler.has_hello(LONG_S)


def test_a_peer_without_the_keys_is_neither_heard_nor_in_the_way(scheduler: SchedulerEnd) -> None:
    host, _, port = scheduler.line.address.removeprefix("tcp://").rpartition(":")
    with (
        closing(RawPeer(scheduler.line, with_keys=False)) as stranger,
        socket.create_connection((host, int(port))) as browser,
    ):
        stranger.send(encode_hello(Hello(EPOCH, RANK)))
        browser.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)
        assert not scheduler.has_hello(0.3)
        with closing(RankEnd(scheduler.line, RANK, EPOCH)) as rank:
            assert scheduler.has_hello(LONG_S)
            stranger.send(encode_output(answer(0)))
            scheduler.send(encode_step(step(0)))
            assert rank.receive(LONG_S) == step(0)
            assert scheduler.receive(step(0), 0.1) is None
    assert host == LOOPBACK


def test_a_message_that_is_too_long_is_not_sent(scheduler: SchedulerEnd, rank: RankEnd) -> None:
    with pytest.raises(ChannelError, match="takes 5000 bytes, of which a message may have 4096"):
        scheduler.send(b"x" * 5000)
    with pytest.raises(ChannelError, match=r"the answer to step 0 takes \d+ bytes, of which a message may have 4096"):
        rank.send(answer(0, num_tokens=1000))
    scheduler.send(encode_step(step(0)))
    assert rank.receive(LONG_S) == step(0), "the connection goes on"


def test_a_message_that_is_too_long_for_its_receiver_ends_the_connection(scheduler: SchedulerEnd) -> None:
    with closing(RankEnd(scheduler.line, RANK, EPOCH)) as rank:
        assert scheduler.has_hello(LONG_S)
        rank.send(answer(0, num_tokens=1000))
        with pytest.raises(ChannelError, match="the connection to rank 3 broke"):
            wait_for_break(lambda: scheduler.receive(step(0), 0.1))
        with pytest.raises(ChannelError, match="the connection to rank 3 broke"):
            scheduler.send(encode_step(step(0)))
        with pytest.raises(ChannelError, match="the connection to the scheduler broke"):
            wait_for_break(lambda: rank.receive(0.1))
        with pytest.raises(ChannelError, match="the connection to the scheduler broke"):
            rank.send(answer(1))


def test_either_end_notices_that_the_other_has_gone(scheduler: SchedulerEnd) -> None:
    with closing(RankEnd(scheduler.line, RANK, EPOCH)) as rank:
        assert scheduler.has_hello(LONG_S)
        rank.close()
        with pytest.raises(ChannelError, match="the connection to rank 3 broke"):
            wait_for_break(lambda: scheduler.receive(step(0), 0.1))
    other = SchedulerEnd(RANK, EPOCH, LOOPBACK)
    with closing(RankEnd(other.line, RANK, EPOCH)) as rank:
        assert other.has_hello(LONG_S)
        other.close()
        with pytest.raises(ChannelError, match="the connection to the scheduler broke"):
            wait_for_break(lambda: rank.receive(0.1))


FROZEN = """
import sys
from glm5ray.actors.channel import Line, RankEnd

end = RankEnd(Line(sys.argv[1], *(bytes.fromhex(key) for key in sys.argv[2:])), 3, 7)
print("connected", flush=True)
end.receive(600)
"""


@pytest.mark.slow
def test_a_rank_that_falls_silent_is_noticed(scheduler: SchedulerEnd) -> None:
    """Its process is stopped, as that of a machine that is cut off: the connection does not end by itself."""
    keys = [key.hex() for key in scheduler.line[1:]]
    command = [sys.executable, "-c", FROZEN, scheduler.line.address, *keys]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as rank:
        try:
            assert scheduler.has_hello(LONG_S)
            scheduler.check()
            rank.send_signal(signal.SIGSTOP)
            with pytest.raises(ChannelError, match="the connection to rank 3 broke"):
                wait_for_break(lambda: scheduler.receive(step(0), 0.1), 2 * SILENCE_MS / 1000)
        finally:
            rank.kill()


def wait_for_break(receive: Callable[[], object], timeout_s: float = LONG_S) -> None:
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        assert receive() is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_message_that_was_cut_or_is_not_ours_is_an_error(data: st.DataObject) -> None:
    whole = data.draw(
        st.sampled_from([encode_step(step(0)), encode_output(answer(0)), encode_hello(Hello(EPOCH, RANK))])
    )
    cut = data.draw(st.one_of(st.integers(0, len(whole) - 1).map(lambda n: whole[:n]), st.binary(max_size=40)))
    with (
        closing(SchedulerEnd(RANK, EPOCH, LOOPBACK)) as scheduler,
        closing(RawPeer(scheduler.line)) as peer,
    ):
        peer.send(encode_hello(Hello(EPOCH, RANK)))
        assert scheduler.has_hello(LONG_S)
        peer.send(cut)
        with pytest.raises(ChannelError, match=rf"the answer of rank 3 \({len(cut)} bytes\) cannot be read"):
            scheduler.receive(step(0), LONG_S)
    with (
        closing(SchedulerEnd(RANK, EPOCH, LOOPBACK)) as scheduler,
        closing(RankEnd(scheduler.line, RANK, EPOCH)) as rank,
    ):
        assert scheduler.has_hello(LONG_S)
        scheduler.send(cut)
        with pytest.raises(ChannelError, match=rf"a step \({len(cut)} bytes\) cannot be read"):
            rank.receive(LONG_S)
