"""The choice of providers."""

from __future__ import annotations

import logging

import pytest

from glm5ray.errors import ConfigError
from glm5ray.kernels import cpu, reference
from glm5ray.kernels import select as select_module
from glm5ray.kernels.select import OPS, Provider, kernel_table, select_kernels
from glm5ray.kernels.tolerances import TOLERANCES


def test_cpu_is_first_on_a_cpu_and_triton_on_a_gpu() -> None:
    assert {row.provider for row in kernel_table({}, "cpu")} == {"cpu", "absorbed", "reference"}
    on_a_gpu = {row.op: row.provider for row in kernel_table({}, "cuda:3")}
    assert set(on_a_gpu.values()) <= {"triton", "triton_plain", "cuda", "expanded"}
    assert on_a_gpu["mla_attention"] == "triton"
    assert [row.op for row in kernel_table({}, "cpu")] == list(OPS)


def test_one_op_can_be_taken_from_another_provider() -> None:
    kernels = select_kernels({"mla_attention": "reference"}, "cpu")
    assert kernels.mla_attention is reference.mla_attention
    assert kernels.select_tokens is cpu.select_tokens
    why = {row.op: row.why for row in kernel_table({"mla_attention": "reference"}, "cpu")}
    assert why["mla_attention"] == "kernels.mla_attention in the config"
    assert why["rope"] == "first that serves it on cpu"


def test_default_gives_way_to_what_is_named_and_to_what_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = select_kernels({"default": "reference", "rope": "cpu"}, "cpu")
    assert kernels.linear is reference.linear
    assert kernels.rope is cpu.rope
    few = Provider("few", "nowhere", devices=("cpu",), ops=("rope",))
    monkeypatch.setattr(select_module, "PROVIDERS", (*select_module.PROVIDERS, few))
    chosen = {row.op: row.provider for row in kernel_table({"default": "few"}, "cpu")}
    assert chosen["rope"] == "few"
    assert chosen["linear"] == "cpu"
    with pytest.raises(ConfigError, match=r"kernels.linear is 'few', which cannot serve it: it serves rope only"):
        kernel_table({"linear": "few"}, "cpu")


@pytest.mark.parametrize(
    ("choices", "device", "message"),
    [
        ({"mla_atention": "cpu"}, "cpu", "kernels.mla_atention is no operation; did you mean 'mla_attention'?"),
        ({"rope": "referense"}, "cpu", "kernels.rope is 'referense', which is no provider; did you mean 'reference'?"),
        (
            {"rope": "cpu"},
            "cuda",
            "kernels.rope is 'cpu', which cannot serve it: it runs on cpu, and the device is cuda",
        ),
        ({}, "tpu", "no provider serves linear on tpu"),
    ],
)
def test_errors(choices: dict[str, str], device: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        kernel_table(choices, device)
    assert message in str(error.value)


def test_weights_in_nvfp4_choose_among_those_who_take_them() -> None:
    both = frozenset({"linear", "experts"})
    chosen = {row.op: row.provider for row in kernel_table({}, "cuda", both)}
    assert chosen["experts"] == "cuda"
    assert chosen["linear"] == "triton", "an NVFP4 one"
    assert chosen["rope"] == "triton"
    assert {row.op: row.provider for row in kernel_table({}, "cuda")}["linear"] == "cuda"
    assert {row.op: row.provider for row in kernel_table({}, "cpu", both)}["experts"] == "reference"
    assert {row.op: row.provider for row in kernel_table({}, "cuda")}["experts"] == "triton_plain"
    with pytest.raises(ConfigError, match=r"kernels.experts is 'cpu', which cannot serve it: it takes no weights in"):
        kernel_table({"experts": "cpu"}, "cpu", both)
    with pytest.raises(ConfigError, match=r"'triton', which cannot serve it: it takes weights in NVFP4 only"):
        kernel_table({"experts": "triton"}, "cuda")


def test_the_table_of_a_gpu_can_be_filled_without_one() -> None:
    """To measure a model on torch's meta device."""
    kernels = select_kernels({}, "cuda", frozenset({"experts"}))
    assert all(callable(getattr(kernels, op)) or hasattr(getattr(kernels, op), "run") for op in OPS)


def test_one_log_line_an_op(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=select_module.__name__):
        select_kernels({"rope": "reference"}, "cpu")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(OPS)
    assert "kernel op=rope provider=reference why='kernels.rope in the config'" in lines


def test_every_op_has_a_tolerance() -> None:
    """A choice is right or wrong."""
    assert {op for op, _ in TOLERANCES} == set(OPS) - {"select_tokens", "pick_tokens"}
