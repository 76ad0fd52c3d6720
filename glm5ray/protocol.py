"""Everything that crosses a process, as frozen dataclasses, and its wire format.

A request goes in as :class:`GenerateRequest`; the scheduler answers each iteration of the engine with a
:class:`StepInput`, the same bytes for every worker; rank 0 answers with a :class:`StepOutput`; the client gets
:class:`TokenEvent`.

The two messages of each step are kept in *columns* (one list of integers per field) instead of one object per sequence:
with 1,024 sequences, making an object each costs more than scheduling them, and flat columns
travel as raw bytes (``array``), which is some eighty times cheaper than nested msgpack.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from glm5ray.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

PROTOCOL_VERSION = 3
"""Raised with every change of a message; peers of another version are refused."""

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends. The meanings are those of vLLM and OpenAI."""

    max_tokens: int | None = None
    """Most new tokens; ``None``: until the model's limit. 0: none, only the prompt is scored."""
    min_tokens: int = 0
    """No end-of-sequence token and no ``stop_token_ids`` before this many new tokens."""
    n: int = 1
    """Independent answers to one prompt."""
    temperature: float = 1.0
    """0: greedy; ties go to the lower token id."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 or -1: all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose probability reaches this."""
    min_p: float = 0.0
    """Keep tokens at least this probable, relative to the most probable one."""
    repetition_penalty: float = 1.0
    """Divides positive (multiplies negative) logits of tokens in the prompt or the output."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time it stands in the output."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Token id -> number added to its logit, -100 to 100."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens may be chosen; ``None``: all."""
    seed: int | None = None
    """Same seed, same tokens, whatever else runs beside; ``None``: drawn when the request is submitted."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; the text ends before them."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, beside the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string that ended the text."""
    skip_special_tokens: bool = True
    """Leave tokens that the tokenizer calls special out of the text."""
    logprobs: int | None = None
    """Log-probability of each new token and of this many most probable ones; 0: of the new token alone."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt (the first has none)."""

    def __post_init__(self) -> None:
        """One stop string may be given as such, and any collection where a tuple is meant. Nothing is refused here: a
        bad value is the matter of :meth:`validate`, so that it fails its own request and no other."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if isinstance(value, list | set | frozenset | range):
                object.__setattr__(self, name, tuple(value))

    def validate(self, *, vocab_size: int, max_logprobs: int = 20, eos_token_ids: tuple[int, ...] = ()) -> None:
        """Raises :class:`RequestError` with the field (``param``) that is out of range or of the wrong type."""
        self._validate_types()
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL_INTS:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                bounds = f"at least {_number(low)}" if high == _INF else f"from {_number(low)} to {_number(high)}"
                raise RequestError(f"{name} is {value!r}; it must be a number {bounds}.", param=name)
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1.", param="top_p")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}; "
                "lower one or raise the other.",
                param="min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > max_logprobs:
                raise RequestError(f"{name} is {value}; this engine returns at most {max_logprobs}.", param=name)
        self._validate_tokens(vocab_size)
        ends = {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}
        if self.min_tokens > 0 and self.allowed_token_ids is not None and ends.issuperset(self.allowed_token_ids):
            raise RequestError(
                "allowed_token_ids has only tokens that end the output, "
                f"which min_tokens, {self.min_tokens}, forbids at first.",
                param="allowed_token_ids",
            )
        if "" in self.stop:
            raise RequestError("stop has an empty string; leave it out.", param="stop")

    def _validate_types(self) -> None:
        for name in ("max_tokens", "min_tokens", "n", "top_k", "seed", "logprobs", "prompt_logprobs"):
            _require_int(name, getattr(self, name), optional=name in _OPTIONAL_INTS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be True or False.", param=name)
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) for text in self.stop):
            raise RequestError(f"stop is {self.stop!r}; it must be a string or a list of strings.", param="stop")
        if not isinstance(self.logit_bias, dict):
            raise RequestError(
                f"logit_bias is {self.logit_bias!r}; it must map token ids to numbers.", param="logit_bias"
            )
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if not isinstance(value, tuple) and not (value is None and name == "allowed_token_ids"):
                raise RequestError(f"{name} is {value!r}; it must be a list of token ids.", param=name)

    def _validate_tokens(self, vocab_size: int) -> None:
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        check_token_ids("logit_bias", self.logit_bias, vocab_size)
        for token_id, bias in self.logit_bias.items():
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100.0 <= bias <= 100.0:
                raise RequestError(
                    f"logit_bias of token {token_id} is {bias!r}; it must be a number from -100 to 100.",
                    param="logit_bias",
                )
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise RequestError(
                    "allowed_token_ids is empty, so no token could follow; leave it out or name at least one.",
                    param="allowed_token_ids",
                )
            check_token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)


_INF = float("inf")
_MAX_COUNT = 2**31 - 1
"""Above any real limit, and small enough for the integer columns of a step and of the sampler."""
_OPTIONAL_INTS = {"max_tokens", "seed", "logprobs", "prompt_logprobs"}
_RANGES = (
    ("max_tokens", 0, _MAX_COUNT),
    ("min_tokens", 0, _MAX_COUNT),
    ("n", 1, 128),
    ("top_k", -1, _MAX_COUNT),
    ("seed", -MAX_SEED - 1, MAX_SEED),
    ("logprobs", 0, _INF),
    ("prompt_logprobs", 0, _INF),
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 10.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _require_int(name: str, value: object, *, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}; it must be a whole number.", param=name)


def check_token_ids(param: str, token_ids: Any, vocab_size: int) -> None:
    """Raises :class:`RequestError` for the first of ``token_ids`` that is no integer in ``[0, vocab_size)``."""
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} has the token id {token_id!r}; "
                f"this model's ids are whole numbers from 0 to {vocab_size - 1}.",
                param=param,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """What a client asked. Immutable."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Lower runs earlier (only under ``policy: priority``); waiting makes a request age towards the front."""


