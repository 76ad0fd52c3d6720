"""What a client saw of each answer, checked event by event against what it must see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from glm5ray.protocol import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from glm5ray.protocol import GenerateRequest, TokenEvent


@dataclass
class Answer:
    request: GenerateRequest
    max_new: int
    token_ids: list[int] = field(default_factory=list)
    num_events: int = 0
    reason: FinishReason | None = None


class ClientRecord:
    """All requests of a run. ``next_token`` is the model that the worker has too."""

    def __init__(
        self, next_token: Callable[[str, int, int], int], eos: int, max_model_len: int, num_slots: int
    ) -> None:
        self.answers: dict[tuple[str, int], Answer] = {}
        self._next_token = next_token
        self._eos = eos
        self._max_model_len = max_model_len
        self._num_slots = num_slots

    def add(self, request: GenerateRequest) -> None:
        max_new = request.sampling.max_tokens
        if max_new is None:
            max_new = min(self._max_model_len, self._num_slots + 1) - len(request.prompt_token_ids)
        for index in range(request.sampling.n):
            self.answers[request.request_id, index] = Answer(request, max_new)

    @property
    def unfinished(self) -> list[str]:
        """request_ids, each once."""
        return list(dict.fromkeys(key[0] for key, answer in self.answers.items() if answer.reason is None))

    def see(self, events: Iterable[TokenEvent]) -> list[TokenEvent]:
        """Takes in what one call returned; returns those that end an answer."""
        events = list(events)
        keys = [(event.request_id, event.index) for event in events]
        assert len(set(keys)) == len(keys), f"two events of an answer in one step: {keys}"
        for event in events:
            self._see(event, self.answers[event.request_id, event.index])
        return [event for event in events if event.finish_reason is not None]

    def _see(self, event: TokenEvent, answer: Answer) -> None:
        assert answer.reason is None, f"{event} after the end"
        request, sampling = answer.request, answer.request.sampling
        prompt_len = len(request.prompt_token_ids)
        if event.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            answer.reason = event.finish_reason
            assert event.token_ids == ()
            return
        answer.num_events += 1
        if answer.num_events > 1 or sampling.prompt_logprobs is None:
            assert event.prompt_logprobs == ()
        else:
            scored = [(entry.token_id, entry.logprob) for entry in event.prompt_logprobs]
            assert scored == [(request.prompt_token_ids[at], -float(at)) for at in range(1, prompt_len)]
        if answer.num_events > 1 or sampling.prompt_logprobs is not None:
            assert event.num_cached_tokens == 0
        assert event.num_cached_tokens < prompt_len
        for token in event.token_ids:
            position = prompt_len + len(answer.token_ids)
            assert token == self._next_token(request.request_id, event.index, position), f"{event} at {position}"
            answer.token_ids.append(token)
        if sampling.logprobs is not None:
            assert [entry.token_id for entry in event.logprobs] == list(event.token_ids)
        self._check_end(event, answer)

    def _check_end(self, event: TokenEvent, answer: Answer) -> None:
        sampling = answer.request.sampling
        stops = {*sampling.stop_token_ids} | (set() if sampling.ignore_eos else {self._eos})
        num_new = len(answer.token_ids)
        assert num_new <= answer.max_new
        ended_before = [t for t in answer.token_ids[sampling.min_tokens :] if t in stops]
        assert not ended_before, f"went on after stop token {ended_before}"
        answer.reason = event.finish_reason
        if event.finish_reason is FinishReason.STOP:
            position = len(answer.request.prompt_token_ids) + num_new
            token = self._next_token(event.request_id, event.index, position)
            assert event.stop_token_id == token
            assert token in stops
            assert num_new >= sampling.min_tokens
            assert event.token_ids == ()
        else:
            assert event.stop_token_id is None
            assert (event.finish_reason is FinishReason.LENGTH) == (num_new == answer.max_new), f"{event} at {num_new}"
