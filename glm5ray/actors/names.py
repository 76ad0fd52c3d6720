"""How the actors of an engine are called: people read it on the dashboard, programs find them again by it."""

from __future__ import annotations

NAMESPACE = "glm5ray"
"""Ray's namespace of all engines."""

_PREFIX, _SCHEDULER, _HTTP = "glm5ray:", ":scheduler", ":http"


def scheduler_name(engine: str) -> str:
    """The actor that a client looks up."""
    return f"{_PREFIX}{engine}{_SCHEDULER}"


def http_name(engine: str) -> str:
    """The actor that serves the engine over HTTP."""
    return f"{_PREFIX}{engine}{_HTTP}"


def group_name(engine: str) -> str:
    """The placement group."""
    return f"{_PREFIX}{engine}"


def worker_name(engine: str, rank: int, epoch: int) -> str:
    """A name is free again only after a death is known everywhere, so each epoch has its own."""
    return f"{_PREFIX}{engine}:worker{rank}:{epoch}"


def engine_of(actor_name: str) -> str | None:
    """The engine whose scheduler an actor is; ``None`` for every other actor."""
    return _between(actor_name, _SCHEDULER)


def served_engine_of(actor_name: str) -> str | None:
    """The engine that an actor serves over HTTP; ``None`` for every other actor."""
    return _between(actor_name, _HTTP)


def _between(actor_name: str, suffix: str) -> str | None:
    if actor_name.startswith(_PREFIX) and actor_name.endswith(suffix):
        return actor_name[len(_PREFIX) : -len(suffix)]
    return None
