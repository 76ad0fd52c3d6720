"""Token prefix -> pages that already hold its keys and values.

A cached page is a *node*: its key is (node of the page before, the tokens of this page). Node ids are never used
twice, so a node stands for one exact token prefix, and a look-up compares tokens, not hashes of them. Evicting a node
makes those behind it unreachable: they stay harmless until their own turn comes, and nothing needs a tree walk.

The cache is one more owner of the pages that it holds. A page that it alone owns is *idle*: its contents are kept as
long as nobody needs the room, so idle pages count as available.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from glm5ray.scheduler.pages import PagePool

ROOT = 0
"""The node of the empty prefix."""

PageTokens = tuple[int, ...]


class _Node(NamedTuple):
    parent: int
    tokens: PageTokens
    page: int


class PrefixCache:
    """Owns the way pages of ``pool`` are allocated, shared and given back. All calls are O(pages named).

    With ``enabled=False`` nothing is ever found or kept, and it is a plain front of the pool.
    """

    def __init__(self, pool: PagePool, page_size: int, *, enabled: bool = True) -> None:
        self.pool = pool
        self.page_size = page_size
        self.enabled = enabled
        self._nodes: dict[int, _Node] = {}
        self._ids: dict[tuple[int, PageTokens], int] = {}
        self._node_of_page: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._last_id = ROOT

    def __repr__(self) -> str:
        return f"PrefixCache({self.num_cached} pages, {len(self._idle)} idle, {self.pool!r})"

    @property
    def num_cached(self) -> int:
        """Pages whose contents the cache knows."""
        return len(self._nodes)

    @property
    def num_idle(self) -> int:
        """Cached pages that no sequence holds."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages that :meth:`allocate` could hand out now."""
        return self.pool.num_free + len(self._idle)

    def allocate(self, n: int) -> list[int]:
        """``n`` pages with one owner; evicts idle pages, the least recently used first, when too few are free."""
        for _ in range(n - self.pool.num_free):
            assert self._idle, f"{n} pages asked for, none left to evict: {self!r}"
            self._remove(self._node_of_page[next(iter(self._idle))])
        return self.pool.allocate(n)

    def acquire(self, pages_of_tokens: Iterable[PageTokens]) -> tuple[list[int], int]:
        """The longest cached run of the given full pages of tokens: its pages, now held by the caller too, and its
        last node.

        Consumes ``pages_of_tokens`` no further than to the first page that is not cached.
        """
        pages: list[int] = []
        node_id = ROOT
        if not self.enabled:
            return pages, node_id
        for tokens in pages_of_tokens:
            found = self._ids.get((node_id, tokens))
            if found is None:
                break
            node_id = found
            page = self._nodes[node_id].page
            self._idle.pop(page, None)
            pages.append(page)
        self.pool.retain(pages)
        return pages, node_id

    def release(self, pages: Sequence[int]) -> None:
        """The caller holds these pages, in order of position, no more. The last of them is evicted first: the front
        of a prefix serves more requests than its end."""
        for page in reversed(pages):
            self.pool.release((page,))
            if page in self._node_of_page and self.pool.count(page) == 1:
                self._idle[page] = None

    def insert(self, parent: int, tokens: PageTokens, page: int) -> tuple[int, bool] | None:
        """Makes ``page``, which the caller holds and whose contents are computed, findable behind ``parent``.

        Returns the node and whether it is a new one (otherwise it is another page of the same tokens, and ``page``
        stays private), or ``None`` if ``parent`` is gone, so that nothing behind it could be found.
        """
        assert len(tokens) == self.page_size, f"{len(tokens)} tokens in a page of {self.page_size}"
        if not self.enabled or (parent != ROOT and parent not in self._nodes):
            return None
        new_id = self._last_id + 1
        node_id = self._ids.setdefault((parent, tokens), new_id)  # one look-up: hashing the tokens is most of the cost
        if node_id != new_id:
            return node_id, False
        assert page not in self._node_of_page, f"page {page} is cached as node {self._node_of_page[page]} already"
        self.pool.retain((page,))
        self._last_id = new_id
        self._nodes[new_id] = _Node(parent, tokens, page)
        self._node_of_page[page] = new_id
        return new_id, True

    def forget(self, node_ids: Iterable[int]) -> None:
        """Nobody finds these nodes again; those that are gone already are ignored. Sequences that hold their pages
        keep them."""
        for node_id in node_ids:
            if node_id in self._nodes:
                self._remove(node_id)

    def _remove(self, node_id: int) -> None:
        node = self._nodes.pop(node_id)
        del self._ids[node.parent, node.tokens]
        del self._node_of_page[node.page]
        self._idle.pop(node.page, None)
        self.pool.release((node.page,))

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """The pool's invariants with the cache as one more owner, and that the tables of the cache agree.
        O(num_pages)."""
        assert self.enabled or not self._nodes, f"a cache that is off holds {len(self._nodes)} pages"
        cached = [node.page for node in self._nodes.values()]
        self.pool.check([*owners, cached])
        keys = {(node.parent, node.tokens): node_id for node_id, node in self._nodes.items()}
        assert keys == self._ids, f"nodes and look-up table differ: {keys.items() ^ self._ids.items()}"
        of_page = {node.page: node_id for node_id, node in self._nodes.items()}
        assert of_page == self._node_of_page, f"nodes and pages differ: {of_page.items() ^ self._node_of_page.items()}"
        idle = {page for page in cached if self.pool.count(page) == 1}
        assert idle == self._idle.keys(), f"idle pages differ: {sorted(idle ^ self._idle.keys())}"
