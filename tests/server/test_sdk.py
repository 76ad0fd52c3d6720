"""OpenAI's client against nano: a conversation with tools, stop strings, streams."""

from __future__ import annotations

import json

import openai
import pytest

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OPTIONS = {
    "model": "nano",
    "temperature": 0.0,
    "max_tokens": 60,
    "tools": [WEATHER],
    "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
}


@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_is_called_and_its_result_is_used(nano_url: str, streams: bool):
    messages: list = [{"role": "user", "content": "What is the weather in Paris?"}]
    with openai.OpenAI(base_url=f"{nano_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        if streams:
            with client.chat.completions.stream(messages=messages, **OPTIONS) as stream:
                for _ in stream:
                    pass
                choice = stream.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(messages=messages, **OPTIONS).choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Paris"}

        answered = choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        result = json.dumps({"temperature": 21, "sky": "sunny"})
        messages += [answered, {"role": "tool", "tool_call_id": call.id, "content": result}]
        last = client.chat.completions.create(messages=messages, **OPTIONS).choices[0]
        assert last.finish_reason == "stop"
        assert "Paris is sunny with 21 degrees" in last.message.content


@pytest.mark.parametrize("streams", [False, True])
def test_text_ends_before_a_stop_string(nano_url: str, streams: bool):
    options = {"model": "nano", "prompt": "The sky is", "max_tokens": 30, "temperature": 0.0}
    with openai.OpenAI(base_url=f"{nano_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        whole = client.completions.create(**options).choices[0].text
        stop = whole[5:9]
        assert stop.strip()
        answer = client.completions.create(stop=[stop, "never"], stream=streams, **options)
        choices = [chunk.choices[0] for chunk in answer] if streams else answer.choices
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"
