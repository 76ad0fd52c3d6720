"""Damaged, incomplete and foreign checkpoints: an error of ours that names what is wrong, whatever the damage."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from glm5ray.errors import CheckpointError
from glm5ray.model.safetensors_reader import CheckpointFiles, read_header
from glm5ray.model.tiny import write_tiny
from glm5ray.model.weights import ShardSpec, load_shard
from glm5ray.model_config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.1.mlp.experts.3.up_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each format: in one file, and ``sharded`` in two."""
    root = tmp_path_factory.mktemp("healthy")
    formats: list[Any] = ["bf16", "fp8", "nvfp4", "nvfp4-ct"]
    for format in formats:
        write_tiny(root / format, format=format, num_shards=1)
    write_tiny(root / "sharded", num_shards=2)
    return {folder.name: folder for folder in root.iterdir()}


@pytest.fixture
def copy(healthy: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """``copy(format)`` -> a folder that may be damaged."""
    return lambda format: Path(shutil.copytree(healthy[format], tmp_path / format))


def load(folder: Path) -> Tensors:
    config = ModelConfig.from_checkpoint(folder)
    return load_shard(folder, config, ShardSpec(), dtype=torch.float32, with_mtp=True)


def failure(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    return str(caught.value)


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def rewrite_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the JSON header and leaves the tensors' bytes as they are."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def rename(tensors: Tensors, old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


@pytest.mark.parametrize(
    ("format", "change", "words"),
    [
        ("bf16", lambda t: t.pop("lm_head.weight"), ["lm_head.weight [272, 64] is missing"]),
        ("bf16", lambda t: [t.pop(f"{EXPERT}.weight"), t.pop("model.norm.weight")], [EXPERT, "is missing, and 1 more"]),
        ("bf16", lambda t: t.pop("model.layers.2.enorm.weight"), ["model.layers.2.enorm.weight [64] is missing"]),
        (
            "bf16",
            lambda t: t.update({"model.extra": torch.ones(3)}),
            ["model.extra is F32 [3]", "no part of this model"],
        ),
        (
            "bf16",
            lambda t: rename(t, "model.norm.weight", "model.norm.wieght"),
            ["model.norm.weight [64] is missing"],
        ),
        (
            "bf16",
            lambda t: t.update({f"{EXPERT}.weight": torch.ones(64, 32).bfloat16()}),
            [f"{EXPERT}.weight is BF16 [64, 32]; expected BF16 or F32 or F16 [32, 64]"],
        ),
        (
            "bf16",
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}),
            ["model.norm.weight is I32 [64]; expected BF16 or F32 or F16 [64]"],
        ),
        ("bf16", lambda t: t.update({f"{EXPERT}.weight": torch.ones(32, 64).double()}), ["F64", "expected BF16"]),
        ("bf16", lambda t: t.update({f"{EXPERT}.weight_scale": torch.ones(1)}), ["weight_scale", "does not go with"]),
        ("bf16", lambda t: t["model.norm.weight"].fill_(float("nan")), ["model.norm.weight holds NaN or infinity"]),
        (
            "bf16",
            lambda t: t["model.layers.1.mlp.gate.e_score_correction_bias"].fill_(float("inf")),
            ["e_score_correction_bias holds NaN or infinity"],
        ),
        (
            "bf16",
            lambda t: t.update({"lm_head.weight": torch.zeros(272, 32, dtype=torch.uint8)}),
            ["lm_head.weight is U8 [272, 32]; expected BF16"],
        ),
        (
            "fp8",
            lambda t: t.pop("model.layers.0.self_attn.o_proj.weight_scale_inv"),
            ["o_proj.weight is F8_E4M3", "weight_scale_inv, F32 [1, 1], is missing"],
        ),
        (
            "fp8",
            lambda t: t.update({"model.layers.0.self_attn.o_proj.weight_scale_inv": torch.ones(2, 1)}),
            ["weight_scale_inv is F32 [2, 1]; expected F32 [1, 1]"],
        ),
        (
            "fp8",
            lambda t: t["model.layers.0.self_attn.o_proj.weight_scale_inv"].fill_(float("nan")),
            ["o_proj.weight_scale_inv holds NaN"],
        ),
        (
            "fp8",
            lambda t: t["model.layers.0.self_attn.o_proj.weight_scale_inv"].fill_(-1.5),
            ["o_proj.weight_scale_inv holds a negative scale, -1.5"],
        ),
        ("nvfp4", lambda t: t.pop(f"{EXPERT}.weight_scale_2"), [f"{EXPERT}.weight_scale_2, F32 [], is missing"]),
        ("nvfp4", lambda t: t.pop(f"{EXPERT}.weight_scale"), [f"{EXPERT}.weight_scale, F8_E4M3 [32, 4], is missing"]),
        ("nvfp4", lambda t: t.pop(f"{EXPERT}.weight"), [f"{EXPERT}.weight [32, 64] is missing"]),
        ("nvfp4", lambda t: t[f"{EXPERT}.weight_scale_2"].fill_(float("inf")), ["weight_scale_2 holds infinity"]),
        (
            "nvfp4",
            lambda t: t[f"{EXPERT}.weight_scale"].view(torch.uint8)[3, 1].fill_(0x7F),
            [f"{EXPERT}.weight_scale holds NaN"],
        ),
        (
            "nvfp4",
            lambda t: t.update({f"{EXPERT}.weight_scale": torch.ones(32, 4)}),
            ["weight_scale is F32 [32, 4]; expected F8_E4M3 [32, 4]"],
        ),
        (
            "nvfp4",
            lambda t: t.update({f"{EXPERT}.weight_scale_2": torch.ones(32)}),
            ["weight_scale_2 is F32 [32]; expected F32 []"],
        ),
        (
            "nvfp4-ct",
            lambda t: t[f"{EXPERT}.weight_global_scale"].zero_(),
            ["weight_global_scale is 0 and has to divide"],
        ),
        ("nvfp4-ct", lambda t: t.update({f"{EXPERT}.weight": t["lm_head.weight"]}), [f"{EXPERT}.weight", "no part"]),
    ],
)
def test_tensors_that_are_wrong(
    copy: Callable[[str], Path], format: str, change: Callable[[Tensors], object], words: list[str]
) -> None:
    folder = copy(format)
    edit(folder, lambda tensors: [change(tensors), tensors.update({k: v.clone() for k, v in tensors.items()})])
    message = failure(folder)
    assert all(word in message for word in words), message
    assert str(folder) in message


