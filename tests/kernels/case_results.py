"""Results of an operation's case from two providers, compared as its contract allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from glm5ray.kernels.cache_rows import split_keys, split_rows
from glm5ray.kernels.tolerances import TOLERANCES

if TYPE_CHECKING:
    from glm5ray.bench.kernel_cases import Case, CaseMaker

FP8_STEP = 2**-3
"""Of e4m3, relative: numbers that round to neighbours."""


def assert_same(case: Case, actual: Any, expected: Any, maker: CaseMaker) -> None:
    """``expected``: the reference's."""
    if case.op == "select_tokens":
        assert_same_selection(actual, expected)
        return
    if case.op == "route":
        order, other = actual[0].argsort(dim=1), expected[0].argsort(dim=1)
        assert torch.equal(actual[0].gather(1, order), expected[0].gather(1, other))
        torch.testing.assert_close(actual[1].gather(1, order), expected[1].gather(1, other), rtol=1e-4, atol=1e-5)
        return
    if case.op == "pick_tokens":
        assert torch.equal(actual, expected)
        return
    rtol, atol = TOLERANCES[case.op, maker.dtype]
    parts = zip(*(x if isinstance(x, tuple) else (x,) for x in (actual, expected)), strict=True)
    for ours, theirs in parts:
        if theirs.dtype == torch.uint8:
            ours, theirs = (_values(case.op, x, maker) for x in (ours, theirs))
            rtol, atol = FP8_STEP, max(atol, 2e-2)
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, msg=lambda text: f"{case.op}: {text}")


def assert_same_selection(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Of random numbers two sums in other orders may pass each other at the edge of the selection: in one of 500."""
    assert actual.shape == expected.shape
    differing = 0
    for ours, theirs in zip(actual.tolist(), expected.tolist(), strict=True):
        chosen = [slot for slot in ours if slot >= 0]
        assert len(set(chosen)) == len(chosen), "a slot is selected twice"
        assert len(chosen) == len([slot for slot in theirs if slot >= 0])
        differing += len(set(chosen) - set(theirs))
    assert differing <= max(1, expected.numel() // 500), f"{differing} of {expected.numel()} slots differ"


def _values(op: str, rows: torch.Tensor, maker: CaseMaker) -> torch.Tensor:
    """fp32 of the rows that were written."""
    config, written = maker.config, torch.arange(maker.tokens, device=rows.device)
    if op == "append_latent":
        return split_rows(rows, config.kv_lora_rank, config.qk_rope_head_dim).gather(written)
    return split_keys(rows, config.index_head_dim).gather(written)
