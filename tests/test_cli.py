"""The command as a user meets it: files, messages, exit status, no tracebacks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, get_args

import pytest

from glm5ray.cli.app import main
from glm5ray.config import load_config, preset_names
from glm5ray.model.tiny import TinyFormat, write_tiny

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(folder)
    return folder


class Outcome:
    """Exit status and output of one command."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def last_json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def glm5ray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls the entry point in this process, as the installed script does."""

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["glm5ray", *map(str, arguments)])
        status: Any = 0
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Outcome(status, captured.out, captured.err)

    return call


def batch(path: Path, count: int, **body: Any) -> Path:
    body = {"prompt": "abc", "max_tokens": 3, "temperature": 0, **body}
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# --- run-batch --------------------------------------------------------------------------------------------------------


def test_run_batch(glm5ray: Any, tmp_path: Path, tiny: Path) -> None:
    source, output = batch(tmp_path / "in.jsonl", 5, model="tiny"), tmp_path / "out.jsonl"
    done = glm5ray("run-batch", source, "-o", output, "--model", tiny, "--json")
    assert done.status == 0, done.err
    assert done.last_json["completed"] == 5
    assert done.last_json["output"] == str(output)
    assert done.last_json["output_tokens"] <= 15
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert {line["custom_id"] for line in lines} == set("01234")
    assert len({line["response"]["body"]["choices"][0]["text"] for line in lines}) == 1
    again = glm5ray("run-batch", source, "-o", output, "--model", tiny)
    assert again.status == 1
    assert (
        again.err
        == f"error: {output} exists; continue it with --resume, replace it with --overwrite, or name another file\n"
    )
    resumed = glm5ray("run-batch", source, "-o", output, "--model", tiny, "--resume", "--json")
    assert (resumed.status, resumed.last_json["resumed"]) == (0, 5)


def test_failed_lines_are_announced(glm5ray: Any, tmp_path: Path, tiny: Path) -> None:
    source, output = batch(tmp_path / "in.jsonl", 2, model="gpt-5"), tmp_path / "out.jsonl"
    done = glm5ray("run-batch", source, "-o", output, "-m", tiny, "--error-file", tmp_path / "errors.jsonl")
    assert done.status == 0
    assert "2 failed" in done.out
    assert "errors.jsonl" in done.err
    assert output.read_text() == ""
    renamed = glm5ray("run-batch", source, "-o", output, "-m", tiny, "--overwrite", "--served-model-name", "gpt-5")
    assert "2 answered, 0 failed" in renamed.out


COMMAND = [sys.executable, "-c", "from glm5ray.cli.app import main; main()"]


def wait_for(process: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happened() and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("signals", "status"),
    [
        ([signal.SIGINT] * 5, 130),
        ([signal.SIGTERM, signal.SIGINT, signal.SIGTERM], 143),
    ],
)
def test_a_signal_leaves_whole_lines(tmp_path: Path, tiny: Path, signals: list[signal.Signals], status: int) -> None:
    """Further signals do not disturb the end that the first one began."""
    source, output = batch(tmp_path / "in.jsonl", 2000, max_tokens=100, ignore_eos=True), tmp_path / "out.jsonl"
    arguments = ["run-batch", str(source), "-o", str(output), "-m", str(tiny), "-s", "scheduler.max_num_seqs=4"]
    with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True) as process:
        wait_for(process, lambda: output.exists() and output.stat().st_size > 0)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.01)
        _, err = process.communicate(timeout=120)
    data = output.read_bytes()
    assert data.endswith(b"\n")
    num_done = len([json.loads(line) for line in data.splitlines()])
    assert process.returncode == status, err
    assert err.splitlines()[-1] == f"interrupted: {num_done} lines are done in {output}; --resume does the others"
    assert "Traceback" not in err


SWALLOWED = """
import os, signal, sys
from glm5ray.cli.app import main

def find_spec(name, path=None, target=None):
    if name == MODULE:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            pass
    return None

sys.meta_path.insert(0, type("Finder", (), {"find_spec": staticmethod(find_spec)}))
main()
"""


