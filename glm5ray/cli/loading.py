"""From settings to an engine that is ready, with progress on standard error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glm5ray.cli import signals
from glm5ray.cli.progress import ProgressBar, load_progress

if TYPE_CHECKING:
    from glm5ray.config import EngineConfig
    from glm5ray.engine.llm import LLM


def load_engine(settings: EngineConfig) -> LLM:
    """Raises :class:`CheckpointError` and :class:`ConfigError`, and ``KeyboardInterrupt`` after a signal."""
    with signals.held():
        import glm5ray.worker.worker  # noqa: F401 - torch and all that is heavy
        from glm5ray.engine.llm import LLM

    with ProgressBar(f"loading {settings.model.path}", None, "MiB") as bar:
        llm = LLM(config=settings, progress=load_progress(bar))
    signals.check()
    return llm
