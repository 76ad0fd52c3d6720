"""Results -> bodies: the shapes of OpenAI's API, with the numbers where its clients look for them."""

from __future__ import annotations

import json
from typing import Any

from glm5ray.engine.results import Choice, RequestResult
from glm5ray.openai_api.requests import ServedModel, parse_chat_body, parse_completion_body
from glm5ray.openai_api.responses import chat_completion_body, completion_body
from glm5ray.protocol import FinishReason, TokenLogprobs
from glm5ray.tokenizer import Tokenizer
from tests.conftest import CHAT_TEMPLATE, byte_level_bpe

TOKENIZER = Tokenizer(byte_level_bpe(), chat_template=CHAT_TEMPLATE)
SERVED = ServedModel(tokenizer=TOKENIZER, names=("tiny",), vocab_size=272)
HELLO = [{"role": "user", "content": "Hi"}]


def choice(text: str, *, index: int = 0, reason: FinishReason = FinishReason.STOP, **fields: Any) -> Choice:
    return Choice(index=index, text=text, token_ids=tuple(text.encode()), finish_reason=reason, **fields)


def result(*choices: Choice, prompt: bytes = b"Hi", **fields: Any) -> RequestResult:
    return RequestResult(
        request_id="r",
        num_prompt_tokens=len(prompt),
        prompt_token_ids=tuple(prompt),
        choices=choices,
        **{"num_cached_tokens": 0, **fields},
    )


def scores(data: bytes, **top: Any) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token, -0.5, ((token, -0.5), (0xE2, -1.5)), 1) for token in data)


def test_chat_body() -> None:
    call = parse_chat_body({"messages": HELLO, "n": 2}, SERVED, request_id="abc")
    body = chat_completion_body(
        call,
        result(choice("one"), choice("two!", index=1, reason=FinishReason.LENGTH), num_cached_tokens=1),
        TOKENIZER,
    )
    assert body["id"] == "chatcmpl-abc"
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert body["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "one", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert body["choices"][1]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 7,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_chat_logprobs() -> None:
    call = parse_chat_body({"messages": HELLO, "logprobs": True, "top_logprobs": 2}, SERVED, request_id="r")
    body = chat_completion_body(call, result(choice("a", logprobs=scores(b"a"))), TOKENIZER)
    assert body["choices"][0]["logprobs"]["content"] == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "bytes:\\xe2", "logprob": -1.5, "bytes": [0xE2]},
            ],
        }
    ]


def test_reasoning_and_tool_calls() -> None:
    body = {
        "messages": HELLO,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"enable_thinking": True},
    }
    call = parse_chat_body(body, SERVED, request_id="r")
    text = "hm</think><tool_call>f<arg_key>x</arg_key><arg_value>é</arg_value></tool_call>"
    answer = chat_completion_body(call, result(choice(text)), TOKENIZER)["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["reasoning_content"] == "hm"
    assert answer["message"]["content"] is None
    (tool_call,) = answer["message"]["tool_calls"]
    assert tool_call["function"] == {"name": "f", "arguments": '{"x": "é"}'}
    cut = chat_completion_body(call, result(choice(text[:30], reason=FinishReason.LENGTH)), TOKENIZER)["choices"][0]
    assert (cut["finish_reason"], cut["message"]["content"]) == ("length", "")


def test_completion_of_several_prompts() -> None:
    call = parse_completion_body({"prompt": ["Hi", "abc"], "n": 2}, SERVED, request_id="r")
    results = [result(choice("x"), choice("y", index=1)), result(choice("z"), choice("w", index=1), prompt=b"abc")]
    body = completion_body(call, results, TOKENIZER)
    assert body["id"] == "cmpl-r"
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "x"), (1, "y"), (2, "z"), (3, "w")]
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 4


def test_echo_with_logprobs() -> None:
    prompt = "aé"
    call = parse_completion_body({"prompt": prompt, "echo": True, "logprobs": 2}, SERVED, request_id="r")
    data = prompt.encode()
    answer = result(choice("é", logprobs=scores("é".encode())), prompt=data, prompt_logprobs=scores(data[1:]))
    (found,) = completion_body(call, [answer], TOKENIZER)["choices"]
    assert found["text"] == "aéé"
    logprobs = found["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"bytes:\\xc3": -0.5, "bytes:\\xe2": -1.5}
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2]


def test_the_chosen_token_is_always_listed() -> None:
    call = parse_completion_body({"prompt": "Hi", "logprobs": 0}, SERVED, request_id="r")
    chosen = (TokenLogprobs(98, -3.0, (), 7),)
    (found,) = completion_body(call, [result(choice("b", logprobs=chosen))], TOKENIZER)["choices"]
    assert found["logprobs"]["top_logprobs"] == [{"b": -3.0}]


def test_infinities_are_valid_json() -> None:
    call = parse_completion_body({"prompt": "Hi", "logprobs": 1}, SERVED, request_id="r")
    impossible = (TokenLogprobs(98, float("-inf"), ((97, float("nan")),), 7),)
    body = completion_body(call, [result(choice("b", logprobs=impossible))], TOKENIZER)
    text = json.dumps(body, allow_nan=False)
    assert "-9999.0" in text


def test_offsets_leave_skipped_tokens_out() -> None:
    call = parse_completion_body({"prompt": "<eos>a", "logprobs": 0, "echo": True}, SERVED, request_id="r")
    tokens = (256, 97, 256, 98)
    chosen = tuple(TokenLogprobs(token, -1.0, (), 1) for token in tokens)
    ended = Choice(index=0, text="b", token_ids=(256, 98), finish_reason=FinishReason.STOP, logprobs=chosen[2:])
    answer = RequestResult(
        request_id="r",
        num_prompt_tokens=2,
        num_cached_tokens=0,
        prompt_token_ids=(256, 97),
        prompt_logprobs=chosen[1:2],
        choices=(ended,),
    )
    (found,) = completion_body(call, [answer], TOKENIZER)["choices"]
    assert found["text"] == "<eos>ab"
    assert found["logprobs"]["text_offset"] == [0, 5, 6, 6]
