"""NVFP4 experts in Triton, interpreted on a CPU or run on a GPU, against the reference on the same numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from glm5ray.kernels import reference
from glm5ray.kernels.interface import ExpertWeights
from glm5ray.kernels.nvfp4_fragments import matrix_order, pack_experts, pack_matrix, permute_columns, unpack_matrix
from glm5ray.kernels.triton import expert_rows, experts_nvfp4
from glm5ray.quantization.nvfp4 import quantize_nvfp4
from tests.kernels.nvfp4_experts import make_nvfp4_experts, unquantized

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_INTERPRETED = DEVICE == "cpu"


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (48, 128), (5, 16), (24, 80), (1, 208)])
def test_fragments_keep_every_bit(rows: int, columns: int) -> None:
    made = quantize_nvfp4(torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)))
    packed, scales = unpack_matrix(*pack_matrix(made.packed, made.scale))
    assert torch.equal(packed[:rows, : columns // 2], made.packed)
    assert torch.equal(scales.view(torch.uint8)[:rows, : columns // 16], made.scale.view(torch.uint8))
    assert not packed[rows:].any()
    assert not packed[:, columns // 2 :].any()


def test_lane_holds_what_mma_wants() -> None:
    """The word of (lane, k16 step) holds A[g][2t], A[g+8][2t], A[g][2t+8], A[g+8][2t+8] and their right neighbours, as
    the PTX manual draws m16n8k16's A, of columns in matrix_order(): here column c of row r has code (r + c) % 16."""
    code = (torch.arange(16)[:, None] + torch.arange(64)[None, :]) % 16
    packed = (code[:, 0::2] | code[:, 1::2] << 4).to(torch.uint8)
    words, _ = pack_matrix(packed, torch.ones(16, 4).to(torch.float8_e4m3fn))
    lane, step = 13, 2
    g, t = 3, 1
    word = int(words[0, 0, lane, step]) & 0xFFFFFFFF
    places = [(15, 6), (12, 3), (13, 0), (14, 9)]
    for pair, (row, column) in enumerate([(g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8)]):
        for half in range(2):
            sign, magnitude = (16 * half + place for place in places[pair])
            found = (word >> sign & 1) << 3 | (word >> magnitude & 7)
            assert found == code[row, matrix_order()[16 * step + column + half]]
            assert matrix_order()[16 * step + column + half] // 16 == t  # one group of scales a lane


def test_a_scale_of_zero_makes_zeros() -> None:
    """The kernels know no zero among scales."""
    packed, scales = torch.full((16, 32), 0x37, dtype=torch.uint8), torch.ones(16, 4)
    scales[3, 1] = 0
    unpacked, _ = unpack_matrix(*pack_matrix(packed, scales.to(torch.float8_e4m3fn)))
    assert not unpacked[3, 8:16].any()
    assert (unpacked[3, :8] == 0x37).all()
    assert (unpacked[4] == 0x37).all()


@settings(max_examples=25, deadline=None)
@given(counts=st.lists(st.integers(0, 700), min_size=1, max_size=9), capability=st.sampled_from([90, 120]))
def test_tiles_cover_every_row_once(counts: list[int], capability: int) -> None:
    """... of every expert, and there are no more of them than the grid has programs for."""
    widths = experts_nvfp4.WIDTHS[capability]
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[:, None].to(DEVICE)
    if not len(ids):
        return
    rows = expert_rows.sort_rows(ids, 0, len(counts), widths)
    covered = torch.zeros(len(ids), dtype=torch.int64)
    starts = rows.row_start_E1.tolist()
    for i, width in enumerate(widths):
        cumulative = rows.cumulative_WE[i].tolist()
        assert cumulative[-1] <= expert_rows.max_tiles(i, widths, len(ids), len(counts))
        for e, (before, upto) in enumerate(zip([0, *cumulative], cumulative, strict=False)):
            for tile in range(upto - before):
                first = int(rows.start_WE[i, e]) + tile * width
                covered[first : min(first + width, starts[e + 1])] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize("one_launch", [True, False])
