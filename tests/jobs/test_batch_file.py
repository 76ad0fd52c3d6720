"""run-batch over the real engine with a fake executor: what goes in, what comes out, and what is left after an
accident.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from glm5ray.config import config_from_dict
from glm5ray.engine.executor import FakeExecutor
from glm5ray.engine.llm import LLM
from glm5ray.errors import ConfigError, RequestError, WorkerDied
from glm5ray.jobs.batch_file import BatchInterrupted, BatchSummary, run_batch
from glm5ray.protocol import Capacity, StepInput

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from glm5ray.engine.executor import PendingStep
    from glm5ray.tokenizer import Tokenizer

CAPACITY = Capacity(num_pages=24, page_size=16, max_model_len=128, vocab_size=272, eos_token_ids=(256,))
CONFIG = config_from_dict({"scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64}, "cache": {"page_size": 16}})


def letters(request_id: str, index: int, position: int) -> int:
    """The alphabet by position, so that an answer depends on its prompt's length alone."""
    return ord("a") + position % 26


@pytest.fixture
def llm(tokenizer: Tokenizer) -> Iterator[LLM]:
    with LLM.from_executor(FakeExecutor(CAPACITY, letters), tokenizer, CONFIG) as llm:
        yield llm


def line(custom_id: str, *, url: str = "/v1/completions", method: str = "POST", **body: Any) -> dict[str, Any]:
    body = {"prompt": "abc", "max_tokens": 4, **body} if url == "/v1/completions" else body
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    return [json.loads(entry) for entry in data.splitlines()]


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    """Lines with a custom_id; none may stand twice."""
    found = read(path)
    counts = Counter(record["custom_id"] for record in found if record["custom_id"] is not None)
    assert not counts or max(counts.values()) == 1
    return {record["custom_id"]: record for record in found if record["custom_id"] is not None}


def run(source: Any, output: Path, llm: LLM, **options: Any) -> BatchSummary:
    return run_batch(source, output, llm, model_names=("tiny",), **options)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_answers_of_both_endpoints(tmp_path: Path, llm: LLM) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "model": "tiny", "max_tokens": 3}
    source = write(
        tmp_path / "in.jsonl",
        [line("a"), line("b", url="/v1/chat/completions", **chat), line("c", prompt=["abc", "abcd"], n=2)],
    )
    summary = run(source, tmp_path / "out.jsonl", llm)
    found = by_id(tmp_path / "out.jsonl")
    assert found.keys() == {"a", "b", "c"}
    assert all(record["error"] is None and record["response"]["status_code"] == 200 for record in found.values())
    bodies = {custom_id: record["response"]["body"] for custom_id, record in found.items()}
    assert bodies["a"]["choices"][0]["text"] == "defg"
    assert bodies["a"]["choices"][0]["finish_reason"] == "length"
    assert bodies["b"]["object"] == "chat.completion"
    assert len(bodies["b"]["choices"][0]["message"]["content"]) == 3
    assert [choice["text"] for choice in bodies["c"]["choices"]] == ["defg", "defg", "efgh", "efgh"]
    assert bodies["c"]["usage"]["prompt_tokens"] == 7
    assert (summary.completed, summary.failed, summary.total) == (3, 0, 3)
    assert summary.output_tokens == sum(body["usage"]["completion_tokens"] for body in bodies.values())
    assert summary.prompt_tokens == sum(body["usage"]["prompt_tokens"] for body in bodies.values())
    assert len({record["id"] for record in found.values()}) == 3


def test_one_bad_line_does_not_take_the_batch(tmp_path: Path, llm: LLM) -> None:
    lines = [line(str(i), prompt="a" * 1000 if i == 3 else "abc") for i in range(1, 6)]
    source = write(tmp_path / "in.jsonl", lines)
    summary = run(source, tmp_path / "out.jsonl", llm, error_file=tmp_path / "errors.jsonl")
    assert (summary.total, summary.completed, summary.failed) == (5, 4, 1)
    assert by_id(tmp_path / "out.jsonl").keys() == {"1", "2", "4", "5"}
    (failed,) = read(tmp_path / "errors.jsonl")
    assert (failed["custom_id"], failed["response"]["status_code"], failed["error"]) == ("3", 400, None)
    assert failed["response"]["body"]["error"]["code"] == "context_length_exceeded"


