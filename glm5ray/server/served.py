"""From an engine that answers to the application over it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from glm5ray.model.byte_tokenizer import tokenizer_of
from glm5ray.model.checkpoint_folder import resolve_checkpoint
from glm5ray.openai_api.requests import ServedModel
from glm5ray.server.app import create_app

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import FastAPI

    from glm5ray.engine.client import EngineClient, EngineInfo


def served_names(model_path: str, names: Sequence[str] = ()) -> tuple[str, ...]:
    """What requests may call the model: ``names``, the folder's name and its path. The first is what ``/v1/models``
    begins with."""
    return tuple(dict.fromkeys([*names, Path(model_path).name, model_path]))


def app_over(
    client: EngineClient, info: EngineInfo, *, names: Sequence[str] = (), api_key: str | None = None
) -> FastAPI:
    """The application; reads the tokenizer beside the weights. ``info`` is the client's. Raises
    :class:`glm5ray.errors.CheckpointError`."""
    served = ServedModel(
        tokenizer=tokenizer_of(resolve_checkpoint(info.model_path), info.load_format),
        names=served_names(info.model_path, names),
        vocab_size=info.capacity.vocab_size,
        max_logprobs=info.max_logprobs,
    )
    return create_app(client, served, max_model_len=info.capacity.max_model_len, api_key=api_key)
