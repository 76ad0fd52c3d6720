"""Every operation on the GPU that is here, against the reference on the same GPU.

    pytest -m gpu tests/kernels/test_gpu.py

``real``: the sizes of GLM-5. ``small``: few experts and narrow layers, but the attention's own widths; what
``scripts/sanitize_kernels.sh`` runs under compute-sanitizer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from glm5ray.bench.kernel_cases import CaseMaker
from glm5ray.errors import ConfigError
from glm5ray.kernels.select import OPS, PROVIDERS, select_kernels
from glm5ray.model_config import ModelConfig
from tests.kernels.case_results import assert_same

if TYPE_CHECKING:
    from glm5ray.bench.kernel_cases import Case
    from glm5ray.kernels.interface import Kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NVFP4 = frozenset({"experts"})
REAL_TOKENS, SMALL_TOKENS = (1, 10, 64, 500), (1, 7, 130)
CONTEXTS = (300, 5000)
"""Below index_topk, and above it."""


@cache
def config_of(size: str) -> ModelConfig:
    folder = Path(str(resources.files("glm5ray"))) / "bench" / "slices" / "glm5-12l-nvfp4"
    config = ModelConfig.from_checkpoint(folder)
    if size == "real":
        return config
    return replace(
        config,
        hidden_size=512,
        intermediate_size=512,
        moe_intermediate_size=256,
        n_routed_experts=16,
        num_attention_heads=16,
        index_topk=128,
    )


@cache
def table(provider: str) -> Kernels:
    return select_kernels({} if provider == "default" else {"default": provider}, "cuda", NVFP4)


def make(size: str, op: str, tokens: int, context: int, fp8_cache: bool) -> tuple[Case, CaseMaker]:
    config = config_of(size)
    if size == "small":
        context //= 10
        if context > 128:
            context = 500
    if op in ("select_tokens", "mla_attention") and tokens > 64:
        tokens = 64 if size == "real" else 24  # the reference works token by token
    maker = CaseMaker(
        config,
        tokens=tokens,
        context=context,
        device="cuda",
        dtype=torch.bfloat16,
        packs_experts=True,
        fp8_cache=fp8_cache,
    )
    case = maker.make(op)
    if case is None:
        pytest.skip("nothing is selected in a context as short")
    return case, maker


def cases() -> list[tuple[str, str, int, int, bool]]:
    """(size, operation, tokens, context, FP8 cache), where a dimension matters."""
    found = []
    for size, numbers in (("small", SMALL_TOKENS), ("real", REAL_TOKENS)):
        for op in OPS:
            cached = op in ("mla_attention", "select_tokens", "append_latent", "append_index_keys")
            contexts = {"mla_attention": CONTEXTS, "select_tokens": CONTEXTS[1:]}.get(op, CONTEXTS[:1])
            found += [
                (size, op, tokens, context, fp8)
                for tokens in numbers
                for context in contexts
                for fp8 in ((False, True) if cached else (False,))
            ]
    return found


@pytest.mark.parametrize(("size", "op", "tokens", "context", "fp8"), cases())
@torch.inference_mode()
def test_default_kernels(size: str, op: str, tokens: int, context: int, fp8: bool) -> None:
    case, maker = make(size, op, tokens, context, fp8)
    call = case.prepare(table("default"))
    first = _copied(call())
    assert_same(case, first, case.prepare(table("reference"))(), maker)
    if op not in ("add_rms_norm", "rope"):  # these change what they are given
        second = call()
        for a, b in zip(_tuple(first), _tuple(second), strict=True):
            assert torch.equal(a, b), "the same call gave other bits"


@pytest.mark.parametrize(
    ("size", "tokens"), [("small", 1), ("small", 130), ("small", 700), ("real", 1), ("real", 64), ("real", 1500)]
)
@torch.inference_mode()
def test_experts_of_triton(size: str, tokens: int) -> None:
    """Which are not the first choice where CUDA C++ can be compiled."""
    case, maker = make(size, "experts", tokens, CONTEXTS[0], fp8_cache=False)
    call = case.prepare(select_kernels({"experts": "triton"}, "cuda", NVFP4))
    first = _copied(call())
    assert_same(case, first, case.prepare(table("reference"))(), maker)
    assert torch.equal(_tuple(first)[0], call()), "the same call gave other bits"


@pytest.mark.parametrize(
    ("size", "tokens", "dtype"),
    [
        *[("small", tokens, dtype) for tokens in (1, 130, 2100) for dtype in (torch.bfloat16, torch.float32)],
        ("real", 3, torch.bfloat16),
        ("real", 1100, torch.bfloat16),
    ],
)
@torch.inference_mode()
def test_unquantised_experts(size: str, tokens: int, dtype: torch.dtype) -> None:
    maker = CaseMaker(config_of(size), tokens=tokens, context=16, device="cuda", dtype=dtype, packs_experts=False)
    case = maker.make("experts")
    assert case is not None
    call = case.prepare(select_kernels({}, "cuda"))
    first = _copied(call())
    assert_same(case, first, case.prepare(table("reference"))(), maker)
    assert torch.equal(_tuple(first)[0], _tuple(call())[0]), "the same call gave other bits"


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="it is for sm_90"
)
@pytest.mark.parametrize("context", [1, 63, *CONTEXTS])
@pytest.mark.parametrize("tokens", [1, 10, 64, 300])
@torch.inference_mode()
def test_attention_in_cuda(tokens: int, context: int) -> None:
    case, maker = make("real", "mla_attention", tokens, context, fp8_cache=False)
    call = case.prepare(select_kernels({"mla_attention": "cuda_mla"}, "cuda", NVFP4))
    first = _copied(call())
    assert_same(case, first, case.prepare(table("reference"))(), maker)
    assert torch.equal(_tuple(first)[0], call()), "the same call gave other bits"


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("tokens", [1, 10, 64])
@torch.inference_mode()
def test_flashinfer_attention(tokens: int, context: int) -> None:
    pytest.importorskip("flashinfer")
    fp8 = torch.cuda.get_device_capability()[0] == 12
    try:
        kernels = select_kernels({"mla_attention": "flashinfer"}, "cuda", NVFP4)
    except ConfigError as error:
        pytest.skip(str(error))
    case, maker = make("real", "mla_attention", tokens, context, fp8)
    assert_same(case, case.prepare(kernels)(), case.prepare(table("reference"))(), maker)


def test_every_operation_of_triton_has_a_case() -> None:
    triton = next(provider for provider in PROVIDERS if provider.name == "triton")
    assert {op for _, op, _, _, _ in cases()} >= set(triton.ops)


def _tuple(result: object) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)  # type: ignore[return-value]


def _copied(result: object) -> object:
    copies = tuple(tensor.clone() for tensor in _tuple(result))
    return copies if isinstance(result, tuple) else copies[0]
