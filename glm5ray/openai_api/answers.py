"""What GLM-5 writes -> reasoning, content and tool calls.

The chat template ends with ``<think>``, so an answer starts inside the reasoning and ``</think>`` ends it. A call is
``<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>``; it ends the reasoning too.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

THINK, END_THINK, CALL, END_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


class ToolCall(NamedTuple):
    """A function that the model wants called."""

    name: str
    arguments: dict[str, Any]


class Answer(NamedTuple):
    """The parts of one chat answer."""

    reasoning: str | None
    content: str | None
    """``None`` if there are only calls."""
    tool_calls: tuple[ToolCall, ...] = ()


def parse_answer(
    text: str, *, starts_in_reasoning: bool, is_complete: bool, tools: Sequence[dict[str, Any]] = ()
) -> Answer:
    """Takes an answer apart. ``is_complete``: the model ended it, no limit cut it. Calls are looked for only if
    there are ``tools``.
    """
    reasoning, rest = _split_reasoning(text, starts_in_reasoning, is_complete, bool(tools))
    if not tools or CALL not in rest:
        return Answer(reasoning, rest)
    before, *pieces = rest.split(CALL)
    outside, calls = [before], []
    for piece in pieces:
        inside, end, after = piece.partition(END_CALL)
        outside.append(after)
        call = _parse_call(inside, tools) if end or is_complete else None
        if call is not None:
            calls.append(call)
    content = "".join(outside).strip()
    return Answer(reasoning, content or (None if calls else ""), tuple(calls))


def _split_reasoning(text: str, inside: bool, is_complete: bool, with_tools: bool) -> tuple[str | None, str]:
    if not inside and text.lstrip().startswith(THINK):
        inside, text = True, text.lstrip().removeprefix(THINK)
    if not inside:
        return None, text
    reasoning, end, rest = text.partition(END_THINK)
    if with_tools and CALL in reasoning:
        start = reasoning.index(CALL)
        return reasoning[:start], text[start:].replace(END_THINK, "", 1)
    if end:
        return reasoning, rest
    # Without an end the model either skipped the reasoning and answered, or was cut while it reasoned.
    return (None, text) if is_complete else (text, "")


def _parse_call(inside: str, tools: Sequence[dict[str, Any]]) -> ToolCall | None:
    name = inside.partition("<arg_key>")[0].strip()
    if not name:
        return None
    schema = next((t["function"].get("parameters") or {} for t in tools if t["function"]["name"] == name), {})
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    found = _ARGUMENT.findall(inside)
    return ToolCall(name, {key.strip(): _typed(value, properties.get(key.strip())) for key, value in found})


def _typed(value: str, schema: Any) -> Any:
    """The model writes texts bare and all else as JSON; where the schema says text, ``1`` is the text ``1``."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    kinds = kind if isinstance(kind, list) else [kind]
    if "string" in kinds and not ("null" in kinds and value.strip() == "null"):
        return value
    try:
        return json.loads(value, parse_constant=_no_json, parse_float=_finite)
    except (ValueError, RecursionError):
        return value


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _no_json(digits)  # 1e999 would be written back as Infinity


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
