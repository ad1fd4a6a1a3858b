"""Things that are lent: only surplus moves, nobody is worse off, and everyone finds the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cornstarch.plan.dealing import lend_out

SIZES = st.lists(st.lists(st.integers(1, 60), max_size=12), min_size=1, max_size=9)


def loads(sizes: list[list[int]], takers: list[list[int]]) -> list[int]:
    found = [0] * len(sizes)
    for own, whose in zip(sizes, takers, strict=True):
        for size, taker in zip(own, whose, strict=True):
            found[taker] += size
    return found


@given(SIZES)
def test_only_surplus_moves_and_nobody_waits_longer(sizes: list[list[int]]) -> None:
    takers = lend_out(sizes)
    before, after = [sum(own) for own in sizes], loads(sizes, takers)
    moved = [(owner, taker) for owner, whose in enumerate(takers) for taker in whose if taker != owner]
    assert takers == lend_out([list(own) for own in sizes])
    assert sum(after) == sum(before) and max(after) <= max(before)
    for owner, own in enumerate(sizes):
        kept = [size for size, taker in zip(own, takers[owner], strict=True) if taker == owner]
        assert bool(kept) == bool(own)  # whoever has something encodes something
        if before[owner] * len(sizes) <= sum(before):
            assert kept == own  # at most an even share: it lends nothing
    if moved:
        assert max(after) <= 0.95 * max(before)
        assert all(after[taker] <= max(after) and before[owner] * len(sizes) > sum(before) for owner, taker in moved)


@given(SIZES)
def test_it_is_close_to_even(sizes: list[list[int]]) -> None:
    """Nobody has more than an even share and one thing, unless it would gain little."""
    after = loads(sizes, lend_out(sizes))
    largest = max((size for own in sizes for size in own), default=0)
    assert 0.95 * max(after) <= sum(after) / len(sizes) + largest


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([[4, 4, 4, 4], []], [[0, 0, 1, 1], []]),
        ([[], [1, 1, 1], [1]], [[], [1, 0, 1], [2]]),
        ([[9], []], [[0], []]),
        ([[5], [5]], [[0], [1]]),
        ([[100] * 10, [100] * 10 + [1]], [[0] * 10, [1] * 11]),
        ([[8, 1, 1], [2], []], [[0, 2, 2], [1], []]),
        ([[]], [[]]),
    ],
)
def test_some_that_can_be_followed(sizes: list[list[int]], expected: list[list[int]]) -> None:
    assert lend_out(sizes) == expected
