"""What may be asked of an engine: a request that could never be served is refused when it is submitted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glm5ray.errors import CapacityError, RequestError
from glm5ray.protocol import check_token_ids

if TYPE_CHECKING:
    from glm5ray.config import SchedulerSection
    from glm5ray.protocol import Capacity, GenerateRequest


class RequestLimits:
    """The limits of one engine: what the workers can hold, narrowed by the settings."""

    def __init__(self, config: SchedulerSection, capacity: Capacity) -> None:
        wanted = config.max_model_len
        self.max_model_len = capacity.max_model_len if wanted == "auto" else min(wanted, capacity.max_model_len)
        self._capacity = capacity
        self._max_logprobs = config.max_logprobs

    def max_len(self, request: GenerateRequest) -> int:
        """Most tokens, prompt and output, of each answer to ``request``.

        Raises :class:`RequestError` for a value that is wrong by itself, :class:`CapacityError` for one that does not
        fit.
        """
        self._check_prompt(request.prompt_token_ids)
        request.sampling.validate(
            vocab_size=self._capacity.vocab_size,
            max_logprobs=self._max_logprobs,
            eos_token_ids=self._capacity.eos_token_ids,
        )
        if isinstance(request.priority, bool) or not isinstance(request.priority, int):
            raise RequestError(f"priority is {request.priority!r}; it must be a whole number.", param="priority")
        max_len = self._check_length(len(request.prompt_token_ids), request.sampling.max_tokens)
        return self._check_pages(request, max_len)

    def _check_prompt(self, token_ids: tuple[int, ...]) -> None:
        if not token_ids:
            raise RequestError("the prompt has no tokens; it needs at least one.", param="prompt")
        # The usual case costs three passes in C; the slow check finds the token to name.
        if set(map(type, token_ids)) != {int} or min(token_ids) < 0 or max(token_ids) >= self._capacity.vocab_size:
            check_token_ids("prompt", token_ids, self._capacity.vocab_size)

    def _check_length(self, prompt_len: int, max_tokens: int | None) -> int:
        limit = self.max_model_len
        if prompt_len > limit:
            raise CapacityError(
                f"the prompt has {prompt_len} tokens, more than the {limit} that a sequence may have here; shorten it.",
                param="prompt",
                code="context_length_exceeded",
            )
        if prompt_len == limit and max_tokens != 0:
            raise CapacityError(
                f"the prompt has {prompt_len} tokens and a sequence may have {limit} here, so no token could follow; "
                "shorten it, or set max_tokens to 0 to score it.",
                param="prompt",
                code="context_length_exceeded",
            )
        if max_tokens is None:
            return limit
        if prompt_len + max_tokens > limit:
            raise CapacityError(
                f"the prompt has {prompt_len} tokens and max_tokens is {max_tokens}, together more than the {limit} "
                f"that a sequence may have here; max_tokens may be at most {limit - prompt_len}.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return prompt_len + max_tokens

    def _check_pages(self, request: GenerateRequest, max_len: int) -> int:
        """One sequence alone must fit the pool. The last token of an output is sampled and never computed: it needs
        no slot."""
        num_pages, page_size = self._capacity.num_pages, self._capacity.page_size
        num_slots = num_pages * page_size
        cache = f"the KV cache holds {num_slots} ({num_pages} pages of {page_size})"
        prompt_len = len(request.prompt_token_ids)
        if prompt_len > num_slots:
            raise CapacityError(
                f"the prompt has {prompt_len} tokens and {cache}; shorten it, or raise cache.num_pages.",
                param="prompt",
                code="context_length_exceeded",
            )
        if max_len - 1 <= num_slots:
            return max_len
        if request.sampling.max_tokens is None:
            return num_slots + 1  # it asked for as many as possible
        raise CapacityError(
            f"the prompt has {prompt_len} tokens, max_tokens is {request.sampling.max_tokens}, and {cache}; "
            f"max_tokens may be at most {num_slots + 1 - prompt_len}, or raise cache.num_pages.",
            param="max_tokens",
            code="context_length_exceeded",
        )
