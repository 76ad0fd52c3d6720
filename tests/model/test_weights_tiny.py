"""Tiny checkpoints: seeded, in the shape of the public ones; their tokenizer; and the report on a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from glm5ray.errors import CheckpointError, ConfigError
from glm5ray.model.checkpoint_report import inspect_checkpoint
from glm5ray.model.load_plan import plan_weights
from glm5ray.model.name_table import checkpoint_weights
from glm5ray.model.tiny import TinyFormat, write_tiny
from glm5ray.model.weights import ShardSpec
from glm5ray.model_config import ModelConfig
from glm5ray.quantization.formats import PLAIN, parse_claim
from glm5ray.tokenizer import Tokenizer

FORMATS: list[Any] = list(get_args(TinyFormat))
CONFIGS = Path(__file__).parent.parent / "golden" / "configs"


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("format", FORMATS)
def test_same_seed_same_files(tmp_path: Path, format: Any) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_tiny(tmp_path / name, format=format, seed=seed)
    assert all_bytes(tmp_path / "a") == all_bytes(tmp_path / "b")
    assert all_bytes(tmp_path / "a") != all_bytes(tmp_path / "c")


def test_mtp_layer_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    write_tiny(tmp_path / "with", num_shards=1)
    write_tiny(tmp_path / "without", num_shards=1, with_mtp=False)
    with_it, without_it = (load_file(tmp_path / name / "model.safetensors") for name in ("with", "without"))
    assert with_it.keys() > without_it.keys()
    assert all(torch.equal(with_it[name], tensor) for name, tensor in without_it.items())


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_shards_and_index(tmp_path: Path, num_shards: int) -> None:
    write_tiny(tmp_path / "tiny", num_shards=num_shards)
    report = inspect_checkpoint(tmp_path / "tiny")
    assert len(report.shards) == num_shards
    assert sum(shard.num_tensors for shard in report.shards) == report.num_tensors
    assert (tmp_path / "tiny" / "model.safetensors.index.json").exists() == (num_shards > 1)


@pytest.mark.parametrize("style", ["glm5", "glm5.2"])
@pytest.mark.parametrize("format", FORMATS)
def test_config_claims_what_the_files_hold(tmp_path: Path, format: Any, style: Any) -> None:
    """The exclude lists have the oddities of the public ones, and what is planned from them is what is there."""
    write_tiny(tmp_path / "tiny", format=format, style=style)
    config = ModelConfig.from_checkpoint(tmp_path / "tiny")
    report = inspect_checkpoint(tmp_path / "tiny")
    assert report.disagreements == ()
    assert report.quantization == {"bf16": "plain", "fp32": "plain", "fp8": "fp8-block", "nvfp4-ct": "nvfp4-ct"}.get(
        format, "nvfp4"
    )
    plan = plan_weights(config, dtype=config.dtype, keep_quantized=True)
    in_float32 = [s for s in checkpoint_weights(config, with_mtp=False) if s.keep_float32 and len(s.shape) == 2]
    extra = sum(2 * spec.shape[0] * spec.shape[1] for spec in in_float32) if format != "fp32" else 0
    assert plan.total_bytes - extra == report.rank_bytes_stored
    claim = parse_claim(config.quantization)
    quantized = {
        s.part
        for s in checkpoint_weights(config, with_mtp=True)
        if claim.format_of(s.module) is not PLAIN and s.is_linear
    }
    assert len(quantized) == {"nvfp4": 1, "nvfp4-all": 3, "nvfp4-ct": 3, "fp8": 5}.get(format, 0)


def test_quantisation_of_glm5_stands_beside_the_config(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", format="nvfp4-all")
    assert "quantization_config" not in json.loads((tmp_path / "tiny" / "config.json").read_text())
    assert inspect_checkpoint(tmp_path / "tiny").quantization == "nvfp4"


def test_report_names_layers_that_the_config_gets_wrong(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", format="nvfp4")
    file = tmp_path / "tiny" / "config.json"
    values = json.loads(file.read_text())
    values["quantization_config"]["ignore"].append("model.layers.1.mlp.experts.5.*")
    file.write_text(json.dumps(values))
    (tmp_path / "tiny" / "more.safetensors").write_bytes(b"")
    report = inspect_checkpoint(tmp_path / "tiny")
    assert report.disagreements == tuple(f"model.layers.1.mlp.experts.5.{n}_proj" for n in ("gate", "up", "down"))
    assert report.unlisted_files == ("more.safetensors",)


def test_report(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", format="nvfp4")
    report = inspect_checkpoint(tmp_path / "tiny", tp=2, ep=2)
    config = ModelConfig.from_checkpoint(tmp_path / "tiny")
    assert report.num_parameters == plan_weights(config).num_parameters
    assert report.has_mtp
    assert report.num_parameters + report.num_mtp_parameters == plan_weights(config, with_mtp=True).num_parameters
    assert {total.dtype for total in report.dtypes} == {"BF16", "U8", "F8_E4M3", "F32"}
    assert sum(total.num_bytes for total in report.dtypes) == report.num_bytes
    assert sum(total.num_bytes for total in report.formats) == report.num_bytes
    parts = {(total.part, total.format): total.num_weights for total in report.formats}
    assert parts["routed_experts", "nvfp4"] == 8 * 3
    assert parts["attention", "bf16"] == 2 * 7
    shard = ShardSpec(tp_size=2, ep_size=2)
    assert report.rank_bytes_loaded == plan_weights(config, shard).total_bytes
    assert json.loads(json.dumps(report.to_dict()))["has_mtp"] is True


def test_report_is_as_strict_as_loading(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", num_shards=2)
    (tmp_path / "tiny" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        inspect_checkpoint(tmp_path / "tiny")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_tensors"), [("GLM-5.2", 59_585 + 3 * 256 * 75 * 3)])
def test_report_on_a_checkpoint_of_the_real_size(tmp_path: Path, name: str, num_tensors: int) -> None:
    """GLM-5.2-NVFP4's 232,385 tensors and 465 GB in sparse files: counts and bytes are the published ones."""
    from glm5ray.quantization.formats import NVFP4

    values = json.loads((CONFIGS / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = ModelConfig.from_dict(values)
    weight_map: dict[str, str] = {}
    layers: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for spec in checkpoint_weights(config, with_mtp=True):
        file = f"{'-'.join(spec.name.split('.')[1:3])}.safetensors"
        entries = layers.setdefault(file, {})
        if spec.part == "routed_experts" and not spec.is_mtp:
            for part in NVFP4.parts:
                entries[f"{spec.module}.{part.suffix}"] = part.dtypes[0], part.shape(spec.shape[0], spec.shape[1])
        else:
            entries[spec.name] = "F32" if spec.name.endswith("correction_bias") else "BF16", spec.shape
    for file, entries in layers.items():
        header, offset = {}, 0
        for tensor, (dtype, shape) in entries.items():
            size = torch.Size(shape).numel() * {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}[dtype]
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
            weight_map[tensor] = file
            offset += size
        text = json.dumps(header).encode()
        with (tmp_path / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + offset)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    report = inspect_checkpoint(tmp_path, tp=8)
    assert report.num_tensors == num_tensors == 232_385
    assert report.num_bytes / 1e9 == pytest.approx(464.795, abs=6e-3)
    assert report.rank_bytes_stored / 1e9 == pytest.approx(58.36, abs=6e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "nvpf4"}, "format is 'nvpf4'; it must be one of bf16, .*did you mean 'nvfp4'"),
        ({"style": "glm4"}, "style is 'glm4'"),
        ({"num_shards": 0}, "num_shards is 0"),
        ({"sizes": {"hiden_size": 3}}, "no size hiden_size; did you mean 'hidden_size'"),
        ({"sizes": {"vocab_size": 256}}, "vocab_size is 256; the tokenizer of bytes needs 265"),
        ({"sizes": {"moe_intermediate_size": 24}, "format": "nvfp4"}, "24 columns; NVFP4 needs a multiple of 16"),
    ],
)
def test_errors(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_tiny(tmp_path / "tiny", **arguments)
    assert not (tmp_path / "tiny").exists()


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="is no empty folder"):
        write_tiny(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_format_s_own_library_reads_the_files(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", format="fp8", num_shards=1)
    with safe_open(tmp_path / "tiny" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_slice("model.layers.0.self_attn.o_proj.weight").get_dtype() == "F8_E4M3"


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer") / "tiny"
    write_tiny(folder)
    return Tokenizer.from_checkpoint(folder)


@settings(deadline=None, max_examples=100)
@given(text=st.text().filter(lambda text: "<" not in text))
def test_ids_are_the_bytes(byte_tokenizer: Tokenizer, text: str) -> None:
    ids = byte_tokenizer.encode(text)
    assert bytes(ids) == text.encode()
    assert byte_tokenizer.decode(ids) == text


def test_markers(byte_tokenizer: Tokenizer) -> None:
    text = "a<think>b</think><tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call><eos>"
    ids = byte_tokenizer.encode(text)
    assert [i for i in ids if i > 255] == [257, 258, 259, 261, 262, 263, 264, 260, 256]
    assert byte_tokenizer.decode(ids) == text.removesuffix("<eos>")
    assert byte_tokenizer.is_special(256)


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1, "s": "a b"}}}


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        ([("user", "Hi")], {}, "<|user|>Hi<|assistant|><think>"),
        ([("user", "Hi")], {"enable_thinking": False}, "<|user|>Hi<|assistant|><think></think>"),
        ([("system", "Be brief."), ("user", "Hi")], {"add_generation_prompt": False}, "<|system|>Be brief.<|user|>Hi"),
        (
            [("user", "Hi"), ("assistant", "<think>hmm</think> ok"), ("user", "Hi")],
            {},
            "<|user|>Hi<|assistant|><think></think>ok<|user|>Hi<|assistant|><think>",
        ),
        (
            [
                ("user", "Hi"),
                {"role": "assistant", "content": None, "reasoning_content": "use f", "tool_calls": [CALL]},
                ("tool", "r1"),
                ("tool", "r2"),
            ],
            {},
            "<|user|>Hi<|assistant|><think>use f</think><tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value>"
            "<arg_key>s</arg_key><arg_value>a b</arg_value></tool_call><|observation|><tool_response>r1</tool_response>"
            "<tool_response>r2</tool_response><|assistant|><think>",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], {}, "<|user|>Hi<|assistant|><think>"),
    ],
)
def test_chat_template(byte_tokenizer: Tokenizer, messages: list[Any], options: dict[str, Any], expected: str) -> None:
    turns = [m if isinstance(m, dict) else {"role": m[0], "content": m[1]} for m in messages]
    assert byte_tokenizer.apply_chat_template(turns, **options) == expected


def test_chat_template_with_tools(byte_tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}, {"name": "g"}]
    text = byte_tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tools=tools)
    assert text.startswith('<|system|># Tools\n{"name": "f", "parameters": {}}\n{"name": "g"}\nCall one as <tool_call>')
    assert text.endswith("</tool_call><|user|>Hi<|assistant|><think>")
