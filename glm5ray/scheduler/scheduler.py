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
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from glm5ray.errors import RequestError
from glm5ray.protocol import FinishReason, NewSequence, StepInput, StepOutput, TokenEvent
from glm5ray.scheduler.decodes import DecodeBatch, DecodeRows
from glm5ray.scheduler.limits import RequestLimits
from glm5ray.scheduler.pages import PagePool
from glm5ray.scheduler.prefix_cache import ROOT, PrefixCache
from glm5ray.scheduler.sequence import Sequence, State
from glm5ray.scheduler.waiting import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from glm5ray.config import SchedulerSection
    from glm5ray.protocol import Capacity, GenerateRequest, TokenLogprobs

OLDEST_EVERY = 16
"""Under ``policy: priority`` every 16th admission is that of the sequence that arrived first, whatever its priority.
So a request ages with the admissions around it, needs no clock, and starts at the latest when the requests older than
it have had their turns."""

SPARE_SHARE = 8
"""Admission leaves pages available for an eighth of what the running sequences may still come to need, but for at least a
quarter page and at most two pages for each of them. They grow while some of them end: with less room many are preempted,
each at the price of a prefill; with much more of it the batch is small. Measured in docs/scheduler.md."""

MAX_STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerStats:
    """Figures of this moment, and counters since the start."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_free: int
    """Neither held nor cached."""
    num_pages_held: int
    """Held by sequences, shared ones counted once."""
    num_pages_idle: int
    """In the prefix cache only: available, if need be."""
    num_pages_cached: int
    """In the prefix cache, idle or held as well."""
    num_steps: int
    num_tokens_scheduled: int
    num_tokens_sampled: int
    num_admissions: int
    num_preemptions: int
    prefix_query_tokens: int
    """Tokens of admitted sequences that were looked up."""
    prefix_hit_tokens: int
    """Of these, tokens whose pages were found."""
    num_finished: dict[str, int]
    """Sequences by finish reason."""
    num_corrupted: int
    """Sequences that ended because their numbers went wrong."""


class _Chunk(NamedTuple):
    """A slice of a sequence in PREFILL."""

    seq: Sequence
    start: int
    num_tokens: int
    is_last: bool
    """Reaches the last known token, so it samples."""


@dataclass(slots=True)
class _Flight:
    """A step that workers have and whose result is not in yet."""

    step_id: int
    rows: DecodeRows
    chunks: list[_Chunk]
    filling: list[Sequence]
    """Decodes whose slice fills a page."""
    single: set[int]
    """seq_ids whose sample needs more than being appended: the first or the last of a sequence."""
    void: set[int] = field(default_factory=set)
    """seq_ids that ended since: what the step says of them means nothing."""

    def tokens(self, output: StepOutput) -> list[int]:
        """Sampled tokens in the order of ``rows``, then of the last chunks; -1 for a failed sequence that has none."""
        seq_ids = self.rows.seq_ids + [chunk.seq.seq_id for chunk in self.chunks if chunk.is_last]
        if output.seq_ids == seq_ids:
            return output.token_ids.copy()
        by_id = dict(zip(output.seq_ids, output.token_ids, strict=True))
        missing = [seq_id for seq_id in seq_ids if seq_id not in by_id and seq_id not in output.failed]
        assert not missing, f"step {self.step_id} has no token for sequences {missing[:8]}"
        return [by_id.get(seq_id, -1) for seq_id in seq_ids]


class Scheduler:
    """Continuous batching over a pool of pages: chunked prefill, prefix cache, preemption by recomputation, two
    policies."""

    def __init__(
        self, config: SchedulerSection, capacity: Capacity, *, prefix_caching: bool = True, epoch: int = 0
    ) -> None:
        self.limits = RequestLimits(config, capacity)
        self._config = config
        self._capacity = capacity
        self._prefix_caching = prefix_caching
        # Every running sequence gets at least one token per step, so a batch never has more of them than the step has
        # tokens.
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._eos = frozenset(capacity.eos_token_ids)

        self._live: dict[int, Sequence] = {}
        self._requests: dict[str, list[Sequence]] = {}
        """Unfinished sequences of each request."""
        self._waiting = WaitingQueue()
        self._parked: dict[str, deque[Sequence]] = {}
        """request_id -> siblings that wait for the first of them to compute the prompt."""
        self._num_parked = 0
        self._stop_ids: Counter[int] = Counter()
        """Every token that ends some live sequence."""
        self._last_seq_id = -1

        self._num_steps = 0
        self._num_tokens_scheduled = 0
        self._num_tokens_sampled = 0
        self._num_admissions = 0
        self._num_preemptions = 0
        self._prefix_query_tokens = 0
        self._prefix_hit_tokens = 0
        self._num_finished: Counter[FinishReason] = Counter()
        self._num_corrupted = 0
        self._reset(epoch)

    def _reset(self, epoch: int) -> None:
        """What belongs to one incarnation of the workers."""
        page_size = self._capacity.page_size
        self._epoch = epoch
        self._next_step_id = 0
        self._cache = PrefixCache(PagePool(self._capacity.num_pages), page_size, enabled=self._prefix_caching)
        self._prefilling: list[Sequence] = []
        self._decodes = DecodeBatch(page_size)
        self._flights: deque[_Flight] = deque()
        self._dropped: list[int] = []
        self._may_grow = 0
        """Pages that running sequences would come to need beyond those they hold, if all went to their limits."""
        self._admission_may_succeed = True

    def __repr__(self) -> str:
        running = f"{len(self._decodes)} decode, {len(self._prefilling)} prefill"
        return f"Scheduler(step {self._next_step_id}, {running}, {self.num_waiting} waiting, {self._cache!r})"

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    @property
    def num_unfinished(self) -> int:
        """Sequences, not requests."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._num_parked

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return len(self._live) - self.num_waiting

    def add(self, request: GenerateRequest) -> None:
        """Raises :class:`RequestError` (its subclass :class:`CapacityError` if it could never fit); then nothing has
        changed."""
        if request.request_id in self._requests:
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
            self._last_seq_id += 1
            seq = Sequence(
                seq_id=self._last_seq_id,
                request=request,
                index=index,
                max_len=max_len,
                page_size=self._capacity.page_size,
                stop_ids=stop_ids,
                priority=priority,
            )
            self._live[seq.seq_id] = seq
            self._stop_ids.update(stop_ids)
            siblings.append(seq)
        self._requests[request.request_id] = siblings
        shares_prompt = (
            self._prefix_caching
            and siblings[0].reads_cache
            and len(request.prompt_token_ids) > self._capacity.page_size
        )
        num_parked = sampling.n - 1 if shares_prompt else 0
        for seq in siblings[: sampling.n - num_parked]:
            self._wait(seq)
        if num_parked:
            self._parked[request.request_id] = deque(siblings[1:])
            self._num_parked += num_parked
            for seq in siblings[1:]:
                seq.state = State.PARKED

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> list[TokenEvent]:
        """Ends a request, or one of its answers, now. Unknown and finished ones give no event. A step in flight goes
        on; what it says of them is ignored."""
        seqs = [seq for seq in self._requests.get(request_id, ()) if index is None or seq.index == index]
        for seq in seqs:
            self._end(seq, reason)
        return [TokenEvent(request_id, seq.index, (), reason) for seq in seqs]

    def restart(self, epoch: int) -> None:
        """The workers were replaced by incarnation ``epoch``: no page has contents, steps in flight never come back,
        and what was running waits again with the tokens it has."""
        assert epoch > self._epoch, f"epoch {epoch} follows {self._epoch}"
        running = [seq for seq in self._live.values() if seq.state in (State.PREFILL, State.DECODE, State.DRAINING)]
        self._reset(epoch)
        for seq in self._live.values():
            seq.pages_wanted = 0
            seq.inserted.clear()
        for seq in running:
            self._forget_pages(seq)
            self._wait(seq)

    def _wait(self, seq: Sequence) -> None:
        seq.state = State.WAITING
        self._waiting.push(seq)
        self._admission_may_succeed = True

    # --- schedule ---------------------------------------------------------------------------------------------------

    def schedule(self) -> StepInput | None:
        """The next step, or ``None`` if nothing can run before an ``update()`` or an ``add()``. At most two steps are
        in flight."""
        assert len(self._flights) < MAX_STEPS_IN_FLIGHT, f"{len(self._flights)} steps are in flight already"
        step_id = self._next_step_id
        num_preemptions = self._num_preemptions
        new_pages = self._open_pages(step_id)
        budget = self._config.max_num_batched_tokens - len(self._decodes)
        chunks = self._continue_prefills(budget)
        new_sequences: list[NewSequence] = []
        if (
            self._num_preemptions == num_preemptions
        ):  # else there is no room, and a victim must not return in the same step
            budget -= sum(chunk.num_tokens for chunk in chunks)
            self._admit(chunks, new_sequences, budget)
        num_decodes = len(self._decodes)
        if not num_decodes and not chunks:
            return None

        step = StepInput(
            epoch=self._epoch,
            step_id=step_id,
            seq_ids=self._decodes.seq_ids + [chunk.seq.seq_id for chunk in chunks],
            starts=self._decodes.starts + [chunk.start for chunk in chunks],
            num_tokens=[1] * num_decodes + [chunk.num_tokens for chunk in chunks],
            new_sequences=tuple(new_sequences),
            new_pages=new_pages,
            dropped=self._dropped,
        )
        self._dropped = []
        self._next_step_id += 1
        self._num_steps += 1
        self._num_tokens_scheduled += num_decodes + sum(chunk.num_tokens for chunk in chunks)
        self._take_off(step_id, chunks)
        return step

    def _open_pages(self, step_id: int) -> dict[int, list[int]]:
        """A page for each decode that needs one in this step; preempts when there are not enough."""
        opening = self._decodes.opening_page(step_id)
        while len(opening) > self._cache.num_available:
            self._preempt_one()
        self._may_grow -= len(opening)
        new_pages = {}
        for seq, page in zip(opening, self._cache.allocate(len(opening)), strict=True):
            seq.pages.append(page)
            new_pages[seq.seq_id] = [page]
        return new_pages

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
        self._wait(victim)

    def _continue_prefills(self, budget: int) -> list[_Chunk]:
        chunks = []
        for seq in self._prefilling:
            if budget == 0:
                break
            chunk = _next_chunk(seq, budget)
            budget -= chunk.num_tokens
            chunks.append(chunk)
        return chunks

    def _admit(self, chunks: list[_Chunk], new_sequences: list[NewSequence], budget: int) -> None:
        """Starts waiting sequences while there are tokens, places and pages.

        A sequence whose pages are not there may be passed by later ones, at most ``max_skips`` times; then all wait
        for it. As no more than ``max_skips`` sequences that do not fit are looked at, a step costs the same however
        many wait.
        """
        if not self._admission_may_succeed:
            return
        places = self._max_running - self.num_running
        max_skips = self._config.max_skips
        passed: list[Sequence] = []
        while budget > 0 and places > 0 and len(passed) <= max_skips:
            if any(seq.num_passes >= max_skips for seq in passed):
                break
            seq = self._waiting.pop(oldest=self._is_turn_of_oldest() and not passed)
            if seq is None:
                break
            new = self._try_start(seq, self._max_running - places)
            if new is None:
                passed.append(seq)
                continue
            for other in passed:
                other.num_passes += 1
            chunk = _next_chunk(seq, budget)
            places -= 1
            budget -= chunk.num_tokens
            chunks.append(chunk)
            new_sequences.append(new)
        for seq in passed:
            self._waiting.push(seq)
        # If pages were all that was missing, it is no use to look again before some come back or another sequence
        # arrives.
        self._admission_may_succeed = not passed or budget == 0 or places == 0

    def _is_turn_of_oldest(self) -> bool:
        return self._config.policy == "priority" and self._num_admissions % OLDEST_EVERY == OLDEST_EVERY - 1

    def _try_start(self, seq: Sequence, num_running: int) -> NewSequence | None:
        """Gives a waiting sequence the pages of all its tokens, cached ones first, or leaves everything as it was.

        All of them at once, so that a prefill never waits for a page while it holds others.
        """
        page_size = self._capacity.page_size
        num_tokens = seq.num_tokens
        spare = min(max(self._may_grow // SPARE_SHARE, -(-num_running // 4)), 2 * num_running)
        available = self._cache.num_available - spare
        if seq.pages_wanted > available:
            return None
        pages: list[int] = []
        node: int | None = ROOT
        if seq.reads_cache:
            # The last token is computed in any case: its logits give the next one.
            ends = range(page_size, num_tokens, page_size)
            pages, node = self._cache.acquire(seq.tokens(end - page_size, end) for end in ends)
        num_missing = -(-num_tokens // page_size) - len(pages)
        if num_missing > self._cache.num_available - spare:
            num_idle_found = available - (self._cache.num_available - spare)
            seq.pages_wanted = num_missing + num_idle_found
            self._cache.release(pages)
            return None
        seq.state = State.PREFILL
        seq.num_chained = len(pages)
        seq.last_node = node
        seq.num_scheduled = len(pages) * page_size
        if seq.num_cached_tokens < 0:
            seq.num_cached_tokens = seq.num_scheduled
        if seq.reads_cache:
            self._prefix_query_tokens += num_tokens
            self._prefix_hit_tokens += seq.num_scheduled
        seq.pages = pages + self._cache.allocate(num_missing)
        self._may_grow += seq.max_pages - len(seq.pages)
        seq.num_passes = 0
        self._prefilling.append(seq)
        self._num_admissions += 1
        return NewSequence(
            seq_id=seq.seq_id,
            request_id=seq.request_id,
            index=seq.index,
            token_ids=seq.tokens(0, num_tokens),
            num_prompt_tokens=len(seq.prompt),
            sampling=seq.sampling,
            pages=tuple(seq.pages),
        )

    def _take_off(self, step_id: int, chunks: list[_Chunk]) -> None:
        """Notes the step that was just planned, and brings every sequence to where it will be behind it."""
        ending = list(self._decodes.ending(step_id))
        flight = _Flight(
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
            self._fail(self._live[seq_id], message)
            for seq_id, message in sorted(output.failed.items())
            if seq_id in self._live
        ]
        self._flights.popleft()
        self._confirm(flight, output)
        sampled = self._take_single(flight, output, tokens)
        deque(map(list.append, flight.rows.outputs, tokens), maxlen=0)  # half the time of a for statement
        self._num_tokens_sampled += len(tokens)
        events += _token_events(flight.rows, tokens)
        for seq_id, token in sorted(sampled.items()):
            if seq_id not in flight.void:
                events.append(self._advance(self._live[seq_id], token, output.logprobs.get(seq_id)))
        return events

    def _take_single(self, flight: _Flight, output: StepOutput, tokens: list[int]) -> dict[int, int]:
        """Removes from ``rows`` and ``tokens`` the sequences that are more than one more token: seq_id -> token."""
        num_rows = len(flight.rows.seq_ids)
        last_chunks = (chunk.seq.seq_id for chunk in flight.chunks if chunk.is_last)
        sampled = dict(zip(last_chunks, tokens[num_rows:], strict=True))
        del tokens[num_rows:]
        single = flight.single.union(flight.void, output.logprobs)
        if not self._stop_ids.keys().isdisjoint(tokens):
            rows = zip(flight.rows.seq_ids, tokens, strict=True)
            single.update([seq_id for seq_id, token in rows if token in self._stop_ids])
        for seq_id in single:
            token = flight.rows.take(seq_id, tokens)
            if token is not None:
                sampled[seq_id] = token
        return sampled

    def _confirm(self, flight: _Flight, output: StepOutput) -> None:
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
            self._cache_pages(seq, start + num_tokens)
            if start + num_tokens >= len(seq.prompt):
                self._unpark(seq.request_id)
        for seq in flight.filling:
            if seq.seq_id not in flight.void and seq.state is not State.WAITING:
                self._cache_pages(seq, seq.num_tokens)  # all known tokens: the sample is not appended yet

    def _cache_pages(self, seq: Sequence, num_computed: int) -> None:
        """Makes the full pages among the first ``num_computed`` tokens findable."""
        page_size = self._capacity.page_size
        while seq.last_node is not None and (seq.num_chained + 1) * page_size <= num_computed:
            start = seq.num_chained * page_size
            tokens = seq.tokens(start, start + page_size)
            inserted = self._cache.insert(seq.last_node, tokens, seq.pages[seq.num_chained])
            if inserted is None:
                seq.last_node = None
                return
            seq.last_node, is_new = inserted
            seq.num_chained += 1
            if is_new:
                seq.inserted.append(seq.last_node)

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
        """Its numbers went wrong: nothing that it computed may serve another."""
        self._cache.forget(seq.inserted)
        self._num_corrupted += 1
        self._end(seq, FinishReason.ERROR)
        return TokenEvent(
            seq.request_id, seq.index, finish_reason=FinishReason.ERROR, error=message, error_code="numerical_error"
        )

    # --- leaving ----------------------------------------------------------------------------------------------------

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        """``seq`` is finished, whatever state it was in."""
        if seq.state is State.WAITING:
            self._waiting.discard(seq)
        elif seq.state is State.PARKED:
            self._parked[seq.request_id].remove(seq)
            self._num_parked -= 1
        else:
            if seq.state is State.DECODE:
                self._decodes.remove(seq)
            elif seq.state is State.PREFILL:
                self._prefilling.remove(seq)
            self._give_back(seq)
        seq.state = State.FINISHED
        for flight in self._flights:
            flight.void.add(seq.seq_id)
        self._num_finished[reason] += 1
        del self._live[seq.seq_id]
        for token in seq.stop_ids:
            self._stop_ids[token] -= 1
            if not self._stop_ids[token]:
                del self._stop_ids[token]
        siblings = self._requests[seq.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._requests[seq.request_id]
        self._lead_on(seq.request_id)

    def _lead_on(self, request_id: str) -> None:
        """If all that is left of a request is parked, the first of them computes the prompt now."""
        parked = self._parked.get(request_id)
        if parked is None or len(parked) < len(self._requests.get(request_id, ())):
            return
        if parked:
            self._num_parked -= 1
            self._wait(parked.popleft())
        else:
            del self._parked[request_id]

    def _unpark(self, request_id: str) -> None:
        """The prompt is computed: the other answers find its pages in the cache."""
        for seq in self._parked.pop(request_id, ()):
            self._num_parked -= 1
            self._wait(seq)

    def _give_back(self, seq: Sequence) -> None:
        """Pages to the pool; the workers forget the sequence with the next step."""
        self._cache.release(seq.pages)
        self._may_grow -= seq.max_pages - len(seq.pages)
        self._dropped.append(seq.seq_id)
        self._admission_may_succeed = True
        self._forget_pages(seq)

    @staticmethod
    def _forget_pages(seq: Sequence) -> None:
        seq.pages = []
        seq.pages_wanted = 0
        seq.num_scheduled = 0
        seq.num_chained = 0
        seq.last_node = ROOT

    # --- looking ----------------------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """O(1)."""
        pool = self._cache.pool
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_pages=pool.num_pages,
            num_pages_free=pool.num_free,
            num_pages_held=pool.num_pages - self._cache.num_available,
            num_pages_idle=self._cache.num_idle,
            num_pages_cached=self._cache.num_cached,
            num_steps=self._num_steps,
            num_tokens_scheduled=self._num_tokens_scheduled,
            num_tokens_sampled=self._num_tokens_sampled,
            num_admissions=self._num_admissions,
            num_preemptions=self._num_preemptions,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            num_finished={reason.value: n for reason, n in self._num_finished.items()},
            num_corrupted=self._num_corrupted,
        )

    def check(self) -> None:
        """All invariants; raises ``AssertionError`` with the values. O(pages + sequences): for tests and idle turns."""
        by_state: dict[State, set[int]] = {state: set() for state in State}
        for seq in self._live.values():
            by_state[seq.state].add(seq.seq_id)
        parked = [seq for siblings in self._parked.values() for seq in siblings]
        for state, seqs in (
            (State.WAITING, self._waiting.sequences()),
            (State.PARKED, parked),
            (State.PREFILL, self._prefilling),
            (State.DECODE, self._decodes.sequences),
            (State.FINISHED, ()),
        ):
            ids = {seq.seq_id for seq in seqs}
            assert ids == by_state[state], (
                f"{state.name}: sequences {sorted(ids ^ by_state[state])} are in one place only"
            )
        assert len(parked) == self._num_parked, f"{len(parked)} parked, {self._num_parked} counted"
        assert self.num_running <= self._max_running, f"{self.num_running} run, at most {self._max_running} may"
        self._waiting.check()
        for seq in self._waiting.sequences():
            assert seq.num_passes <= self._config.max_skips, f"{seq!r} was passed {seq.num_passes} times"
        self._decodes.check(self._next_step_id)
        for seq in self._live.values():
            self._check_pages_of(seq)
        self._cache.check([seq.pages for seq in self._live.values()])
        running = [seq for seq in self._live.values() if seq.pages]
        may_grow = sum(seq.max_pages - len(seq.pages) for seq in running)
        assert may_grow == self._may_grow, f"running sequences may grow by {may_grow} pages, counted {self._may_grow}"
        of_requests = sorted(seq.seq_id for seqs in self._requests.values() for seq in seqs)
        assert of_requests == sorted(self._live), f"requests hold {of_requests}, alive are {sorted(self._live)}"
        stop_ids = Counter(token for seq in self._live.values() for token in seq.stop_ids)
        assert stop_ids == self._stop_ids, f"stop tokens {stop_ids}, counted {self._stop_ids}"
        for request_id in self._parked:
            assert len(self._parked[request_id]) < len(self._requests[request_id]), f"nobody leads {request_id!r}"

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


def _next_chunk(seq: Sequence, budget: int) -> _Chunk:
    """The next tokens of a sequence in PREFILL, at most ``budget``."""
    start = seq.num_scheduled
    num_tokens = min(seq.num_tokens - start, budget)
    seq.num_scheduled += num_tokens
    return _Chunk(seq, start, num_tokens, seq.num_scheduled == seq.num_tokens)


def _token_events(rows: DecodeRows, tokens: list[int]) -> Iterator[TokenEvent]:
    """``TokenEvent(request_id, index, (token,))`` for each row. In columns, through C alone: the constructor takes
    twice the time, and this is the largest part of the cost of a step."""
    nones, empties = repeat(None), repeat(())
    rest = (nones, nones, empties, empties, repeat(0), nones, nones)
    assert len(rest) + 3 == len(TokenEvent._fields), f"columns for other fields than {TokenEvent._fields}"
    columns = zip(rows.request_ids, rows.indexes, zip(tokens, strict=True), *rest, strict=False)  # rest has no end
    return map(tuple.__new__, repeat(TokenEvent), columns)
