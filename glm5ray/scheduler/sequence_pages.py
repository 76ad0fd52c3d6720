"""Which pages each sequence holds: how it gets them, what of them becomes findable, how it gives them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glm5ray.scheduler.pages import PagePool
from glm5ray.scheduler.prefix_cache import ROOT, PrefixCache

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from glm5ray.protocol import Capacity
    from glm5ray.scheduler.sequence import Sequence

SPARE_SHARE = 8
"""Admission leaves pages available for an eighth of what the running sequences may still come to need, but for at least
a quarter page and at most two pages for each of them. They grow while some of them end: with less room many are
preempted, each at the price of a prefill; with much more of it the batch is small. Measured in docs/scheduler.md."""


class SequencePages:
    """The pool and the prefix cache, as sequences use them."""

    def __init__(self, capacity: Capacity, *, prefix_caching: bool) -> None:
        self._capacity = capacity
        self._prefix_caching = prefix_caching
        self.num_query_tokens = 0
        """Tokens of admitted sequences that were looked up."""
        self.num_hit_tokens = 0
        """Of these, tokens whose pages were found."""
        self.reset()

    def reset(self) -> None:
        """Every page is free and has no contents. The sequences must be told (:meth:`forget`)."""
        self.cache = PrefixCache(
            PagePool(self._capacity.num_pages), self._capacity.page_size, enabled=self._prefix_caching
        )
        self._may_grow = 0
        """Pages that running sequences would come to need beyond those they hold, if all went to their limits."""

    def __repr__(self) -> str:
        return repr(self.cache)

    def can_be_shared(self, seq: Sequence) -> bool:
        """Whether a sibling with the same prompt would find pages of it. The last token is never looked up."""
        return self._prefix_caching and seq.reads_cache and len(seq.prompt) > self._capacity.page_size

    def try_fill(self, seq: Sequence, num_running: int) -> bool:
        """Pages for all known tokens of a sequence that holds none, cached ones first; or leaves everything as it was.

        All of them at once, so that a prefill never waits for a page while it holds others.
        """
        page_size = self._capacity.page_size
        num_tokens = seq.num_tokens
        spare = min(max(self._may_grow // SPARE_SHARE, -(-num_running // 4)), 2 * num_running)
        available = self.cache.num_available - spare
        if seq.pages_wanted > available:
            return False
        pages: list[int] = []
        node = ROOT
        if seq.reads_cache:
            # The last token is computed in any case: its logits give the next one.
            ends = range(page_size, num_tokens, page_size)
            pages, node = self.cache.acquire(seq.tokens(end - page_size, end) for end in ends)
        num_missing = -(-num_tokens // page_size) - len(pages)
        left = self.cache.num_available - spare
        if num_missing > left:
            seq.pages_wanted = num_missing + (available - left)  # pages found idle were available before
            self.cache.release(pages)
            return False
        seq.num_chained = len(pages)
        seq.last_node = node
        seq.num_scheduled = len(pages) * page_size
        seq.num_cached_tokens = seq.num_scheduled
        if seq.reads_cache:
            self.num_query_tokens += num_tokens
            self.num_hit_tokens += seq.num_scheduled
        seq.pages = pages + self.cache.allocate(num_missing)
        self._may_grow += seq.max_pages - len(seq.pages)
        return True

    def open(self, seqs: Collection[Sequence]) -> dict[int, list[int]]:
        """One more page for each: seq_id -> it. That so many are available is the caller's to know."""
        new_pages = {}
        for seq, page in zip(seqs, self.cache.allocate(len(seqs)), strict=True):
            seq.pages.append(page)
            new_pages[seq.seq_id] = [page]
        self._may_grow -= len(new_pages)
        return new_pages

    def confirm(self, seq: Sequence, num_computed: int) -> None:
        """Makes the full pages among the first ``num_computed`` tokens findable."""
        page_size = self._capacity.page_size
        while seq.last_node is not None and (seq.num_chained + 1) * page_size <= num_computed:
            start = seq.num_chained * page_size
            tokens = seq.tokens(start, start + page_size)
            inserted = self.cache.insert(seq.last_node, tokens, seq.pages[seq.num_chained])
            if inserted is None:
                seq.last_node = None
                return
            seq.last_node, is_new = inserted
            seq.num_chained += 1
            if is_new:
                seq.inserted.append(seq.last_node)

    def poison(self, seq: Sequence) -> None:
        """Its numbers went wrong: nothing that it computed may serve another."""
        self.cache.forget(seq.inserted)

    def give_back(self, seq: Sequence) -> None:
        """``seq`` holds no pages any more."""
        self.cache.release(seq.pages)
        self._may_grow -= seq.max_pages - len(seq.pages)
        self.forget(seq)

    @staticmethod
    def forget(seq: Sequence) -> None:
        """``seq`` starts from nothing, as after :meth:`reset`."""
        seq.pages = []
        seq.pages_wanted = 0
        seq.num_scheduled = 0
        seq.num_chained = 0
        seq.last_node = ROOT

    def check(self, seqs: Iterable[Sequence]) -> None:
        """The pool's and the cache's invariants, with ``seqs`` as all owners."""
        holders = [seq for seq in seqs if seq.pages]
        self.cache.check([seq.pages for seq in holders])
        may_grow = sum(seq.max_pages - len(seq.pages) for seq in holders)
        assert may_grow == self._may_grow, f"running sequences may grow by {may_grow} pages, counted {self._may_grow}"
