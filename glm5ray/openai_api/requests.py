"""Bodies of ``/v1/chat/completions`` and ``/v1/completions`` -> :class:`GenerateRequest`.

Pure: no engine, no clock but ``created``. What a body asks for is done, or refused with the field's name; nothing is
dropped in silence.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from glm5ray.errors import CheckpointError, RequestError
from glm5ray.openai_api.body import Body, read_sampling, shown
from glm5ray.openai_api.messages import read_messages, read_tools
from glm5ray.protocol import GenerateRequest, SamplingParams, check_token_ids

if TYPE_CHECKING:
    from glm5ray.tokenizer import Tokenizer

CHAT_FIELDS = (
    "add_generation_prompt",
    "chat_template_kwargs",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "model",
    "parallel_tool_calls",
    "priority",
    "reasoning_effort",
    "tool_choice",
    "tools",
    "top_logprobs",
)
COMPLETION_FIELDS = ("echo", "logprobs", "max_tokens", "model", "priority", "prompt")


MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """What the translation must know of the model behind the API."""

    tokenizer: Tokenizer
    names: tuple[str, ...]
    """Names that a body may call the model by."""
    vocab_size: int
    """Ids below it are valid; the padded size of the model, not the tokenizer's."""
    max_logprobs: int = 20
    defaults: SamplingParams = field(default_factory=SamplingParams)
    """For the fields that a body leaves out."""

    def require(self, name: str) -> str:
        """``name``, if the model is called so. Raises :class:`RequestError`, status 404."""
        if name not in self.names:
            raise RequestError(
                f"the model {shown(name)} is not served here; served: {', '.join(self.names)}.",
                param="model",
                code="model_not_found",
                status=404,
            )
        return name


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedCall:
    """One body, ready to run, with what its answer needs."""

    call_id: str
    model: str
    created: int
    """Seconds since 1970."""
    requests: tuple[GenerateRequest, ...]
    """One; of a completion with a list of prompts, one for each."""
    echo: bool = False
    prompt_texts: tuple[str, ...] = ()
    """With ``echo``, the text of each request's prompt."""
    tools: tuple[dict[str, Any], ...] = ()
    starts_in_reasoning: bool = False
    """The prompt ends with an open ``<think>``."""


def parse_chat_body(values: Any, served: ServedModel, *, request_id: str) -> PreparedCall:
    """A body of ``/v1/chat/completions``. Raises :class:`RequestError`."""
    body = Body(values, CHAT_FIELDS)
    model = _model_name(body, served)
    messages, tools = read_messages(body), read_tools(body)
    prompt = _render(body, served, messages, tools)
    sampling = read_sampling(
        body, served.defaults, max_tokens=_chat_max_tokens(body), logprobs=_chat_logprobs(body), prompt_logprobs=None
    )
    sampling.validate(vocab_size=served.vocab_size, max_logprobs=served.max_logprobs)
    request = GenerateRequest(
        request_id=request_id,
        prompt_token_ids=_encode(served, prompt, "messages"),
        sampling=sampling,
        priority=_priority(body),
    )
    return PreparedCall(
        call_id=request_id,
        model=model,
        created=int(time.time()),
        requests=(request,),
        tools=tuple(tools),
        starts_in_reasoning=prompt.rstrip().endswith("<think>"),
    )


def parse_completion_body(values: Any, served: ServedModel, *, request_id: str) -> PreparedCall:
    """A body of ``/v1/completions``. Raises :class:`RequestError`."""
    body = Body(values, COMPLETION_FIELDS)
    model = _model_name(body, served)
    echo = body.flag("echo", False)
    logprobs = body.integer("logprobs")
    sampling = read_sampling(
        body,
        served.defaults,
        max_tokens=body.integer("max_tokens"),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )
    sampling.validate(vocab_size=served.vocab_size, max_logprobs=served.max_logprobs)
    prompts = _read_prompts(body, served)
    names = [request_id] if len(prompts) == 1 else [f"{request_id}-{i}" for i in range(len(prompts))]
    requests = [
        GenerateRequest(request_id=name, prompt_token_ids=token_ids, sampling=sampling, priority=_priority(body))
        for name, (_, token_ids) in zip(names, prompts, strict=True)
    ]
    return PreparedCall(
        call_id=request_id,
        model=model,
        created=int(time.time()),
        requests=tuple(requests),
        echo=echo,
        prompt_texts=tuple(text for text, _ in prompts) if echo else (),
    )


