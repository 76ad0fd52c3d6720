"""``config.json``: the sizes of the public models, and the traps that they set."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5ray.errors import CheckpointError
from glm5ray.model_config import ModelConfig, read_json

CONFIGS = Path(__file__).parent / "golden" / "configs"
GLM5 = json.loads((CONFIGS / "GLM-5.json").read_text())
GLM52 = json.loads((CONFIGS / "GLM-5.2.json").read_text())


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def write(folder: Path, name: str, values: object) -> None:
    (folder / name).write_text(json.dumps(values))


def test_glm5() -> None:
    config = ModelConfig.from_dict(GLM5)
    assert config.rope_theta == 1e6
    assert config.indexer_types == ("full",) * 78
    assert config.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 75
    assert config.eos_token_ids == (154820, 154827, 154829)
    assert config.qk_head_dim == 256


def test_glm52() -> None:
    config = ModelConfig.from_dict(GLM52)
    assert config.rope_theta == 8e6
    assert config.num_full_index_layers == 21
    assert [i for i, kind in enumerate(config.indexer_types) if kind == "full"][:6] == [0, 1, 2, 6, 10, 14]


def test_rope_theta_is_read_from_where_it_is_nested() -> None:
    assert ModelConfig.from_dict({**GLM52, "rope_theta": 10000.0}).rope_theta == 8e6
    assert ModelConfig.from_dict({**without(GLM52, "rope_parameters"), "rope_theta": 5e5}).rope_theta == 5e5
    with pytest.raises(CheckpointError, match=r"rope_theta is None"):
        ModelConfig.from_dict(without(GLM52, "rope_parameters"))


@pytest.mark.parametrize("head_dim", [64, 192, None])
def test_head_dim_means_nothing(head_dim: int | None) -> None:
    assert ModelConfig.from_dict({**GLM52, "head_dim": head_dim}) == ModelConfig.from_dict(GLM52)


def test_index_share_rule_gives_the_stored_list() -> None:
    by_rule = ModelConfig.from_dict(without(GLM52, "indexer_types"))
    assert by_rule.indexer_types == ModelConfig.from_dict(GLM52).indexer_types


@pytest.mark.parametrize(
    "fields",
    [
        {"index_topk_freq": 4},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
        {"index_topk_freq": 1, "index_skip_topk_offset": 5},
        {"index_topk_pattern": "F" + "FS" * 38 + "F"},
        {},
    ],
)
def test_index_share_is_what_transformers_makes_of_it(fields: dict[str, Any]) -> None:
    """In particular the offset where the field is absent."""
    from transformers import GlmMoeDsaConfig

    values = {
        **without(GLM52, "indexer_types", "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"),
        **fields,
    }
    theirs = GlmMoeDsaConfig(**without(values, "model_type", "architectures"))
    assert ModelConfig.from_dict(values).indexer_types == tuple(theirs.indexer_types)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"indexer_types": ["full"] * 77}, "indexer_types has 77 entries for 78 layers"),
        ({"indexer_types": ["full"] * 77 + ["half"]}, "indexer_types must be a list of full and shared"),
        ({"indexer_types": ["shared"] + ["full"] * 77}, "the first layer is 'shared'"),
        ({"indexer_types": None, "index_topk_pattern": "F" * 77}, "must have an F or S for each of 78 layers"),
        ({"indexer_types": None, "index_topk_pattern": "f" * 78}, "must have an F or S for each of 78 layers"),
        ({"indexer_types": None, "index_topk_freq": 0}, "index_topk_freq is 0"),
        ({"mlp_layer_types": ["dense"] * 79}, "mlp_layer_types has 79 entries"),
        ({"model_type": "glm5_next"}, "model_type is 'glm5_next'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type is 'yarn'"),
        ({"rope_parameters": 8e6}, "rope_parameters is 8000000.0"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta is inf"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": 6144.0}, "hidden_size is 6144.0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok is 257"),
        ({"num_experts": 128}, "n_routed_experts is 256 but num_experts is 128"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave is False"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [-1]}, r"eos_token_id is \[-1\]"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63"),
        ({"topk_group": 2}, "topk_group 2"),
    ],
)
def test_errors_name_file_field_and_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^there/config.json: .*{message}"):
        ModelConfig.from_dict({**GLM52, **fields}, where="there/config.json")


def test_fields_of_other_exports_are_accepted() -> None:
    """What nvidia's config of GLM-5.2 has beside Z.ai's; the bos token is bogus and nothing reads it."""
    more = {
        "num_experts": 256,
        "mlp_bias": False,
        "bos_token_id": 0,
        "layer_types": ["deepseek_sparse_attention"] * 78,
        "torch_dtype": "bfloat16",
        "transformers_version": "5.11.0",
    }
    assert ModelConfig.from_dict({**GLM52, **more}) == ModelConfig.from_dict(GLM52)
    renamed = {**without(GLM52, "n_routed_experts"), "num_experts": 256}
    assert ModelConfig.from_dict(renamed).n_routed_experts == 256
    assert "bos_token_id" not in {field.name for field in dataclasses.fields(ModelConfig)}


def test_type_is_read_from_its_older_name() -> None:
    values = without(GLM5, "dtype")
    assert ModelConfig.from_dict({**values, "torch_dtype": "torch.float32"}).dtype == "float32"
    assert ModelConfig.from_dict(values).dtype == "bfloat16"


def test_quantisation_in_hf_quant_config_alone(tmp_path: Path) -> None:
    write(tmp_path, "config.json", GLM5)
    assert ModelConfig.from_checkpoint(tmp_path).quantization is None
    quantization = {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
    write(tmp_path, "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": quantization})
    assert ModelConfig.from_checkpoint(tmp_path).quantization == quantization
    inside = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}
    write(tmp_path, "config.json", {**GLM5, "quantization_config": inside})
    assert ModelConfig.from_checkpoint(tmp_path).quantization == inside


def test_end_tokens_of_generation_config_are_added(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {**GLM5, "eos_token_id": 154820})
    write(tmp_path, "generation_config.json", {"eos_token_id": [154820, 154827, 154829]})
    assert ModelConfig.from_checkpoint(tmp_path).eos_token_ids == (154820, 154827, 154829)


def test_end_tokens_beyond_the_vocabulary_are_dropped() -> None:
    assert ModelConfig.from_dict({**GLM5, "vocab_size": 154828}).eos_token_ids == (154820, 154827)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"[]", "holds a list"),
        (b"\xff\xfe", "is not valid JSON"),
        (b'{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' is there twice"),
        (b'{"hidden_size": 1' + b"0" * 5000 + b"}", "is not valid JSON"),
        (b'{"a":' * 100_000, "is not valid JSON"),
    ],
)
def test_bad_json_is_an_error_that_names_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_json(path)
    assert str(path) in str(caught.value)


def test_absent_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        ModelConfig.from_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is no folder"):
        ModelConfig.from_checkpoint(tmp_path / "nothing")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_any_value_of_any_field_is_taken_or_refused(data: st.DataObject) -> None:
    """Never another exception than ours."""
    name = data.draw(st.sampled_from(sorted(GLM52)))
    with contextlib.suppress(CheckpointError):
        ModelConfig.from_dict({**GLM52, name: data.draw(JSON_VALUES)})
