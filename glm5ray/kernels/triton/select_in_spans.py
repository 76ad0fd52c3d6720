"""The indexer whose programs score many positions of a prompt one after the other; the rest is
:mod:`glm5ray.kernels.triton.indexer`."""

from glm5ray.kernels.triton.indexer import select_in_spans as select_tokens

__all__ = ["select_tokens"]
