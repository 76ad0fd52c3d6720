"""Reading ahead: pieces and groups of any size give the same parameters, through buffers and without; what goes wrong
in a thread is an error of the caller's."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from glm5ray.errors import CheckpointError
from glm5ray.model import streaming
from glm5ray.model.safetensors_reader import CheckpointFiles
from glm5ray.model.tiny import write_tiny
from glm5ray.model.weights import ShardSpec, load_shard
from glm5ray.model_config import ModelConfig

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {"qk_nope_head_dim": 40, "hidden_size": 160, "q_lora_rank": 144}
"""FP8 blocks end inside matrices."""


class DoneAtOnce:
    """A copy to a CPU is done when it returns."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def through_buffers(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """As for a GPU, but that the buffers are ordinary memory; they are filled with ones before each use."""
    buffers: list[torch.Tensor] = []

    def make() -> Any:
        buffers.append(torch.full((streaming.PINNED_BYTES,), 255, dtype=torch.uint8))
        return streaming.Buffer(buffers[-1], DoneAtOnce())  # type: ignore[arg-type]

    monkeypatch.setattr(streaming, "_needs_buffers", lambda device: True)
    monkeypatch.setattr(streaming, "_pinned_buffer", make)
    return buffers


def load(folder: Path, shard: ShardSpec, **arguments: Any) -> dict[str, torch.Tensor]:
    return load_shard(folder, ModelConfig.from_checkpoint(folder), shard, **arguments)


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize(
    ("format", "packed"),
    [("fp32", False), ("bf16", False), ("fp8", False), ("nvfp4", False), ("nvfp4", True), ("nvfp4-ct", True)],
)
def test_sizes_of_pieces_and_groups_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: Any, packed: bool, buffered: bool
) -> None:
    write_tiny(tmp_path / "tiny", format=format, style="glm5.2", num_shards=3, sizes=SIZES)
    for shard in (ShardSpec(), ShardSpec(1, 2)):
        whole = load(tmp_path / "tiny", shard, dtype=torch.bfloat16, packed_experts=packed)
        with monkeypatch.context() as patch:
            buffers = through_buffers(patch) if buffered else []
            patch.setattr(streaming, "MAX_VALUES", 1500)
            patch.setattr(streaming, "GROUP_BYTES", 5000)
            reports: list[tuple[int, int]] = []
            cut = load(
                tmp_path / "tiny",
                shard,
                dtype=torch.bfloat16,
                packed_experts=packed,
                progress=lambda done, total, seen=reports: seen.append((done, total)),
            )
        assert len(buffers) == (min(streaming.MAX_READERS, streaming.os.cpu_count() or 1) + 1 if buffered else 0)
        assert len(reports) > 20
        assert reports[-1][0] == reports[-1][1]
        assert cut.keys() == whole.keys()
        for name, values in whole.items():
            assert torch.equal(values.view(torch.uint8), cut[name].view(torch.uint8)), name


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", format="bf16", num_shards=1)
    file = tmp_path / "tiny" / "model.safetensors"
    files = CheckpointFiles.open(tmp_path / "tiny")
    last = max(files.entries.values(), key=lambda entry: entry.start)
    with file.open("r+b") as handle:
        handle.truncate(last.start + last.num_bytes - 1)
    with files, pytest.raises(CheckpointError, match=r"model\.safetensors was cut short while it was read"):
        files.read_into(last, None, None, torch.empty(last.shape, dtype=torch.bfloat16))


def test_an_error_in_a_thread_ends_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one in order is raised, and no thread is left."""
    write_tiny(tmp_path / "tiny", format="bf16", num_shards=1)
    true_read = CheckpointFiles.read_into

    def failing(self: CheckpointFiles, entry: Any, *arguments: Any) -> None:
        if "layers.1" in entry.name:
            raise CheckpointError(f"{entry.file} cannot be read: a bad sector")
        true_read(self, entry, *arguments)

    monkeypatch.setattr(CheckpointFiles, "read_into", failing)
    monkeypatch.setattr(streaming, "GROUP_BYTES", 2000)
    before = set(threading.enumerate())
    with pytest.raises(CheckpointError, match="a bad sector"):
        load(tmp_path / "tiny", ShardSpec(), dtype=torch.bfloat16)
    assert set(threading.enumerate()) == before