class FinishReason(StrEnum):
    """Why a sequence ended; the values are OpenAI's where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, natural logarithm, of the distribution before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), most probable first; as many as were asked for."""
    rank: int = 0
    """1 for the most probable token of the vocabulary."""


class TokenEvent(NamedTuple):
    """News of one sequence: new tokens, or its end, or both."""

    request_id: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] - OpenAI's name; nobody searches an event
    """Which of the request's ``n`` answers."""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended it, which is not among ``token_ids`` when the reason is ``stop``."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Sent once, with the first event: positions 1 to the end of the prompt."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache; sent with the first event."""
    error: str | None = None
    error_code: str | None = None


_TOKENS_ALONE = TokenEvent("", 0)[3:]


@dataclass(frozen=True, kw_only=True, slots=True)
class NewSequence:
    """A sequence that the workers do not know yet (or no longer: preempted ones come back as new)."""

    seq_id: int
    request_id: str
    index: int
    token_ids: tuple[int, ...]
    """All tokens so far: the prompt, and after a preemption what was generated."""
    num_prompt_tokens: int
    sampling: SamplingParams
    pages: tuple[int, ...]
    """Pages in order of position; the first of them may hold a prefix found in the cache."""


class SequenceSlice(NamedTuple):
    """The tokens of one sequence in one step; a decode is a slice of one."""

    seq_id: int
    start: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInput:
    """One iteration of the engine, the same for every worker.

    Columns ``seq_ids``, ``starts`` and ``num_tokens`` have one entry per slice. A slice that reaches the last token of
    its sequence samples the next one; with the overlapped loop that last token may itself be the sample of the step
    before, which only the worker knows yet.
    """

    epoch: int
    """Incarnation of the workers; messages of another epoch are refused."""
    step_id: int
    """Grows by one; a gap is an error."""
    seq_ids: list[int]
    starts: list[int]
    """Position of the slice's first token."""
    num_tokens: list[int]
    """Tokens of the slice, at least one."""
    new_sequences: tuple[NewSequence, ...] = ()
    new_pages: dict[int, list[int]] = field(default_factory=dict)
    """seq_id -> pages that now follow its others."""
    dropped: list[int] = field(default_factory=list)
    """Sequences to forget, before anything else in this step: finished, aborted or preempted."""
    parts: tuple[StepInput, ...] = ()
    """With data parallelism: what each group of ranks computes, in order of ``dp_rank``; nothing else is set then but
    ``epoch`` and ``step_id``. A part's own ``step_id`` is that of its group's scheduler; a part may be empty."""

    def slices(self) -> Iterator[SequenceSlice]:
        """The columns, row by row."""
        return map(SequenceSlice, self.seq_ids, self.starts, self.num_tokens)

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens) + sum(part.total_tokens for part in self.parts)

    @property
    def is_decode(self) -> bool:
        """Whether every slice is one token; false for a step without slices."""
        num_slices = len(self.num_tokens) + sum(len(part.num_tokens) for part in self.parts)
        return 0 < num_slices == self.total_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What a step sampled. ``seq_ids`` and ``token_ids`` are columns: the sequences whose slice ended their known
    tokens.
    """

    epoch: int
    step_id: int
    seq_ids: list[int]
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """seq_id -> of the sampled token, for the sequences that asked."""
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """seq_id -> of the prompt tokens that this step's slice scored, in order of position."""
    failed: dict[int, str] = field(default_factory=dict)
    """seq_id -> what went wrong with this sequence alone (its token in ``token_ids`` means nothing)."""
    duration_s: float = 0.0
    from_graph: bool = False
    """Whether a CUDA graph computed it, or the fixed batch that emulates one."""