def test_a_refused_prompt_fails_its_whole_line(tmp_path: Path, llm: LLM) -> None:
    source = write(tmp_path / "in.jsonl", [line("a", prompt=["abc", "a" * 1000, "abcd"]), line("b")])
    assert run(source, tmp_path / "out.jsonl", llm).failed == 1
    found = by_id(tmp_path / "out.jsonl")
    assert found["a"]["response"]["status_code"] == 400
    assert found["b"]["response"]["status_code"] == 200


# --- files as people write them ---------------------------------------------------------------------------------------


def test_malformed_lines(tmp_path: Path, llm: LLM) -> None:
    good = json.dumps(line("good")).encode()
    crlf = json.dumps(line("crlf")).encode() + b"\r"
    last = json.dumps(line("last")).encode()
    no_method = {name: value for name, value in line("no-method").items() if name != "method"}
    bad: dict[str | int, Any] = {
        2: b'{"custom_id":"b"',
        3: b"[1,2,3]",
        4: b"null",
        "body": {**line("body"), "body": "x"},
        "no-method": no_method,
        "get": line("get", method="GET"),
        "url": line("url", url="/v1/embeddings"),
        "model": line("model", model="gpt-5"),
        "stream": line("stream", stream=True),
        12: b'{"custom_id": "\xff"}',
        13: b"[" * 100_000,
        14: {**line("x"), "custom_id": 5},
        15: {**line("x"), "custom_id": ""},
        16: {**line("x"), "custom_id": "x" * 300},
        17: line("good"),
        18: b'{"custom_id": ' + b"1" * 5000 + b"}",
    }
    encoded = [entry if isinstance(entry, bytes) else json.dumps(entry).encode() for entry in bad.values()]
    source = tmp_path / "in.txt"
    source.write_bytes(b"\xef\xbb\xbf" + b"\n".join([good, *encoded[:3], b"   ", *encoded[3:], crlf, last]))
    summary = run(source, tmp_path / "out.jsonl", llm)
    assert (summary.completed, summary.failed) == (3, len(bad))
    found = by_id(tmp_path / "out.jsonl")
    assert {name for name, record in found.items() if record["error"] is None} >= {"good", "crlf", "last"}
    codes = {name: found[name]["error"]["code"] for name in ("body", "no-method", "get", "url")}
    assert codes == {
        "body": "invalid_body",
        "no-method": "invalid_method",
        "get": "invalid_method",
        "url": "invalid_url",
    }
    assert found["model"]["response"]["status_code"] == 404
    assert found["stream"]["response"]["body"]["error"]["param"] == "stream"
    nameless = [record["error"] for record in read(tmp_path / "out.jsonl") if record["custom_id"] is None]
    expected = {
        **dict.fromkeys((2, 3, 4, 13, 18), "invalid_json_line"),
        12: "invalid_utf8",
        **dict.fromkeys((14, 15, 16), "invalid_custom_id"),
        17: "duplicate_custom_id",
    }
    assert {error["line"]: error["code"] for error in nameless} == expected
    assert "line 1" in next(error["message"] for error in nameless if error["code"] == "duplicate_custom_id")


def test_ids_and_text_that_utf8_cannot_hold(tmp_path: Path, llm: LLM) -> None:
    source = write(tmp_path / "in.jsonl", [line("a\ud800"), line("b", prompt="\udfff"), line("ü", prompt="é")])
    run(source, tmp_path / "out.jsonl", llm)
    found = by_id(tmp_path / "out.jsonl")
    assert found["a\ud800"]["response"]["status_code"] == 200
    assert found["b"]["response"]["body"]["error"]["param"] == "prompt"
    assert "ü".encode() in (tmp_path / "out.jsonl").read_bytes()


def test_a_line_that_is_too_long() -> None:
    from glm5ray.jobs.lines import read_lines

    data = b"x" * 25 + b"\nabc\n" + b"y" * 40
    assert list(read_lines(io.BytesIO(data), max_bytes=10)) == [(1, None), (2, b"abc\n"), (3, None)]


