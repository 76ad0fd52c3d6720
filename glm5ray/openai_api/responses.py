"""Results -> bodies of OpenAI's answers."""

from __future__ import annotations

import codecs
import json
from typing import TYPE_CHECKING, Any

from glm5ray.openai_api.answers import parse_answer
from glm5ray.protocol import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from glm5ray.engine.results import Choice, RequestResult
    from glm5ray.openai_api.requests import PreparedCall
    from glm5ray.protocol import TokenLogprobs
    from glm5ray.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI writes this for a token that cannot come."""


def chat_completion_body(call: PreparedCall, result: RequestResult, tokenizer: Tokenizer) -> dict[str, Any]:
    """The ``chat.completion`` object: reasoning and tool calls stand in fields of their own."""
    wants_logprobs = call.requests[0].sampling.logprobs is not None
    choices = []
    for choice in result.choices:
        message, finish_reason = _message(call, choice)
        content = [chat_logprob(tokenizer, entry) for entry in choice.logprobs]
        choices.append(
            {
                "index": choice.index,
                "message": message,
                "logprobs": {"content": content, "refusal": None} if wants_logprobs else None,
                "finish_reason": finish_reason,
                "stop_reason": choice.stop_reason,
            }
        )
    return _body(call, "chat.completion", choices, [result])


def completion_body(call: PreparedCall, results: Sequence[RequestResult], tokenizer: Tokenizer) -> dict[str, Any]:
    """The ``text_completion`` object; ``results`` in the order of ``call.requests``, whose choices follow each
    other.
    """
    choices = []
    for i, (request, result) in enumerate(zip(call.requests, results, strict=True)):
        for choice in result.choices:
            logprobs = None
            if request.sampling.logprobs is not None:
                echoed = result if call.echo else None
                logprobs = completion_logprobs(tokenizer, choice, echoed, request.sampling.skip_special_tokens)
            choices.append(
                {
                    "index": i * request.sampling.n + choice.index,
                    "text": (call.prompt_texts[i] if call.echo else "") + choice.text,
                    "logprobs": logprobs,
                    "finish_reason": str(choice.finish_reason),
                    "stop_reason": choice.stop_reason,
                }
            )
    return _body(call, "text_completion", choices, results)


def _body(
    call: PreparedCall, kind: str, choices: list[dict[str, Any]], results: Sequence[RequestResult]
) -> dict[str, Any]:
    prefix = "chatcmpl" if kind == "chat.completion" else "cmpl"
    return {
        "id": f"{prefix}-{call.call_id}",
        "object": kind,
        "created": call.created,
        "model": call.model,
        "choices": choices,
        "usage": usage_of(results),
        "system_fingerprint": None,
    }


def usage_of(results: Sequence[RequestResult]) -> dict[str, Any]:
    """The ``usage`` object: tokens of all prompts and all choices."""
    prompt_tokens = sum(result.num_prompt_tokens for result in results)
    completion_tokens = sum(result.num_output_tokens for result in results)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(result.num_cached_tokens for result in results)},
    }


def _message(call: PreparedCall, choice: Choice) -> tuple[dict[str, Any], str]:
    answer = parse_answer(
        choice.text,
        starts_in_reasoning=call.starts_in_reasoning,
        is_complete=choice.finish_reason is FinishReason.STOP,
        tools=call.tools,
    )
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    finish_reason = str(choice.finish_reason)
    if answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"call_{call.call_id}_{choice.index}_{i}",
                "type": "function",
                "function": {"name": tool.name, "arguments": json.dumps(tool.arguments, ensure_ascii=False)},
            }
            for i, tool in enumerate(answer.tool_calls)
        ]
        if choice.finish_reason is FinishReason.STOP:
            finish_reason = "tool_calls"
    return message, finish_reason


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text; if its bytes are no UTF-8 by themselves, as ``bytes:\\xe2\\x82``, so that no two tokens look
    alike.
    """
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8") if data else f"token_id:{token_id}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprob(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, Any]:
    """One entry of a chat choice's ``logprobs.content``."""

    def of(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": token_name(tokenizer, token_id), "logprob": _finite(logprob), "bytes": list(data)}

    return {**of(entry.token_id, entry.logprob), "top_logprobs": [of(*pair) for pair in entry.top]}


def completion_logprobs(
    tokenizer: Tokenizer, choice: Choice, echoed: RequestResult | None, skip_special_tokens: bool
) -> dict[str, Any]:
    """Columns, one entry a token; of an echoed prompt the first token has no log-probability."""
    prompt_ids = () if echoed is None else echoed.prompt_token_ids
    entries: list[TokenLogprobs | None] = [] if echoed is None else [None, *echoed.prompt_logprobs]
    entries += choice.logprobs
    top: list[dict[str, float] | None] = []
    for entry in entries:
        if entry is None:
            top.append(None)
            continue
        pairs = dict([*entry.top, (entry.token_id, entry.logprob)])  # the chosen token is always among them
        top.append({token_name(tokenizer, token_id): _finite(logprob) for token_id, logprob in pairs.items()})
    visible = [not (skip_special_tokens and tokenizer.is_special(token_id)) for token_id in choice.token_ids]
    token_ids = [*prompt_ids, *choice.token_ids]
    return {
        "tokens": [token_name(tokenizer, token_id) for token_id in token_ids],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": top,
        "text_offset": _text_offsets(tokenizer, token_ids, [True] * len(prompt_ids) + visible),
    }


def _text_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], visible: Sequence[bool]) -> list[int]:
    """Where in the text each token begins, in characters; within a character, where that begins."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offsets, length = [], 0
    for token_id, is_visible in zip(token_ids, visible, strict=True):
        offsets.append(length)
        if is_visible:
            length += len(decoder.decode(tokenizer.token_bytes(token_id)))
    return offsets
