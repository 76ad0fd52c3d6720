"""Every error that glm5ray raises on purpose.

    Glm5RayError
    ├── ConfigError        a setting: names the field, the value and the remedy
    ├── CheckpointError    a checkpoint folder: names the file, the tensor, what was expected and what was found
    ├── RequestError       one request: becomes an error line or an HTTP 400; the others go on
    │   └── CapacityError  a request that could never fit the limits of this engine
    ├── ChannelError       what came over a rank's connection, or did not: the rank is replaced
    └── WorkerDied         a rank ended; in one process its requests end with an error and a new LLM is needed

Users' mistakes raise these. What only a bug of ours can break is an ``assert`` with the values in its message.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Glm5RayError(Exception):
    """Base of all errors of this package."""


class ConfigError(Glm5RayError):
    """A setting that is unknown, of the wrong type or out of range."""


class CheckpointError(Glm5RayError):
    """A checkpoint that is absent, damaged, incomplete or not of this model."""


class RequestError(Glm5RayError):
    """A request that cannot be served as asked.

    ``param`` is the OpenAI name of the field at fault, ``code`` a stable machine-readable word,
    ``status`` the HTTP status that a server answers with.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status

    def body(self) -> dict[str, dict[str, str | None]]:
        """The error object of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class CapacityError(RequestError):
    """A request that could never fit: refused when it is submitted, not when its turn comes."""


class ChannelError(Glm5RayError):
    """The connection between scheduler and rank broke, or something came over it that has no place there."""


class WorkerDied(Glm5RayError):
    """A worker process ended or stopped answering."""


class EngineUnavailable(Glm5RayError):
    """No engine answers now: it starts, restarts, has failed or has ended. Asking again later may help, unless it has
    failed; a server answers with HTTP status 503."""

    code = "engine_unavailable"
    """For errors of this kind that travel as data."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint like ``; did you mean 'page_size'?`` for an unknown ``name``, or nothing if no known one is near."""
    names = list(known)
    close = get_close_matches(name, names, n=1, cutoff=0.55)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(sorted(names))}" if len(names) <= 12 else ""
