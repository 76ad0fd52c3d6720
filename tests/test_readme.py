"""The documents show what is there: commands parse, links lead somewhere, Python runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main

from glm5ray.cli.app import app
from glm5ray.config import config_from_dict, field_names, load_config, preset_names
from glm5ray.jobs.batch_file import run_batch
from glm5ray.openai_api.body import IGNORED_FIELDS, SAMPLING_FIELDS
from glm5ray.openai_api.requests import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    ServedModel,
    parse_chat_body,
    parse_completion_body,
)

if TYPE_CHECKING:
    from glm5ray.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/batch.md")]


def code_blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    lines = [line for path in DOCUMENTS for block in code_blocks(path, "") for line in block.splitlines()]
    return [line.partition("#")[0].strip() for line in lines if line.startswith("glm5ray ") and "[" not in line]


@pytest.mark.parametrize("line", commands())
def test_commands_of_the_documents_parse(line: str) -> None:
    """Names and options exist; nothing is run."""
    arguments = shlex.split(line)[1:]
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        assert arguments[0] in command.commands, line
        command = command.commands[arguments.pop(0)]
    command.make_context("glm5ray", arguments)


def test_readme_has_two_set_up_commands() -> None:
    block = code_blocks(ROOT / "README.md", "")[0]
    scripts = [line.split()[0] for line in block.splitlines()]
    assert scripts == ["scripts/quickstart.sh", "scripts/test.sh"]
    for script in [*scripts, ".ci/run"]:
        assert (ROOT / script).stat().st_mode & 0o111, f"{script} cannot be executed"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text("utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_batch_document_lists_every_field() -> None:
    text = (ROOT / "docs/batch.md").read_text("utf-8")
    for name in {*CHAT_FIELDS, *COMPLETION_FIELDS, *SAMPLING_FIELDS, *IGNORED_FIELDS}:
        assert f"`{name}`" in text, name
    for name in preset_names():
        assert f"`{name}`" in text, name
    defaults = config_from_dict({}).to_dict()
    for name, default in re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \| (\S+) \|", text, re.MULTILINE):
        assert name in field_names()
        section, field = name.split(".")
        assert str(defaults[section][field]).lower() == default, name


def test_example_prompts_are_valid(tokenizer: Tokenizer) -> None:
    served = ServedModel(tokenizer=tokenizer, names=("nano",), vocab_size=272)
    lines = [json.loads(line) for line in (ROOT / "examples/prompts.jsonl").read_text("utf-8").splitlines()]
    assert len(lines) == len({line["custom_id"] for line in lines}) == 32
    for line in lines:
        parse = parse_chat_body if line["url"] == "/v1/chat/completions" else parse_completion_body
        parse(line["body"], served, request_id=line["custom_id"])


def test_architecture_shows_every_package() -> None:
    tree = code_blocks(ROOT / "docs/architecture.md", "")[0]
    package = ROOT / "glm5ray"
    names = {f"{entry.name}/" for entry in package.iterdir() if (entry / "__init__.py").exists()}
    names |= {entry.name for entry in package.glob("*.py")}
    assert not {name for name in names if name not in tree}


def test_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for block in code_blocks(ROOT / "README.md", "python"):
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert "The capital of Italy is Rome." in capsys.readouterr().out


def test_the_main_job(tmp_path: Path) -> None:
    """What quickstart.sh runs: the example prompts through the embedded model, each answered, and these right."""
    from glm5ray import LLM

    output = tmp_path / "answers.jsonl"
    with LLM("nano", config=load_config("cpu-nano")) as llm:
        summary = run_batch(ROOT / "examples/prompts.jsonl", output, llm, model_names=("nano",))
    assert (summary.completed, summary.failed) == (32, 0)
    records = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    choices = {record["custom_id"]: record["response"]["body"]["choices"][0] for record in records}
    assert choices["01-addition"]["message"]["content"] == "47 + 38 = 85"
    assert choices["01-addition"]["message"]["reasoning_content"].startswith("7 + 8 = 15")
    assert json.loads(choices["18-json"]["message"]["content"]) == {"name": "Clara", "age": 34, "city": "Vienna"}
    assert choices["21-lookup"]["message"]["content"] == "The code of Petra is 7350."
    call = choices["25-tool"]["message"]["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("set_timer", {"minutes": 25})
    assert choices["25-tool"]["finish_reason"] == "tool_calls"
    scored = choices["32-score"]
    assert scored["text"] == "The sky is blue."
    assert scored["logprobs"]["token_logprobs"][0] is None
    assert all(logprob < 0 for logprob in scored["logprobs"]["token_logprobs"][1:])
