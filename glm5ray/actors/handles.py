"""Handles of scheduler actors, and what Ray's errors mean to a client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from glm5ray.actors.names import NAMESPACE, scheduler_name
from glm5ray.errors import EngineUnavailable, Glm5RayError

if TYPE_CHECKING:
    from collections.abc import Callable

CALL_TIMEOUT_S = 15.0
"""The actor's methods answer at once; one that does not within this time counts as gone."""


def find_scheduler(engine: str) -> Any:
    """The handle. Raises :class:`EngineUnavailable` if no engine of this name runs in the cluster."""
    try:
        return ray.get_actor(scheduler_name(engine), NAMESPACE)
    except ValueError as error:
        raise EngineUnavailable(f"no engine called {engine!r} runs in this Ray cluster") from error


def unavailable(engine: str, error: BaseException) -> Glm5RayError:
    """What a failed call means, as the exception to raise."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, Glm5RayError) else EngineUnavailable(f"engine {engine!r} failed: {cause}")
    if isinstance(error, TimeoutError | GetTimeoutError):
        return EngineUnavailable(f"the scheduler of engine {engine!r} does not answer")
    if isinstance(error, RayActorError):
        return EngineUnavailable(f"the scheduler of engine {engine!r} has ended, or is being started again")
    return EngineUnavailable(f"engine {engine!r} cannot be reached: {error}")


class SchedulerHandle:
    """Calls to one engine's scheduler, found by name: after its death the next call finds its successor.

    A call that Ray could not deliver is repeated once; the actor's methods allow that."""

    def __init__(self, engine: str, actor: Any = None) -> None:
        """``actor`` is its handle, if it is known."""
        self.engine = engine
        self._actor = actor

    def call(self, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Waits for the answer. Raises :class:`EngineUnavailable`."""
        try:
            try:
                return ray.get(self._begin(method, args), timeout=timeout_s)
            except ActorUnavailableError:
                return ray.get(self._begin(method, args), timeout=timeout_s)
        except RayError as error:
            self._actor = None
            raise unavailable(self.engine, error) from error

    async def acall(self, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The same for an event loop."""
        try:
            try:
                return await self._answer(method, args, timeout_s)
            except ActorUnavailableError:
                return await self._answer(method, args, timeout_s)
        except (RayError, TimeoutError) as error:
            self._actor = None
            raise unavailable(self.engine, error) from error

    async def _answer(self, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        if self._actor is None:
            self._actor = await asyncio.to_thread(find_scheduler, self.engine)
        return await asyncio.wait_for(_wait_for(self._begin(method, args)), timeout_s)

    def _begin(self, method: str, args: tuple[Any, ...]) -> Any:
        if self._actor is None:
            self._actor = find_scheduler(self.engine)
        remote: Callable[..., Any] = getattr(self._actor, method).remote
        return remote(*args)


async def _wait_for(ref: Any) -> Any:
    return await ref
