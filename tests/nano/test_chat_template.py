"""The chat template gives exactly the strings of GLM-5.2's, and training's own rendering gives the template's."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from glm5ray.nano import data
from glm5ray.nano.evaluate import CHECKPOINT
from glm5ray.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_checkpoint(CHECKPOINT)
HI: dict[str, Any] = {"role": "user", "content": "Hi"}
MORE: dict[str, Any] = {"role": "user", "content": "More"}
START = "[gMASK]<sop><|system|>Reasoning Effort: Max"


def render(messages: list[dict[str, Any]], **values: Any) -> str:
    import transformers

    loaded = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    return loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **values)


ASSISTANT = {"role": "assistant", "content": " ok ", "reasoning_content": "hmm"}
IN_CONTENT = {"role": "assistant", "content": "<think>hmm</think>\nok"}
CALL = {"name": "f", "arguments": {"x": 1, "s": "a b", "u": [True, "é"]}}
TOOL_TURN = [
    HI,
    {"role": "assistant", "content": "", "reasoning_content": "use f", "tool_calls": [{"function": CALL}]},
    {"role": "tool", "content": "r1"},
    {"role": "tool", "content": [{"type": "text", "text": "r2"}]},
]
FUNCTION = {"name": "f", "description": "Does é.", "parameters": {"type": "object", "properties": {}}}
HIDDEN = {"type": "function", "function": {"name": "g", "defer_loading": True}}
CALLED = (
    "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value><arg_key>s</arg_key><arg_value>a b</arg_value>"
    '<arg_key>u</arg_key><arg_value>[true, "é"]</arg_value></tool_call>'
)

STRINGS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "default": ([HI], {}, f"{START}<|user|>Hi<|assistant|><think>"),
    "thinking off": ([HI], {"enable_thinking": False}, "[gMASK]<sop><|user|>Hi<|assistant|><think></think>"),
    "high": ([HI], {"reasoning_effort": "high"}, f"{START[:-3]}High<|user|>Hi<|assistant|><think>"),
    "any other effort": ([HI], {"reasoning_effort": "low"}, f"{START}<|user|>Hi<|assistant|><think>"),
    "system": (
        [{"role": "system", "content": "Be brief."}, HI],
        {},
        f"{START}<|system|>Be brief.<|user|>Hi<|assistant|><think>",
    ),
    "history": (
        [HI, ASSISTANT, MORE],
        {},
        f"{START}<|user|>Hi<|assistant|><think></think>ok<|user|>More<|assistant|><think>",
    ),
    "history, thinking kept": (
        [HI, IN_CONTENT, MORE],
        {"clear_thinking": False},
        f"{START}<|user|>Hi<|assistant|><think>hmm</think>ok<|user|>More<|assistant|><think>",
    ),
    "two results": (
        TOOL_TURN,
        {},
        f"{START}<|user|>Hi<|assistant|><think>use f</think>{CALLED}<|observation|><tool_response>r1</tool_response>"
        "<tool_response>r2</tool_response><|assistant|><think>",
    ),
    "tools": (
        [HI],
        {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}, HIDDEN]},
        f"{START}{data.render_tools((FUNCTION,))}<|user|>Hi<|assistant|><think>",
    ),
}


@pytest.mark.parametrize("case", STRINGS)
def test_template_in_transformers(case: str) -> None:
    messages, values, wanted = STRINGS[case]
    assert render(messages, **values) == wanted


@pytest.mark.parametrize("case", STRINGS)
def test_template_in_our_tokenizer(case: str) -> None:
    messages, values, wanted = STRINGS[case]
    assert TOKENIZER.apply_chat_template(messages, **values) == wanted


@pytest.mark.parametrize("thinking", [False, True])
def test_training_sees_what_the_template_writes(thinking: bool) -> None:
    for seed in range(20):
        exercise = data.tool_call(Random(seed), 400, heldout=True)
        tools = [{"type": "function", "function": dict(tool)} for tool in exercise.tools]
        shown = render([{"role": "user", "content": exercise.question}], tools=tools, enable_thinking=thinking)
        assert data.render("tool_call", exercise, thinking).prompt == shown
