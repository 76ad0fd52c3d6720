"""The pool's contract, and that ``check()`` sees each way to break it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from glm5ray.scheduler.pages import PagePool

if TYPE_CHECKING:
    from collections.abc import Callable


def test_pages_are_free_or_owned() -> None:
    pool = PagePool(4)
    first = pool.allocate(3)
    assert sorted(first) == [0, 1, 2]
    pool.retain(first[:1])
    pool.check([first, first[:1]])
    pool.release(first)
    assert pool.num_free == 3
    assert pool.count(first[0]) == 1
    pool.check([first[:1]])
    pool.release(first[:1])
    assert pool.num_free == 4
    assert repr(pool) == "PagePool(4 free of 4)"


def test_the_same_calls_give_the_same_pages() -> None:
    def pages() -> list[list[int]]:
        pool = PagePool(9)
        first, second = pool.allocate(4), pool.allocate(3)
        pool.release(first[1:3])
        return [first, second, pool.allocate(4)]

    assert pages() == pages()


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda pool: pool.allocate(3), "3 pages asked for, 2 free"),
        (lambda pool: pool.allocate(-1), "-1 pages"),
        (lambda pool: pool.retain([3]), "page 3 is free"),
        (lambda pool: pool.release([3]), "page 3 is free"),
    ],
)
def test_misuse_is_refused(misuse: Callable[[PagePool], object], message: str) -> None:
    pool = PagePool(4)
    pool.allocate(2)
    with pytest.raises(AssertionError, match=message):
        misuse(pool)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda pool: pool._free.append(3), "duplicates"),
        (lambda pool: pool._free.append(0), "free and owned"),
        (lambda pool: pool._free.pop(), "neither free nor owned"),
        (lambda pool: pool._counts.__setitem__(0, 2), "reference count"),
    ],
)
def test_check_sees_a_corrupt_pool(corrupt: Callable[[PagePool], object], message: str) -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.check([pages])
    corrupt(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check([pages])


def test_check_sees_owners_that_do_not_add_up() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    for owners in ([], [pages, pages], [[*pages, 3]], [[0, 0, 1]]):
        with pytest.raises(AssertionError):
            pool.check(owners)


def test_a_million_pages_cost_no_more_than_a_few() -> None:
    """A pool that looked at all its pages in each call would need hours for this."""
    pool = PagePool(1_000_000)
    for _ in range(100_000):
        pool.release(pool.allocate(1))
    assert pool.num_free == 1_000_000
