"""Sequences in a worker without an engine around it: for those who time steps alone."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from glm5ray.protocol import NewSequence, SamplingParams, StepInput

if TYPE_CHECKING:
    from glm5ray.protocol import StepOutput
    from glm5ray.worker.worker import Worker


class DecodeBatch:
    """``count`` sequences of ``context`` random tokens in ``worker``, one token more after each :meth:`decode`, up to
    ``new_tokens`` of them. ``step_id`` is the worker's next one, before and after."""

    def __init__(
        self, worker: Worker, count: int, context: int, *, new_tokens: int, first_step: int, prompt_tokens: int = 8192
    ) -> None:
        """Computes the prompts, at most ``prompt_tokens`` of them in a step (but one prompt at least)."""
        self.worker, self.count, self.step_id = worker, count, first_step
        self.length = context
        pages = pages_for(context + new_tokens, worker.capacity.page_size)
        rng = Random(count)
        vocab = worker.capacity.vocab_size
        together = max(1, prompt_tokens // context)
        for first in range(0, count, together):
            ids = range(first, min(first + together, count))
            new = tuple(
                NewSequence(
                    seq_id=i,
                    request_id=str(i),
                    index=0,
                    token_ids=tuple(rng.randrange(vocab) for _ in range(context)),
                    num_prompt_tokens=context,
                    sampling=SamplingParams(temperature=0.0, max_tokens=10_000, ignore_eos=True),
                    pages=tuple(range(i * pages, (i + 1) * pages)),
                )
                for i in ids
            )
            self._run(seq_ids=list(ids), starts=[0] * len(ids), num_tokens=[context] * len(ids), new_sequences=new)

    def decode(self, steps: int = 1) -> None:
        """``steps`` tokens each; more than one step are queued one behind the other before any is waited for."""
        everyone = list(range(self.count))
        launched = []
        for _ in range(steps):
            step = self._step(seq_ids=everyone, starts=[self.length] * self.count, num_tokens=[1] * self.count)
            launched.append(self.worker.launch(step))
            self.length += 1
        for one in launched:
            _require_finite(one.output())

    def drop(self) -> None:
        self._run(seq_ids=[], starts=[], num_tokens=[], dropped=list(range(self.count)))

    def _run(self, **fields: Any) -> None:
        _require_finite(self.worker.execute(self._step(**fields)))

    def _step(self, **fields: Any) -> StepInput:
        self.step_id += 1
        return StepInput(epoch=0, step_id=self.step_id - 1, **fields)


def _require_finite(output: StepOutput) -> None:
    assert not output.failed, output.failed


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that one sequence of :class:`DecodeBatch` takes."""
    return -(-tokens // page_size)
