"""From settings to an engine that is ready, with progress on standard error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from glm5ray.cli import signals
from glm5ray.cli.progress import ProgressBar, load_progress
from glm5ray.config import ModelSection
from glm5ray.errors import ConfigError

if TYPE_CHECKING:
    from glm5ray.config import EngineConfig
    from glm5ray.engine.llm import LLM

DEFAULT_MODEL = ModelSection().path


def load_engine(settings: EngineConfig, *, address: str | None = None, engine: str = "default") -> LLM:
    """In this process or, with ``address``, in a Ray cluster: the engine of this name, or one for this command alone.

    Raises :class:`CheckpointError`, :class:`ConfigError` and :class:`EngineUnavailable`, and ``KeyboardInterrupt``
    after a signal."""
    if address is not None:
        return _join_engine(settings, address, engine)
    with signals.held():
        import glm5ray.worker.worker  # noqa: F401 - torch and all that is heavy
        from glm5ray.engine.llm import LLM

    with ProgressBar(f"loading {settings.model.path}", None, "MiB") as bar:
        llm = LLM(config=settings, progress=load_progress(bar))
    signals.check()
    return llm


def _join_engine(settings: EngineConfig, address: str, engine: str) -> LLM:
    with signals.held():
        from glm5ray.actors.launch import open_llm

    llm = open_llm(settings, engine=engine, address=address, progress=lambda phase: typer.echo(phase, err=True))
    if (wanted := settings.model.path) not in (DEFAULT_MODEL, llm.config.model.path):
        llm.close()
        raise ConfigError(
            f"engine {engine!r} serves {llm.config.model.path}, not {wanted}; leave --model out, or name another engine"
        )
    signals.check()
    return llm