@pytest.mark.parametrize("data", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_files_without_lines(tmp_path: Path, llm: LLM, data: bytes) -> None:
    (tmp_path / "in.jsonl").write_bytes(data)
    with pytest.raises(RequestError) as caught:
        run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", llm)
    assert caught.value.code == "empty_file"
    assert not (tmp_path / "out.jsonl").exists()


# --- streaming --------------------------------------------------------------------------------------------------------


class CountingStream(io.RawIOBase):
    """A long batch file that exists only line by line; knows how many lines were taken."""

    def __init__(self, num_lines: int) -> None:
        self.num_lines = num_lines
        self.taken = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        if self.taken == self.num_lines:
            return b""
        self.taken += 1
        return json.dumps(line(str(self.taken), max_tokens=1)).encode() + b"\n"


def test_lines_are_read_only_as_the_engine_has_room(tmp_path: Path, llm: LLM) -> None:
    stream = CountingStream(3000)
    ahead = []
    run(stream, tmp_path / "out.jsonl", llm, progress=lambda summary: ahead.append(stream.taken - summary.total))
    assert len(by_id(tmp_path / "out.jsonl")) == 3000
    assert max(ahead) < 4 * CONFIG.scheduler.max_num_seqs


def test_bad_lines_do_not_pile_up(tmp_path: Path, llm: LLM) -> None:
    stream = CountingStream(500)
    stream.readline = lambda size=-1: (  # type: ignore[method-assign]
        CountingStream.readline(stream).replace(b"POST", b"GET")
    )
    assert run(stream, tmp_path / "out.jsonl", llm).failed == 500


# --- no line ends the batch -------------------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "Hi"}]


def chat_line(custom_id: str, **body: Any) -> dict[str, Any]:
    return line(custom_id, url="/v1/chat/completions", **{"messages": HELLO, "max_tokens": 2, **body})


def test_no_line_ends_the_batch(tmp_path: Path, llm: LLM) -> None:
    names = ("self", "messages", "tools", "add_generation_prompt", "raise_exception", "eos_token", "a b")
    lines = [chat_line(f"option {name}", chat_template_kwargs={name: 1}) for name in names]
    encoded = [json.dumps(entry) for entry in [*lines, line("good")]]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": "@"}}}}
    for depth in (300, *range(800, 1000, 8)):  # about as deep as Python's JSON goes, and a bit less
        nested = [
            chat_line(f"tools {depth}", tools=[tool]),
            chat_line(f"messages {depth}", messages="@"),
            line(f"bias {depth}", logit_bias={"1": "@"}),
            {**line(f"body {depth}"), "body": "@"},
            {**line(f"extra {depth}"), "extra": "@"},
        ]
        encoded += [json.dumps(entry).replace('"@"', "[" * depth + "]" * depth) for entry in nested]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(encoded))
    assert run(source, tmp_path / "out.jsonl", llm).total == len(encoded)
    found = by_id(tmp_path / "out.jsonl")
    for name in names[:4]:
        assert found[f"option {name}"]["response"]["status_code"] == 400
        assert found[f"option {name}"]["response"]["body"]["error"]["param"] == "chat_template_kwargs"
    assert found["good"]["response"]["status_code"] == 200
    assert found["extra 300"]["response"]["status_code"] == 200


def test_a_checkpoint_without_a_template_serves_completions(tmp_path: Path) -> None:
    from glm5ray.tokenizer import Tokenizer
    from tests.conftest import byte_level_bpe

    source = write(tmp_path / "in.jsonl", [chat_line("chat"), line("text")])
    with LLM.from_executor(FakeExecutor(CAPACITY, letters), Tokenizer(byte_level_bpe()), CONFIG) as llm:
        run(source, tmp_path / "out.jsonl", llm)
    found = by_id(tmp_path / "out.jsonl")
    assert found["text"]["response"]["status_code"] == 200
    assert found["chat"]["response"]["body"]["error"]["code"] == "no_chat_template"


def test_errors_spell_values_as_json_does(tmp_path: Path, llm: LLM) -> None:
    lines = {
        b'{"custom_id": null}': "custom_id is null; it must be a text",
        b'{"custom-id": "a", "a": 1}': "the line has \"custom-id\"; did you mean 'custom_id'?",
        b'{"a": 1}': "custom_id is missing; it must be a text of 1 to 256 characters; "
        'the line has "a"; known: body, custom_id, method, url.',
        b'{"custom_id": "1", "method": true}': 'method is true; it must be "POST".',
        b'{"custom_id": "2", "method": "POST"}': "url is missing; it must be",
        b'{"custom_id": "3", "custom_id": "4"}': 'the name "custom_id" comes twice',
        b'{"custom_id": "5", "body": {"n": 1, "n": 2}}': 'the name "n" comes twice',
        b'{"custom_id": "6", "x": NaN}': "NaN is no JSON value",
        b"null": "the line is null; it must be a JSON object",
    }
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", llm)
    messages = [record["error"]["message"] for record in read(tmp_path / "out.jsonl")]
    for message, part in zip(messages, lines.values(), strict=True):
        assert part in message


