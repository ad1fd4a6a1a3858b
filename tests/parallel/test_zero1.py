"""Whole parameters dealt out among processes."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cornstarch.plan.dealing import deal_out
from tests.parallel.work import dealt_out, refused_owners
from tests.parity.pool import Pool


def largest_load(sizes: list[int], owners: int, dealt: tuple[int, ...] | list[int]) -> int:
    return max(sum(size for size, whose in zip(sizes, dealt, strict=True) if whose == owner) for owner in range(owners))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_the_largest_share_is_near_the_best_that_can_be(sizes: list[int], owners: int) -> None:
    best = min(largest_load(sizes, owners, dealt) for dealt in product(range(owners), repeat=len(sizes)))
    found = largest_load(sizes, owners, deal_out(sizes, owners))
    assert best <= found <= best * (4 / 3 - 1 / (3 * owners)) + 1e-9  # Graham's bound for largest first


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
def test_each_goes_to_who_has_least(sizes: list[int], owners: int) -> None:
    dealt = deal_out(sizes, owners)
    load = [0] * owners
    for size, _, owner in sorted(((size, -n, dealt[n]) for n, size in enumerate(sizes)), reverse=True):
        assert load[owner] == min(load) and owner == load.index(min(load))
        load[owner] += size
    if len(sizes) >= owners:
        assert set(dealt) == set(range(owners))  # nobody is left without


def test_dealing_out_needs_no_order_and_no_chance() -> None:
    assert deal_out([3, 3, 3], 2) == [0, 1, 0]
    assert deal_out([1, 5, 2, 2], 2) == [1, 0, 1, 1]
    assert deal_out([], 2) == []


@pytest.mark.parametrize("dtypes", [False, True], ids=["one type", "two types"])
def test_what_owners_change_reaches_all(workers: Pool, dtypes: bool) -> None:
    first, second = workers.run(2, dealt_out, dtypes, None)
    assert sorted(first["names"] + second["names"]) == [f"p{n}" for n in range(5)]
    assert all(first["changed"].values()) and all(second["changed"].values())


def test_some_of_the_processes_can_deal_out_among_themselves(workers: Pool) -> None:
    other, first, second = workers.run(3, dealt_out, False, [1, 2])
    assert other is None
    assert sorted(first["names"] + second["names"]) == [f"p{n}" for n in range(5)]
    assert all(first["changed"].values()) and all(second["changed"].values())


def test_more_processes_than_parameters_are_refused(workers: Pool) -> None:
    expected = "zero1 deals out whole parameters, and there are 1 for 2 processes. Use fewer processes, or ddp."
    assert workers.run(2, refused_owners) == [expected] * 2
