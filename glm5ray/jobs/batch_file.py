"""Runs a batch file in OpenAI's format: a line in, a line out.

Input, one JSON object a line: ``{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}``.
Lines are read only as far as the engine has room, and each answer is written when it is there, so the memory does
not grow with the file (but for the ids, which are kept to find duplicates). Output lines come in the order in which
requests finish.

Whatever a line holds, it becomes exactly one line of output: an answer, or an error. A line whose ``custom_id`` is
missing or was used before has ``custom_id: null`` there and its number in ``error.line``, so no id stands twice.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, NoReturn, Protocol

from glm5ray.engine.results import RequestFailure, RequestResult
from glm5ray.errors import EngineUnavailable, RequestError, WorkerDied, nearest
from glm5ray.jobs.lines import LineWriter, read_lines, recover
from glm5ray.jobs.paths import check_paths, empty_file, open_input
from glm5ray.openai_api.body import cut, found, shown
from glm5ray.openai_api.requests import PreparedCall, ServedModel, parse_chat_body, parse_completion_body
from glm5ray.openai_api.responses import chat_completion_body, completion_body

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from glm5ray.protocol import Capacity, GenerateRequest
    from glm5ray.tokenizer import Tokenizer

CHAT_URL, COMPLETIONS_URL = "/v1/chat/completions", "/v1/completions"
_LINE_FIELDS = ("custom_id", "method", "url", "body")
MAX_CUSTOM_ID = 256
"""Characters."""


class BatchEngine(Protocol):
    """What a batch needs of an engine; :class:`glm5ray.LLM` is one."""

    tokenizer: Tokenizer

    @property
    def capacity(self) -> Capacity: ...

    def run(
        self,
        requests: Iterable[GenerateRequest | RequestFailure],
        *,
        on_step: Callable[[int], None] | None = None,
    ) -> Iterator[RequestResult | RequestFailure]: ...


@dataclass(kw_only=True, slots=True)
class BatchSummary:
    """Counts of a run, final or so far."""

    completed: int = 0
    failed: int = 0
    resumed: int = 0
    """Lines that an earlier run had done."""
    resumed_failures: int = 0
    """Of these, lines that had failed."""
    generated_tokens: int = 0
    """Output tokens so far, those of lines that are not complete included."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0

    @property
    def total(self) -> int:
        """Lines that have their output line."""
        return self.completed + self.failed + self.resumed

    @property
    def output_tokens_per_s(self) -> float:
        """Of all tokens generated so far, complete lines or not."""
        return max(self.output_tokens, self.generated_tokens) / self.seconds if self.seconds > 0 else 0.0


class BatchInterrupted(KeyboardInterrupt):
    """Ctrl-C. The files hold complete lines, which ``summary`` counts; a run with ``resume`` goes on from there."""

    def __init__(self, summary: BatchSummary) -> None:
        super().__init__(f"interrupted after {summary.total} lines")
        self.summary = summary


def run_batch(
    source: str | Path | BinaryIO,
    output: str | Path,
    llm: BatchEngine,
    *,
    model_names: tuple[str, ...],
    error_file: str | Path | None = None,
    resume: bool = False,
    retry_failed: bool = False,
    overwrite: bool = False,
    max_logprobs: int = 20,
    progress: Callable[[BatchSummary], None] | None = None,
) -> BatchSummary:
    """Answers every line of ``source`` (a path, or a binary stream) in ``output``.

    ``model_names`` are what ``body.model`` may say. ``error_file`` takes the lines that failed, which otherwise
    stand in ``output`` too. An ``output`` that exists is continued (``resume``) or replaced (``overwrite``), else
    refused. ``retry_failed`` continues it and runs the lines that failed once more. ``progress`` is called after each
    line and each step of the engine, with the same object each time.

    Raises :class:`ConfigError` for paths that cannot be used, :class:`RequestError` with code ``empty_file`` for a file
    without lines, :class:`WorkerDied` if the engine failed (``resume`` runs the rest), :class:`BatchInterrupted` on
    Ctrl-C.
    """
    resume = resume or retry_failed
    paths = [Path(output)] + ([Path(error_file)] if error_file is not None else [])
    check_paths(source, paths, resume=resume, overwrite=overwrite)
    new_paths = [path for path in paths if not path.exists()]
    served = ServedModel(
        tokenizer=llm.tokenizer, names=model_names, vocab_size=llm.capacity.vocab_size, max_logprobs=max_logprobs
    )
    with ExitStack() as stack:
        stream = stack.enter_context(open_input(source)) if isinstance(source, str | Path) else source
        done = _Done.of(paths, keep=_is_answered if retry_failed else _is_final) if resume else _Done()
        writers = [stack.enter_context(LineWriter(path, append=resume)) for path in paths]
        run = _Run(llm, served, done, writers, progress)
        run.summary.resumed_failures = done.num_failed
        try:
            run.all_lines(stream)
            stack.close()
        except KeyboardInterrupt as interrupt:
            raise BatchInterrupted(run.summary) from interrupt
    if run.num_lines == 0:
        for path in new_paths:
            path.unlink()
        raise empty_file(source)
    return run.summary