def test_config_that_asks_for_billions_of_experts_ends_soon(copy: Callable[[str], Path]) -> None:
    folder = copy("bf16")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "n_routed_experts": 2**31 - 1}))
    assert "mlp.gate.weight is BF16 [8, 64]; expected BF16 or F32 or F16 [2147483647, 64]" in failure(folder)
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".mlp.gate." in name])
    assert "mlp.gate.weight [2147483647, 64] is missing, and 100000 more" in failure(folder)


def test_indexer_weights_in_a_shared_layer(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", style="glm5.2", num_shards=1)
    name = "model.layers.4.self_attn.indexer.wk.weight"
    edit(tmp_path / "tiny", lambda tensors: tensors.update({name: torch.ones(32, 64)}))
    message = failure(tmp_path / "tiny")
    assert name in message
    assert "layer 4 shares the selection of an earlier one" in message


def test_mtp_layer_that_the_config_does_not_have(copy: Callable[[str], Path]) -> None:
    folder = copy("bf16")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "num_nextn_predict_layers": 0}))
    assert "num_nextn_predict_layers 0" in failure(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / SECOND).unlink(), [SECOND, "is missing"]),
        (lambda f: os.truncate(f / SECOND, 30_000), [SECOND, "is truncated: it has 30000 bytes, its header describes"]),
        (lambda f: os.truncate(f / SECOND, 100), [SECOND, "cut short: it has 100 bytes"]),
        (lambda f: os.truncate(f / SECOND, 3), [SECOND, "cut short: it has 3 bytes"]),
        (lambda f: os.truncate(f / SECOND, 0), [SECOND, "cut short: it has 0 bytes"]),
        (lambda f: (f / INDEX).write_text("{"), [INDEX, "is not valid JSON"]),
        (lambda f: (f / INDEX).write_text("{}"), [INDEX, "weight_map is missing"]),
        (lambda f: (f / INDEX).write_text('{"weight_map": {"a": "../x.safetensors"}}'), [INDEX, "in the same folder"]),
        (lambda f: (f / INDEX).write_text('{"weight_map": {"a": 3}}'), [INDEX, "a is in 3"]),
        (lambda f: (f / INDEX).write_text('{"weight_map": {"a": "x.bin"}}'), [INDEX, "'x.bin'"]),
        (
            lambda f: (f / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'),
            [INDEX, "'a' is there twice"],
        ),
        (lambda f: [p.unlink() for p in f.glob("*.safe*")], ["holds no safetensors files and no", INDEX]),
        (lambda f: shutil.copy(f / FIRST, f / SECOND), ["is in two files", FIRST, SECOND]),
        (lambda f: (f / "config.json").unlink(), ["config.json is missing"]),
        (lambda f: ((f / SECOND).unlink(), os.mkfifo(f / SECOND)), [SECOND, "is no regular file"]),
        (lambda f: ((f / SECOND).unlink(), (f / SECOND).mkdir()), [SECOND, "is no regular file"]),
    ],
)
def test_files_that_are_wrong(copy: Callable[[str], Path], change: Callable[[Path], object], words: list[str]) -> None:
    folder = copy("sharded")
    change(folder)
    message = failure(folder)
    assert all(word in message for word in words), message


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    values = json.loads((folder / INDEX).read_text())
    change(values["weight_map"])
    (folder / INDEX).write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update({"lm_head.weight": FIRST}), [f"lm_head.weight is in {FIRST}; it is in {SECOND}"]),
        (lambda m: m.update({"model.ghost": FIRST}), [f"model.ghost is in {FIRST}; it is not"]),
        (lambda m: m.pop("lm_head.weight"), ["holds lm_head.weight, which", "does not list"]),
        (
            lambda m: m.update({"a": "model-00003-of-00003.safetensors"}),
            ["model-00003-of-00003.safetensors is missing"],
        ),
    ],
)
def test_index_that_disagrees_with_the_files(
    copy: Callable[[str], Path], change: Callable[[dict[str, str]], object], words: list[str]
) -> None:
    folder = copy("sharded")
    change_index(folder, change)
    message = failure(folder)
    assert all(word in message for word in words), message


