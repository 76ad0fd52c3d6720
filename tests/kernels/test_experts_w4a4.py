"""W4A4 experts against torch on activations rounded by the quantiser of checkpoints; the instruction is the gate's.

Interpreted, and on GPUs without FP4 units, the kernel decodes and multiplies: tiles, masks, scales and rounding are
what is tested here."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from glm5ray.errors import ConfigError
from glm5ray.kernels import reference
from glm5ray.kernels.select import kernel_table
from glm5ray.kernels.triton import experts_w4a4
from glm5ray.kernels.triton.expert_rows import sort_rows
from glm5ray.quantization.nvfp4 import quantize_nvfp4
from tests.kernels.nvfp4_experts import make_nvfp4_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Each row as NVFP4 with its own global scale holds it."""
    return torch.cat([quantize_nvfp4(row[None]).dequantize() for row in rows]) if len(rows) else rows.float()


def expected(x, ids, weights, experts) -> torch.Tensor:
    out = torch.zeros(x.shape)
    x = rounded(x)
    for e in range(len(experts.down_global)):
        token, choice = torch.where(ids == experts.first_expert + e)
        gate_up, down = reference.expert_values(experts, e)
        gate, up = (x[token] @ gate_up.T).bfloat16().float().chunk(2, dim=-1)
        hidden = rounded(gate * torch.sigmoid(gate) * up)
        out.index_add_(0, token, (hidden @ down.T).bfloat16().float() * weights[token, choice, None])
    return out


@pytest.mark.parametrize(
    ("tokens", "sizes"), [(0, (2, 64, 64)), (3, (3, 128, 64)), (9, (2, 192, 64)), (2, (2, 80, 48))]
)
def test_against_rounded_activations(tokens: int, sizes: tuple[int, int, int]) -> None:
    experts = make_nvfp4_experts(*sizes, first_expert=1)
    generator = torch.Generator().manual_seed(4)
    x = (
        torch.randn(tokens, sizes[1], generator=generator) * torch.logspace(-5, 1, max(tokens, 1))[:tokens, None]
    ).bfloat16()
    ids = torch.rand(tokens, sizes[0] + 2, generator=generator).argsort(1)[:, :2]
    weights = torch.rand(tokens, 2, generator=generator)
    on_device = type(experts)(
        **{f: v.to(DEVICE) if isinstance(v := getattr(experts, f), torch.Tensor) else v for f in experts.__slots__}
    )
    actual = experts_w4a4.experts.run(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), on_device).cpu().float()
    want = expected(x, ids, weights, experts)
    assert actual.shape == x.shape
    # Where a sum's last bit moves a hidden number over the edge between two codes, or a group's largest between two
    # scales, its token differs by a step of four bits. Most have none; the unrounded reference is 0.11 to 0.22 away.
    errors = (actual - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-20)
    assert tokens == 0 or (float(errors.median()) < 0.03 and float(errors.max()) < 0.2)


def test_activations_are_rounded_as_the_quantiser_rounds() -> None:
    """To the bit: packed codes, group scales, the row's factor; with a row of zeros, and rows in order of experts."""
    x = torch.randn(6, 80, generator=torch.Generator().manual_seed(5)) * torch.logspace(-4, 4, 6)[:, None]
    x[3] = 0
    x = x.bfloat16()
    ids = torch.tensor([[1, 0], [0, 9], [1, 0], [0, 1], [9, 9], [1, 9]])
    rows = sort_rows(ids.to(DEVICE), 0, 2, (128,))
    packed, scales, factors = experts_w4a4._quantize(x.to(DEVICE), rows, 2, 80, gated=False)
    num_rows = int(rows.row_start_E1[-1])
    assert num_rows == 8
    for row, assignment in enumerate(rows.assignment_X[:num_rows].tolist()):
        want = quantize_nvfp4(x[assignment // 2][None])
        assert torch.equal(packed[row].cpu(), want.packed[0])
        assert torch.equal(scales[row].cpu().view(torch.uint8), want.scale[0].view(torch.uint8))
        torch.testing.assert_close(factors[row].cpu(), want.scale_2)


def test_it_is_chosen_by_name_only() -> None:
    nvfp4 = frozenset({"experts"})
    assert {row.op: row.provider for row in kernel_table({}, "cuda", nvfp4)}["experts"] == "cuda"
    named = kernel_table({"experts": "triton_w4a4"}, "cuda", nvfp4)
    assert {row.op: row.provider for row in named}["experts"] == "triton_w4a4"
    with pytest.raises(ConfigError, match=r"it serves experts only"):
        kernel_table({"rope": "triton_w4a4"}, "cuda")
