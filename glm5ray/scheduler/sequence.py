"""The scheduler's state of one answer to one request."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from glm5ray.protocol import NewSequence
from glm5ray.scheduler.prefix_cache import ROOT

if TYPE_CHECKING:
    from glm5ray.protocol import GenerateRequest, SamplingParams, TokenLogprobs


class State(Enum):
    """Where a sequence is. WAITING -> PREFILL -> (DECODE ->) DRAINING -> FINISHED; a preempted one goes from DECODE
    to WAITING, and from any state it may go to FINISHED."""

    PARKED = "parked"
    """Waits for a sibling to compute their common prompt."""
    WAITING = "waiting"
    PREFILL = "prefill"
    """Has pages; some of its known tokens are in no step yet."""
    DECODE = "decode"
    """One token in each step."""
    DRAINING = "draining"
    """Its last slice is in a step; waits for the result."""
    FINISHED = "finished"


class Sequence:
    """Mutable; owned by the scheduler. While a sequence decodes, what changes with each step (its start) is kept in the
    columns of :class:`~glm5ray.scheduler.decodes.DecodeBatch`, not here."""

    __slots__ = (
        "first_event_sent",
        "index",
        "inserted",
        "last_node",
        "last_step",
        "max_len",
        "max_pages",
        "num_cached_tokens",
        "num_chained",
        "num_failures",
        "num_passes",
        "num_preemptions",
        "num_scheduled",
        "num_tokens_at_failure",
        "output",
        "pages",
        "pages_wanted",
        "phase",
        "priority",
        "prompt",
        "prompt_logprobs",
        "request_id",
        "sampling",
        "seq_id",
        "state",
        "stop_ids",
    )

    def __init__(
        self,
        *,
        seq_id: int,
        request: GenerateRequest,
        index: int,
        max_len: int,
        page_size: int,
        stop_ids: frozenset[int],
        priority: int,
    ) -> None:
        self.seq_id = seq_id
        """Grows with arrival; never used twice."""
        self.request_id = request.request_id
        self.index = index
        self.prompt: tuple[int, ...] = request.prompt_token_ids
        self.sampling: SamplingParams = request.sampling
        self.priority = priority
        self.max_len = max_len
        """Most tokens, prompt and output."""
        self.max_pages = -(-self.max_slots // page_size)
        self.stop_ids = stop_ids
        self.output: list[int] = []
        self.state = State.WAITING
        self.pages: list[int] = []
        self.num_scheduled = 0
        """Tokens that are in slices so far; meaningful in PREFILL."""
        self.num_chained = 0
        """Pages that have a node in the prefix cache, counted from the first."""
        self.last_node: int | None = ROOT
        """Node of the last of them; ``None``: the chain is broken, nothing more goes into the cache."""
        self.inserted: list[int] = []
        """Nodes that this sequence computed, for the case that it turns out to be poisoned."""
        self.num_cached_tokens = 0
        """Tokens found in the cache when it was last admitted. Until its first event these are prompt tokens alone."""
        self.num_preemptions = 0
        self.num_passes = 0
        """Admissions of later sequences while this one did not fit."""
        self.num_failures = 0
        """Deaths of workers with this sequence in a step in flight, in a row: a token gained between ends the row."""
        self.num_tokens_at_failure = -1
        """Known tokens at the last of them."""
        self.pages_wanted = 0
        """Pages that had to be available when it last did not fit."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.first_event_sent = False
        self.phase = 0
        """DECODE: (start - step_id) mod page_size, which stays the same."""
        self.last_step = 0
        """DECODE: the step in which it reaches its limit."""

    def __repr__(self) -> str:
        name = f"Sequence({self.request_id}[{self.index}] #{self.seq_id}"
        out = f"prompt {len(self.prompt)}, out {len(self.output)}/{self.max_len - len(self.prompt)}"
        return f"{name}, {out}, {len(self.pages)} pages, {self.state.name})"

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and what update() has appended."""
        return len(self.prompt) + len(self.output)

    @property
    def max_slots(self) -> int:
        """Most slots of KV that it can ever use. The last token of an output is never computed."""
        return max(len(self.prompt), self.max_len - 1)

    @property
    def reads_cache(self) -> bool:
        """Every logit of the prompt is needed until its log-probabilities are complete; a cached prefix has none."""
        return self.sampling.prompt_logprobs is None or len(self.prompt_logprobs) >= len(self.prompt) - 1

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Known tokens of positions ``start`` to ``stop``, without."""
        prompt_len = len(self.prompt)
        if stop <= prompt_len:
            return self.prompt[start:stop]
        if start >= prompt_len:
            return tuple(self.output[start - prompt_len : stop - prompt_len])
        return self.prompt[start:] + tuple(self.output[: stop - prompt_len])

    def as_new(self) -> NewSequence:
        """For workers that do not know it: all known tokens, and its pages."""
        return NewSequence(
            seq_id=self.seq_id,
            request_id=self.request_id,
            index=self.index,
            token_ids=self.tokens(0, self.num_tokens),
            num_prompt_tokens=len(self.prompt),
            sampling=self.sampling,
            pages=tuple(self.pages),
        )
