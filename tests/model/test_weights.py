"""Loading: what Hugging Face's model holds, whatever the format and however it is split over ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5ray.errors import CheckpointError, ConfigError
from glm5ray.model.checkpoint_folder import resolve_checkpoint
from glm5ray.model.checkpoint_report import inspect_checkpoint
from glm5ray.model.name_table import checkpoint_weights, place_weight
from glm5ray.model.safetensors_reader import CheckpointFiles
from glm5ray.model.tiny import write_tiny
from glm5ray.model.weights import ShardSpec, load_shard
from glm5ray.model_config import ModelConfig
from glm5ray.quantization.fp8_block import dequantize_fp8_block
from glm5ray.quantization.nvfp4 import dequantize_nvfp4, dequantize_nvfp4_inverse
from tests.hf_reference import hf_model

FORMATS: list[Any] = ["bf16", "fp32", "fp8", "nvfp4", "nvfp4-all", "nvfp4-ct"]
BIG_BLOCKS = {"hidden_size": 160, "q_lora_rank": 144, "qk_nope_head_dim": 40, "intermediate_size": 320}
"""Sizes at which an FP8 block ends inside a head, a rank's share and the matrix: kv_b_proj has 72 rows a head."""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """``write(**arguments of write_tiny)`` -> folder."""

    def write_it(**arguments: Any) -> Path:
        folder = tmp_path / f"tiny{len(list(tmp_path.iterdir()))}"
        write_tiny(folder, **arguments)
        return folder

    return write_it


