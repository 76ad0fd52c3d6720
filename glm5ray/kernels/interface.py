"""The operations that the model is made of, as one table of callables; providers implement them, ``select`` fills the
table.

Letters of the shape suffixes, here and in every provider (GLM-5's size in brackets):

    T  tokens of the step, slices one behind the other      S  slices of the step
    P  pages in a row of the page table                     N  slots of the cache (pages x page_size)
    H  attention heads of this rank [64]                    D  one query head, nope + rope [256]
    C  latent, kv_lora_rank [512]                           R  rope part, qk_rope_head_dim [64]
    L  one latent row of the cache, C + R [576]             V  one value head, v_head_dim [256]
    U  nope part of a query head, qk_nope_head_dim [192]    J  index heads [32]
    I  one index head, index_head_dim [128]                 K  selected slots of a token [at most index_topk, 2048]
    M  hidden size [6144]                                   F  width of an MLP or expert on this rank [2048]
    E  experts of this rank [256]                           A  experts of a token, num_experts_per_tok [8]
    O  outputs of a linear layer                            X  any width

Rules for all: T may be 0. Activations and weights are fp32 or bf16, the same in one call; arithmetic that
``docs/model.md`` calls fp32 is fp32. Results are new tensors of the input's dtype unless said otherwise; what is
written in place is said. A row of a result depends on the rows of the same token (and the cache rows it may see)
only, up to rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """One step on one device: tensors for the model, and the same numbers on the host for whatever loops over
    slices."""

    token_ids_T: Tensor
    """int64"""
    positions_T: Tensor
    """int64, from 0 in each sequence. -1 marks a padded row, which only the fixed batches of CUDA graphs have: it sees
    no position, its KV is not written, and its results are finite but mean nothing."""
    slots_T: Tensor
    """int64, where each token's KV is written: ``page * page_size + offset``; no two tokens share one. -1 in a padded
    row."""
    slice_T: Tensor
    """int32, the slice of each token: its row of the page table. 0 in a padded row."""
    page_table_SP: Tensor
    """int32, pages of each slice's sequence in order of position, -1 behind the last; they reach the slice's last
    token at least."""
    starts: tuple[int, ...]
    """Host: position of the first token of each slice."""
    num_tokens: tuple[int, ...]
    """Host: tokens of each slice, at least 1; the rows of a slice are contiguous in T, in order of slices."""
    page_size: int
    max_visible: int
    """Host: no token sees more positions than this. It may be more than the step needs (a CUDA graph was captured for a
    bound), but what is decided by it (select or attend to all; how often to split) is the same for all layers."""
    logits_rows_L: Tensor
    """int64, rows of T whose logits are wanted."""
    has_padding: bool = False
    """Host: some rows may be padded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSettings:
    """How experts are chosen; the fields of the checkpoint's config."""

    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights:
    """Routed experts of one rank, unquantised. Quantised experts are another class; a provider says which it takes."""

    gate_up_EFM: Tensor
    """[E, 2F, M]: rows of the gate first, then those of up."""
    down_EMF: Tensor
    """[E, M, F]"""
    first_expert: int
    """Number of the first of these experts in the model; assignments to others are another rank's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvfp4Weight:
    """A linear layer's weight in NVFP4: ``value = fp4 * scale * global_scale``, as in the checkpoint's files."""

    packed_OX: Tensor
    """uint8 [O, X/2]: two E2M1 numbers a byte, the one of the lower column in the low nibble."""
    scales_OG: Tensor
    """float8_e4m3fn [O, X/16]: one for 16 columns."""
    global_scale: Tensor
    """fp32, no dimensions: a factor of all group scales (of compressed-tensors' files, the inverse of theirs)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvfp4ExpertWeights:
    """Routed experts of one rank in NVFP4, as :class:`Nvfp4Weight`; they are never held unquantised."""

    gate_up_packed: Tensor
    """uint8 [E, 2F, M/2]: rows of the gate first, then those of up."""
    gate_up_scales: Tensor
    """float8_e4m3fn [E, 2F, M/16]"""
    gate_up_global: Tensor
    """fp32 [E, 2]: of the gate, of up."""
    down_packed: Tensor
    """uint8 [E, M, F/2]"""
    down_scales: Tensor
    """float8_e4m3fn [E, M, F/16]"""
    down_global: Tensor
    """fp32 [E]"""
    first_expert: int
    """As in :class:`ExpertWeights`."""


RoutedExperts: TypeAlias = ExpertWeights | Nvfp4ExpertWeights


class SelectTokens(Protocol):
    """DSA's indexer: which cached tokens each token may attend to.

    The score of a visible position s (not behind the token's own) is ``sum_j w[t, j] * relu(q[t, j] . key[s])`` in
    fp32. The published formula multiplies it by ``(J * I) ** -0.5``, which changes no order and is left out. The
    ``index_topk`` highest scores are selected, of equal scores the lower position first; all of them when there are
    no more than that."""

    def plan(self, batch: ForwardBatch, index_topk: int) -> Any | None:
        """What all layers of the step share: the provider's own handle, of host lists and device tensors.

        ``None`` if no token of the step sees more than ``index_topk`` positions: nothing is to be selected, ``run``
        is not called."""
        ...

    def run(self, plan: Any, q_TJI: Tensor, w_TJ: Tensor, keys_NI: Tensor) -> Tensor:
        """Slots int32 [T, K], in any order, -1 behind the last.

        q_TJI: rotated index queries. w_TJ: fp32. keys_NI: the layer's index keys, those of this step already appended.
        """
        ...


class MlaAttention(Protocol):
    """Attention in absorbed form: every head attends to the same latent rows, whose first C numbers are also the
    values."""

    def plan(self, batch: ForwardBatch, index_topk: int) -> Any:
        """As :meth:`SelectTokens.plan`, but never ``None``."""
        ...

    def run(
        self, plan: Any, q_THL: Tensor, rows_NL: Tensor, selected_TK: Tensor | None, scale: float, value_dim: int
    ) -> Tensor:
        """[T, H, C]: ``sum_s softmax_s(scale * q[t, h] . rows[s]) * rows[s, :value_dim]``, the softmax in fp32.

        s runs over ``selected_TK``, or over all positions not behind the token's own if that is ``None``. rows_NL:
        the layer's latent rows, those of this step already appended. What stands in slots that no token of a sequence
        may see, NaN included, must not reach its result."""
        ...


class MlaPrompts(Protocol):
    """Queries, attention and the way out of latent space of a step with prompts, where a provider has something better
    for those than the absorbed form."""

    def plan(self, batch: ForwardBatch, index_topk: int) -> Any | None:
        """As :meth:`SelectTokens.plan`. ``None``: all of the step is to be computed in absorbed form."""
        ...

    def run(
        self,
        plan: Any,
        q_THD: Tensor,
        rows_NL: Tensor,
        selected_TK: Tensor | None,
        w_uk_HUC: Tensor,
        w_uv_HVC: Tensor,
        rope_TR: Tensor,
        scale: float,
    ) -> Tensor:
        """[T, H * V]: what :class:`MlaQuery`, :class:`MlaAttention` and :class:`MlaOutput` give one after the other.
        q_THD may be overwritten."""
        ...


class Linear(Protocol):
    def __call__(self, x_TX: Tensor, weight_OX: Any) -> Tensor:
        """[T, O]: ``x @ weight.T``; no linear layer of the model has a bias.

        weight_OX: a tensor, or an :class:`Nvfp4Weight` if the provider takes it (``Provider.nvfp4_ops``)."""
        ...


class RmsNorm(Protocol):
    def __call__(self, x_TX: Tensor, weight_X: Tensor, eps: float) -> Tensor:
        """[T, X]: ``x / sqrt(mean(x^2) + eps)`` in fp32, rounded to x's dtype, then times weight. x may have strided
        rows."""
        ...


class AddRmsNorm(Protocol):
    def __call__(self, residual_TX: Tensor, x_TX: Tensor, weight_X: Tensor, eps: float) -> Tensor:
        """Adds x to ``residual_TX`` in place; returns :class:`RmsNorm` of the sum."""
        ...


class SiluAndMul(Protocol):
    def __call__(self, gate_up_TX: Tensor) -> Tensor:
        """[T, X/2]: ``silu(first half) * second half``."""
        ...


class Rope(Protocol):
    def __call__(self, x_TJX: Tensor, rope_TR: Tensor) -> None:
        """Rotates the first R of X in place: the pair (2i, 2i+1) by the angle of i; pairs stay in place.

        rope_TR: fp32, ``cos`` and ``sin`` of each angle side by side: (cos_0, sin_0, cos_1, sin_1, ...). x_TJX may be
        a strided view; its last stride is 1."""
        ...


class AppendLatent(Protocol):
    def __call__(
        self, kv_TL: Tensor, weight_C: Tensor, eps: float, rope_TR: Tensor, slots_T: Tensor, rows_NL: Tensor
    ) -> None:
        """Writes ``rows[slots] = [rms_norm(kv[:, :C]) | rope(kv[:, C:])]``, with 0 for what is not finite: the cache
        holds finite numbers, whatever a sequence computes. kv_TL may have strided rows.

        rows_NL, here and for attention: of the model's type [N, L], or uint8, which are FP8 rows as
        :mod:`glm5ray.kernels.cache_rows` lays them out."""
        ...


class AppendIndexKeys(Protocol):
    def __call__(
        self,
        k_TI: Tensor,
        weight_I: Tensor,
        bias_I: Tensor,
        eps: float,
        rope_TR: Tensor,
        slots_T: Tensor,
        keys_NI: Tensor,
    ) -> None:
        """Writes ``keys[slots] = rope(layer_norm(k))``; the norm with bias in fp32, the rotation on the first R; 0 for
        what is not finite. k_TI may have strided rows.

        keys_NI, here and for selection: of the model's type [N, I], or uint8, which are FP8 keys page by page
        (:mod:`glm5ray.kernels.cache_rows`); the queries are then quantised alike, and scores are those of the
        quantised numbers."""
        ...


class MlaQuery(Protocol):
    def __call__(self, q_THD: Tensor, w_uk_HUC: Tensor, rope_TR: Tensor) -> Tensor:
        """[T, H, L]: ``[q[..., :U] @ w_uk | rope(q[..., U:])]``. q_THD may have strided rows and may be overwritten."""
        ...


class MlaOutput(Protocol):
    def __call__(self, o_THC: Tensor, w_uv_HVC: Tensor) -> Tensor:
        """[T, H * V]: each head's ``o @ w_uv.T``, heads side by side."""
        ...


class PickTokens(Protocol):
    def __call__(self, hidden_LM: Tensor, logits_LW: Tensor) -> Tensor:
        """int64 [3, L]: the token with the highest logit, of equal ones the lowest; whether all of the row's hidden
        state is finite; whether all of its logits are. The token of a row with a logit that is not finite is any.

        L here: rows that sample; W: the vocabulary, V elsewhere in the worker."""
        ...


class Route(Protocol):
    def __call__(
        self, x_TM: Tensor, gate_EM: Tensor, bias_E: Tensor, settings: RouterSettings
    ) -> tuple[Tensor, Tensor]:
        """(expert numbers int64 [T, A], weights fp32 [T, A]); E counts all experts of the model.

        ``s = sigmoid(x @ gate.T)`` with x, gate and bias in fp32; the A highest of ``s + bias`` are chosen (within
        the ``topk_group`` groups whose two highest sum to most); weights are ``s`` without the bias, divided by their
        sum + 1e-20 if ``norm_topk_prob``, times ``routed_scaling_factor``."""
        ...


class Experts(Protocol):
    """The routed experts, whose weights are nearly all of the model: a provider may want them laid out its own way."""

    def pack(self, experts: Any) -> Any:
        """The same numbers as :meth:`run` reads them best; called once a layer, after loading.

        Takes :class:`ExpertWeights`, or :class:`Nvfp4ExpertWeights` where the provider serves them
        (``Provider.nvfp4_ops``); the result may be a class of the provider's own."""
        ...

    def run(self, x_TM: Tensor, ids_TA: Tensor, weights_TA: Tensor, experts: Any) -> Tensor:
        """[T, M]: ``sum_a weights[t, a] * down(silu(gate(x)) * up(x))`` over the assignments to this rank's experts.

        ids_TA: int64, numbers of the model's experts; -1 is nobody's, as padded rows have it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """One implementation per operation, of three kinds: plain functions; ``plan`` (once a step) and ``run`` (once a
    layer); ``pack`` (once, at load) and ``run``."""

    linear: Linear
    rms_norm: RmsNorm
    add_rms_norm: AddRmsNorm
    silu_and_mul: SiluAndMul
    rope: Rope
    append_latent: AppendLatent
    append_index_keys: AppendIndexKeys
    mla_query: MlaQuery
    mla_output: MlaOutput
    select_tokens: SelectTokens
    mla_attention: MlaAttention
    mla_prompts: MlaPrompts
    route: Route
    experts: Experts
    pick_tokens: PickTokens
