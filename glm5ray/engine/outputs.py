"""Token events -> text, stop strings and finished results."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from glm5ray.engine.results import Choice, RequestFailure, RequestResult, TextDelta
from glm5ray.errors import EngineUnavailable, RequestError
from glm5ray.protocol import FinishReason
from glm5ray.tokenizer import Detokenizer

if TYPE_CHECKING:
    from glm5ray.protocol import GenerateRequest, TokenEvent, TokenLogprobs
    from glm5ray.tokenizer import Tokenizer


class Progress(NamedTuple):
    """What one event changed."""

    delta: TextDelta | None = None
    """New text or the end of a choice."""
    result: RequestResult | RequestFailure | None = None
    """Set with the request's last event."""
    stop: bool = False
    """The choice met a stop string: the scheduler, which knows only tokens, must be told to end it."""


class _ChoiceState:
    """One answer while it grows."""

    def __init__(self, index: int, request: GenerateRequest, tokenizer: Tokenizer) -> None:
        params = request.sampling
        self.index = index
        self.detokenizer = Detokenizer(
            tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def finish(self, reason: FinishReason, stop_reason: int | str | None) -> str:
        """Text that was held back until now."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        return self.detokenizer.finish()

    def to_choice(self) -> Choice:
        assert self.finish_reason is not None, f"choice {self.index} has not ended"
        return Choice(
            index=self.index,
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs),
        )


class RequestOutput:
    """One request while it runs: feed it each of its events in order."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer) -> None:
        self.request = request
        self._choices = [_ChoiceState(i, request, tokenizer) for i in range(request.sampling.n)]
        self._num_cached_tokens: int | None = None
        self._prompt_logprobs: list[TokenLogprobs] = []

    def process(self, event: TokenEvent) -> Progress:
        """Applies an event. Events of a choice that has already ended (by a stop string) change nothing."""
        if self._num_cached_tokens is None:
            self._num_cached_tokens = event.num_cached_tokens
        self._prompt_logprobs += event.prompt_logprobs
        state = self._choices[event.index]
        if state.finish_reason is not None:
            return Progress()
        if event.finish_reason is FinishReason.ERROR:
            state.finish_reason = FinishReason.ERROR
            return Progress(result=self._failure(event))
        text = state.detokenizer.push(event.token_ids)
        stop = state.detokenizer.stopped
        num_tokens = len(state.token_ids) + len(event.token_ids)
        if stop is not None:
            num_tokens = state.detokenizer.num_tokens_used
            text += state.finish(FinishReason.STOP, stop)
        elif event.finish_reason is not None:
            named = event.stop_token_id if event.stop_token_id in self.request.sampling.stop_token_ids else None
            text += state.finish(event.finish_reason, named)
        new = num_tokens - len(state.token_ids)
        state.text.append(text)
        state.token_ids += event.token_ids[:new]
        state.logprobs += event.logprobs[:new]
        delta = TextDelta(
            request_id=self.request.request_id,
            index=event.index,
            text=text,
            token_ids=event.token_ids[:new],
            finish_reason=state.finish_reason,
            stop_reason=state.stop_reason,
            logprobs=event.logprobs[:new],
        )
        return Progress(delta=delta, result=self._result(), stop=stop is not None and event.finish_reason is None)

    def _result(self) -> RequestResult | None:
        if any(choice.finish_reason is None for choice in self._choices):
            return None
        return RequestResult(
            request_id=self.request.request_id,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=self._num_cached_tokens or 0,
            choices=tuple(choice.to_choice() for choice in self._choices),
            prompt_token_ids=self.request.prompt_token_ids,
            prompt_logprobs=tuple(self._prompt_logprobs),
        )

    def _failure(self, event: TokenEvent) -> RequestFailure:
        message = f"the request failed: {event.error or 'unknown error'}"
        status = 503 if event.error_code == EngineUnavailable.code else 500
        return RequestFailure(
            request_id=self.request.request_id, error=RequestError(message, code=event.error_code, status=status)
        )