@pytest.mark.parametrize(("tokens", "choices"), [(0, 2), (1, 8), (7, 3), (64, 8), (90, 6)])
def test_rows_are_a_stable_sort(tokens: int, choices: int, one_launch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """... by expert, other ranks' behind, in one launch or in three."""
    monkeypatch.setattr(expert_rows, "MAX_ONE_LAUNCH", 1024 if one_launch else -1)
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(-2, 25, (tokens, choices), generator=generator)
    rows = expert_rows.sort_rows(ids.to(DEVICE), 3, 18, ())
    local = ids.flatten() - 3
    key = torch.where((local >= 0) & (local < 18), local, 18)
    order = key.argsort(stable=True)
    assert torch.equal(rows.assignment_X.cpu().long(), order)
    assert torch.equal(rows.row_TA.flatten().cpu().long(), order.argsort())
    assert torch.equal(rows.row_start_E1.cpu().long(), (key[None] < torch.arange(19)[:, None]).sum(1))


@pytest.mark.parametrize("width", [64, 80, 192])
def test_columns_are_permuted_as_said(width: int) -> None:
    x = torch.randn(3, width + 5, generator=torch.Generator().manual_seed(5)).to(DEVICE)[:, :width]
    assert torch.equal(experts_nvfp4.permute_columns(x), permute_columns(x))


def test_the_reference_decodes_as_the_quantisation_does() -> None:
    experts = make_nvfp4_experts(3, 64, 32, first_expert=1)
    plain = unquantized(experts)
    for e in range(3):
        gate_up, down = reference.expert_values(experts, e)
        assert torch.equal(gate_up, plain.gate_up_EFM[e])
        assert torch.equal(down, plain.down_EMF[e])
    x, ids, weights = torch.randn(4, 64), torch.tensor([[0, 1], [1, 2], [3, 4], [3, 1]]), torch.rand(4, 2)
    expected = reference.experts.run(x, ids, weights, plain)
    assert torch.equal(reference.experts.run(x, ids, weights, experts), expected)


def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed, capability: int) -> torch.Tensor:
    asm = not IS_INTERPRETED
    return experts_nvfp4.run_experts(x, ids, weights, packed, arch=capability, asm=asm)


def check(tokens: int, sizes: tuple[int, int, int], choices: int, capability: int, *, elsewhere: int = 2) -> None:
    num_experts, hidden_size, intermediate_size = sizes
    experts = make_nvfp4_experts(num_experts, hidden_size, intermediate_size, first_expert=1)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, hidden_size, generator=generator).bfloat16()
    ids = torch.rand(tokens, num_experts + elsewhere, generator=generator).argsort(1)[:, :choices]
    weights = torch.rand(tokens, choices, generator=generator)
    packed = pack_experts(type(experts)(**{f: _to_device(getattr(experts, f)) for f in experts.__slots__}))
    actual = run(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), packed, capability).cpu()
    expected = reference.experts.run(x.float(), ids, weights, experts)
    assert actual.dtype == torch.bfloat16
    assert actual.shape == x.shape
    scale = float(expected.abs().max()) if tokens else 1.0
    torch.testing.assert_close(actual.float(), expected, rtol=2**-6, atol=2**-7 * max(scale, 1e-6))


def _to_device(value):
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


CAPABILITIES = (90, 120) if IS_INTERPRETED else (10 * torch.cuda.get_device_capability()[0],)


@pytest.mark.parametrize("tokens", [0, 1, 19])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_against_the_reference(tokens: int, capability: int) -> None:
    check(tokens, (3, 128, 64), 2, capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_sizes_that_fill_no_tile(capability: int) -> None:
    """nano's: 192 and 64; and ones that end within a group of eight hidden units or a tile of columns."""
    check(5, (2, 192, 64), 1, capability)
    check(5, (2, 80, 48), 2, capability)


def test_experts_of_other_ranks_only() -> None:
    experts = pack_experts(make_nvfp4_experts(2, 64, 64, first_expert=4))
    experts = type(experts)(**{f: _to_device(getattr(experts, f)) for f in experts.__slots__})
    x, ids = torch.randn(3, 64).bfloat16(), torch.tensor([[0, 1], [6, 7], [-1, -1]])
    out = run(x.to(DEVICE), ids.to(DEVICE), torch.ones(3, 2, device=DEVICE), experts, CAPABILITIES[0])
    assert (out == 0).all()


def test_a_token_with_nan_spoils_no_other() -> None:
    """Padded rows may hold anything."""
    experts = pack_experts(make_nvfp4_experts(2, 64, 64))
    experts = type(experts)(**{f: _to_device(getattr(experts, f)) for f in experts.__slots__})
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 64, generator=generator).bfloat16().to(DEVICE)
    ids, weights = torch.tensor([[0, 1]] * 5, device=DEVICE), torch.ones(5, 2, device=DEVICE)
    clean = run(x, ids, weights, experts, CAPABILITIES[0])
    x[2] = float("nan")
    dirty = run(x, ids, weights, experts, CAPABILITIES[0])
    others = [0, 1, 3, 4]
    assert torch.equal(clean[others], dirty[others])
    assert dirty[2].isnan().all()


def test_unquantised_experts_are_refused() -> None:
    plain = ExpertWeights(gate_up_EFM=torch.zeros(1, 4, 2), down_EMF=torch.zeros(1, 2, 2), first_expert=0)
    with pytest.raises(TypeError, match="triton's experts are NVFP4"):
        experts_nvfp4.experts.pack(plain)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 300, 700])
def test_real_sizes(tokens: int) -> None:
    check(tokens, (6, 6144, 2048), 4, CAPABILITIES[0])
