"""Distributed inference engine for the GLM-5 family.

>>> from glm5ray import LLM, SamplingParams
>>> llm = LLM("nano")  # doctest: +SKIP
>>> llm.generate("The sky is", SamplingParams(max_tokens=8))  # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm5ray.engine.llm import LLM
    from glm5ray.protocol import SamplingParams

__all__ = ["LLM", "SamplingParams"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Loads what is asked for: ``import glm5ray`` alone brings no torch."""
    if name == "LLM":
        from glm5ray.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from glm5ray.protocol import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'glm5ray' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
