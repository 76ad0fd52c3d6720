"""What a client gets back for one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glm5ray.errors import RequestError
    from glm5ray.protocol import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of a request's ``n`` answers."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    """Without the token that ended it."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop string or the ``stop_token_ids`` entry that ended it; ``None`` for the model's own end of sequence."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per entry of ``token_ids``, if they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """A request that was served."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the prefix cache already held."""
    choices: tuple[Choice, ...]
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's second token to its last."""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """A request that was not served; it stands where the result would."""

    request_id: str
    error: RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New text of one choice, for streaming. The deltas of a choice, joined, are its ``text``."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
