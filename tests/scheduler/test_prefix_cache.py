"""What the cache finds, keeps and gives up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5ray.scheduler.pages import PagePool
from glm5ray.scheduler.prefix_cache import ROOT, PrefixCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

PAGE_SIZE = 2


def make_cache(num_pages: int = 8, *, enabled: bool = True) -> PrefixCache:
    return PrefixCache(PagePool(num_pages), PAGE_SIZE, enabled=enabled)


def split(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[at : at + PAGE_SIZE]) for at in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE)]


def compute(cache: PrefixCache, tokens: Sequence[int]) -> list[int]:
    """Pages of a sequence that computed ``tokens`` and still runs."""
    pages = cache.allocate(len(split(tokens)))
    node: int | None = ROOT
    for page_tokens, page in zip(split(tokens), pages, strict=True):
        assert node is not None
        inserted = cache.insert(node, page_tokens, page)
        node = inserted[0] if inserted is not None else None
    return pages


def test_the_longest_common_run_of_pages_is_found_and_held() -> None:
    cache = make_cache()
    pages = compute(cache, [1, 2, 3, 4, 5, 6])
    cache.release(pages)
    found, _ = cache.acquire(iter(split([1, 2, 3, 4, 9, 9])))
    assert found == pages[:2]
    assert cache.num_idle == 1
    cache.check([found])
    assert cache.acquire(iter(split([2, 1]))) == ([], ROOT)


def test_the_same_tokens_behind_another_prefix_are_not_the_same_page() -> None:
    cache = make_cache()
    cache.release(compute(cache, [1, 2, 7, 7]))
    cache.release(compute(cache, [3, 4, 7, 7]))
    first, _ = cache.acquire(iter(split([1, 2, 7, 7])))
    second, _ = cache.acquire(iter(split([3, 4, 7, 7])))
    assert len({*first, *second}) == 4


def test_equal_hashes_are_not_equal_tokens() -> None:
    assert hash(-1) == hash(-2), "CPython's best known collision"
    cache = make_cache()
    cache.release(compute(cache, [-1, 5]))
    assert cache.acquire(iter(split([-2, 5]))) == ([], ROOT)


def test_the_least_recently_used_goes_first_and_the_end_before_the_front() -> None:
    cache = make_cache(num_pages=4)
    old, new = compute(cache, [1, 2, 3, 4]), compute(cache, [5, 6, 7, 8])
    cache.release(old)
    cache.release(new)
    cache.release(cache.acquire(iter(split([1, 2, 3, 4])))[0])  # used again: now the younger
    assert cache.allocate(1) == [new[1]]
    assert cache.allocate(1) == [new[0]]
    assert cache.allocate(1) == [old[1]]
    assert cache.acquire(iter(split([1, 2, 3, 4])))[0] == old[:1]


def test_what_a_sequence_holds_is_not_evicted() -> None:
    cache = make_cache(num_pages=2)
    pages = compute(cache, [1, 2])
    cache.allocate(1)
    assert cache.num_available == 0
    with pytest.raises(AssertionError, match="none left to evict"):
        cache.allocate(1)
    cache.release(pages)
    assert cache.num_available == 1


def test_a_second_copy_stays_private() -> None:
    cache = make_cache()
    first, second = compute(cache, [1, 2, 3, 4]), compute(cache, [1, 2, 3, 4])
    assert cache.num_cached == 2
    cache.release(second)
    assert cache.num_idle == 0
    assert cache.acquire(iter(split([1, 2, 3, 4])))[0] == first


def test_nothing_is_kept_behind_a_parent_that_is_gone() -> None:
    cache = make_cache(num_pages=2)
    page = cache.allocate(1)
    parent = cache.insert(ROOT, (1, 2), page[0])
    assert parent is not None
    cache.forget([parent[0]])
    assert cache.insert(parent[0], (3, 4), cache.allocate(1)[0]) is None
    assert cache.num_cached == 0


def test_forgotten_pages_are_not_found_but_stay_with_their_holder() -> None:
    cache = make_cache()
    pages = compute(cache, [1, 2, 3, 4])
    cache.forget([1, 1, 77])
    assert cache.acquire(iter(split([1, 2, 3, 4]))) == ([], ROOT)
    cache.check([pages])
    cache.release(pages)
    cache.check([])


def test_a_cache_that_is_off_finds_nothing() -> None:
    cache = make_cache(enabled=False)
    pages = compute(cache, [1, 2])
    cache.release(pages)
    assert cache.acquire(iter(split([1, 2]))) == ([], ROOT)
    assert cache.pool.num_free == 8
    cache.check([])


def test_its_repr_says_how_full_it_is() -> None:
    cache = make_cache()
    cache.release(compute(cache, [1, 2]))
    assert repr(cache) == "PrefixCache(1 pages, 1 idle, PagePool(7 free of 8))"


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda cache: cache._idle.clear(), "idle pages differ"),
        (lambda cache: cache._ids.clear(), "nodes and look-up table differ"),
        (lambda cache: cache._node_of_page.clear(), "nodes and pages differ"),
        (lambda cache: cache._nodes.popitem(), "reference count"),
        (lambda cache: cache.pool._free.append(0), "free and owned"),
    ],
)
def test_check_sees_a_corrupt_cache(corrupt: Callable[[PrefixCache], object], message: str) -> None:
    cache = make_cache()
    cache.release(compute(cache, [1, 2, 3, 4]))
    cache.check([])
    corrupt(cache)
    with pytest.raises(AssertionError, match=message):
        cache.check([])


@settings(deadline=None)
@given(st.randoms(use_true_random=False))
def test_random_use_agrees_with_a_table_of_contents(rng: Random) -> None:
    """The oracle is a dictionary page -> the exact tokens up to its end; a found page must hold what was asked for."""
    cache = make_cache(num_pages=6)
    contents: dict[int, tuple[int, ...]] = {}
    held: list[list[int]] = []
    for _ in range(rng.randint(1, 30)):
        if held and rng.random() < 0.5:
            cache.release(held.pop(rng.randrange(len(held))))
        else:
            tokens = tuple(rng.randint(0, 1) for _ in range(PAGE_SIZE * rng.randint(1, 3)))
            found, node = cache.acquire(iter(split(tokens)))
            assert [contents[page] for page in found] == [tokens[: PAGE_SIZE * (i + 1)] for i in range(len(found))]
            missing = len(split(tokens)) - len(found)
            if missing > cache.num_available:
                cache.release(found)
                continue
            pages = found + cache.allocate(missing)
            for i in range(len(found), len(pages)):
                contents[pages[i]] = tokens[: PAGE_SIZE * (i + 1)]
                inserted = cache.insert(node, split(tokens)[i], pages[i])
                assert inserted is not None
                node, is_new = inserted
                assert is_new
            held.append(pages)
        cache.check(held)