@pytest.mark.parametrize("module", ["torch", "glm5ray.protocol"])
def test_a_signal_that_an_import_swallows_still_counts(tiny: Path, module: str) -> None:
    code = SWALLOWED.replace("MODULE", repr(module))
    arguments = ["generate", "abc", "--raw", "-m", str(tiny), "--max-tokens", "3"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_standard_input_and_output(tmp_path: Path, tiny: Path) -> None:
    source, model = batch(tmp_path / "in.jsonl", 3), ["-m", str(tiny)]
    piped = subprocess.run(
        [*COMMAND, "run-batch", "-", "-o", "/dev/stdout", "--json", *model],
        input=source.read_bytes(),
        capture_output=True,
        timeout=120,
    )
    assert piped.returncode == 0, piped.stderr
    assert {json.loads(line)["custom_id"] for line in piped.stdout.splitlines()} == set("012")
    assert json.loads(piped.stderr.splitlines()[-1])["completed"] == 3
    with source.open("rb") as stdin:
        same = subprocess.run(
            [*COMMAND, "run-batch", "-", "-o", str(source), "--overwrite", *model],
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert (same.returncode, same.stderr) == (1, f"error: {source} is the input; name another output file\n")
    assert len(source.read_text().splitlines()) == 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_no_room_for_standard_output(tiny: Path) -> None:
    for arguments in (["generate", "abc", "--raw", "-m", tiny, "--max-tokens", "3"], ["version"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [*COMMAND, *map(str, arguments)], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
            )
        assert done.returncode == 1, done.stderr
        assert done.stderr == "error: [Errno 28] No space left on device\n"


def test_standard_input_without_lines(
    glm5ray: Any, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("run-batch", "-", "-o", tmp_path / "out.jsonl", "-m", tiny)
    empty = subprocess.run(
        [*COMMAND, *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    monkeypatch.setattr(sys, "stdin", None)
    closed = glm5ray(*arguments)
    for status, err in ((empty.returncode, empty.stderr), (closed.status, closed.err)):
        assert status == 1
        assert err == "error: standard input has no lines; a batch file has one JSON object a line.\n"
    assert not (tmp_path / "out.jsonl").exists()
    assert "standard input is closed" in glm5ray("generate", "-", "-m", tiny).err


# --- the others -------------------------------------------------------------------------------------------------------


def test_generate_streams_the_text(glm5ray: Any, tiny: Path) -> None:
    arguments = ("generate", "abc", "--raw", "--model", tiny, "--max-tokens", 5)
    first, second = glm5ray(*arguments), glm5ray(*arguments)
    assert first.status == 0, first.err
    assert first.out == second.out
    assert first.out.endswith("\n")


def test_arguments_in_a_locale_without_utf8(glm5ray: Any, tiny: Path) -> None:
    """Bytes that are UTF-8 are that text all the same, and nothing that is written fails; others are refused."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHONUTF8"))}
    env = {**plain, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    arguments = [*COMMAND, "generate", "--raw", "-m", str(tiny), "--max-tokens", "20", "h\u00e9llo".encode()]
    done = subprocess.run(arguments, env=env, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == glm5ray("generate", "--raw", "-m", tiny, "--max-tokens", 20, "h\u00e9llo").out
    for bad in (["h\udce9llo"], ["a", "--system", "\udcff"], ["a", "--stop", "\udcff"]):
        refused = glm5ray("generate", "-m", tiny, *bad)
        assert refused.status == 1
        assert re.fullmatch(r"error: (the prompt|--system|--stop) cannot be decoded: .*\n", refused.err)


def test_every_format_is_listed(glm5ray: Any) -> None:
    shown = " ".join(glm5ray("weights", "tiny", "--help").out.split())
    listed = re.search(r"--format (?:TEXT|<str>) (.*?)\.", shown)
    assert listed is not None, shown
    assert set(re.split(r", | or ", listed[1])) == set(get_args(TinyFormat))


@pytest.mark.parametrize("format", ["bf16", "fp8", "nvfp4"])
def test_weights(glm5ray: Any, tmp_path: Path, format: str) -> None:
    assert glm5ray("weights", "tiny", tmp_path / "m", "--format", format, "--style", "glm5.2").status == 0
    shown = glm5ray("weights", "inspect", tmp_path / "m", "--tp", 2)
    assert "one rank of tp 2" in shown.out
    report = glm5ray("weights", "inspect", tmp_path / "m", "--json").last_json
    assert report["quantization"] == {"bf16": "plain", "fp8": "fp8-block", "nvfp4": "nvfp4"}[format]
    assert glm5ray("weights", "tiny", tmp_path / "m").err.startswith("error: ")


def test_check(glm5ray: Any, tiny: Path) -> None:
    shown = glm5ray("check", "--model", tiny, "--config", "cpu-nano", "--set", "kernels.mla_attention=reference")
    assert shown.status == 0, shown.err
    assert "page_size: 16" in shown.out
    assert "pages of 16 tokens" in shown.out
    assert re.search(r"memory of one rank +GiB\n.*weights: routed experts +0\.\d{3}\n", shown.out, re.DOTALL)
    report = glm5ray("check", "--model", tiny, "--config", "cpu-nano", "--json").last_json
    assert report["config"]["scheduler"] == load_config("cpu-nano").to_dict()["scheduler"]
    assert report["memory"]["num_pages"] > 0
    assert {entry["op"] for entry in report["kernels"]} >= {"mla_attention", "experts"}


@pytest.mark.parametrize("preset", preset_names())
def test_check_plans_for_hardware_that_is_not_here(glm5ray: Any, tiny: Path, preset: str) -> None:
    shown = glm5ray(
        "check", "--model", tiny, "--config", preset, "--set", "parallel.tp_size=2", "--memory-gib", 96, "--json"
    )
    assert shown.status == 0, shown.err
    memory = shown.last_json["memory"]
    assert memory["kv_bytes"] < sum(memory["lines"].values()) <= memory["usable_bytes"] < 96 * 2**30


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        (["run-batch", "a", "--outptu", "b"], 2, "--output"),
        (["genrate"], 2, "Did you mean 'generate'?"),
        (["check", "--set", "cache.pagesize=3"], 1, "did you mean 'cache.page_size'?"),
        (["check", "--set", "cache.page_size=[1"], 1, "not valid YAML"),
        (["check", "--config", "cpu-nan"], 1, "did you mean 'cpu-nano'?"),
        (["check", "--model", "no-such-model"], 1, "no checkpoint folder no-such-model"),
        (["run-batch", "no.jsonl", "-o", "out.jsonl"], 1, "no.jsonl does not exist"),
        (["weights", "inspect", "no-such-model"], 1, "no checkpoint folder"),
        (["weights", "tiny", "x", "--format", "nvfp5"], 1, "format is 'nvfp5'"),
        (["bench", "offline", "--concurrency", "1,x"], 2, "whole numbers above 0"),
        (["--log-level", "loud", "version"], 2, "loud"),
    ],
)
def test_mistakes_end_with_one_clear_message(
    glm5ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], status: int, part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = glm5ray(*arguments)
    assert done.status == status
    assert part in done.err
    assert status == 2 or (done.err.startswith("error: ") and done.err.count("\n") == 1)


def test_every_command_has_an_example(glm5ray: Any) -> None:
    for name in (
        "run-batch",
        "generate",
        "check",
        "weights inspect",
        "weights tiny",
        "bench offline",
        "bench scheduler",
        "eval nano",
    ):
        shown = glm5ray(*name.split(), "--help")
        assert f"    glm5ray {name}" in shown.out, name


def test_eval_of_the_embedded_model(glm5ray: Any) -> None:
    done = glm5ray("eval", "nano", "--examples", 1, "--config", "cpu-nano", "--json")
    assert done.status == 0, done.err
    assert done.last_json["results"].keys() >= {"addition", "tool_call", "lookup_500"}
    assert sum(done.last_json["results"].values()) >= 9


@pytest.mark.slow
def test_the_full_evaluation(glm5ray: Any) -> None:
    done = glm5ray("eval", "nano", "--full", "--examples", 1, "--forced-examples", 2, "--config", "cpu-nano", "--json")
    results = done.last_json["results"]
    assert results["forced"]["lookup_500"] == 1.0
    assert results["forced"]["lookup_500/half_split_rope"] == 0.0
    assert results["text"]["perplexity"] < 25
    assert results["generation"]["backend"] == "glm5ray"


def test_version_as_command_and_as_option(glm5ray: Any) -> None:
    assert glm5ray("version").out == glm5ray("--version").out
    assert glm5ray("--version").status == 0


def test_reasoning_stands_apart_from_the_answer(glm5ray: Any) -> None:
    done = glm5ray("generate", "What is 47 + 38?", "--think")
    assert done.out.startswith("<think>\n")
    assert done.out.rstrip().endswith("\n</think>\n47 + 38 = 85")


def test_failed_lines_are_run_again_on_demand(glm5ray: Any, tmp_path: Path, tiny: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": tiny.name, "prompt": "a", "max_tokens": 2}
    for max_tokens in (-1, 2):
        line = {
            "custom_id": "x",
            "method": "POST",
            "url": "/v1/completions",
            "body": {**body, "max_tokens": max_tokens},
        }
        source.write_text(json.dumps(line) + "\n")
        if max_tokens < 0:
            assert glm5ray("run-batch", source, "-o", output, "--model", tiny).status == 0
            resumed = glm5ray("run-batch", source, "-o", output, "--model", tiny, "--resume")
            assert "1 done before (1 of them failed: --retry-failed)" in resumed.out
    again = glm5ray("run-batch", source, "-o", output, "--model", tiny, "--retry-failed", "--json")
    assert (again.status, again.last_json["completed"], again.last_json["resumed"]) == (0, 1, 0)
