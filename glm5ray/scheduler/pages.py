"""The free list and the reference counts of KV pages. Only page *numbers* live here; their contents are the
worker's."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class PagePool:
    """``num_pages`` pages, each free or held by one or more owners (sequences, and the prefix cache).

    All calls are O(pages named), whatever the size of the pool. Which page comes next depends on the calls before
    alone.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, f"a pool of {num_pages} pages"
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: page 0 is the first to go
        self._counts = [0] * num_pages

    def __repr__(self) -> str:
        return f"PagePool({self.num_free} free of {self.num_pages})"

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, page: int) -> int:
        """How many owners hold this page."""
        return self._counts[page]

    def allocate(self, n: int) -> list[int]:
        """``n`` free pages, now with one owner each. That there are so many is the caller's to know."""
        assert 0 <= n <= len(self._free), f"{n} pages asked for, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._counts[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more owner for pages that have one."""
        for page in pages:
            assert self._counts[page] > 0, f"page {page} is free and cannot be retained"
            self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner less; pages without an owner are free again."""
        for page in pages:
            count = self._counts[page] - 1
            assert count >= 0, f"page {page} is free and cannot be released"
            self._counts[page] = count
            if count == 0:
                self._free.append(page)

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """That the free list has no duplicates, no owner refers to a free page, and counts equal owners.

        ``owners`` are the pages of each owner. O(num_pages): for tests and idle turns.
        """
        free = set(self._free)
        assert len(free) == len(self._free), f"the free list has duplicates: {_repeated(self._free)}"
        counted: Counter[int] = Counter()
        for pages in owners:
            assert len(set(pages)) == len(pages), f"an owner holds a page twice: {_repeated(pages)}"
            both = free.intersection(pages)
            assert not both, f"pages {sorted(both)} are free and owned"
            counted.update(pages)
        wrong = [(p, n, counted[p]) for p, n in enumerate(self._counts) if n != counted[p]]
        assert not wrong, f"(page, reference count, owners) differ: {wrong[:8]}"
        lost = [p for p, n in enumerate(self._counts) if n == 0 and p not in free]
        assert not lost, f"pages {lost[:8]} are neither free nor owned"


def _repeated(pages: Sequence[int]) -> list[int]:
    return [page for page, n in Counter(pages).items() if n > 1]