def test_several_files_without_an_index(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    before = load(folder)
    (folder / INDEX).unlink()
    after = load(folder)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h["lm_head.weight"].update(dtype="F4"), ["lm_head.weight has the type 'F4'; known: "]),
        (lambda h: h["lm_head.weight"].update(dtype=["BF16"]), ["has the type ['BF16']"]),
        (lambda h: h["lm_head.weight"].update(shape=[272, -64]), ["has the shape [272, -64]"]),
        (lambda h: h["lm_head.weight"].update(shape="272"), ["has the shape '272'"]),
        (lambda h: h["lm_head.weight"].update(shape=[272, True]), ["has the shape [272, True]"]),
        (lambda h: h["lm_head.weight"].update(shape=[272, 10**30]), ["which is", "bytes, but has 34816"]),
        (lambda h: h["lm_head.weight"].update(data_offsets=[10, 4]), ["has the data_offsets [10, 4]"]),
        (lambda h: h["lm_head.weight"].pop("data_offsets"), ["has the data_offsets None"]),
        (lambda h: h.update({"lm_head.weight": 7}), ["entry of lm_head.weight is 7"]),
        (
            lambda h: h["lm_head.weight"].update(data_offsets=[2**40, 2**40 + 34816]),
            ["leaves a gap before it"],
        ),
        (lambda h: h["lm_head.weight"].update(data_offsets=[0, 34816]), ["overlaps the tensor before it"]),
        (lambda h: h.pop("lm_head.weight"), ["leaves a gap before it"]),
    ],
)
def test_headers_that_are_wrong(
    copy: Callable[[str], Path], change: Callable[[dict[str, Any]], object], words: list[str]
) -> None:
    folder = copy("bf16")
    file = folder / "model.safetensors"
    rewrite_header(file, change)
    message = failure(folder)
    assert all(word in message for word in words), message
    assert str(file) in message


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ((2**62).to_bytes(8, "little") + b"{}", "cut short"),
        ((2).to_bytes(8, "little") + b"[]", "the header is a list"),
        ((2).to_bytes(8, "little") + b"{]", "the header is not valid JSON"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "the header is not valid JSON"),
        ((2).to_bytes(8, "little") + b"{}" + b"more", "has 4 bytes behind its last tensor"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "the header is not valid JSON"),
        ((16).to_bytes(8, "little") + b'{"a": 1, "a": 2}', "'a' is there twice"),
    ],
)
def test_raw_headers_that_are_wrong(tmp_path: Path, raw: bytes, words: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=words):
        read_header(tmp_path / "x.safetensors")


