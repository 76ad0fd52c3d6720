"""What is measured of one request while its tokens arrive."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glm5ray.engine.results import TextDelta
    from glm5ray.server.exposition import ServerMetrics


class RequestTimings:
    """Begins with its construction."""

    def __init__(self, metrics: ServerMetrics, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._started_s = time.monotonic()
        self._choices: dict[int, _Choice] = {}

    def arrived(self, delta: TextDelta, *, is_last: bool) -> None:
        """``delta`` is here; ``is_last``: with it the whole request has ended."""
        metrics, now_s = self._metrics, time.monotonic()
        choice = self._choices.get(delta.index)
        if delta.token_ids:
            if not self._choices:
                metrics.ttft_s.observe(now_s - self._started_s)
            if choice is None:
                choice = self._choices[delta.index] = _Choice(now_s)
            else:
                metrics.inter_token_s.observe(now_s - choice.last_s)
                choice.num_later += len(delta.token_ids)
                choice.last_s = now_s
            metrics.generation_tokens.inc(len(delta.token_ids))
        if delta.finish_reason is not None:
            metrics.ended(str(delta.finish_reason))
            if choice is not None and choice.num_later:
                metrics.time_per_token_s.observe((choice.last_s - choice.first_s) / choice.num_later)
        if is_last:
            metrics.prompt_tokens.inc(self._num_prompt_tokens)
            metrics.latency_s.observe(now_s - self._started_s)


class _Choice:
    """When the tokens of one answer came."""

    __slots__ = ("first_s", "last_s", "num_later")

    def __init__(self, now_s: float) -> None:
        self.first_s = self.last_s = now_s
        self.num_later = 0
        """Tokens behind those that came first."""
