"""Steps before the first request: of every kind, within the limits, and without a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm5ray.worker.warm_up import kinds_of_steps, warm_up
from glm5ray.worker.worker import Worker
from tests.engine.conftest import settings

if TYPE_CHECKING:
    from pathlib import Path


@given(st.integers(1, 9000), st.integers(1, 2048), st.integers(1, 200_000), st.sampled_from([16, 2048]))
def test_steps_keep_to_the_limits(tokens: int, seqs: int, longest: int, topk: int) -> None:
    kinds = list(kinds_of_steps(tokens, seqs, longest, topk))
    assert kinds
    assert len(kinds) < 50
    for slices in kinds:
        assert 0 < len(slices) <= seqs
        assert sum(count for _, count in slices) <= tokens
        assert all(start >= 0 and count > 0 and start + count <= longest for start, count in slices)


def test_kinds_of_glm5() -> None:
    kinds = list(kinds_of_steps(8192, 1024, 200_000, 2048))
    assert [(0, 8192)] in kinds
    assert [(0, 256)] * 32 in kinds
    assert [(4096, 8192)] in kinds, "all of its tokens select"
    assert [(255, 1)] * 1024 in kinds
    assert any(len({count for _, count in slices}) == 2 for slices in kinds), "decodes beside a prompt"


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_the_cache_is_left_as_it_is(tiny_folder: Path, kind: str) -> None:
    config = settings(
        model={"path": str(tiny_folder), "device": "cpu"}, kernels={"default": "reference"}, cache={"kv_dtype": kind}
    )
    worker = Worker.load(config)
    rows = [*worker.cache.latent, *(keys for keys in worker.cache.index_keys if keys is not None)]
    before = [row.clone() for row in rows]
    warm_up(worker.model, worker.cache, max_num_tokens=70, max_num_seqs=6, max_model_len=64, page_size=16)
    assert all(torch.equal(row, was) for row, was in zip(rows, before, strict=True))