def test_a_long_name_is_not_copied_into_the_error(tmp_path: Path, llm: LLM) -> None:
    long = "x" * 3_000_000
    lines = [line("a", **{long: 1}), chat_line("b", messages=[{"role": "user", long: 1}]), {**line("c"), "url": long}]
    run(write(tmp_path / "in.jsonl", [*lines, {long: 1}]), tmp_path / "out.jsonl", llm)
    assert (tmp_path / "out.jsonl").stat().st_size < 4000
    assert by_id(tmp_path / "out.jsonl")["a"]["response"]["body"]["error"]["param"].startswith("xxx")


# --- accidents --------------------------------------------------------------------------------------------------------


def test_nothing_is_overwritten_in_silence(tmp_path: Path, llm: LLM) -> None:
    source = write(tmp_path / "in.jsonl", [line("a")])
    output = tmp_path / "out.jsonl"
    output.write_text("precious\n")
    with pytest.raises(ConfigError, match="exists; continue it with --resume"):
        run(source, output, llm)
    with pytest.raises(ConfigError, match="line 1 is no result of a batch"):
        run(source, output, llm, resume=True)
    assert output.read_text() == "precious\n"
    run(source, output, llm, overwrite=True)
    assert by_id(output).keys() == {"a"}


def test_paths_that_cannot_be_right(tmp_path: Path, llm: LLM) -> None:
    source = write(tmp_path / "in.jsonl", [line("a")])
    with pytest.raises(ConfigError, match="is the input"):
        run(source, source, llm, overwrite=True)
    with pytest.raises(ConfigError, match="does not exist"):
        run(tmp_path / "no.jsonl", tmp_path / "out.jsonl", llm)
    with pytest.raises(ConfigError, match="there is no folder"):
        run(source, tmp_path / "no" / "out.jsonl", llm)
    with pytest.raises(ConfigError, match="both answers and errors"):
        run(source, tmp_path / "out.jsonl", llm, error_file=tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="exclude each other"):
        run(source, tmp_path / "out.jsonl", llm, resume=True, overwrite=True)
    assert not (tmp_path / "out.jsonl").exists()


def test_one_file_under_two_names(tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = write(tmp_path / "in.jsonl", [line("a")]), tmp_path / "out.jsonl"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    (tmp_path / "link.jsonl").symlink_to("out.jsonl")  # nothing is there yet
    for other in ("out.jsonl", "d/../out.jsonl", "link.jsonl"):
        with pytest.raises(ConfigError, match="both answers and errors"):
            run(source, output, llm, error_file=other)
    output.touch()
    (tmp_path / "hard.jsonl").hardlink_to(output)
    with pytest.raises(ConfigError, match="both answers and errors"):
        run(source, output, llm, error_file="hard.jsonl", overwrite=True)
    before = source.read_bytes()
    (tmp_path / "input.jsonl").hardlink_to(source)
    for other in ("d/../in.jsonl", "input.jsonl"):
        with pytest.raises(ConfigError, match="is the input"):
            run(source, other, llm, overwrite=True)
        with source.open("rb") as stream, pytest.raises(ConfigError, match="is the input"):
            run(stream, output, llm, error_file=other, overwrite=True)
    assert source.read_bytes() == before


def test_folders_and_unusable_paths(tmp_path: Path, llm: LLM) -> None:
    source = write(tmp_path / "in.jsonl", [line("a")])
    for options in ({"resume": True}, {"overwrite": True}, {}):
        with pytest.raises(ConfigError, match="is a folder"):
            run(source, tmp_path, llm, **options)
    with pytest.raises(ConfigError, match="is a folder"):
        run(tmp_path, tmp_path / "out.jsonl", llm)
    with pytest.raises(ConfigError, match="cannot use the path"):
        run(source, tmp_path / ("x" * 300), llm)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="cannot use the path"):
        run(source, tmp_path / "loop", llm, resume=True)


