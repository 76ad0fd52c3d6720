"""Text deltas -> the chunks of OpenAI's streams, without their framing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from glm5ray.engine.results import Choice
from glm5ray.openai_api.answers import CALL, END_THINK, THINK, parse_answer
from glm5ray.openai_api.responses import chat_logprob, completion_logprobs, usage_of
from glm5ray.protocol import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from glm5ray.engine.results import RequestResult, TextDelta
    from glm5ray.openai_api.requests import PreparedCall
    from glm5ray.tokenizer import Tokenizer


class AnswerSplitter:
    """An answer that grows -> reasoning and content as they come; tool calls whole, at the end.

    What may be the beginning of a tag is held back. Unlike :func:`parse_answer`, which sees the end first, a stream
    cannot know that an answer will end without ``</think>``: its text has gone out as reasoning by then.
    """

    def __init__(self, *, starts_in_reasoning: bool, tools: Sequence[dict[str, Any]] = ()) -> None:
        self._part = "reasoning" if starts_in_reasoning else "unknown"
        self._tools = tools
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """New reasoning and new content."""
        self._held += text
        if self._part == "unknown":
            begun = self._held.lstrip()
            if begun.startswith(THINK):
                self._part, self._held = "reasoning", begun.removeprefix(THINK)
            elif THINK.startswith(begun):
                return "", ""
            else:
                self._part = "content"
        reasoning = ""
        if self._part == "reasoning":
            tags = (END_THINK, CALL) if self._tools else (END_THINK,)
            reasoning, tag = self._take_until(tags)
            if tag == END_THINK:
                self._part, self._held = "content", self._held.removeprefix(END_THINK)
            elif tag == CALL:
                self._part = "calls"
        content = ""
        if self._part == "content":
            content, tag = self._take_until((CALL,) if self._tools else ())
            if tag == CALL:
                self._part = "calls"
        return reasoning, content

    def finish(self, *, is_complete: bool) -> tuple[str, str, list[dict[str, Any]]]:
        """The rest: reasoning, content and calls (``name`` and ``arguments``, a JSON text)."""
        held, self._held = self._held, ""
        if self._part == "reasoning":
            return held, "", []
        if self._part != "calls":
            return "", held, []
        held = held.replace(END_THINK, "", 1)
        answer = parse_answer(held, starts_in_reasoning=False, is_complete=is_complete, tools=self._tools)
        calls = [
            {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            for call in answer.tool_calls
        ]
        return "", answer.content or "", calls

    def _take_until(self, tags: Sequence[str]) -> tuple[str, str | None]:
        """Text before the first of ``tags``, which stays, and that tag; without one, all that cannot begin one."""
        places = [(place, tag) for tag in tags if (place := self._held.find(tag)) >= 0]
        if places:
            place, tag = min(places)
        else:
            place, tag = len(self._held) - max((_overlap(self._held, tag) for tag in tags), default=0), None
        taken, self._held = self._held[:place], self._held[place:]
        return taken, tag


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that begins ``tag``."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)


class ChatChunks:
    """The chunks of one streamed chat call."""

    def __init__(self, call: PreparedCall, tokenizer: Tokenizer) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._wants_logprobs = call.requests[0].sampling.logprobs is not None
        self._splitters = [
            AnswerSplitter(starts_in_reasoning=call.starts_in_reasoning, tools=call.tools)
            for _ in range(call.requests[0].sampling.n)
        ]

    def first(self) -> list[dict[str, Any]]:
        """The role of each choice."""
        return [self._chunk(i, {"role": "assistant", "content": ""}) for i in range(len(self._splitters))]

    def of(self, number: int, delta: TextDelta) -> list[dict[str, Any]]:
        """Chunks for new text; ``number`` is the request's place in the call, here 0."""
        assert number == 0, f"a chat call has one request, not {number + 1}"
        splitter = self._splitters[delta.index]
        reasoning, content = splitter.push(delta.text)
        calls: list[dict[str, Any]] = []
        if delta.finish_reason is not None:
            is_complete = delta.finish_reason is FinishReason.STOP
            more_reasoning, more_content, calls = splitter.finish(is_complete=is_complete)
            reasoning, content = reasoning + more_reasoning, content + more_content
        parts = {"reasoning_content": reasoning, "content": content}
        message: dict[str, Any] = {name: text for name, text in parts.items() if text}
        if calls:
            message["tool_calls"] = [
                {
                    "index": i,
                    "id": f"call_{self._call.call_id}_{delta.index}_{i}",
                    "type": "function",
                    "function": function,
                }
                for i, function in enumerate(calls)
            ]
        logprobs = None
        if self._wants_logprobs and delta.logprobs:
            logprobs = {"content": [chat_logprob(self._tokenizer, x) for x in delta.logprobs], "refusal": None}
        chunks = [self._chunk(delta.index, message, logprobs)] if message or logprobs else []
        if delta.finish_reason is not None:
            ended = "tool_calls" if calls and delta.finish_reason is FinishReason.STOP else str(delta.finish_reason)
            chunks.append(self._chunk(delta.index, {}, finish_reason=ended, stop_reason=delta.stop_reason))
        return chunks

    def usage(self, results: Sequence[RequestResult]) -> dict[str, Any]:
        """The last chunk: no choices, the usage."""
        return {**self._head(), "choices": [], "usage": usage_of(results)}

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._call.call_id}",
            "object": "chat.completion.chunk",
            "created": self._call.created,
            "model": self._call.model,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason, **more}
        return {**self._head(), "choices": [choice]}


class CompletionChunks:
    """The chunks of one streamed completion call."""

    def __init__(self, call: PreparedCall, tokenizer: Tokenizer) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._lengths: dict[int, int] = {}
        """Characters of each choice so far: where the next token's text begins."""

    def first(self) -> list[dict[str, Any]]:
        """With ``echo``, the prompt of each choice."""
        n = self._call.requests[0].sampling.n
        texts = self._call.prompt_texts if self._call.echo else ()
        return [self._chunk(i * n + k, text) for i, text in enumerate(texts) for k in range(n)]

    def of(self, number: int, delta: TextDelta) -> list[dict[str, Any]]:
        """Chunks for new text of the call's request ``number``."""
        sampling = self._call.requests[number].sampling
        index = number * sampling.n + delta.index
        ended = None if delta.finish_reason is None else str(delta.finish_reason)
        logprobs = None
        if sampling.logprobs is not None and delta.logprobs:
            choice = Choice(
                index=delta.index,
                text=delta.text,
                token_ids=delta.token_ids,
                finish_reason=delta.finish_reason or FinishReason.LENGTH,  # not looked at
                logprobs=delta.logprobs,
            )
            logprobs = completion_logprobs(self._tokenizer, choice, None, sampling.skip_special_tokens)
            start = self._lengths.get(index, 0)
            logprobs["text_offset"] = [start + offset for offset in logprobs["text_offset"]]
        self._lengths[index] = self._lengths.get(index, 0) + len(delta.text)
        if not (delta.text or logprobs or ended):
            return []
        return [self._chunk(index, delta.text, logprobs, ended, stop_reason=delta.stop_reason)]

    def usage(self, results: Sequence[RequestResult]) -> dict[str, Any]:
        """The last chunk: no choices, the usage."""
        return {**self._head(), "choices": [], "usage": usage_of(results)}

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self._call.call_id}",
            "object": "text_completion",
            "created": self._call.created,
            "model": self._call.model,
        }

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason, **more}
        return {**self._head(), "choices": [choice]}