def load(folder: Path, shard: ShardSpec | None = None, **arguments: Any) -> dict[str, torch.Tensor]:
    arguments = {"dtype": torch.float32, **arguments}
    return load_shard(folder, ModelConfig.from_checkpoint(folder), shard or ShardSpec(), **arguments)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, read by the format's own library."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def weight_of(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A weight's values in float32, whatever its format: slow and obvious, one whole tensor at a time."""
    module = name.removesuffix(".weight")
    if f"{module}.weight_packed" in tensors:
        parts = [tensors[f"{module}.{part}"] for part in ("weight_packed", "weight_scale", "weight_global_scale")]
        return dequantize_nvfp4_inverse(*parts)
    if f"{module}.weight_scale_2" in tensors:
        return dequantize_nvfp4(*[tensors[f"{module}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2")])
    if f"{module}.weight_scale_inv" in tensors:
        return dequantize_fp8_block(tensors[name], tensors[f"{module}.weight_scale_inv"])
    return tensors[name].float()


def expected_parameters(folder: Path, *, with_mtp: bool = True) -> dict[str, torch.Tensor]:
    """What one rank must hold, put together from whole tensors."""
    config = ModelConfig.from_checkpoint(folder)
    tensors = stored(folder)
    whole = {spec.name: weight_of(tensors, spec.name) for spec in checkpoint_weights(config, with_mtp=with_mtp)}
    expected = {name: weight for name, weight in whole.items() if ".mlp.experts." not in name}
    last = config.num_hidden_layers + (config.num_nextn_predict_layers if with_mtp else 0)
    for layer in range(last):
        prefix = f"model.layers.{layer}.mlp.experts"
        if f"{prefix}.0.gate_proj.weight" in whole:
            gate, up, down = (
                torch.stack([whole[f"{prefix}.{e}.{name}_proj.weight"] for e in range(config.n_routed_experts)])
                for name in ("gate", "up", "down")
            )
            expected[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=1)
            expected[f"{prefix}.down_proj"] = down
    return expected


@pytest.mark.parametrize("style", ["glm5", "glm5.2"])
@pytest.mark.parametrize("format", FORMATS)
def test_each_format_gives_its_weights(write: Write, format: Any, style: Any) -> None:
    folder = write(format=format, style=style, sizes=BIG_BLOCKS)
    loaded, expected = load(folder, with_mtp=True), expected_parameters(folder)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes", [{}, {"num_hidden_layers": 5, "indexer_types": ["full", "full", "shared", "full", "shared"]}]
)
def test_loads_what_hugging_face_saves(tmp_path: Path, dtype: torch.dtype, changes: dict[str, Any]) -> None:
    model = hf_model(seed=3, dtype=dtype, **changes)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, dtype=dtype)
    theirs = model.state_dict()
    assert loaded.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(loaded[name], tensor.to(loaded[name].dtype)), name
        assert loaded[name].dtype in (dtype, torch.float32)


def test_hugging_face_loads_what_we_write(write: Write) -> None:
    from transformers import AutoTokenizer, GlmMoeDsaForCausalLM

    folder = write(format="fp32", style="glm5.2", with_mtp=False)
    model = GlmMoeDsaForCausalLM.from_pretrained(folder)
    loaded = load(folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor), name
    assert AutoTokenizer.from_pretrained(folder).encode("aé<think>") == [97, 195, 169, 257]


def test_router_and_selection_bias_stay_float32(write: Write) -> None:
    folder = write(format="bf16")
    loaded = load(folder, dtype=torch.bfloat16)
    kept = {name for name, tensor in loaded.items() if tensor.dtype == torch.float32}
    assert {name.rpartition("layers.1.")[2] for name in kept if "layers.1." in name} == {
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
        "self_attn.indexer.weights_proj.weight",
    }
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(loaded[bias], stored(folder)[bias])
    assert not torch.equal(loaded[bias], loaded[bias].bfloat16().float())


def test_gate_and_up_have_a_scale_each(write: Write) -> None:
    """Public checkpoints share it; third-party ones need not. Taking one for both is a silent error of a factor."""
    folder = write(format="nvfp4", num_shards=1)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("up_proj.weight_scale_2"):
            tensors[name] = tensors[name] * 3
    save_file(tensors, file)
    assert torch.equal(
        load(folder)["model.layers.1.mlp.experts.gate_up_proj"],
        expected_parameters(folder)["model.layers.1.mlp.experts.gate_up_proj"],
    )


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("present", [True, False])
def test_input_scale_may_be_there_or_not(write: Write, present: bool, shape: tuple[int, ...]) -> None:
    folder = write(format="nvfp4", num_shards=1)
    before = load(folder)
    file = folder / "model.safetensors"
    tensors = {
        name: torch.full(shape, float("nan")) if name.endswith("input_scale") else tensor
        for name, tensor in load_file(file).items()
        if present or not name.endswith("input_scale")
    }
    save_file(tensors, file)
    after = load(folder)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_format_is_decided_by_the_tensors_not_by_the_config(write: Write) -> None:
    """A config that claims the wrong list, as the FP8 ones do, or nothing at all, changes no value."""
    for format in ("fp8", "nvfp4"):
        folder = write(format=format)
        before = load(folder)
        values = json.loads((folder / "config.json").read_text())
        for claim in ({}, {**values["quantization_config"], "ignore": ["*"], "modules_to_not_convert": ["model"]}):
            (folder / "config.json").write_text(json.dumps({**values, "quantization_config": claim or None}))
            after = load(folder)
            assert all(torch.equal(after[name], before[name]) for name in before)


def concatenated(shards: list[dict[str, torch.Tensor]], config: ModelConfig) -> dict[str, torch.Tensor]:
    """The whole model from the parts of its ``tp`` ranks, by the rule for each name written out once more."""
    whole = {}
    for name in shards[0]:
        parts = [shard[name] for shard in shards]
        if name.endswith(("experts.gate_up_proj",)):
            halves = [part.chunk(2, dim=1) for part in parts]
            whole[name] = torch.cat([h[0] for h in halves] + [h[1] for h in halves], dim=1)
        elif name.endswith("experts.down_proj"):
            whole[name] = torch.cat(parts, dim=2)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            whole[name] = torch.cat(parts, dim=1)
        elif name.endswith(
            (
                "q_b_proj.weight",
                "kv_b_proj.weight",
                "gate_proj.weight",
                "up_proj.weight",
                "embed_tokens.weight",
                "lm_head.weight",
            )
        ):
            whole[name] = torch.cat(parts, dim=0)
        else:
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name} is not the same on all ranks"
            whole[name] = parts[0]
    return whole


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("format", FORMATS)
def test_tp_shards_together_are_the_whole(write: Write, format: Any, size: int) -> None:
    folder = write(format=format, sizes=BIG_BLOCKS)
    config = ModelConfig.from_checkpoint(folder)
    shards = [load(folder, ShardSpec(tp_rank=rank, tp_size=size), with_mtp=True) for rank in range(size)]
    whole = load(folder, with_mtp=True)
    together = concatenated(shards, config)
    assert together.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(together[name], tensor), name


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
def test_ep_shards_hold_whole_experts(write: Write, format: Any, tp_size: int) -> None:
    """With ``ep`` experts are not split any further, whatever ``tp`` is."""
    folder = write(format=format)
    shards = [load(folder, ShardSpec(rank % tp_size, tp_size, rank, 4)) for rank in range(4)]
    whole = load(folder)
    for name, tensor in whole.items():
        if ".mlp.experts." in name:
            assert torch.equal(torch.cat([shard[name] for shard in shards]), tensor), name
        elif tp_size == 1:
            assert all(torch.equal(shard[name], tensor) for shard in shards), name
    heads = "model.layers.0.self_attn.q_b_proj.weight"
    assert torch.equal(torch.cat([shards[rank][heads] for rank in range(tp_size)]), whole[heads])


@pytest.mark.parametrize("format", FORMATS)
def test_each_rank_reads_only_its_part(write: Write, format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte that the reader hands out is counted. A rank's share of each matrix has whole FP8 blocks here, as in
    GLM-5."""
    opened: list[CheckpointFiles] = []
    true_open = CheckpointFiles.open

    def recorded(folder: Path) -> CheckpointFiles:
        opened.append(true_open(folder))
        return opened[-1]

    monkeypatch.setattr(CheckpointFiles, "open", recorded)
    sizes = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "index_head_dim": 64}
    sizes |= {"moe_intermediate_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    folder = write(format=format, style="glm5.2", sizes=sizes)
    reports: list[tuple[int, int]] = []
    shard = ShardSpec(1, 2, 3, 4)
    load(folder, shard, progress=lambda done, total: reports.append((done, total)))
    done, total = reports[-1]
    assert done == total == opened[0].bytes_read == inspect_checkpoint(folder, tp=2, ep=4).rank_bytes_stored
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    config = ModelConfig.from_checkpoint(folder)
    experts = sum(
        e.num_bytes for name, e in opened[0].entries.items() if ".experts." in name and ".layers.4." not in name
    )
    rest = sum(
        e.num_bytes * len(place.rows) * (len(place.columns) if place.columns else 1) / torch.Size(spec.shape).numel()
        for spec in checkpoint_weights(config, with_mtp=False, experts=range(0))
        for suffix in ("", "_scale_inv", "_packed", "_scale", "_scale_2", "_global_scale")
        if (e := opened[0].entries.get(spec.name + suffix)) and (place := place_weight(spec, config, shard))
    )
    assert done == pytest.approx(experts / 4 + rest, rel=0.01)


@pytest.mark.skipif(not hasattr(os, "SEEK_HOLE"), reason="needs sparse files")
def test_a_rank_of_a_large_checkpoint_reads_from_a_sparse_file(tmp_path: Path) -> None:
    """A file of 64 GiB, nearly all of it a hole: one rank of 4,096 loads its 1/4,096 of the experts in no time and
    memory."""
    write_tiny(
        tmp_path / "tiny",
        num_shards=1,
        with_mtp=False,
        sizes={"n_routed_experts": 4096, "moe_intermediate_size": 16, "hidden_size": 16},
    )
    file = tmp_path / "tiny" / "model.safetensors"
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    config = replace(ModelConfig.from_checkpoint(tmp_path / "tiny"), hidden_size=2048, moe_intermediate_size=1280)
    offset, sparse = 0, {}
    for spec in checkpoint_weights(config, with_mtp=False):
        size = torch.Size(spec.shape).numel() * (4 if spec.name.endswith("bias") and "gate" in spec.name else 2)
        sparse[spec.name] = {
            "dtype": header[spec.name]["dtype"],
            "shape": spec.shape,
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(sparse).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + offset)
    assert file.stat().st_size > 60 * 2**30
    reports: list[tuple[int, int]] = []
    shard = ShardSpec(ep_rank=77, ep_size=4096)
    loaded = load_shard(
        tmp_path / "tiny",
        config,
        shard,
        dtype=torch.bfloat16,
        progress=lambda done, total: reports.append((done, total)),
    )
    assert loaded["model.layers.1.mlp.experts.gate_up_proj"].shape == (1, 2560, 2048)
    assert reports[-1][0] == reports[-1][1] < 2**27


MEASURE = """
import sys
from pathlib import Path
import torch
from glm5ray.model.weights import ShardSpec, load_shard
from glm5ray.model_config import ModelConfig

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

folder = Path(sys.argv[1])
config = ModelConfig.from_checkpoint(folder)
torch.zeros(1).to(torch.float8_e4m3fn).float()
Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is used now
before = kilobytes("VmRSS:")
parameters = load_shard(folder, config, ShardSpec(), dtype=torch.bfloat16)
print((kilobytes("VmHWM:") - before) * 1024, sum(tensor.nbytes for tensor in parameters.values()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for the peak")
@pytest.mark.parametrize("format", ["fp8", "nvfp4", "bf16"])
def test_peak_memory_is_the_parameters_and_one_weight(write: Write, format: Any) -> None:
    """About 100 MB of parameters from twelve shards. Beside them there may be a shard's mapped pages (8 MB) and the
    float32 of one weight (2 MB, twice): not another copy of the model."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "n_routed_experts": 32}
    folder = write(format=format, num_shards=12, with_mtp=False, sizes=sizes)
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    peak, parameters = map(int, out.stdout.split())
    assert parameters > 90e6
    assert parameters < peak < parameters + 32e6


def test_mtp_is_skipped_knowingly(write: Write) -> None:
    folder = write(style="glm5.2")
    config = ModelConfig.from_checkpoint(folder)
    prefix = f"model.layers.{config.num_hidden_layers}."
    with_it, without_it = load(folder, with_mtp=True), load(folder)
    assert with_it.keys() - without_it.keys() == {name for name in with_it if name.startswith(prefix)}
    assert f"{prefix}self_attn.indexer.wk.weight" in with_it
    assert f"{prefix}shared_head.norm.weight" in with_it
    assert with_it[f"{prefix}eh_proj.weight"].shape == (config.hidden_size, 2 * config.hidden_size)


def test_checkpoint_without_mtp_whose_config_announces_it(write: Write) -> None:
    folder = write(with_mtp=False)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "num_nextn_predict_layers": 1}))
    assert load(folder)
    with pytest.raises(CheckpointError, match="has no MTP layer"):
        load(folder, with_mtp=True)


