"""Reading a request body: every field is known, of its type, and either honoured or refused by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from glm5ray.errors import RequestError, nearest
from glm5ray.protocol import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

IGNORED_FIELDS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""Accepted without effect: they ask for nothing that would change the tokens."""

SAMPLING_FIELDS = frozenset(
    {
        "allowed_token_ids",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""Fields of :class:`SamplingParams` that both endpoints take under the same name."""

UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "stream": (False,),
    "stream_options": (),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields of OpenAI's and other engines' APIs that are not served, with the values that ask for nothing."""


MAX_SHOWN = 80
"""Characters of a value or a name that an error repeats."""


def shown(value: object) -> str:
    """A value for an error message as JSON spells it, cut short."""
    if isinstance(value, str):
        value = value[: MAX_SHOWN + 1]  # the rest would be encoded only to be cut off
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (RecursionError, ValueError, TypeError):
        return "a value that JSON cannot spell"
    return cut(text)


def cut(text: str) -> str:
    """At most ``MAX_SHOWN`` characters of ``text``."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def found(values: Mapping[str, Any], name: str) -> str:
    """``"model is null"`` or ``"model is missing"``, to begin an error message with."""
    return f"{name} is {shown(values[name]) if name in values else 'missing'}"


class Body:
    """Typed look-ups in a body; ``null`` counts as absent, as in OpenAI's API.

    Raises :class:`RequestError` with ``param``, for unknown fields with the nearest known name.
    """

    def __init__(self, values: Any, fields: Iterable[str]) -> None:
        if not isinstance(values, dict):
            raise RequestError(f"the body is {shown(values)}; it must be a JSON object.")
        known = {*fields, *SAMPLING_FIELDS}
        for name, value in values.items():
            if name in known or name in IGNORED_FIELDS or value is None:
                continue
            if name not in UNSUPPORTED_FIELDS:
                hint = nearest(cut(name), known) or "; leave it out"
                raise RequestError(f"unknown field {shown(name)}{hint}", param=cut(name), code="unknown_parameter")
            if value not in UNSUPPORTED_FIELDS[name]:
                message = f"{name} is {shown(value)}, which this endpoint does not support; leave it out."
                raise RequestError(message, param=name, code="unsupported_parameter")
        self.values: Mapping[str, Any] = {
            name: value for name, value in values.items() if name in known and value is not None
        }

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def wrong(self, name: str, wanted: str) -> RequestError:
        """The error for a field of another type."""
        return RequestError(f"{found(self.values, name)}; it must be {wanted}.", param=name)

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integer(self, name: str, default: int | None = None) -> int | None:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise self.wrong(name, "a whole number")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        try:
            return float(value)
        except OverflowError as error:
            raise self.wrong(name, "a number of ordinary size") from error

    def integers(self, name: str) -> tuple[int, ...] | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(x, int) and not isinstance(x, bool) for x in value):
            raise self.wrong(name, "a list of whole numbers")
        return tuple(value)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.values.get(name, {})
        if not isinstance(value, dict):
            raise self.wrong(name, "a JSON object")
        return value


def read_sampling(
    body: Body, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """The sampling fields of a body over ``defaults``. Ranges are :meth:`SamplingParams.validate`'s business."""
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        min_tokens=body.integer("min_tokens", defaults.min_tokens) or 0,
        n=_required(body, "n", defaults.n),
        temperature=body.number("temperature", defaults.temperature),
        top_k=_required(body, "top_k", defaults.top_k),
        top_p=body.number("top_p", defaults.top_p),
        min_p=body.number("min_p", defaults.min_p),
        repetition_penalty=body.number("repetition_penalty", defaults.repetition_penalty),
        presence_penalty=body.number("presence_penalty", defaults.presence_penalty),
        frequency_penalty=body.number("frequency_penalty", defaults.frequency_penalty),
        logit_bias=_logit_bias(body),
        allowed_token_ids=body.integers("allowed_token_ids"),
        seed=body.integer("seed", defaults.seed),
        stop=_stop(body, defaults),
        stop_token_ids=body.integers("stop_token_ids") or defaults.stop_token_ids,
        ignore_eos=body.flag("ignore_eos", defaults.ignore_eos),
        include_stop_str_in_output=body.flag("include_stop_str_in_output", defaults.include_stop_str_in_output),
        skip_special_tokens=body.flag("skip_special_tokens", defaults.skip_special_tokens),
    )


def _required(body: Body, name: str, default: int) -> int:
    value = body.integer(name, default)
    assert value is not None, f"{name} has a default"
    return value


def _stop(body: Body, defaults: SamplingParams) -> tuple[str, ...]:
    value = body.values.get("stop", list(defaults.stop))
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise body.wrong("stop", "a text or a list of texts")
    return tuple(strings)


def _logit_bias(body: Body) -> dict[int, float]:
    """JSON has texts as keys; they stand for token ids."""
    bias: dict[int, float] = {}
    for key, value in body.mapping("logit_bias").items():
        # int() would also read " 7", "1_0" and other scripts' digits; an id is written one way
        if not (key.isascii() and key.isdigit() and len(key) <= 18):
            raise RequestError(f"logit_bias has the key {shown(key)}; keys are token ids.", param="logit_bias")
        bias[int(key)] = value
    return bias
