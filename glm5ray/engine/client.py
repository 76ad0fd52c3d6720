"""EngineClient: an engine as a server or a script sees it, wherever it runs. Tokens in and out; text is above it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from glm5ray.protocol import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from glm5ray.protocol import Capacity, GenerateRequest, TokenEvent
    from glm5ray.scheduler.stats import SchedulerStats


class EngineState(StrEnum):
    """Where an engine is in its life."""

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    """Workers are replaced; requests wait and go on."""
    FAILED = "failed"
    """It gave up and serves nothing; its log says why."""
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStatus:
    """What ``/health``, ``glm5ray status`` and ``/metrics`` read."""

    engine: str
    """Its name; several engines may run in one cluster."""
    state: EngineState
    detail: str
    """One sentence for people: what it waits for, or why it failed."""
    epoch: int
    """Incarnation of the workers; grows with each restart."""
    layout: str
    """``tp 2``, ``tp 8, ep 8``, ``dp 8, ep 8`` ..."""
    seconds_since_step: float
    """Age of the oldest step in flight, or 0 if none is: what the watchdog looks at."""
    num_restarts: int
    steps_per_second: float
    """Mean of the last ten seconds."""
    num_decode_steps: int
    """Steps in which every sequence had one token."""
    num_graph_steps: int
    """Of these, the ones that a CUDA graph computed."""
    scheduler: SchedulerStats


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What does not change while an engine runs."""

    engine: str
    model_path: str
    """As in the config: a folder, or a name like ``nano``; the tokenizer is read from there."""
    capacity: Capacity
    max_logprobs: int
    load_format: str = "checkpoint"
    """As in the config; under ``dummy`` the folder may lack a tokenizer."""


class EngineClient(Protocol):
    """All methods are coroutines of one event loop. Each may raise :class:`glm5ray.errors.EngineUnavailable`."""

    async def info(self) -> EngineInfo: ...

    async def status(self) -> EngineStatus:
        """Answers within seconds, also when the engine hangs."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """News of the request's ``n`` answers, mixed, until each has had its ``finish_reason``.

        Raises :class:`glm5ray.errors.RequestError` before the first event if it cannot be served. An answer that fails
        ends with ``finish_reason`` error and ``error_code``. Leaving the iterator (``aclose``, cancellation) aborts the
        request. Events come in batches inside: no remote call for each token."""
        ...

    async def abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request, or one of its answers; unknown ones are ignored. ``reason``: stop, when a stop string was
        found in the text."""
        ...