def test_header_of_more_than_the_format_allows(tmp_path: Path) -> None:
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)
    with pytest.raises(CheckpointError, match="the header claims 200000000 bytes"):
        read_header(tmp_path / "x.safetensors")


def test_files_that_the_format_s_own_library_refuses_are_refused(healthy: dict[str, Path], tmp_path: Path) -> None:
    """And what it accepts is accepted: headers alone, with metadata and with no tensor at all."""
    file = tmp_path / "x.safetensors"
    save_file({}, file, metadata={"format": "pt"})
    assert read_header(file) == {}
    save_file({"a": torch.zeros(0, 4), "b": torch.zeros(())}, file)
    assert {name: entry.shape for name, entry in read_header(file).items()} == {"a": (0, 4), "b": ()}
    with pytest.raises(CheckpointError, match="is no folder"):
        CheckpointFiles.open(tmp_path / "nothing")


FUZZ = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@FUZZ
@given(data=st.data())
def test_flipped_bytes_of_a_header_never_raise_anything_else(
    healthy: dict[str, Path], tmp_path: Path, data: st.DataObject
) -> None:
    folder = tmp_path / "fuzz"
    if not folder.exists():
        shutil.copytree(healthy["nvfp4"], folder)
    raw = bytearray((healthy["nvfp4"] / "model.safetensors").read_bytes())
    length = int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, 8 + length - 1))] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(raw)
    with contextlib.suppress(CheckpointError):
        load(folder)


@FUZZ
@given(data=st.data())
def test_flipped_bytes_of_json_files_never_raise_anything_else(
    healthy: dict[str, Path], tmp_path: Path, data: st.DataObject
) -> None:
    folder = tmp_path / "fuzz"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(healthy["sharded"], folder)
    file = folder / data.draw(st.sampled_from(["config.json", INDEX, "generation_config.json"]))
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(raw)
    with contextlib.suppress(CheckpointError):
        load(folder)


@FUZZ
@given(share=st.floats(0, 1, exclude_max=True))
def test_cut_at_any_byte(healthy: dict[str, Path], tmp_path: Path, share: float) -> None:
    folder = tmp_path / "fuzz"
    if not folder.exists():
        shutil.copytree(healthy["fp8"], folder)
    raw = (healthy["fp8"] / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[: int(share * len(raw))])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(folder)
