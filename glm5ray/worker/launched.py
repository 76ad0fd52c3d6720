"""A step between its launch and its output: what is to be read back from the device, and what that means.

Shapes: L rows that sample, T tokens of the step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from glm5ray.protocol import StepOutput

if TYPE_CHECKING:
    from torch import Tensor

    from glm5ray.protocol import StepInput, TokenLogprobs
    from glm5ray.worker.logprobs import Scores
    from glm5ray.worker.transfers import ReadBack

HIDDEN_NOT_FINITE = "the model's hidden state is not finite"
LOGITS_NOT_FINITE = "the model's logits are not finite"


@dataclass(slots=True)
class LaunchedStep:
    """Tensors are on the host, and filled once :attr:`read` is done."""

    step: StepInput
    read: ReadBack
    started_s: float
    """``time.perf_counter()`` at the launch."""
    slices: list[tuple[int, int]] = field(default_factory=list)
    """(seq_id, tokens) of each slice."""
    hidden_is_finite_T: Tensor | None = None
    sampled: list[int] = field(default_factory=list)
    """seq_ids of the rows that sample."""
    token_ids_L: Tensor | None = None
    logits_are_finite_L: Tensor | None = None
    scores: list[tuple[int, Scores]] = field(default_factory=list)
    """(seq_id, log-probabilities of its new token), where they were asked for."""
    prompt_scores: list[tuple[int, list[Scores]]] = field(default_factory=list)
    from_graph: bool = False
    """Whether the runner's fixed batches computed it."""

    @property
    def is_done(self) -> bool:
        """Whether :meth:`output` would not wait."""
        return self.read.is_done

    def output(self) -> StepOutput:
        """Waits for the device."""
        self.read.wait()
        failed = self._failures()
        token_ids: list[int] = [] if self.token_ids_L is None else self.token_ids_L.tolist()
        logprobs = {seq_id: scores.entries()[0] for seq_id, scores in self.scores if seq_id not in failed}
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {
            seq_id: tuple(entry for scores in parts for entry in scores.entries())
            for seq_id, parts in self.prompt_scores
        }
        return StepOutput(
            epoch=self.step.epoch,
            step_id=self.step.step_id,
            seq_ids=self.sampled,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            failed=failed,
            duration_s=time.perf_counter() - self.started_s,
            from_graph=self.from_graph,
        )

    def _failures(self) -> dict[int, str]:
        """Sequences with a number that is not finite, in the hidden states or else in the logits."""
        failed: dict[int, str] = {}
        if self.hidden_is_finite_T is not None and not (finite_T := self.hidden_is_finite_T.numpy()).all():
            begins_S = np.cumsum([0, *(count for _, count in self.slices)])[:-1]
            finite_S = np.logical_and.reduceat(finite_T, begins_S)
            for (seq_id, _), is_finite in zip(self.slices, finite_S.tolist(), strict=True):
                if not is_finite:
                    failed[seq_id] = HIDDEN_NOT_FINITE
        if self.logits_are_finite_L is not None and not (finite_L := self.logits_are_finite_L.numpy()).all():
            for seq_id, is_finite in zip(self.sampled, finite_L.tolist(), strict=True):
                if not is_finite:
                    failed.setdefault(seq_id, LOGITS_NOT_FINITE)
        return failed
