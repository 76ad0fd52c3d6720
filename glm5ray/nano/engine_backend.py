"""The engine as a backend of the evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glm5ray.engine.results import RequestFailure
from glm5ray.protocol import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from glm5ray.engine.llm import LLM


class EngineBackend:
    """All prompts at once through an :class:`LLM`, greedy."""

    name = "glm5ray"

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """The new token ids of each prompt, without the one that ended it. Raises :class:`RequestError`."""
        params = SamplingParams(max_tokens=max_new_tokens, temperature=0.0)
        answers = []
        for result in self._llm.generate([list(prompt) for prompt in prompts], params):
            if isinstance(result, RequestFailure):
                raise result.error
            answers.append(list(result.choices[0].token_ids))
        return answers
