"""A worker that computes nothing and believes nothing: the oracle of the scheduler's tests.

It keeps, for every slot of the cache, which exact token prefix a real KV cache would hold there, and checks for each
slice that every position it reads holds the prefix of its own sequence. What it samples is a pure function.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from glm5ray.protocol import StepOutput, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from glm5ray.protocol import Capacity, NewSequence, StepInput

NOTHING = -1


@dataclass
class Mirror:
    """What a worker knows of a sequence."""

    new: NewSequence
    tokens: list[int]
    pages: list[int]
    prefixes: list[int] = field(default_factory=list)
    """Number of the prefix that ends at each position."""
    num_computed: int = NOTHING
    """-1 before its first slice."""


class ShadowWorker:
    """Executes steps in order. ``next_token(request_id, index, position)`` is the model."""

    def __init__(
        self, capacity: Capacity, next_token: Callable[[str, int, int], int], *, max_num_seqs: int, max_tokens: int
    ) -> None:
        self.mirrors: dict[int, Mirror] = {}
        self.slices_of_cached: dict[int, int] = {}
        self._capacity = capacity
        self._next_token = next_token
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_tokens
        self._next_step_id = 0
        self._prefix_numbers: dict[tuple[int, int], int] = {}
        num_slots = capacity.num_pages * capacity.page_size
        self._slots = [NOTHING] * num_slots
        self._writers = [NOTHING] * num_slots
        self._poisoned: set[int] = set()

    def execute(self, step: StepInput, *, fails: Callable[[str, int, int], bool] = lambda *_: False) -> StepOutput:
        """Checks the step and answers it; ``fails`` says of (request_id, index, position) whether its numbers go
        wrong."""
        self._apply(step)
        self._check_shape(step)
        written: dict[int, int] = {}
        for seq_id, start, num_tokens in step.slices():
            self._write(seq_id, start, num_tokens, written)
        for seq_id, _, _ in step.slices():
            self._check_reads(seq_id)
        return self._sample(step, fails)

    def poison(self, seq_id: int) -> None:
        """The scheduler knows now that this sequence failed: from here on nobody may read what it wrote through the
        cache."""
        self._poisoned |= {slot for slot, writer in enumerate(self._writers) if writer == seq_id}

    def _apply(self, step: StepInput) -> None:
        assert step.step_id == self._next_step_id, f"step {step.step_id} came, {self._next_step_id} was due"
        self._next_step_id += 1
        for seq_id in step.dropped:
            del self.mirrors[seq_id]
        for new in step.new_sequences:
            assert new.seq_id not in self.mirrors, f"{new.seq_id} is known already"
            mirror = Mirror(new, list(new.token_ids), list(new.pages))
            self._number_prefixes(mirror)
            self.mirrors[new.seq_id] = mirror
        for seq_id, pages in step.new_pages.items():
            assert pages
            assert seq_id in step.seq_ids, f"{seq_id} gets pages and no slice"
            self.mirrors[seq_id].pages += pages

    def _number_prefixes(self, mirror: Mirror) -> None:
        for position in range(len(mirror.prefixes), len(mirror.tokens)):
            parent = mirror.prefixes[-1] if mirror.prefixes else NOTHING
            key = (parent, mirror.tokens[position])
            mirror.prefixes.append(self._prefix_numbers.setdefault(key, len(self._prefix_numbers)))

    def _check_shape(self, step: StepInput) -> None:
        assert step.seq_ids, "an empty step"
        assert len(set(step.seq_ids)) == len(step.seq_ids), f"two slices of a sequence: {step.seq_ids}"
        assert step.total_tokens <= self._max_tokens, f"{step.total_tokens} tokens, {self._max_tokens} allowed"
        assert len(self.mirrors) <= self._max_num_seqs, f"{len(self.mirrors)} sequences, {self._max_num_seqs} allowed"
        for seq_id, mirror in self.mirrors.items():
            assert len(set(mirror.pages)) == len(mirror.pages), f"{seq_id} has a page twice: {mirror.pages}"
            assert all(0 <= page < self._capacity.num_pages for page in mirror.pages)

    def _slot(self, mirror: Mirror, position: int) -> int:
        page_size = self._capacity.page_size
        return mirror.pages[position // page_size] * page_size + position % page_size

    def _write(self, seq_id: int, start: int, num_tokens: int, written: dict[int, int]) -> None:
        mirror = self.mirrors[seq_id]
        assert num_tokens >= 1, f"an empty slice of {seq_id}"
        assert start + num_tokens <= len(mirror.tokens), f"{seq_id}: [{start}, +{num_tokens}) of {len(mirror.tokens)}"
        if mirror.num_computed == NOTHING:
            read = {self._slot(mirror, position) for position in range(start)}
            assert not read & self._poisoned, f"{seq_id} reads slots {sorted(read & self._poisoned)} of a failed one"
            assert start == 0 or mirror.new.sampling.prompt_logprobs is None or start < len(mirror.tokens)
            self.slices_of_cached[seq_id] = start
        else:
            assert start == mirror.num_computed, f"{seq_id} goes on at {start}, it is at {mirror.num_computed}"
        mirror.num_computed = start + num_tokens
        for position in range(start, start + num_tokens):
            slot = self._slot(mirror, position)
            assert slot not in written, f"slot {slot} is written by {written[slot]} and {seq_id} in one step"
            written[slot] = seq_id
            self._slots[slot] = mirror.prefixes[position]
            self._writers[slot] = seq_id
            self._poisoned.discard(slot)

    def _check_reads(self, seq_id: int) -> None:
        mirror = self.mirrors[seq_id]
        held = [self._slots[self._slot(mirror, position)] for position in range(mirror.num_computed)]
        assert held == mirror.prefixes[: mirror.num_computed], f"{seq_id} reads what is not its own prefix"

    def _sample(self, step: StepInput, fails: Callable[[str, int, int], bool]) -> StepOutput:
        output = StepOutput(epoch=step.epoch, step_id=step.step_id, seq_ids=[], token_ids=[])
        for seq_id, start, num_tokens in step.slices():
            mirror = self.mirrors[seq_id]
            new = mirror.new
            end = start + num_tokens
            if fails(new.request_id, new.index, end):
                output.failed[seq_id] = f"not finite at position {end}"
            scored_end = min(end, new.num_prompt_tokens - 1)
            if new.sampling.prompt_logprobs is not None and start < scored_end:
                output.prompt_logprobs[seq_id] = tuple(
                    TokenLogprobs(mirror.tokens[at + 1], -float(at + 1), ()) for at in range(start, scored_end)
                )
            if end < len(mirror.tokens):
                continue
            token = self._next_token(new.request_id, new.index, end)
            mirror.tokens.append(token)
            self._number_prefixes(mirror)
            output.seq_ids.append(seq_id)
            output.token_ids.append(token)
            if new.sampling.logprobs is not None:
                output.logprobs[seq_id] = TokenLogprobs(token, -float(end), ())
        return output
