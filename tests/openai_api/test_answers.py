"""GLM's output format: reasoning, content and tool calls of whole answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5ray.openai_api.answers import Answer, ToolCall, parse_answer

F = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "properties": {"s": {"type": "string"}, "i": {"type": "integer"}, "maybe": {"type": ["string", "null"]}}
        },
    },
}
CALL = "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"


def parse(text: str, *, is_complete: bool = True, starts_in_reasoning: bool = True, tools: Any = (F,)) -> Answer:
    return parse_answer(text, starts_in_reasoning=starts_in_reasoning, is_complete=is_complete, tools=tools)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("r</think><tool_call>now</tool_call>", Answer("r", None, (ToolCall("now", {}),))),
        (f"r{CALL}", Answer("r", None, (ToolCall("f", {"x": 1}),))),
        (f"r{CALL}</think>", Answer("r", None, (ToolCall("f", {"x": 1}),))),
        ("Paris", Answer(None, "Paris")),
        ("r2</think>done", Answer("r2", "done")),
        (f"r</think>Let me see.{CALL}{CALL}", Answer("r", "Let me see.", (ToolCall("f", {"x": 1}),) * 2)),
        ("r</think><tool_call></tool_call>a", Answer("r", "a")),
    ],
)
def test_complete_answers(text: str, expected: Answer) -> None:
    assert parse(text) == expected


def test_cut_answers_show_no_tags() -> None:
    assert parse("still thinking", is_complete=False) == Answer("still thinking", "")
    cut = "r<tool_call>f<arg_key>x</arg_key><arg_value>"
    assert parse(cut, is_complete=False) == Answer("r", "")


def test_without_reasoning() -> None:
    assert parse("Paris", starts_in_reasoning=False) == Answer(None, "Paris")
    assert parse("<think>r</think>Paris", starts_in_reasoning=False) == Answer("r", "Paris")


def test_without_tools_a_call_is_text() -> None:
    assert parse(f"r</think>{CALL}", tools=()) == Answer("r", CALL)


def test_arguments_are_typed_by_the_schema() -> None:
    pairs = {
        "s": "1",
        "i": "2",
        "maybe": "null",
        "other": '{"a": [1]}',
        "bad": "[1",
        "nan": "NaN",
        "big": "1e999",
        "multi": "a\nb",
    }
    text = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in pairs.items())
    (call,) = parse(f"</think><tool_call>f{text}</tool_call>").tool_calls
    assert call.arguments == {
        "s": "1",
        "i": 2,
        "maybe": None,
        "other": {"a": [1]},
        "bad": "[1",
        "nan": "NaN",
        "big": "1e999",
        "multi": "a\nb",
    }


pieces = st.sampled_from(["a", "</think>", "<think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "f"])


@given(st.lists(pieces, max_size=12).map("".join), st.booleans(), st.booleans())
def test_anything_the_model_may_write(text: str, is_complete: bool, starts_in_reasoning: bool) -> None:
    answer = parse(text, is_complete=is_complete, starts_in_reasoning=starts_in_reasoning)
    assert "<tool_call>" not in (answer.content or "")
    assert answer.content is not None or answer.tool_calls
    assert all(call.name for call in answer.tool_calls)
