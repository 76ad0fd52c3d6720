"""An optional file that is a link to nowhere is a damaged checkpoint, not one without the file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch

from glm5ray.errors import CheckpointError
from glm5ray.model.tiny import write_tiny
from glm5ray.model.weights import ShardSpec, load_shard
from glm5ray.model_config import ModelConfig
from glm5ray.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("target", ["nowhere", "itself"])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "hf_quant_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
    ],
)
def test_a_link_to_nowhere_is_named(tmp_path: Path, name: str, target: str) -> None:
    folder = tmp_path / "tiny"
    write_tiny(folder, format="bf16", with_mtp=False)
    path = folder / name
    path.unlink(missing_ok=True)
    path.symlink_to(name if target == "itself" else "nowhere")
    with pytest.raises(CheckpointError, match=re.escape(name)):
        read_all(folder)


def read_all(folder: Path) -> None:
    config = ModelConfig.from_checkpoint(folder)
    Tokenizer.from_checkpoint(folder)
    load_shard(folder, config, ShardSpec(), dtype=torch.float32)
