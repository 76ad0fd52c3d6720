"""Bodies -> requests: what is refused, with which ``param``, and what the accepted fields become."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5ray.errors import RequestError
from glm5ray.openai_api.requests import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    PreparedCall,
    ServedModel,
    parse_chat_body,
    parse_completion_body,
)
from glm5ray.protocol import SamplingParams
from glm5ray.tokenizer import Tokenizer
from tests.conftest import CHAT_TEMPLATE, byte_level_bpe

SERVED = ServedModel(
    tokenizer=Tokenizer(byte_level_bpe(), chat_template=CHAT_TEMPLATE), names=("tiny", "other-name"), vocab_size=272
)
HELLO = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> PreparedCall:
    return parse_chat_body({"messages": HELLO, **fields}, SERVED, request_id="r")


def completion(**fields: Any) -> PreparedCall:
    return parse_completion_body({"prompt": "Hi", **fields}, SERVED, request_id="r")


def prompt_of(call: PreparedCall) -> str:
    return SERVED.tokenizer.decode(call.requests[0].prompt_token_ids, skip_special_tokens=False)


def refusal(parse: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    return caught.value


# --- fields that both have -----------------------------------------------------------------------------------------


def test_every_sampling_field_arrives() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "logit_bias": {"97": 5, "0": -100},
        "allowed_token_ids": [1, 97],
        "seed": -3,
        "n": 3,
        "min_tokens": 2,
        "max_tokens": 9,
        "stop": ["a", "bc"],
        "stop_token_ids": [120],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    expected = SamplingParams(
        **{
            **fields,
            "logit_bias": {97: 5, 0: -100},
            "stop": ("a", "bc"),
            "stop_token_ids": (120,),
            "allowed_token_ids": (1, 97),
        }
    )
    for parse in (chat, completion):
        call = parse(**fields, priority=4)
        assert call.requests[0].sampling == expected
        assert call.requests[0].priority == 4
        null = parse(**dict.fromkeys(fields))
        assert null.requests[0].sampling == SamplingParams()


def test_defaults_of_the_served_model() -> None:
    served = ServedModel(
        tokenizer=SERVED.tokenizer,
        names=("tiny",),
        vocab_size=272,
        defaults=SamplingParams(temperature=0.3, stop=("x",)),
    )
    sampling = parse_completion_body({"prompt": "a", "top_p": 0.5}, served, request_id="r").requests[0].sampling
    assert (sampling.temperature, sampling.stop, sampling.top_p) == (0.3, ("x",), 0.5)


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_k", 1.5),
        ("top_k", 10**12),
        ("n", 0),
        ("n", 1.0),
        ("seed", 2**64),
        ("stop", [1]),
        ("stop", [""]),
        ("stop", {"a": 1}),
        ("stop_token_ids", [151645]),
        ("stop_token_ids", "120"),
        ("logit_bias", {"272": 5}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"\u0663": 1}),
        ("logit_bias", {"97": 101}),
        ("logit_bias", {"97": "5"}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("ignore_eos", "yes"),
        ("max_tokens", -1),
        ("max_tokens", "ten"),
        ("max_tokens", 1.5),
        ("max_tokens", 10**30),
        ("priority", 10**30),
        ("model", "gpt-5"),
        ("model", 3),
    ],
)
def test_bad_values_name_their_field(parse: Any, field: str, value: Any) -> None:
    error = refusal(parse, **{field: value})
    assert error.param == field
    assert field.removesuffix("_ids") in error.message or field == "model"
    assert len(error.message) < 400


def test_min_tokens_above_max_tokens() -> None:
    assert refusal(completion, min_tokens=9, max_tokens=5).param == "min_tokens"


def test_unknown_fields_suggest_the_nearest() -> None:
    error = refusal(chat, temprature=0.5)
    assert (error.param, error.code) == ("temprature", "unknown_parameter")
    assert "did you mean 'temperature'" in error.message
    assert refusal(chat, prompt="Hi").param == "prompt"
    assert refusal(completion, messages=HELLO).param == "messages"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream", True),
        ("best_of", 4),
        ("suffix", "end"),
        ("response_format", {"type": "json_object"}),
        ("functions", [{"name": "f"}]),
        ("guided_json", {}),
        ("prompt_logprobs", 1),
        ("audio", {"voice": "x"}),
    ],
)
def test_what_is_not_served_is_refused(field: str, value: Any) -> None:
    for parse in (chat, completion):
        error = refusal(parse, **{field: value})
        assert (error.param, error.code) == (field, "unsupported_parameter")


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    neutral = {
        "stream": False,
        "best_of": 1,
        "suffix": None,
        "response_format": {"type": "text"},
        "user": "u",
        "metadata": {"a": "b"},
    }
    assert chat(**neutral).requests == chat().requests
    assert completion(**neutral).requests == completion().requests


def test_model_names() -> None:
    assert chat().model == "tiny"
    assert chat(model="other-name").model == "other-name"
    error = refusal(chat, model="gpt-5")
    assert (error.status, error.code) == (404, "model_not_found")
    assert "tiny, other-name" in error.message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from([*CHAT_FIELDS, *COMPLETION_FIELDS, "n", "stop", "logit_bias", "x"]), json_values)
)
def test_any_json_is_parsed_or_refused(values: dict[str, Any]) -> None:
    for parse in (parse_chat_body, parse_completion_body):
        for body in (values, {"messages": HELLO, **values}, {"prompt": "a", **values}):
            with suppress(RequestError):
                call = parse(body, SERVED, request_id="r")
                assert all(request.prompt_token_ids for request in call.requests)


@given(json_values)
def test_any_message_is_parsed_or_refused(value: Any) -> None:
    for message in (value, {"role": "assistant", "content": value}, {"role": "assistant", "tool_calls": value}):
        with suppress(RequestError):
            assert chat(messages=[message]).requests[0].prompt_token_ids


def test_errors_spell_values_as_json_does() -> None:
    assert refusal(chat, temperature=True).message == "temperature is true; it must be a number."
    assert refusal(chat, messages=[{"role": None, "content": "x"}]).message.startswith("messages[0].role is null; ")
    assert refusal(chat, messages=[{"content": "x"}]).message.startswith("messages[0].role is missing; ")
    assert refusal(chat, stop=[None, {"a": False}]).message.startswith('stop is [null, {"a": false}]; ')
    assert refusal(parse_text, prompt=None).message.startswith("prompt is missing; ")


def parse_text(**fields: Any) -> PreparedCall:
    return parse_completion_body(fields, SERVED, request_id="r")


@pytest.mark.parametrize("name", ["self", "messages", "tools", "add_generation_prompt"])
def test_names_that_the_template_has_for_itself(name: str) -> None:
    assert refusal(chat, chat_template_kwargs={name: 1}).param == "chat_template_kwargs"


def test_an_unknown_name_is_cut() -> None:
    error = refusal(chat, **{"x" * 1000: 1})
    assert error.param is not None
    assert max(len(error.param), len(error.message)) < 300


# --- chat -------------------------------------------------------------------------------------------------------------


def test_max_tokens_of_chat() -> None:
    assert chat().requests[0].sampling.max_tokens is None
    assert chat(max_tokens=None).requests[0].sampling.max_tokens is None
    assert chat(max_tokens=5).requests[0].sampling.max_tokens == 5
    assert chat(max_completion_tokens=5).requests[0].sampling.max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).requests[0].sampling.max_tokens == 5
    assert refusal(chat, max_tokens=0).param == "max_tokens"
    assert refusal(chat, max_completion_tokens=0).param == "max_completion_tokens"
    assert refusal(chat, max_completion_tokens=-1).param == "max_completion_tokens"
    assert "differ" in refusal(chat, max_completion_tokens=5, max_tokens=6).message


def test_logprobs_of_chat() -> None:
    assert chat(logprobs=False).requests[0].sampling.logprobs is None
    assert chat(logprobs=True).requests[0].sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).requests[0].sampling.logprobs == 3
    assert refusal(chat, top_logprobs=3).param == "top_logprobs"
    assert refusal(chat, logprobs=True, top_logprobs=-1).param == "top_logprobs"
    assert refusal(chat, logprobs=2).param == "logprobs"
    assert "at most 20" in refusal(chat, logprobs=True, top_logprobs=21).message


def test_messages_reach_the_template() -> None:
    call = chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "content": "r", "tool_call_id": "1"},
        ]
    )
    assert prompt_of(call) == 's:Be brief.;u:ab;a:;f{"x": 1};t:r;a:'


def test_template_options() -> None:
    call = chat(chat_template_kwargs={"enable_thinking": True})
    assert prompt_of(call).endswith("a:<think>")
    assert call.starts_in_reasoning
    assert not chat(reasoning_effort="none").starts_in_reasoning
    assert prompt_of(chat(add_generation_prompt=False)) == "u:Hi;"
    assert refusal(chat, chat_template_kwargs={"messages": []}).param == "chat_template_kwargs"
    assert refusal(chat, chat_template_kwargs={"messages ": []}, messages=[]).param == "messages"


def test_tools() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = chat(tools=tools)
    assert prompt_of(call).startswith("T:f;")
    assert call.tools == tuple(tools)
    hidden = chat(tools=tools, tool_choice="none")
    assert prompt_of(hidden).startswith("u:")
    assert hidden.tools == ()
    assert refusal(chat, tools=tools, tool_choice="required").param == "tool_choice"
    assert refusal(chat, tools=tools, parallel_tool_calls=False).param == "parallel_tool_calls"
    for bad in ([{}], {}, [{"type": "function", "function": {}}], [{"type": "mcp"}]):
        assert refusal(chat, tools=bad).param == "tools"


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([], "at least one"),
        ("Hi", "at least one"),
        (["Hi"], "messages[0]"),
        ([{"role": "user"}], "content is missing"),
        ([{"role": "robot", "content": "a"}], "messages[0].role"),
        ([*HELLO, {"role": "user", "content": 3}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "a", "contnet": "b"}], "did you mean 'content'"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "not valid JSON"),
        ([{"role": "user", "content": "a\ud800"}], "surrogate"),
    ],
)
def test_bad_messages(messages: Any, part: str) -> None:
    error = refusal(chat, messages=messages)
    assert error.param == "messages"
    assert part in error.message


# --- completions -----------------------------------------------------------------------------------------------------


def test_prompts() -> None:
    assert completion(prompt="ab").requests[0].prompt_token_ids == (97, 98)
    assert completion(prompt=[97, 98]).requests[0].prompt_token_ids == (97, 98)
    several = completion(prompt=["a", "bc"])
    assert [r.request_id for r in several.requests] == ["r-0", "r-1"]
    assert [r.prompt_token_ids for r in several.requests] == [(97,), (98, 99)]
    assert [r.prompt_token_ids for r in completion(prompt=[[97], [98, 271]]).requests] == [(97,), (98, 271)]


@pytest.mark.parametrize(
    "prompt", [None, 3, "", [], [""], [[]], ["a", 1], [1, "a"], [[1], 2], [-1], [272], [True], "\udfff"]
)
def test_bad_prompts(prompt: Any) -> None:
    assert refusal(completion, prompt=prompt).param == "prompt"


def test_scoring() -> None:
    call = completion(prompt=[97, 256], max_tokens=0, echo=True, logprobs=1)
    sampling = call.requests[0].sampling
    assert (sampling.max_tokens, sampling.logprobs, sampling.prompt_logprobs) == (0, 1, 1)
    assert call.prompt_texts == ("a<eos>",)
    assert completion(logprobs=2).requests[0].sampling.prompt_logprobs is None
    assert refusal(completion, logprobs=-1).param == "logprobs"
    assert refusal(completion, logprobs=True).param == "logprobs"