def test_outputs_that_are_no_ordinary_files(tmp_path: Path, llm: LLM) -> None:
    import os
    import stat
    import threading
    from pathlib import Path

    from glm5ray.errors import Glm5RayError

    source = write(tmp_path / "in.jsonl", [line(str(i)) for i in range(5)])
    assert run(source, Path("/dev/null"), llm, error_file=Path("/dev/null")).completed == 5
    fifo, got = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    run(source, fifo, llm)
    reader.join()
    assert {json.loads(entry)["custom_id"] for entry in got[0].splitlines()} == set("01234")
    with pytest.raises(ConfigError, match="--resume cannot read back"):
        run(source, fifo, llm, resume=True)
    if os.path.exists("/dev/full"):
        with pytest.raises(Glm5RayError, match="cannot write /dev/full: No space left"):
            run(source, Path("/dev/full"), llm)
    with pytest.raises(RequestError, match="the stream has no lines"):
        run(io.BytesIO(), Path("/dev/null"), llm)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_failed_resume_leaves_the_file_as_it_was(tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    from glm5ray.errors import Glm5RayError

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source, output = write(tmp_path / "in.jsonl", [line("a"), line("b")]), tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.recovered").write_text("another file of the user")
    run(source, output, llm)
    output.chmod(0o640)
    output.write_bytes(torn := output.read_bytes()[:-20])
    files = sorted(tmp_path.iterdir())
    monkeypatch.setattr("glm5ray.jobs.lines.os.fsync", full)
    with pytest.raises(Glm5RayError, match="No space left"):
        run(source, output, llm, resume=True)
    assert sorted(tmp_path.iterdir()) == files
    assert output.read_bytes() == torn
    monkeypatch.undo()
    link = tmp_path / "link.jsonl"
    link.symlink_to(output)
    assert run(source, link, llm, resume=True).resumed == 1
    assert link.is_symlink()
    assert by_id(output).keys() == {"a", "b"}
    assert os.stat(output).st_mode & 0o777 == 0o640
    assert (tmp_path / "out.jsonl.recovered").read_text() == "another file of the user"


def test_an_input_that_breaks_off(tmp_path: Path, llm: LLM) -> None:
    from glm5ray.errors import Glm5RayError

    class Broken(CountingStream):
        def readline(self, size: int | None = -1, /) -> bytes:
            if self.taken == 3:
                raise OSError(5, "Input/output error")
            return super().readline(size)

    with pytest.raises(Glm5RayError, match="the batch file cannot be read: Input/output error"):
        run(Broken(10), tmp_path / "out.jsonl", llm)
    assert len(by_id(tmp_path / "out.jsonl")) <= 3


def answers(path: Path) -> dict[str, Any]:
    return {name: record["response"]["body"]["choices"] for name, record in by_id(path).items()}


@pytest.mark.parametrize("with_error_file", [False, True])
@pytest.mark.parametrize("stop_after", [0, 1, 7, 19])
def test_interrupted_and_resumed(tmp_path: Path, llm: LLM, stop_after: int, with_error_file: bool) -> None:
    """The files after a resumed run hold what an undisturbed run writes, each line once."""
    lines = [line(str(i), prompt="a" * (1000 if i % 7 == 3 else 1 + i)) for i in range(20)]
    source = write(tmp_path / "in.jsonl", [*lines, line("0"), [1]])
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    errors = {"error_file": tmp_path / "errors.jsonl"} if with_error_file else {}
    run(source, whole, llm)

    def interrupt(summary: BatchSummary) -> None:
        if summary.total > stop_after:
            raise KeyboardInterrupt

    with pytest.raises(BatchInterrupted) as caught:
        run(source, output, llm, progress=interrupt, **errors)
    assert caught.value.summary.total == stop_after + 1
    assert len(read(output)) + (len(read(errors["error_file"])) if errors else 0) == stop_after + 1
    assert llm.stats().num_running == llm.stats().num_waiting == 0

    summary = run(source, output, llm, resume=True, **errors)
    assert (summary.total, summary.resumed) == (22, stop_after + 1)
    if errors:
        output.write_bytes(output.read_bytes() + errors["error_file"].read_bytes())
    assert len(read(output)) == 22
    assert by_id(output).keys() == by_id(whole).keys()
    for custom_id, record in by_id(whole).items():
        body = by_id(output)[custom_id]["response"]["body"]
        for field in ("choices", "error"):
            assert body.get(field) == record["response"]["body"].get(field)
    again = run(source, output, llm, resume=True)
    assert (again.resumed, again.completed, again.failed) == (22, 0, 0)


@pytest.mark.parametrize("with_error_file", [False, True])
def test_failed_lines_can_be_run_again(tmp_path: Path, llm: LLM, with_error_file: bool) -> None:
    """After the mistake was corrected in the input; what was answered stays as it is."""
    output = tmp_path / "out.jsonl"
    errors = {"error_file": tmp_path / "errors.jsonl"} if with_error_file else {}
    wrong = [line("good"), line("bad", max_tokens=-1), [1]]
    first = run(write(tmp_path / "in.jsonl", wrong), output, llm, **errors)
    assert (first.completed, first.failed) == (1, 2)
    answered = by_id(output)["good"]
    source = write(tmp_path / "in.jsonl", [line("good"), line("bad"), [1]])
    resumed = run(source, output, llm, resume=True, **errors)
    assert (resumed.completed, resumed.resumed, resumed.resumed_failures) == (0, 3, 2)
    again = run(source, output, llm, retry_failed=True, **errors)
    assert (again.completed, again.failed, again.resumed, again.resumed_failures) == (1, 1, 1, 0)
    assert by_id(output)["good"] == answered
    assert by_id(output)["bad"]["response"]["status_code"] == 200
    assert len(read(errors["error_file"] if errors else output)) == (1 if errors else 3)


def test_progress_counts_tokens_of_lines_that_are_not_complete(tmp_path: Path, llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    source = write(tmp_path / "in.jsonl", [line("a", max_tokens=12, ignore_eos=True)])
    run(source, tmp_path / "out.jsonl", llm, progress=lambda s: seen.append((s.total, s.generated_tokens)))
    assert any(0 < tokens < 12 for total, tokens in seen if total == 0)
    assert seen[-1] == (1, 12)


def test_a_torn_last_line_is_run_again(tmp_path: Path, llm: LLM) -> None:
    source, output = write(tmp_path / "in.jsonl", [line("a"), line("b")]), tmp_path / "out.jsonl"
    run(source, output, llm)
    expected = answers(output)
    output.write_bytes(output.read_bytes()[:-20])
    assert run(source, output, llm, resume=True).resumed == 1
    assert answers(output) == expected


class DyingExecutor(FakeExecutor):
    """Fails for good at the fifth step."""

    def submit(self, step: StepInput) -> PendingStep:
        if len(self.steps) == 5:
            raise WorkerDied("rank 0 is gone")
        return super().submit(step)


@pytest.mark.parametrize("code", ["engine_failed", "engine_unavailable"])
def test_a_dead_engine_ends_the_run_and_resume_does_the_rest(
    tmp_path: Path, tokenizer: Tokenizer, llm: LLM, code: str
) -> None:
    source, output = write(tmp_path / "in.jsonl", [line(str(i)) for i in range(200)]), tmp_path / "out.jsonl"
    dying = LLM.from_executor(DyingExecutor(CAPACITY, letters), tokenizer, CONFIG)
    with pytest.raises(WorkerDied, match="--resume runs the others"):
        run(source, output, dying)
    found = by_id(output)
    failed = [record for record in found.values() if record["error"] is not None]
    assert failed
    assert {(record["response"], record["error"]["code"]) for record in failed} == {(None, "engine_failed")}
    for file in tmp_path.iterdir():
        file.write_text(file.read_text().replace('"engine_failed"', f'"{code}"'))  # the code of one that starts again
    failed = [record for record in by_id(output).values() if record["error"] is not None]
    assert {record["error"]["code"] for record in failed} == {code}
    summary = run(source, output, llm, resume=True)
    assert summary.total == 200
    assert summary.failed == 0
    assert all(record["error"] is None for record in by_id(output).values())
    assert len(by_id(output)) == 200


def test_no_room_on_the_disk_leaves_whole_lines(tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    from glm5ray.errors import Glm5RayError

    write_some, room = os.write, [1000]

    def limited(fd: int, data: Any) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write_some(fd, bytes(data)[: room[0]])
        room[0] -= written
        return written

    source, output = write(tmp_path / "in.jsonl", [line(str(i)) for i in range(20)]), tmp_path / "out.jsonl"
    monkeypatch.setattr("glm5ray.jobs.lines.os.write", limited)
    with pytest.raises(Glm5RayError, match="No space left"):
        run(source, output, llm)
    assert 0 < len(by_id(output)) < 20
    monkeypatch.undo()
    assert run(source, output, llm, resume=True).total == 20
