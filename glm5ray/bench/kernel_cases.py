"""One call of each operation of the kernel table at a model's own sizes, with random inputs: what a benchmark times and
what a test on a GPU compares with the reference.

``num_bytes`` is what a call must read and write at least, every input and result once, however often it needs them;
``flops`` counts a multiplication and an addition as two. Shape suffixes in :mod:`glm5ray.kernels.interface`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from glm5ray.kernels.cache_rows import index_page_bytes, latent_row_bytes, write_keys, write_latent
from glm5ray.kernels.interface import ExpertWeights, ForwardBatch, Nvfp4ExpertWeights, RouterSettings
from glm5ray.model.packed import packed_shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from glm5ray.kernels.interface import Kernels
    from glm5ray.model_config import ModelConfig

PAGE_SIZE = 64


@dataclass(frozen=True, slots=True)
class Case:
    """One operation and its inputs."""

    op: str
    prepare: Callable[[Kernels], Callable[[], Any]]
    """Of a table, a call that can be repeated; plans and packs beforehand. It returns what the operation returns or
    writes: tensors, which the next call may overwrite."""
    num_bytes: int
    flops: int


class CaseMaker:
    """Cases for ``tokens`` sequences that decode, each with ``context`` tokens, its own among them.

    Inputs are made from a seed of the operation's name, so that they do not depend on which others are made."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        tokens: int,
        context: int,
        device: str,
        dtype: torch.dtype,
        packs_experts: bool,
        fp8_cache: bool = False,
    ) -> None:
        self.config, self.tokens, self.context = config, tokens, context
        self.device, self.dtype = device, dtype
        self.packs_experts, self.fp8_cache = packs_experts, fp8_cache
        self._generator = torch.Generator(device)
        self._size = dtype.itemsize

    def make(self, op: str) -> Case | None:
        """``None``: no decode of this context calls it."""
        self._generator.manual_seed(sum(map(ord, op)))
        return getattr(self, f"_{op}")()

    def _normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return made.normal_(0.0, scale, generator=self._generator)

    def _rope_table(self) -> Tensor:
        angle_TP = self._normal(self.tokens, self.config.qk_rope_head_dim // 2, dtype=torch.float32)
        return torch.stack([angle_TP.cos(), angle_TP.sin()], dim=-1).flatten(-2)

    def _bytes(self, *tensors: Tensor) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _linear(self) -> Case:
        """``o_proj``, the largest outside the experts."""
        width, hidden = self.config.num_attention_heads * self.config.v_head_dim, self.config.hidden_size
        x, weight = self._normal(self.tokens, width), self._normal(hidden, width, scale=width**-0.5)
        written = self.tokens * hidden * self._size
        flops = 2 * self.tokens * width * hidden
        return Case("linear", lambda k: lambda: k.linear(x, weight), self._bytes(x, weight) + written, flops)

    def _rms_norm(self) -> Case:
        x, weight = self._normal(self.tokens, self.config.hidden_size), self._normal(self.config.hidden_size)
        return Case("rms_norm", lambda k: lambda: k.rms_norm(x, weight, 1e-5), 2 * self._bytes(x), 0)

    def _add_rms_norm(self) -> Case:
        hidden = self.config.hidden_size
        x, residual, weight = self._normal(self.tokens, hidden), self._normal(self.tokens, hidden), self._normal(hidden)

        def prepare(k: Kernels) -> Callable[[], Any]:
            own = residual.clone()  # written in place
            return lambda: (k.add_rms_norm(own, x, weight, 1e-5), own)

        return Case("add_rms_norm", prepare, 4 * self._bytes(x), 0)

    def _silu_and_mul(self) -> Case:
        x = self._normal(self.tokens, 2 * self.config.intermediate_size)
        return Case("silu_and_mul", lambda k: lambda: k.silu_and_mul(x), self._bytes(x) * 3 // 2, 0)

    def _rope(self) -> Case:
        """The index queries."""
        x = self._normal(self.tokens, self.config.index_n_heads, self.config.index_head_dim)
        table = self._rope_table()
        turned = 2 * self.tokens * self.config.index_n_heads * self.config.qk_rope_head_dim * self._size

        def prepare(k: Kernels) -> Callable[[], Any]:
            own = x.clone()
            return lambda: (k.rope(own, table), own)[1]

        return Case("rope", prepare, turned + self._bytes(table), 0)

    def _append_latent(self) -> Case:
        latent, rope_dim = self.config.kv_lora_rank, self.config.qk_rope_head_dim
        kv, weight = self._normal(self.tokens, latent + rope_dim), self._normal(latent)
        table, slots = self._rope_table(), torch.arange(self.tokens, device=self.device)
        rows = self._empty_rows(self.tokens)

        def prepare(k: Kernels) -> Callable[[], Any]:
            own = rows.clone()
            return lambda: (k.append_latent(kv, weight, 1e-5, table, slots, own), own)[1]

        return Case("append_latent", prepare, self._bytes(kv, table, slots, rows), 0)

    def _append_index_keys(self) -> Case:
        dim = self.config.index_head_dim
        key, weight, bias = self._normal(self.tokens, dim), self._normal(dim), self._normal(dim)
        table, slots = self._rope_table(), torch.arange(self.tokens, device=self.device)
        keys = self._empty_keys(-(-self.tokens // PAGE_SIZE))
        written = self._bytes(keys) * self.tokens // (-(-self.tokens // PAGE_SIZE) * PAGE_SIZE)

        def prepare(k: Kernels) -> Callable[[], Any]:
            own = keys.clone()
            return lambda: (k.append_index_keys(key, weight, bias, 1e-6, table, slots, own), own)[1]

        return Case("append_index_keys", prepare, self._bytes(key, table, slots) + written, 0)

    def _mla_query(self) -> Case:
        c = self.config
        q = self._normal(self.tokens, c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim)
        weight = self._normal(c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank, scale=c.qk_nope_head_dim**-0.5)
        table = self._rope_table()
        written = self.tokens * c.num_attention_heads * (c.kv_lora_rank + c.qk_rope_head_dim) * self._size
        flops = 2 * self.tokens * weight.numel()
        # it may overwrite the queries, so each call has its own copy, which a timing holds against it
        return Case(
            "mla_query",
            lambda k: lambda: k.mla_query(q.clone(), weight, table),
            self._bytes(q, weight, table) + written,
            flops,
        )

    def _mla_output(self) -> Case:
        c = self.config
        o = self._normal(self.tokens, c.num_attention_heads, c.kv_lora_rank)
        weight = self._normal(c.num_attention_heads, c.v_head_dim, c.kv_lora_rank, scale=c.kv_lora_rank**-0.5)
        written = self.tokens * c.num_attention_heads * c.v_head_dim * self._size
        flops = 2 * self.tokens * weight.numel()
        return Case("mla_output", lambda k: lambda: k.mla_output(o, weight), self._bytes(o, weight) + written, flops)

    def _select_tokens(self) -> Case | None:
        c, batch = self.config, self._batch()
        if self.context <= c.index_topk:
            return None
        q = self._normal(self.tokens, c.index_n_heads, c.index_head_dim)
        weights = self._normal(self.tokens, c.index_n_heads, dtype=torch.float32)
        keys, num_slots = self._filled_keys(), self.tokens * self.context
        flops = 2 * num_slots * c.index_n_heads * c.index_head_dim
        read = self._bytes(keys) * num_slots // self._num_slots()

        def prepare(k: Kernels) -> Callable[[], Any]:
            plan = k.select_tokens.plan(batch, c.index_topk)
            return lambda: k.select_tokens.run(plan, q, weights, keys)

        return Case("select_tokens", prepare, self._bytes(q, weights) + read + self.tokens * c.index_topk * 4, flops)

    def _mla_prompts(self) -> None:
        """Prompts only; ``scripts/bench_prompts.py`` and a prompt among ``scripts/bench_long_context.py`` have it."""

    def _mla_attention(self) -> Case:
        c, batch = self.config, self._batch()
        latent, width = c.kv_lora_rank, c.kv_lora_rank + c.qk_rope_head_dim
        q = self._normal(self.tokens, c.num_attention_heads, width)
        rows = self._filled_rows()
        selected = self._selection(batch) if self.context > c.index_topk else None
        num_rows = self.tokens * min(self.context, c.index_topk)
        flops = 2 * num_rows * c.num_attention_heads * (width + latent)
        written = self.tokens * c.num_attention_heads * latent * self._size

        def prepare(k: Kernels) -> Callable[[], Any]:
            plan = k.mla_attention.plan(batch, c.index_topk)
            return lambda: k.mla_attention.run(plan, q, rows, selected, c.qk_head_dim**-0.5, latent)

        read = num_rows * rows.shape[1] * rows.element_size()
        return Case("mla_attention", prepare, self._bytes(q) + read + written, flops)

    def _pick_tokens(self) -> Case:
        hidden, logits = (
            self._normal(self.tokens, self.config.hidden_size),
            self._normal(self.tokens, self.config.vocab_size),
        )
        return Case("pick_tokens", lambda k: lambda: k.pick_tokens(hidden, logits), self._bytes(hidden, logits), 0)

    def _route(self) -> Case:
        c = self.config
        x = self._normal(self.tokens, c.hidden_size)
        gate = self._normal(c.n_routed_experts, c.hidden_size, scale=c.hidden_size**-0.5, dtype=torch.float32)
        bias = self._normal(c.n_routed_experts, scale=0.01, dtype=torch.float32)
        settings = RouterSettings(
            num_experts_per_tok=c.num_experts_per_tok,
            n_group=c.n_group,
            topk_group=c.topk_group,
            norm_topk_prob=c.norm_topk_prob,
            routed_scaling_factor=c.routed_scaling_factor,
        )
        written = self.tokens * c.num_experts_per_tok * 12
        flops = 2 * self.tokens * gate.numel()
        return Case(
            "route", lambda k: lambda: k.route(x, gate, bias, settings), self._bytes(x, gate, bias) + written, flops
        )

    def _experts(self) -> Case:
        """Experts chosen uniformly; those that no token has are not read."""
        c = self.config
        x = self._normal(self.tokens, c.hidden_size)
        lots = torch.rand(self.tokens, c.n_routed_experts, device=self.device, generator=self._generator)
        ids = lots.topk(c.num_experts_per_tok, dim=-1).indices
        weights = torch.rand(ids.shape, device=self.device, generator=self._generator)
        held = self._expert_weights()
        num_bytes = sum(self._bytes(value) for name in held.__slots__ if torch.is_tensor(value := getattr(held, name)))
        num_read = len(ids.unique()) * (num_bytes // c.n_routed_experts)
        flops = 6 * ids.numel() * c.hidden_size * c.moe_intermediate_size

        def prepare(k: Kernels) -> Callable[[], Any]:
            packed = k.experts.pack(held)
            return lambda: k.experts.run(x, ids, weights, packed)

        return Case("experts", prepare, 2 * self._bytes(x) + self._bytes(ids, weights) + num_read, flops)

    def _expert_weights(self) -> ExpertWeights | Nvfp4ExpertWeights:
        c = self.config
        shapes = {
            "gate_up": (c.n_routed_experts, 2 * c.moe_intermediate_size, c.hidden_size),
            "down": (c.n_routed_experts, c.hidden_size, c.moe_intermediate_size),
        }
        if not self.packs_experts:
            gate_up, down = (self._normal(*shape, scale=shape[2] ** -0.5) for shape in shapes.values())
            return ExpertWeights(gate_up_EFM=gate_up, down_EMF=down, first_expert=0)
        fields: dict[str, Any] = {}
        for name, shape in shapes.items():
            for suffix, (size, dtype) in packed_shapes(shape, f"{name}_proj").items():
                if suffix == "packed":
                    made = torch.randint(0, 256, size, dtype=dtype, device=self.device, generator=self._generator)
                elif suffix == "scales":  # from 0.5 to 1.75
                    codes = torch.randint(0x30, 0x3F, size, device=self.device, generator=self._generator)
                    made = codes.to(torch.uint8).view(dtype)
                else:
                    made = torch.rand(size, device=self.device, generator=self._generator) + 0.5
                    made = made * shape[2] ** -0.5 / 3.0  # an E2M1 number of a random code has deviation 2.9
                fields[f"{name}_{suffix}"] = made
        return Nvfp4ExpertWeights(**fields, first_expert=0)

    def _pages(self) -> int:
        """Of one sequence."""
        return -(-self.context // PAGE_SIZE)

    def _num_slots(self) -> int:
        return self.tokens * self._pages() * PAGE_SIZE

    def _batch(self) -> ForwardBatch:
        """Pages are scattered over the cache, as they are after a while."""
        position = self.context - 1
        order = torch.randperm(self.tokens * self._pages(), generator=torch.Generator().manual_seed(1))
        table = order.view(self.tokens, self._pages()).int()
        slots = table[:, position // PAGE_SIZE].long() * PAGE_SIZE + position % PAGE_SIZE
        return ForwardBatch(
            token_ids_T=torch.zeros(self.tokens, dtype=torch.int64, device=self.device),
            positions_T=torch.full((self.tokens,), position, device=self.device),
            slots_T=slots.to(self.device),
            slice_T=torch.arange(self.tokens, dtype=torch.int32, device=self.device),
            page_table_SP=table.to(self.device),
            starts=(position,) * self.tokens,
            num_tokens=(1,) * self.tokens,
            page_size=PAGE_SIZE,
            max_visible=self.context,
            logits_rows_L=torch.zeros(0, dtype=torch.int64, device=self.device),
        )

    def _selection(self, batch: ForwardBatch) -> Tensor:
        """Slots [T, index_topk] of positions at random."""
        lots = torch.rand(self.tokens, self.context, device=self.device, generator=self._generator)
        position_TK = lots.topk(self.config.index_topk, dim=-1).indices
        page_TK = batch.page_table_SP.long().gather(1, position_TK // PAGE_SIZE)
        return (page_TK * PAGE_SIZE + position_TK % PAGE_SIZE).int()

    def _empty_rows(self, slots: int) -> Tensor:
        latent, rope_dim = self.config.kv_lora_rank, self.config.qk_rope_head_dim
        if self.fp8_cache:
            return torch.zeros(slots, latent_row_bytes(latent, rope_dim), dtype=torch.uint8, device=self.device)
        return torch.zeros(slots, latent + rope_dim, dtype=self.dtype, device=self.device)

    def _filled_rows(self) -> Tensor:
        latent, rope_dim, slots = self.config.kv_lora_rank, self.config.qk_rope_head_dim, self._num_slots()
        rows = self._empty_rows(slots)
        for first in range(0, slots, 2**16):
            at = torch.arange(first, min(first + 2**16, slots), device=self.device)
            write_latent(rows, at, self._normal(len(at), latent), self._normal(len(at), rope_dim))
        return rows

    def _empty_keys(self, pages: int) -> Tensor:
        dim = self.config.index_head_dim
        if self.fp8_cache:
            return torch.zeros(pages, index_page_bytes(PAGE_SIZE, dim), dtype=torch.uint8, device=self.device)
        return torch.zeros(pages * PAGE_SIZE, dim, dtype=self.dtype, device=self.device)

    def _filled_keys(self) -> Tensor:
        slots = self._num_slots()
        keys = self._empty_keys(slots // PAGE_SIZE)
        for first in range(0, slots, 2**16):
            at = torch.arange(first, min(first + 2**16, slots), device=self.device)
            write_keys(keys, at, self._normal(len(at), self.config.index_head_dim))
        return keys