def _model_name(body: Body, served: ServedModel) -> str:
    model = body.text("model")
    return served.names[0] if model is None else served.require(model)


def _priority(body: Body) -> int:
    priority = body.integer("priority") or 0
    if abs(priority) > MAX_PRIORITY:
        raise body.wrong("priority", f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return priority


def _chat_max_tokens(body: Body) -> int | None:
    """``max_tokens`` is the older name of ``max_completion_tokens``. Neither: up to the model's limit."""
    limits = {name: body.integer(name) for name in ("max_tokens", "max_completion_tokens") if name in body}
    if len(set(limits.values())) > 1:
        raise RequestError("max_tokens and max_completion_tokens differ; send one of them.", param="max_tokens")
    for name, limit in limits.items():
        if limit is None or limit < 1:
            raise RequestError(f"{name} is {limit}; an answer needs at least 1.", param=name)
        return limit
    return None


def _chat_logprobs(body: Body) -> int | None:
    wanted = body.flag("logprobs", False)
    top = body.integer("top_logprobs")
    if top is not None and not wanted:
        raise RequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
    if top is not None and top < 0:
        raise RequestError(f"top_logprobs is {top}; it must be at least 0.", param="top_logprobs")
    return (top or 0) if wanted else None


def _render(body: Body, served: ServedModel, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    options = _template_options(body)
    is_open = body.flag("add_generation_prompt", True)
    try:
        return served.tokenizer.apply_chat_template(messages, tools or None, add_generation_prompt=is_open, **options)
    except CheckpointError as error:  # no template: completions can be served all the same
        raise RequestError(f"{error}.", param="messages", code="no_chat_template") from error


_RESERVED_OPTIONS = ("messages", "tools", "add_generation_prompt", "self")
"""Fields of their own, and the name by which a template calls itself."""


def _template_options(body: Body) -> dict[str, Any]:
    """Variables of the chat template: ``chat_template_kwargs``, and ``reasoning_effort`` (``none``: no thinking)."""
    options = dict(body.mapping("chat_template_kwargs"))
    for name in _RESERVED_OPTIONS:
        if name in options:
            why = "a name that templates have for themselves" if name == "self" else "a field of its own"
            raise RequestError(f"chat_template_kwargs has {name}, which is {why}.", param="chat_template_kwargs")
    effort = body.text("reasoning_effort")
    if effort == "none":
        options.setdefault("enable_thinking", False)
    elif effort is not None:
        options.setdefault("reasoning_effort", effort)
    return options


def _read_prompts(body: Body, served: ServedModel) -> list[tuple[str, tuple[int, ...]]]:
    """Text and ids of each prompt. A list of numbers is one prompt, of token ids."""
    value = body.values.get("prompt")
    wanted = "a text, a list of texts, a list of token ids or a list of such lists"
    if isinstance(value, str):
        return [(value, _encode(served, value, "prompt"))]
    if not isinstance(value, list) or not value:
        raise body.wrong("prompt", wanted)
    if all(isinstance(entry, str) for entry in value):
        return [(text, _encode(served, text, "prompt")) for text in value]
    lists = value if all(isinstance(entry, list) for entry in value) else [value]
    prompts = []
    for token_ids in lists:
        if any(not isinstance(token_id, int) for token_id in token_ids):
            raise body.wrong("prompt", wanted)
        check_token_ids("prompt", token_ids, served.vocab_size)
        if not token_ids:
            raise _empty("prompt")
        prompts.append((served.tokenizer.decode(token_ids, skip_special_tokens=False), tuple(token_ids)))
    return prompts


def _encode(served: ServedModel, text: str, param: str) -> tuple[int, ...]:
    try:
        token_ids = served.tokenizer.encode(text)
    except RequestError as error:
        raise RequestError(error.message, param=param) from error
    if not token_ids:
        raise _empty(param)
    return tuple(token_ids)


def _empty(param: str) -> RequestError:
    return RequestError("the prompt is empty; the model needs at least one token to go on from.", param=param)
