"""Log-probabilities of tokens that were sampled or given, and of the most probable ones beside them.

Shapes: N scored rows, V vocabulary, K tokens asked for at most."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from glm5ray.protocol import TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

    from glm5ray.worker.transfers import ReadBack


@dataclass(frozen=True, slots=True)
class Scores:
    """Of N tokens, on the device that computed them or, after :meth:`read_back`, on the host."""

    num_top: list[int]
    """Of each row, how many of the most probable tokens were asked for."""
    token_ids_N: Tensor
    logprobs_N: Tensor
    ranks_N: Tensor
    """1 is the most probable."""
    top_ids_NK: Tensor
    top_logprobs_NK: Tensor
    """Most probable first; ties go to the lower token id."""

    def read_back(self, read: ReadBack) -> Scores:
        """The same on the host, once ``read`` is done."""
        return replace(
            self,
            token_ids_N=read.add(self.token_ids_N),
            logprobs_N=read.add(self.logprobs_N),
            ranks_N=read.add(self.ranks_N),
            top_ids_NK=read.add(self.top_ids_NK),
            top_logprobs_NK=read.add(self.top_logprobs_NK),
        )

    def entries(self) -> list[TokenLogprobs]:
        """One of each row."""
        columns = (self.token_ids_N, self.logprobs_N, self.top_ids_NK, self.top_logprobs_NK, self.ranks_N)
        rows = zip(*(column.tolist() for column in columns), self.num_top, strict=True)
        return [
            TokenLogprobs(token_id, logprob, tuple(zip(top_ids[:k], top_values[:k], strict=True)), rank)
            for token_id, logprob, top_ids, top_values, rank, k in rows
        ]


def score_tokens(logits_NV: Tensor, token_ids_N: Tensor, num_top: list[int]) -> Scores:
    """Of ``token_ids_N`` under raw ``logits_NV`` (fp32), each with its ``num_top[i]`` most probable tokens. Launches
    only."""
    logprobs_NV = logits_NV.log_softmax(dim=-1)
    chosen_N1 = logprobs_NV.gather(-1, token_ids_N[:, None])
    values_NK, ids_NK = _top(logprobs_NV, max(num_top, default=0))
    return Scores(
        num_top=num_top,
        token_ids_N=token_ids_N,
        logprobs_N=chosen_N1.squeeze(-1),
        ranks_N=(logprobs_NV > chosen_N1).sum(dim=-1) + 1,
        top_ids_NK=ids_NK,
        top_logprobs_NK=values_NK,
    )


def _top(logprobs_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, largest first, lower index first among equals."""
    values_NK, ids_NK = logprobs_NV.topk(k, dim=-1)
    # topk leaves the order of equals open: sort by id, then stably by value
    ids_NK, by_id = ids_NK.sort(dim=-1)
    values_NK, by_value = values_NK.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values_NK, ids_NK.gather(-1, by_value)