class _Done(NamedTuple):
    """What an earlier run has written."""

    custom_ids: frozenset[str] = frozenset()
    lines: frozenset[int] = frozenset()
    """Numbers of the lines that had no ``custom_id`` of their own."""
    num_failed: int = 0

    @classmethod
    def of(cls, paths: Iterable[Path], keep: Callable[[dict[str, Any]], bool]) -> _Done:
        custom_ids, lines, num_failed = set(), set(), 0
        for path in paths:
            for record in recover(path, keep=keep):
                num_failed += not _is_answered(record)
                if isinstance(record["custom_id"], str):
                    custom_ids.add(record["custom_id"])
                elif isinstance(record["error"], dict) and isinstance(record["error"].get("line"), int):
                    lines.add(record["error"]["line"])
        return cls(frozenset(custom_ids), frozenset(lines), num_failed)


def _is_answered(record: dict[str, Any]) -> bool:
    response = record["response"]
    return isinstance(response, dict) and response.get("status_code") == 200


def _is_final(record: dict[str, Any]) -> bool:
    """A line that failed with the engine, not by itself, is run again."""
    error = record["error"]
    return not isinstance(error, dict) or error.get("code") not in ("engine_failed", EngineUnavailable.code)


class _LineError(Exception):
    """A line that is no request."""

    def __init__(self, code: str, message: str, param: str | None = None, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.custom_id = custom_id
        """``None`` if the line has none that could name it."""


class _Line(NamedTuple):
    """A line that holds a request."""

    number: int
    custom_id: str
    url: str
    body: Any


@dataclass(slots=True)
class _Pending:
    """A line whose answer is not complete."""

    line: _Line
    call: PreparedCall
    results: dict[str, RequestResult | RequestFailure] = field(default_factory=dict)


class _Run:
    """One pass over the lines of a file."""

    def __init__(
        self,
        llm: BatchEngine,
        served: ServedModel,
        done: _Done,
        writers: list[LineWriter],
        progress: Callable[[BatchSummary], None] | None,
    ) -> None:
        self.num_lines = 0
        self.summary = BatchSummary()
        self._llm = llm
        self._served = served
        self._done = done
        self._output, self._errors = writers[0], writers[-1]
        self._progress = progress
        self._started = time.perf_counter()
        self._run_id = uuid.uuid4().hex[:12]
        self._pending_of_request: dict[str, _Pending] = {}
        self._line_of_id: dict[str, int] = {}
        self._engine_error: str | None = None

    def all_lines(self, stream: BinaryIO) -> None:
        """The engine pulls requests out of ``stream``; their results are written as they come."""
        results = self._llm.run(self._requests(stream), on_step=self._count_step)
        try:
            for result in results:
                self._take(result)
        finally:
            close = getattr(results, "close", None)
            if close is not None:
                close()  # what still runs is of no use to anyone
        if self._engine_error is not None:
            raise WorkerDied(f"{self._engine_error}; {self.summary.completed} lines are done, --resume runs the others")
        assert not self._pending_of_request, f"no answer came for {list(self._pending_of_request)[:5]}"

    # --- in ----------------------------------------------------------------------------------------------------------

    def _requests(self, stream: BinaryIO) -> Iterator[GenerateRequest]:
        """The requests of the lines, as the engine asks for more. A line that is no request is answered at once."""
        for number, data in read_lines(stream):
            self.num_lines += 1
            request_id = f"{self._run_id}-{number}"
            try:
                line = self._read_line(number, data)
            except _LineError as error:
                self._refuse_line(number, request_id, error)
                continue
            if line is None:
                self._count(resumed=1)
                continue
            try:
                call = self._parse(line, request_id)
            except RequestError as error:
                self._write_failure(line, request_id, error)
                continue
            pending = _Pending(line, call)
            for request in call.requests:
                self._pending_of_request[request.request_id] = pending
                yield request
            if self._engine_error is not None:
                return

    def _parse(self, line: _Line, request_id: str) -> PreparedCall:
        parse = parse_chat_body if line.url == CHAT_URL else parse_completion_body
        try:
            return parse(line.body, self._served, request_id=request_id)
        except RecursionError as error:
            raise RequestError("the body is nested too deeply.", code="nested_too_deeply") from error

    def _read_line(self, number: int, data: bytes | None) -> _Line | None:
        """``None`` for a line that an earlier run has answered. Raises :class:`_LineError`."""
        values = _parse_json(data)
        custom_id = values.get("custom_id")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
            wanted = f"it must be a text of 1 to {MAX_CUSTOM_ID} characters"
            message = f"{found(values, 'custom_id')}; {wanted}{_unknown_field(values)}."
            raise _LineError("invalid_custom_id", message, "custom_id")
        first = self._line_of_id.setdefault(custom_id, number)
        if first != number:
            message = f"custom_id {shown(custom_id)} was already used by line {first}; ids must differ."
            raise _LineError("duplicate_custom_id", message, "custom_id")
        if custom_id in self._done.custom_ids:
            return None
        method, url, body = (values.get(name) for name in _LINE_FIELDS[1:])
        if method != "POST":
            message = f'{found(values, "method")}; it must be "POST"{_unknown_field(values)}.'
            raise _LineError("invalid_method", message, "method", custom_id)
        if url not in (CHAT_URL, COMPLETIONS_URL):
            message = f"{found(values, 'url')}; it must be {CHAT_URL} or {COMPLETIONS_URL}{_unknown_field(values)}."
            raise _LineError("invalid_url", message, "url", custom_id)
        if not isinstance(body, dict):
            message = f"{found(values, 'body')}; it must be a JSON object{_unknown_field(values)}."
            raise _LineError("invalid_body", message, "body", custom_id)
        return _Line(number, custom_id, url, body)

    # --- out ---------------------------------------------------------------------------------------------------------

    def _take(self, result: RequestResult | RequestFailure) -> None:
        """A result of the engine: with the last one of a line, its output is written."""
        pending = self._pending_of_request.pop(result.request_id)
        pending.results[result.request_id] = result
        line, call = pending.line, pending.call
        if len(pending.results) < len(call.requests):
            return
        results: list[RequestResult] = []
        for request in call.requests:
            entry = pending.results[request.request_id]
            if isinstance(entry, RequestFailure):
                self._write_failure(line, call.call_id, entry.error)
                return
            results.append(entry)
        body = self._answer_body(line, call, results)
        self._output.write(_record(call.call_id, line.custom_id, response=_response(200, call.call_id, body)))
        usage = body["usage"]
        self._count(completed=1, prompt_tokens=usage["prompt_tokens"], output_tokens=usage["completion_tokens"])

    def _answer_body(self, line: _Line, call: PreparedCall, results: list[RequestResult]) -> dict[str, Any]:
        if line.url == CHAT_URL:
            return chat_completion_body(call, results[0], self._served.tokenizer)
        return completion_body(call, results, self._served.tokenizer)

    def _write_failure(self, line: _Line, request_id: str, error: RequestError) -> None:
        """An error of the request has a status, as its HTTP answer would; one of the engine has no response."""
        if error.code == "engine_failed":
            self._engine_error = error.message
        if error.status < 500:
            record = _record(request_id, line.custom_id, response=_response(error.status, request_id, error.body()))
        else:
            fields = {
                "code": error.code or "server_error",
                "message": error.message,
                "param": None,
                "line": line.number,
            }
            record = _record(request_id, line.custom_id, error=fields)
        self._errors.write(record)
        self._count(failed=1)

    def _refuse_line(self, number: int, request_id: str, error: _LineError) -> None:
        if error.custom_id is None and number in self._done.lines:
            self._count(resumed=1)
            return
        fields = {"code": error.code, "message": f"line {number}: {error}", "param": error.param, "line": number}
        self._errors.write(_record(request_id, error.custom_id, error=fields))
        self._count(failed=1)

    def _count_step(self, num_tokens: int) -> None:
        self.summary.generated_tokens += num_tokens
        self._count()

    def _count(
        self, *, completed: int = 0, failed: int = 0, resumed: int = 0, prompt_tokens: int = 0, output_tokens: int = 0
    ) -> None:
        self.summary.completed += completed
        self.summary.failed += failed
        self.summary.resumed += resumed
        self.summary.prompt_tokens += prompt_tokens
        self.summary.output_tokens += output_tokens
        self.summary.seconds = time.perf_counter() - self._started
        if self._progress is not None:
            self._progress(self.summary)


def _parse_json(data: bytes | None) -> dict[str, Any]:
    if data is None:
        raise _LineError("line_too_long", "the line is too long.")
    try:
        values = json.loads(data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise _LineError("invalid_utf8", f"the line is not UTF-8: {error.reason} at byte {error.start}.") from error
    except (ValueError, RecursionError) as error:
        raise _LineError("invalid_json_line", f"the line is not valid JSON: {error}.") from error
    if not isinstance(values, dict):
        raise _LineError("invalid_json_line", f"the line is {shown(values)}; it must be a JSON object.")
    return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names differ: of two values, readers of JSON take either."""
    values = dict(pairs)
    if len(values) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {shown(twice)} comes twice in one object")
    return values


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON value")


def _unknown_field(values: dict[str, Any]) -> str:
    """A hint for a line that lacks a field: one that it has and that may be meant."""
    unknown = [cut(name) for name in values if name not in _LINE_FIELDS]
    hints = [f"; the line has {shown(name)}{nearest(name, _LINE_FIELDS)}" for name in unknown[:20]]
    return max(hints, key=lambda hint: "did you mean" in hint, default="")


def _response(status: int, request_id: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id, "body": body}


def _record(
    request_id: str,
    custom_id: str | None,
    *,
    response: dict[str, Any] | None = None,
    error: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": error}
