"""Which tokens of which sequences each step computes, and in which pages.

Two calls make a step: ``schedule()`` alone changes pages and slices, ``update()`` alone appends tokens and ends
sequences. There is no clock, no randomness and no I/O here: the same calls give the same steps, byte for byte.

The overlapped loop calls ``schedule()`` once more while a step is in flight. A sequence whose newest token is still
unknown then takes its next slice all the same (the worker has the token), which has three consequences:

* Limits are kept by counting, so no slice goes past them. A stop token is found one step late: the slice that was
  scheduled meanwhile is *void*, and what it samples is ignored.
* Pages can be given back while a step in flight still writes to them. That is safe: workers run steps in order, so a
  later owner's write comes after it; and a page in the prefix cache is full of known tokens, while a void slice
  writes behind the known ones.
* A sequence can be preempted while its newest token is in flight. The token counts when it arrives: it is sent to the
  client, and the sequence is computed again from all its tokens.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import count
from typing import TYPE_CHECKING

from glm5ray.errors import RequestError
from glm5ray.protocol import FinishReason, StepInput, StepOutput, TokenEvent
from glm5ray.scheduler.admission import Admission
from glm5ray.scheduler.decodes import DecodeBatch
from glm5ray.scheduler.flights import Chunk, Flight, next_chunk, token_events
from glm5ray.scheduler.limits import RequestLimits
from glm5ray.scheduler.live_requests import LiveRequests
from glm5ray.scheduler.probation import FAILURES_TO_QUARANTINE
from glm5ray.scheduler.sequence import Sequence, State
from glm5ray.scheduler.sequence_pages import SequencePages
from glm5ray.scheduler.stats import SchedulerStats

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from glm5ray.config import SchedulerSection
    from glm5ray.protocol import Capacity, GenerateRequest, TokenLogprobs

MAX_STEPS_IN_FLIGHT = 2


class Scheduler:
    """Continuous batching over a pool of pages: chunked prefill, prefix cache, preemption by recomputation, two
    policies."""

    def __init__(
        self,
        config: SchedulerSection,
        capacity: Capacity,
        *,
        prefix_caching: bool = True,
        epoch: int = 0,
        seq_ids: Iterator[int] | None = None,
    ) -> None:
        """``seq_ids``: growing numbers for the sequences; by default all from 0."""
        self.limits = RequestLimits(config, capacity)
        self._config = config
        self._capacity = capacity
        self._eos = frozenset(capacity.eos_token_ids)

        self._live = LiveRequests()
        self._pages = SequencePages(capacity, prefix_caching=prefix_caching)
        self._admission = Admission(config, self._pages)
        self._seq_ids = count() if seq_ids is None else seq_ids

        self._num_steps = 0
        self._num_tokens_scheduled = 0
        self._num_tokens_sampled = 0
        self._num_preemptions = 0
        self._num_finished: Counter[FinishReason] = Counter()
        self._num_corrupted = 0
        self._num_quarantined = 0
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        """What belongs to one incarnation of the workers."""
        self._epoch = epoch
        self._next_step_id = 0
        self._prefilling: list[Sequence] = []
        self._decodes = DecodeBatch(self._capacity.page_size)
        self._flights: deque[Flight] = deque()
        self._dropped: list[int] = []

    def __repr__(self) -> str:
        running = f"{len(self._decodes)} decode, {len(self._prefilling)} prefill"
        return f"Scheduler(step {self._next_step_id}, {running}, {self.num_waiting} waiting, {self._pages!r})"

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        return len(self._live) > 0

    @property
    def num_unfinished(self) -> int:
        """Sequences, not requests."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        return len(self._admission.waiting) + self._live.num_parked

    @property
    def num_in_flight(self) -> int:
        """Steps that were scheduled and not updated."""
        return len(self._flights)

    @property
    def is_on_probation(self) -> bool:
        """Whether suspects of having killed the workers run one by one (:mod:`glm5ray.scheduler.probation`)."""
        return self._admission.probation.is_on

    def has_request(self, request_id: str) -> bool:
        """Whether a request of this id is unfinished."""
        return request_id in self._live

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return len(self._live) - self.num_waiting

    def add(self, request: GenerateRequest) -> None:
        """Raises :class:`RequestError` (its subclass :class:`CapacityError` if it could never fit); then nothing has
        changed."""
        if request.request_id in self._live:
            raise RequestError(
                f"request_id {request.request_id!r} is in use by an unfinished request; choose another.",
                param="request_id",
            )
        max_len = self.limits.max_len(request)
        sampling = request.sampling
        stop_ids = frozenset() if sampling.ignore_eos else self._eos
        if sampling.stop_token_ids:
            stop_ids = stop_ids.union(sampling.stop_token_ids)
        priority = request.priority if self._config.policy == "priority" else 0
        siblings = []
        for index in range(sampling.n):
            seq = Sequence(
                seq_id=next(self._seq_ids),
                request=request,
                index=index,
                max_len=max_len,
                page_size=self._capacity.page_size,
                stop_ids=stop_ids,
                priority=priority,
            )
            siblings.append(seq)
        for seq in self._live.add(siblings, park=self._pages.can_be_shared(siblings[0])):
            self._admission.wait(seq)

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> list[TokenEvent]:
        """Ends a request, or one of its answers, now. Unknown and finished ones give no event. A step in flight goes
        on; what it says of them is ignored."""
        seqs = [seq for seq in self._live.of(request_id) if index is None or seq.index == index]
        for seq in seqs:
            self._end(seq, reason)
        return [TokenEvent(request_id, seq.index, (), reason) for seq in seqs]

    def restart(self, epoch: int) -> list[TokenEvent]:
        """The workers were replaced by incarnation ``epoch``: no page has contents, steps in flight never come back,
        and what was running waits again with the tokens it has. Returns the ends of sequences that are given up."""
        assert epoch > self._epoch, f"epoch {epoch} follows {self._epoch}"
        suspects = sorted({seq_id for flight in self._flights for seq_id in flight.suspects()})
        self._begin(epoch)
        self._pages.reset()
        self._admission.look_again()
        for seq in self._live.sequences.values():
            seq.inserted.clear()
            self._pages.forget(seq)
            if seq.state not in (State.WAITING, State.PARKED):
                self._admission.wait(seq)
        given_up = self._admission.probation.blame([self._live.sequences[seq_id] for seq_id in suspects])
        request_ids = dict.fromkeys(seq.request_id for seq in given_up)
        return [self._quarantine(seq) for request_id in request_ids for seq in self._live.of(request_id)]

    # --- schedule ---------------------------------------------------------------------------------------------------

    def schedule(self) -> StepInput | None:
        """The next step, or ``None`` if nothing can run before an ``update()`` or an ``add()``. At most two steps are
        in flight."""
        assert len(self._flights) < MAX_STEPS_IN_FLIGHT, f"{len(self._flights)} steps are in flight already"
        step_id = self._next_step_id
        if self._admission.probation.wants_all_quiet:
            while len(self._decodes):
                self._preempt_one()
        num_preemptions = self._num_preemptions
        new_pages = self._pages.open(self._make_room(step_id))
        budget = self._config.max_num_batched_tokens - len(self._decodes)
        chunks = self._continue_prefills(budget)
        admitted: list[Chunk] = []
        if self._num_preemptions == num_preemptions:  # else nothing is left, and a victim must not return at once
            budget -= sum(chunk.num_tokens for chunk in chunks)
            num_running = self.num_running
            is_idle = not num_running and not self._flights
            admitted = self._admission.admit(budget, num_running=num_running, is_idle=is_idle)
            self._prefilling += [chunk.seq for chunk in admitted]
            chunks += admitted
        num_decodes = len(self._decodes)
        if not num_decodes and not chunks:
            return None

        step = StepInput(
            epoch=self._epoch,
            step_id=step_id,
            seq_ids=self._decodes.seq_ids + [chunk.seq.seq_id for chunk in chunks],
            starts=self._decodes.starts + [chunk.start for chunk in chunks],
            num_tokens=[1] * num_decodes + [chunk.num_tokens for chunk in chunks],
            new_sequences=tuple(chunk.seq.as_new() for chunk in admitted),
            new_pages=new_pages,
            dropped=self._dropped,
        )
        self._dropped = []
        self._next_step_id += 1
        self._num_steps += 1
        self._num_tokens_scheduled += num_decodes + sum(chunk.num_tokens for chunk in chunks)
        self._take_off(step_id, chunks)
        return step

    def _make_room(self, step_id: int) -> Collection[Sequence]:
        """The decodes that need another page in this step, with so many available; preempts for it."""
        opening = self._decodes.opening_page(step_id)
        while len(opening) > self._pages.cache.num_available:
            self._preempt_one()
        return opening

    def _preempt_one(self) -> None:
        """Gives up the least urgent decode, the latest of equals.

        Only decodes: they have sampled a token since they were admitted, so each sequence gains one between two of
        its preemptions, and all of them end however small the pool is. The decode that wants a page is one of them,
        so there is always a victim.
        """
        victim = max(self._decodes.sequences, key=lambda seq: (seq.priority, seq.seq_id))
        self._decodes.remove(victim)
        self._give_back(victim)
        victim.num_preemptions += 1
        self._num_preemptions += 1
        self._admission.wait(victim)

    def _continue_prefills(self, budget: int) -> list[Chunk]:
        chunks = []
        for seq in self._prefilling:
            if budget == 0:
                break
            chunk = next_chunk(seq, budget)
            budget -= chunk.num_tokens
            chunks.append(chunk)
        return chunks

    def _take_off(self, step_id: int, chunks: list[Chunk]) -> None:
        """Notes the step that was just planned, and brings every sequence to where it will be behind it."""
        ending = list(self._decodes.ending(step_id))
        flight = Flight(
            step_id=step_id,
            rows=self._decodes.rows(),
            chunks=chunks,
            filling=list(self._decodes.filling_page(step_id)),
            single={seq.seq_id for seq in ending},
        )
        self._flights.append(flight)
        for seq in ending:
            self._decodes.remove(seq)
            seq.state = State.DRAINING
        self._decodes.advance()
        for chunk in chunks:
            seq = chunk.seq
            if not chunk.is_last:
                continue
            if seq.num_scheduled + 1 < seq.max_len:
                self._decodes.add(seq, seq.num_scheduled, self._next_step_id)
            else:
                seq.state = State.DRAINING
        self._prefilling = [seq for seq in self._prefilling if seq.state is State.PREFILL]

    # --- update -----------------------------------------------------------------------------------------------------

    def update(self, step: StepInput, output: StepOutput) -> list[TokenEvent]:
        """Takes in what the oldest step in flight sampled. A result of workers that were replaced since gives no
        event."""
        if output.epoch != self._epoch:
            return []
        assert self._flights, f"step {output.step_id} is not in flight; none is"
        flight = self._flights[0]
        assert step.step_id == output.step_id == flight.step_id, (
            f"result {output.step_id} of step {step.step_id}, the oldest in flight is {flight.step_id}"
        )
        tokens = flight.tokens(output)
        events = [
            self._fail(self._live.sequences[seq_id], message)
            for seq_id, message in sorted(output.failed.items())
            if seq_id in self._live.sequences
        ]
        self._flights.popleft()
        self._confirm(flight, output)
        sampled = self._take_single(flight, output, tokens)
        deque(map(list.append, flight.rows.outputs, tokens), maxlen=0)  # half the time of a for statement
        self._num_tokens_sampled += len(tokens)
        events += token_events(flight.rows, tokens)
        for seq_id, token in sorted(sampled.items()):
            if seq_id not in flight.void:
                events.append(self._advance(self._live.sequences[seq_id], token, output.logprobs.get(seq_id)))
        return events

    def _take_single(self, flight: Flight, output: StepOutput, tokens: list[int]) -> dict[int, int]:
        """Removes from ``rows`` and ``tokens`` the sequences that are more than one more token: seq_id -> token."""
        num_rows = len(flight.rows.seq_ids)
        last_chunks = (chunk.seq.seq_id for chunk in flight.chunks if chunk.is_last)
        sampled = dict(zip(last_chunks, tokens[num_rows:], strict=True))
        del tokens[num_rows:]
        single = flight.single.union(flight.void, output.logprobs)
        if not self._live.stop_ids.keys().isdisjoint(tokens):
            rows = zip(flight.rows.seq_ids, tokens, strict=True)
            single.update([seq_id for seq_id, token in rows if token in self._live.stop_ids])
        for seq_id in single:
            token = flight.rows.take(seq_id, tokens)
            if token is not None:
                sampled[seq_id] = token
        return sampled

    def _confirm(self, flight: Flight, output: StepOutput) -> None:
        """The slices of the step are computed: full pages go into the prefix cache, and siblings may follow."""
        for seq, start, num_tokens, _ in flight.chunks:
            if seq.seq_id in flight.void:
                continue
            scored = output.prompt_logprobs.get(seq.seq_id)
            if scored is not None:
                # Scores token start + 1 and on. After a preemption the first of them are known already.
                num_known = len(seq.prompt_logprobs) - start
                assert num_known >= 0, f"{seq!r} misses log-probabilities before position {start}"
                seq.prompt_logprobs += scored[num_known:]
            if seq.state is State.WAITING:
                continue  # preempted behind this step: the pages are another's by now
            self._pages.confirm(seq, start + num_tokens)
            if start + num_tokens >= len(seq.prompt):
                for sibling in self._live.unpark(seq.request_id):
                    self._admission.wait(sibling)
        for seq in flight.filling:
            if seq.seq_id not in flight.void and seq.state is not State.WAITING:
                self._pages.confirm(seq, seq.num_tokens)  # all known tokens: the sample is not appended yet

    def _advance(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> TokenEvent:
        """One sequence gets its sample, and perhaps ends with it."""
        is_first = not seq.first_event_sent
        seq.first_event_sent = True
        reason: FinishReason | None = None
        stop_token_id: int | None = None
        new: tuple[int, ...] = ()
        if seq.max_len == len(seq.prompt):
            reason = FinishReason.LENGTH  # max_tokens is 0: the prompt was to be scored, the sample is none
        elif token in seq.stop_ids and len(seq.output) >= seq.sampling.min_tokens:
            reason = FinishReason.STOP
            stop_token_id = token
        else:
            new = (token,)
            seq.output.append(token)
            self._num_tokens_sampled += 1
            if seq.num_tokens == seq.max_len:
                reason = FinishReason.LENGTH
        if reason is not None:
            self._end(seq, reason)
        return TokenEvent(
            seq.request_id,
            seq.index,
            new,
            reason,
            stop_token_id,
            logprobs=(logprobs,) if new and logprobs is not None else (),
            prompt_logprobs=tuple(seq.prompt_logprobs) if is_first else (),
            num_cached_tokens=seq.num_cached_tokens if is_first else 0,
        )

    def _fail(self, seq: Sequence, message: str) -> TokenEvent:
        self._pages.poison(seq)
        self._num_corrupted += 1
        self._end(seq, FinishReason.ERROR)
        return TokenEvent(
            seq.request_id, seq.index, finish_reason=FinishReason.ERROR, error=message, error_code="numerical_error"
        )

    def _quarantine(self, seq: Sequence) -> TokenEvent:
        self._num_quarantined += 1
        message = (
            f"the workers died {FAILURES_TO_QUARANTINE} times in a row while they computed this request, at last it "
            "alone; it is not tried again"
        )
        self._end(seq, FinishReason.ERROR)
        return TokenEvent(
            seq.request_id, seq.index, finish_reason=FinishReason.ERROR, error=message, error_code="quarantined"
        )

    # --- leaving ----------------------------------------------------------------------------------------------------

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        """``seq`` is finished, whatever state it was in."""
        if seq.state is State.WAITING:
            self._admission.waiting.discard(seq)
        elif seq.state is not State.PARKED:
            if seq.state is State.DECODE:
                self._decodes.remove(seq)
            elif seq.state is State.PREFILL:
                self._prefilling.remove(seq)
            self._give_back(seq)
        next_leader = self._live.remove(seq)
        if next_leader is not None:
            self._admission.wait(next_leader)
        seq.state = State.FINISHED
        for flight in self._flights:
            flight.void.add(seq.seq_id)
        self._num_finished[reason] += 1

    def _give_back(self, seq: Sequence) -> None:
        """Pages to the pool; the workers forget the sequence with the next step."""
        self._pages.give_back(seq)
        self._dropped.append(seq.seq_id)
        self._admission.look_again()

    # --- looking ----------------------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """O(1)."""
        cache = self._pages.cache
        pool = cache.pool
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_pages=pool.num_pages,
            num_pages_free=pool.num_free,
            num_pages_held=pool.num_pages - cache.num_available,
            num_pages_idle=cache.num_idle,
            num_pages_cached=cache.num_cached,
            num_steps=self._num_steps,
            num_tokens_scheduled=self._num_tokens_scheduled,
            num_tokens_sampled=self._num_tokens_sampled,
            num_admissions=self._admission.num_admissions,
            num_preemptions=self._num_preemptions,
            prefix_query_tokens=self._pages.num_query_tokens,
            prefix_hit_tokens=self._pages.num_hit_tokens,
            num_finished={reason.value: n for reason, n in self._num_finished.items()},
            num_corrupted=self._num_corrupted,
            num_quarantined=self._num_quarantined,
        )

    def check(self) -> None:
        """All invariants; raises ``AssertionError`` with the values. O(pages + sequences): for tests and idle turns."""
        self._live.check()
        self._admission.check()
        self._decodes.check(self._next_step_id)
        by_state: dict[State, set[int]] = {state: set() for state in State}
        for seq in self._live.sequences.values():
            by_state[seq.state].add(seq.seq_id)
            self._check_pages_of(seq)
        for state, seqs in (
            (State.WAITING, self._admission.waiting.sequences()),
            (State.PREFILL, self._prefilling),
            (State.DECODE, self._decodes.sequences),
            (State.FINISHED, ()),
        ):
            wrong = by_state[state] ^ {seq.seq_id for seq in seqs}
            assert not wrong, f"sequences {sorted(wrong)} are {state.name} by their state or by their place alone"
        max_running = self._admission.max_running
        assert self.num_running <= max_running, f"{self.num_running} run, at most {max_running} may"
        self._pages.check(self._live.sequences.values())

    def _check_pages_of(self, seq: Sequence) -> None:
        """Committed <= allocated."""
        committed = {State.PREFILL: seq.num_scheduled, State.DRAINING: seq.max_slots}.get(seq.state, 0)
        if seq.state is State.DECODE:
            committed = self._decodes.start_of(seq)
        num_slots = len(seq.pages) * self._capacity.page_size
        assert committed <= num_slots, f"{seq!r} has committed {committed} slots of {num_slots}"
        has_pages = seq.state in (State.PREFILL, State.DECODE, State.DRAINING)
        assert bool(seq.pages) == has_pages, f"{seq!r} has pages {seq.pages}"
        assert seq.num_tokens <= seq.max_len, f"{seq!r} has {seq.num_tokens} tokens, at most {seq.max_len}"