def merge_outputs(outputs: list[StepOutput]) -> StepOutput:
    """The outputs of the groups of ranks for one step, as one; no two have a sequence in common."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    assert {(o.epoch, o.step_id) for o in outputs} == {(first.epoch, first.step_id)}, "outputs of several steps"
    return StepOutput(
        epoch=first.epoch,
        step_id=first.step_id,
        seq_ids=[seq_id for output in outputs for seq_id in output.seq_ids],
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs={seq_id: value for output in outputs for seq_id, value in output.logprobs.items()},
        prompt_logprobs={seq_id: value for output in outputs for seq_id, value in output.prompt_logprobs.items()},
        failed={seq_id: message for output in outputs for seq_id, message in output.failed.items()},
        duration_s=max(output.duration_s for output in outputs),
        from_graph=all(output.from_graph for output in outputs),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What the workers can hold, decided after the weights are loaded. Admission, ``/v1/models`` and the scheduler
    all read this one object."""

    num_pages: int
    page_size: int
    """Tokens per page."""
    max_model_len: int
    """Most tokens (prompt and output) of one sequence."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]


# --- wire format ------------------------------------------------------------------------------------------------------


class Hello(NamedTuple):
    """The first message of a rank."""

    epoch: int
    rank: int


def encode_hello(hello: Hello) -> bytes:
    return _pack([PROTOCOL_VERSION, "hello", *hello])


def decode_hello(data: bytes) -> Hello:
    """Raises ``ValueError`` for a message of another version, or another message."""
    version, *rest = msgpack.unpackb(data)
    _check_version(version)
    word, epoch, rank = rest
    if word != "hello":
        raise ValueError(f"{word!r} where hello was due")
    return Hello(epoch, rank)


def encode_step(step: StepInput) -> bytes:
    """Columns as raw little-endian int64, the rest as msgpack."""
    head = [PROTOCOL_VERSION, step.epoch, step.step_id, [_plain(seq) for seq in step.new_sequences]]
    pages = [[seq_id, len(new)] for seq_id, new in step.new_pages.items()]
    flat_pages = [page for new in step.new_pages.values() for page in new]
    columns = [_column(c) for c in (step.seq_ids, step.starts, step.num_tokens, step.dropped, flat_pages)]
    return _pack([head, pages, columns, [encode_step(part) for part in step.parts]])


def decode_step(data: bytes) -> StepInput:
    """Raises ``ValueError`` for a message of another version."""
    head, *rest = msgpack.unpackb(data, strict_map_key=False)
    version, epoch, step_id, new = head
    _check_version(version)
    pages, columns, parts = rest
    seq_ids, starts, num_tokens, dropped, flat_pages = (_uncolumn(c) for c in columns)
    new_pages: dict[int, list[int]] = {}
    offset = 0
    for seq_id, count in pages:
        new_pages[seq_id] = flat_pages[offset : offset + count]
        offset += count
    return StepInput(
        epoch=epoch,
        step_id=step_id,
        seq_ids=seq_ids,
        starts=starts,
        num_tokens=num_tokens,
        new_sequences=tuple(_new_sequence(values) for values in new),
        new_pages=new_pages,
        dropped=dropped,
        parts=tuple(decode_step(part) for part in parts),
    )


def encode_output(output: StepOutput) -> bytes:
    """The answer of rank 0, or of the first rank of a data-parallel group."""
    rest = [output.logprobs, output.prompt_logprobs, output.failed, output.duration_s, output.from_graph]
    head = [PROTOCOL_VERSION, output.epoch, output.step_id]
    return _pack([head, [_column(output.seq_ids), _column(output.token_ids)], rest])


def decode_output(data: bytes) -> StepOutput:
    """Raises ``ValueError`` for a message of another version."""
    (version, epoch, step_id), (seq_ids, token_ids), rest = msgpack.unpackb(data, strict_map_key=False)
    _check_version(version)
    logprobs, prompt_logprobs, failed, duration_s, from_graph = rest
    return StepOutput(
        epoch=epoch,
        step_id=step_id,
        seq_ids=_uncolumn(seq_ids),
        token_ids=_uncolumn(token_ids),
        logprobs={seq_id: _token_logprobs(values) for seq_id, values in logprobs.items()},
        prompt_logprobs={s: tuple(_token_logprobs(v) for v in values) for s, values in prompt_logprobs.items()},
        failed=failed,
        duration_s=duration_s,
        from_graph=from_graph,
    )


def encode_events(events: list[TokenEvent]) -> bytes:
    """Events of many requests in one message. The usual event, new tokens and nothing else, travels in columns; what
    the others have beside is msgpack."""
    numbers: dict[str, int] = {}
    rest = []
    for row, event in enumerate(events):
        numbers.setdefault(event.request_id, len(numbers))
        if event[3:] != _TOKENS_ALONE:
            rest.append([row, *event[3:]])
    columns = (
        [numbers[event.request_id] for event in events],
        [event.index for event in events],
        [len(event.token_ids) for event in events],
        [token for event in events for token in event.token_ids],
    )
    return _pack([PROTOCOL_VERSION, list(numbers), [_column(c) for c in columns], rest])


def decode_events(data: bytes) -> list[TokenEvent]:
    """Raises ``ValueError`` for a message of another version."""
    version, names, columns, rest = msgpack.unpackb(data, strict_map_key=False)
    _check_version(version)
    numbers, indexes, counts, flat_tokens = (_uncolumn(c) for c in columns)
    tokens = iter(flat_tokens)
    events = [
        TokenEvent(names[number], index, tuple(islice(tokens, count)))
        for number, index, count in zip(numbers, indexes, counts, strict=True)
    ]
    for row, reason, stop_token_id, logprobs, prompt_logprobs, num_cached, error, error_code in rest:
        events[row] = events[row]._replace(
            finish_reason=FinishReason(reason) if reason is not None else None,
            stop_token_id=stop_token_id,
            logprobs=tuple(_token_logprobs(values) for values in logprobs),
            prompt_logprobs=tuple(_token_logprobs(values) for values in prompt_logprobs),
            num_cached_tokens=num_cached,
            error=error,
            error_code=error_code,
        )
    return events


def encode_request(request: GenerateRequest) -> bytes:
    """For a queue or a file; see :func:`decode_request`."""
    return _pack([PROTOCOL_VERSION, _plain(request)])


def decode_request(data: bytes) -> GenerateRequest:
    """Raises ``ValueError`` for a message of another version."""
    version, values = msgpack.unpackb(data, strict_map_key=False)
    _check_version(version)
    request_id, prompt, sampling, priority = values
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=_sampling(sampling),
        priority=priority,
    )


def _pack(message: list[Any]) -> bytes:
    data = msgpack.packb(message)
    assert data is not None, "packb returns None only with autoreset=False"
    return data


def _check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise ValueError(f"a message of protocol version {version}, this process speaks {PROTOCOL_VERSION}")


def _plain(message: Any) -> list[Any]:
    """A dataclass as the list of its values, in field order; nested ones too."""
    values = []
    for f in fields(message):
        value = getattr(message, f.name)
        values.append(_plain(value) if hasattr(value, "__dataclass_fields__") else value)
    return values


def _sampling(values: list[Any]) -> SamplingParams:
    named = dict(zip((f.name for f in fields(SamplingParams)), values, strict=True))
    for name in ("stop", "stop_token_ids", "allowed_token_ids"):
        if named[name] is not None:
            named[name] = tuple(named[name])
    return SamplingParams(**named)


def _new_sequence(values: list[Any]) -> NewSequence:
    seq_id, request_id, index, token_ids, num_prompt_tokens, sampling, pages = values
    return NewSequence(
        seq_id=seq_id,
        request_id=request_id,
        index=index,
        token_ids=tuple(token_ids),
        num_prompt_tokens=num_prompt_tokens,
        sampling=_sampling(sampling),
        pages=tuple(pages),
    )


def _token_logprobs(values: list[Any]) -> TokenLogprobs:
    token_id, logprob, top, rank = values
    return TokenLogprobs(token_id, logprob, tuple((t, lp) for t, lp in top), rank)


def _column(values: list[int]) -> bytes:
    return array("q", values).tobytes()


def _uncolumn(data: bytes) -> list[int]:
    column = array("q")
    column.frombytes(data)
    return column.tolist()