def test_known_extra_tensors_are_left_out_by_name(write: Write) -> None:
    folder = write(num_shards=1)
    file = folder / "model.safetensors"
    extra = {
        "model.layers.0.self_attn.k_proj.k_scale": torch.ones(()),
        "model.layers.0.self_attn.v_scale": torch.ones(()),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.2.embed_tokens.weight": torch.ones(272, 64),
        "model.layers.2.shared_head.head.weight": torch.ones(272, 64),
    }
    save_file({**load_file(file), **extra}, file)
    assert load(folder, with_mtp=True).keys().isdisjoint(extra)
    assert set(inspect_checkpoint(folder).skipped) == set(extra)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (ShardSpec(tp_size=8), "tp_size is 8; it must divide the model's num_attention_heads, which is 4"),
        (ShardSpec(ep_size=3), "ep_size is 3; it must divide the model's n_routed_experts, which is 8"),
    ],
)
def test_sizes_that_do_not_divide(write: Write, shard: ShardSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write(), shard)


def test_coarse_router_is_warned_of(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(num_shards=1)
    load(folder)
    assert not caplog.records
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    save_file({**tensors, name: tensors[name].bfloat16()}, file)
    load(folder)
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} is BF16; routing is as coarse as that, F32 is usual"
    ]


def test_resolve_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "GLM-5.2-NVFP4").mkdir()
    (tmp_path / "notes.txt").touch()
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match=r"did you mean '.*GLM-5.2-NVFP4'\?"):
        resolve_checkpoint(str(tmp_path / "GLM-5.2-NVPF4"))
    with pytest.raises(CheckpointError, match="did you mean 'nano'"):
        resolve_checkpoint("nanno")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_checkpoint(str(tmp_path / "notes.txt"))
    with pytest.raises(CheckpointError, match="there is no checkpoint folder"):
        resolve_checkpoint("/no/such/place/at/all")
