"""Chat messages and tools: checked, and brought into the shape that chat templates read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from glm5ray.errors import RequestError, nearest
from glm5ray.openai_api.body import cut, found, shown

if TYPE_CHECKING:
    from glm5ray.openai_api.body import Body

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Role in the API -> role in the template."""

_TEXT_FIELDS = ("reasoning_content", "name", "tool_call_id")
_FIELDS = ("role", "content", "tool_calls", *_TEXT_FIELDS)
_EMPTY_FIELDS = ("refusal", "annotations", "audio", "function_call")
"""Fields of OpenAI's own answers that come back in a history; they must be empty."""


def read_messages(body: Body) -> list[dict[str, Any]]:
    """``messages`` as a template wants them: contents are texts, arguments of tool calls are objects.

    Raises :class:`RequestError` that names the message and the field.
    """
    messages = body.values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise body.wrong("messages", "a list of at least one message")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def read_tools(body: Body) -> list[dict[str, Any]]:
    """``tools`` that the template may show the model: none with ``tool_choice: none``.

    Raises :class:`RequestError` for a choice that only constrained decoding could keep.
    """
    tools = body.values.get("tools", [])
    if not isinstance(tools, list):
        raise body.wrong("tools", "a list of tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _error(f"tools[{i}] is {shown(tool)}; it must be a function with a name.", "tools")
        if not isinstance(function.get("parameters") or {}, dict):
            raise _error(f"tools[{i}].function.parameters must be a JSON schema.", "tools")
    choice = body.values.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise body.wrong(
            "tool_choice", '"auto" or "none" (a forced call needs constrained decoding, which is not there yet)'
        )
    if not body.flag("parallel_tool_calls", True):
        raise body.wrong("parallel_tool_calls", "true (how many calls come is the model's choice)")
    return [] if choice == "none" else tools


def _error(message: str, param: str = "messages") -> RequestError:
    return RequestError(message, param=param)


def _read_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _error(f"{where} is {shown(message)}; it must be an object with role and content.")
    for name, value in message.items():
        if name in _EMPTY_FIELDS and not value:
            continue
        if name not in _FIELDS:
            raise _error(f"{where} has the unknown field {shown(name)}{nearest(cut(name), _FIELDS)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _error(f"{where}.{found(message, 'role')}; it must be one of {', '.join(_ROLES)}.")
    read: dict[str, Any] = {"role": _ROLES[role]}
    for name in _TEXT_FIELDS:
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise _error(f"{where}.{name} is {shown(value)}; it must be a text.")
        if value is not None:
            read[name] = value
    calls = _read_tool_calls(message.get("tool_calls"), where, role)
    if calls:
        read["tool_calls"] = calls
    content = message.get("content")
    if content is None and role != "assistant":
        raise _error(f"{where}.content is missing; a message of the {role} needs one.")
    read["content"] = _read_content(content, where)
    return read


def _read_content(content: Any, where: str) -> str:
    """Text parts follow each other without anything between, as GLM's templates write them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _error(f"{where}.content is {shown(content)}; it must be a text or a list of text parts.")
    texts = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise _error(f"{where}.content[{i}] is {shown(part)}; this model reads parts of type 'text' only.")
        texts.append(text)
    return "".join(texts)


def _read_tool_calls(calls: Any, where: str, role: str) -> list[dict[str, Any]]:
    if not calls:
        return []
    if role != "assistant" or not isinstance(calls, list):
        raise _error(f"{where}.tool_calls must be a list, and only the assistant calls tools.")
    read = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _error(
                f"{where}.tool_calls[{i}] is {shown(call)}; it must have function.name and function.arguments."
            )
        arguments = _read_arguments(function.get("arguments"), f"{where}.tool_calls[{i}].function.arguments")
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def _read_arguments(arguments: Any, where: str) -> dict[str, Any]:
    """OpenAI writes them as a text that holds JSON; templates want the object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise _error(f"{where} is {shown(arguments)}, which is not valid JSON: {error}.") from error
    if not isinstance(arguments, dict):
        raise _error(f"{where} is {shown(arguments)}; it must be a JSON object.")
    return arguments
