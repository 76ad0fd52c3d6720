"""How far a provider's result may lie from the reference's: operation x dtype -> (rtol, atol), with the reason.

Both compute in fp32 or better, so in fp32 they differ by the order of sums alone: about ``sqrt(n) * 2^-24`` of the
sum of magnitudes for n terms. In bf16 the result is rounded to 8 bits, so two results that agree to fp32 rounding
differ by at most one unit in the last place (2^-8 relative, of the larger neighbour 2^-7); where a provider also
rounds an intermediate to bf16, by one or two units more."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    rtol: float
    atol: float


FP32_SUM = Tolerance(1e-5, 2e-5)
"""Sums of up to a few thousand terms of unit scale, in another order."""
FP32_POINTWISE = Tolerance(2e-6, 1e-6)
"""No long sums: a few roundings; complex products are fused differently."""
BF16_ROUNDED_ONCE = Tolerance(2**-7, 1e-3)
"""The same fp32 number rounded once, seen from both sides of a tie."""
BF16_INTERMEDIATE = Tolerance(2**-6, 2e-2)
"""An intermediate is rounded too (silu before the product, a normed vector before its weight, the softmax before the
values): its error, 2^-9 of unit-scale terms, enters sums of many."""
BF16_OTHER_FORM = Tolerance(2**-5, 4e-2)
"""The same function by other products: one way rounds queries and results in latent space, the other keys and
values."""
BF16_EXPERTS = Tolerance(2**-6, 6e-2)
"""gate_up, the hidden vector and each expert's result are rounded, and weights that sum to several units multiply the
errors."""

TOLERANCES: dict[tuple[str, torch.dtype], Tolerance] = {
    ("linear", torch.float32): FP32_SUM,
    ("linear", torch.bfloat16): BF16_ROUNDED_ONCE,
    ("rms_norm", torch.float32): FP32_POINTWISE,
    ("rms_norm", torch.bfloat16): BF16_INTERMEDIATE,
    ("add_rms_norm", torch.float32): FP32_POINTWISE,
    ("add_rms_norm", torch.bfloat16): BF16_INTERMEDIATE,
    ("silu_and_mul", torch.float32): FP32_POINTWISE,
    ("silu_and_mul", torch.bfloat16): BF16_INTERMEDIATE,
    ("rope", torch.float32): FP32_POINTWISE,
    ("rope", torch.bfloat16): BF16_ROUNDED_ONCE,
    ("append_latent", torch.float32): FP32_POINTWISE,
    ("append_latent", torch.bfloat16): BF16_INTERMEDIATE,
    ("append_index_keys", torch.float32): FP32_SUM,
    ("append_index_keys", torch.bfloat16): BF16_INTERMEDIATE,
    ("mla_query", torch.float32): FP32_SUM,
    ("mla_query", torch.bfloat16): BF16_ROUNDED_ONCE,
    ("mla_output", torch.float32): FP32_SUM,
    ("mla_output", torch.bfloat16): BF16_ROUNDED_ONCE,
    ("mla_attention", torch.float32): FP32_SUM,
    ("mla_attention", torch.bfloat16): BF16_INTERMEDIATE,
    ("mla_prompts", torch.float32): FP32_SUM,
    ("mla_prompts", torch.bfloat16): BF16_OTHER_FORM,
    ("route", torch.float32): FP32_SUM,
    ("route", torch.bfloat16): FP32_SUM,
    ("experts", torch.float32): FP32_SUM,
    ("experts", torch.bfloat16): BF16_EXPERTS,
}
"""``select_tokens`` and ``pick_tokens`` are missing on purpose: a choice is right or wrong. ``route`` is fp32 whatever
the dtype of its input."""


def assert_close(op: str, actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises ``AssertionError`` if ``actual`` is further from the reference's ``expected`` than ``op`` may be."""
    rtol, atol = TOLERANCES[op, dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, msg=lambda text: f"{op}: {text}")
