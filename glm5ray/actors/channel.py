"""The step channel: a ZeroMQ connection between the scheduler and each rank; steps go out, answers come back.

The scheduler binds a socket for each rank and incarnation, and the rank connects once. The connection is encrypted with
keys that travel through Ray (CurveZMQ), so a peer that was not given them is not heard. The rank says hello, and each
end checks what it gets: version, epoch, step number, length. What does not fit, and a connection that breaks, is a
:class:`ChannelError`; nothing is sent twice and no connection is made again, for a message may be lost with it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import zmq

from glm5ray.errors import ChannelError
from glm5ray.protocol import (
    Hello,
    decode_hello,
    decode_output,
    decode_step,
    encode_hello,
    encode_output,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from glm5ray.protocol import StepInput, StepOutput

T = TypeVar("T")

MAX_MESSAGE_BYTES = 2**30
"""Steps carry whole prompts: 200 of a million tokens fit. A longer message is refused before memory is taken for it."""
LOOPBACK = "127.0.0.1"
_HEARTBEAT_MS, SILENCE_MS = 5_000, 30_000
"""A machine that vanished without a word is noticed after such a silence; ZeroMQ's own thread keeps the beat."""
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
"""What msgpack and our decoders raise for bytes that were not encoded here."""


class Line(NamedTuple):
    """What a rank needs to connect. Whoever has it can read the rank's steps and answer them."""

    address: str
    server_key: bytes
    public_key: bytes
    secret_key: bytes


class SchedulerEnd:
    """The scheduler's end of the connection to one rank of one incarnation."""

    def __init__(self, rank: int, epoch: int, host: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """Binds a free port at ``host``, an address of this machine: :data:`LOOPBACK` if the rank is here as well."""
        self.rank = rank
        self._epoch = epoch
        self._max_bytes = max_message_bytes
        server_key, server_secret = zmq.curve_keypair()
        self._socket = _socket(max_message_bytes)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = server_key, server_secret
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.line = Line(f"tcp://{host}:{port}", server_key, *zmq.curve_keypair())
        self._is_known = False

    def has_hello(self, timeout_s: float) -> bool:
        """Whether the rank has said who it is, after a wait for it. Raises :class:`ChannelError` if what came is no
        hello, or another's."""
        if not self._is_known and self._socket.poll(_ms(timeout_s)):
            hello = _read(decode_hello, self._socket.recv(), f"the hello of rank {self.rank}")
            if hello != Hello(self._epoch, self.rank):
                raise ChannelError(
                    f"rank {hello.rank} of epoch {hello.epoch} came where rank {self.rank} of epoch {self._epoch} "
                    "was due"
                )
            self._is_known = True
        return self._is_known

    def send(self, data: bytes) -> None:
        """Never waits. ``data`` is an encoded step. Raises :class:`ChannelError` if the rank is not connected, or
        would not take so long a message."""
        assert self._is_known, f"a step for rank {self.rank}, which has not said hello"
        if len(data) > self._max_bytes:
            raise ChannelError(f"a step takes {len(data)} bytes, of which a message may have {self._max_bytes}")
        self.check()
        self._socket.send(data, zmq.DONTWAIT)

    def receive(self, step: StepInput, timeout_s: float) -> StepOutput | None:
        """The answer to ``step``; ``None`` if none comes in time. Raises :class:`ChannelError` if the connection broke
        or another answer comes."""
        if not self._socket.poll(_ms(timeout_s)):
            self.check()
            return None
        output = _read(decode_output, self._socket.recv(), f"the answer of rank {self.rank}")
        if (output.epoch, output.step_id) != (step.epoch, step.step_id):
            raise ChannelError(
                f"rank {self.rank} answered step {output.step_id} of epoch {output.epoch}, "
                f"not step {step.step_id} of epoch {step.epoch}"
            )
        return output

    def check(self) -> None:
        """Raises :class:`ChannelError` if the rank was connected and is not any more. Never waits."""
        # there is no limit to what may wait in the socket, so it takes nothing only if nobody is there
        if self._is_known and not self._socket.poll(0, zmq.POLLOUT):
            raise ChannelError(f"the connection to rank {self.rank} broke")

    def close(self) -> None:
        """What was not sent yet is dropped."""
        self._socket.close(0)


class RankEnd:
    """The rank's end. Used by one thread."""

    def __init__(self, line: Line, rank: int, epoch: int, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """Connects and says hello; neither waits for the scheduler."""
        self._epoch = epoch
        self._max_bytes = max_message_bytes
        self._next_step_id = 0
        self._waiting: deque[StepInput] = deque()
        self._socket = _socket(max_message_bytes)
        self._socket.curve_serverkey, self._socket.curve_publickey, self._socket.curve_secretkey = line[1:]
        self._socket.reconnect_ivl = -1  # never: what was under way is lost
        self._socket.connect(line.address)
        self._socket.send(encode_hello(Hello(epoch, rank)))

    @property
    def num_waiting(self) -> int:
        """Steps that have come and were not handed out; may be read from any thread."""
        return len(self._waiting)

    def receive(self, timeout_s: float) -> StepInput | None:
        """The next step; ``None`` if none comes in time. Raises :class:`ChannelError` if the connection broke, or for
        a step that is not the next one."""
        if self._waiting:
            return self._waiting.popleft()
        if not self._socket.poll(_ms(timeout_s)):
            self._check_connected()
            return None
        while self._socket.poll(0):
            self._waiting.append(self._take(self._socket.recv()))
        return self._waiting.popleft()

    def _take(self, data: bytes) -> StepInput:
        step = _read(decode_step, data, "a step")
        if step.epoch != self._epoch:
            raise ChannelError(f"a step of epoch {step.epoch} came to a rank of epoch {self._epoch}")
        if step.step_id != self._next_step_id:
            raise ChannelError(f"step {step.step_id} came where step {self._next_step_id} was due")
        self._next_step_id += 1
        return step

    def send(self, output: StepOutput) -> None:
        """Never waits. Raises :class:`ChannelError` if the connection broke, or the scheduler would not take so long a
        message."""
        data = encode_output(output)
        if len(data) > self._max_bytes:
            raise ChannelError(
                f"the answer to step {output.step_id} takes {len(data)} bytes, of which a message may have "
                f"{self._max_bytes}"
            )
        self._check_connected()
        self._socket.send(data, zmq.DONTWAIT)

    def close(self) -> None:
        """What was not sent yet is dropped."""
        self._socket.close(0)

    def _check_connected(self) -> None:
        if not self._socket.poll(0, zmq.POLLOUT):
            raise ChannelError("the connection to the scheduler broke")


def _socket(max_message_bytes: int) -> zmq.Socket[bytes]:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0
    socket.maxmsgsize = max_message_bytes
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, SILENCE_MS
    return socket


def _read(decode: Callable[[bytes], T], data: bytes, what: str) -> T:
    try:
        return decode(data)
    except _UNREADABLE as error:
        raise ChannelError(f"{what} ({len(data)} bytes) cannot be read: {error}") from error


def _ms(seconds: float) -> int:
    return max(0, round(1000 * seconds))
