"""The layer for multi-token prediction. transformers leaves it out, so the oracle is put together from its decoder
layer and norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaDecoderLayer, GlmMoeDsaRMSNorm

from glm5ray.kernels.select import select_kernels
from glm5ray.model.glm5 import Glm5
from glm5ray.parallel import ParallelContext
from tests.hf_reference import INDEX_SHARE, hf_config, hf_model, model_config, our_state
from tests.model.paged_run import PagedRun


class Oracle(nn.Module):
    """One MTP layer over a whole sequence, by the checkpoint's names."""

    def __init__(self, layer: int, **changes: Any) -> None:
        super().__init__()
        kinds = [*INDEX_SHARE["indexer_types"], "full"]
        config = hf_config(**INDEX_SHARE | {"num_hidden_layers": layer + 1, "indexer_types": kinds} | changes)
        hidden = config.hidden_size
        self.enorm = GlmMoeDsaRMSNorm(hidden, config.rms_norm_eps)
        self.hnorm = GlmMoeDsaRMSNorm(hidden, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = GlmMoeDsaDecoderLayer(config, layer)
        self.norm = GlmMoeDsaRMSNorm(hidden, config.rms_norm_eps)
        torch.manual_seed(7)
        for tensor in self.state_dict().values():
            tensor.normal_(std=0.2) if tensor.ndim > 1 else tensor.uniform_(0.5, 1.5)

    @torch.no_grad()
    def forward(self, embedding: Tensor, hidden: Tensor, rotary: Any) -> Tensor:
        length = len(hidden)
        x = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1))[None]
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
        angles = rotary(x, torch.arange(length)[None])
        return self.norm(self.layer(x, attention_mask=mask, position_embeddings=angles)[0])[0]

    def our_state(self, prefix: str) -> dict[str, Tensor]:
        names = {"norm": "shared_head.norm"}
        state = {}
        for name, tensor in self.state_dict().items():
            head, _, rest = name.partition(".")
            state[prefix + (rest if head == "layer" else f"{names.get(head, head)}.{rest}")] = tensor.clone()
        return state


@pytest.mark.parametrize("index_topk", [24, 200])
def test_mtp_layer(index_topk: int) -> None:
    """In chunks over pages, beside the main model's own cache, the layer gives what it gives over the whole sequence
    at once."""
    layer, length = INDEX_SHARE["num_hidden_layers"], 50
    theirs = hf_model(5, **INDEX_SHARE, index_topk=index_topk)
    oracle = Oracle(layer, index_topk=index_topk)
    config = model_config(theirs.config)
    config = type(config).from_dict({**theirs.config.to_dict(), "dtype": "float32", "num_nextn_predict_layers": 1})
    ours = Glm5(
        config, select_kernels({}, "cpu"), ParallelContext(), dtype=torch.float32, norm_eps="huggingface", with_mtp=True
    )
    ours.load_state_dict(our_state(theirs) | oracle.our_state(f"model.layers.{layer}."), strict=True, assign=True)
    ours.prepare()

    tokens = torch.randint(0, 96, (length + 1,)).tolist()
    with torch.no_grad():
        hidden = theirs.model(torch.tensor([tokens[:length]])).last_hidden_state[0]
        embedding = theirs.model.embed_tokens(torch.tensor(tokens[1:]))
        expected = oracle(embedding, hidden, theirs.model.rotary_emb)

    main = PagedRun(ours, [tokens], page_size=8, with_mtp=True)
    drafts = PagedRun(ours, [tokens], page_size=8, with_mtp=True)
    drafts.cache = main.cache
    parts = []
    for count in (20, 17, 12, 1):
        batch = main.batch([(0, count)])
        hidden_TM = ours.forward_hidden(batch, main.cache)
        parts.append(ours.mtp_forward(drafts.batch([(0, count)], shift=1), hidden_TM, main.cache))
    torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(ours.compute_logits(torch.cat(parts)), theirs.lm_head(expected), rtol=0, atol=2e-4)
