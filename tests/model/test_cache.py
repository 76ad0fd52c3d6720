"""What the cache holds, and that nothing leaks from one sequence to another through it."""

from __future__ import annotations

import pytest
import torch

from glm5ray.model.cache import PagedCache
from tests.hf_reference import INDEX_SHARE, hf_config, hf_model, model_config, our_model
from tests.model.paged_run import PagedRun


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("with_mtp", [False, True])
def test_bytes_per_page_is_what_is_allocated(dtype: torch.dtype, with_mtp: bool) -> None:
    values = {**hf_config(**INDEX_SHARE).to_dict(), "dtype": "float32", "num_nextn_predict_layers": 1}
    config = type(model_config(hf_config())).from_dict(values)
    cache = PagedCache(config, num_pages=3, page_size=16, dtype=dtype, with_mtp=with_mtp)
    tensors = [*cache.latent, *(keys for keys in cache.index_keys if keys is not None)]
    assert sum(tensor.nbytes for tensor in tensors) == 3 * PagedCache.bytes_per_page(
        config, 16, dtype, with_mtp=with_mtp
    )
    shared = [i for i, keys in enumerate(cache.index_keys) if keys is None]
    assert shared == [2, 4, 5]


def test_bytes_per_page_of_glm52() -> None:
    """The published sizes: 78 latents of 576 numbers and 21 index keys of 128, in bf16: 95,232 bytes a token."""
    layers = {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3, "indexer_types": None}
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "mlp_layer_types": None}
    values = hf_config().to_dict() | layers | sizes
    config = type(model_config(hf_config())).from_dict(values)
    assert PagedCache.bytes_per_page(config, 64, torch.bfloat16) == 64 * 95_232


@pytest.mark.parametrize("provider", ["reference", "cpu"])
@pytest.mark.parametrize("index_topk", [24, 200])
def test_poisoned_pages_reach_nobody(provider: str, index_topk: int) -> None:
    """Every slot that no sequence has written holds NaN, and so does one whole sequence; the other's logits are
    untouched."""
    model = our_model(hf_model(2, **INDEX_SHARE, index_topk=index_topk), kernels={"default": provider})
    tokens = torch.randint(1, 96, (41,)).tolist()
    steps = [[(0, 20), (1, 30)], [(0, 20), (1, 5)], [(0, 1), (1, 1)]]

    clean = PagedRun(model, [tokens, tokens], page_size=7).all_logits(steps)
    poisoned_run = PagedRun(model, [tokens, [0] * 41], page_size=7)
    for rows in [*poisoned_run.cache.latent, *poisoned_run.cache.index_keys]:
        if rows is not None:
            rows.fill_(float("nan"))
    model.model.embed_tokens.weight.data[0] = float("nan")
    poisoned = poisoned_run.all_logits(steps)

    assert poisoned[1].isnan().all()
    torch.testing.assert_close(poisoned[0], clean[0], rtol=0, atol=1e-5)
