"""Whole parameters dealt out among processes."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cornstarch.plan.balancing import assign_largest_first
from tests.parallel.work import dealt_out, refused_owners
from tests.parity.pool import Pool


def largest_load(sizes: list[int], owners: int, dealt: tuple[int, ...] | list[int]) -> int:
    return max(sum(size for size, whose in zip(sizes, dealt, strict=True) if whose == owner) for owner in range(owners))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_largest_load_is_near_the_optimum(sizes: list[int], owners: int) -> None:
    best = min(largest_load(sizes, owners, dealt) for dealt in product(range(owners), repeat=len(sizes)))
    found = largest_load(sizes, owners, assign_largest_first(sizes, owners))
    assert best <= found <= best * (4 / 3 - 1 / (3 * owners)) + 1e-9  # Graham's bound for largest first


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
def test_each_parameter_goes_to_the_least_loaded_rank(sizes: list[int], owners: int) -> None:
    dealt = assign_largest_first(sizes, owners)
    load = [0] * owners
    for size, _, owner in sorted(((size, -n, dealt[n]) for n, size in enumerate(sizes)), reverse=True):
        assert load[owner] == min(load) and owner == load.index(min(load))
        load[owner] += size
    if len(sizes) >= owners:
        assert set(dealt) == set(range(owners))  # nobody is left without


def test_assignment_is_deterministic() -> None:
    assert assign_largest_first([3, 3, 3], 2) == [0, 1, 0]
    assert assign_largest_first([1, 5, 2, 2], 2) == [1, 0, 1, 1]
    assert assign_largest_first([], 2) == []


@pytest.mark.parametrize("dtypes", [False, True], ids=["one type", "two types"])
def test_broadcast_sends_owned_parameters_to_all_ranks(workers: Pool, dtypes: bool) -> None:
    first, second = workers.run(2, dealt_out, dtypes, None)
    assert sorted(first["names"] + second["names"]) == [f"p{n}" for n in range(5)]
    assert all(first["changed"].values()) and all(second["changed"].values())


def test_subgroup_divides_parameters_among_its_ranks(workers: Pool) -> None:
    other, first, second = workers.run(3, dealt_out, False, [1, 2])
    assert other is None
    assert sorted(first["names"] + second["names"]) == [f"p{n}" for n in range(5)]
    assert all(first["changed"].values()) and all(second["changed"].values())


def test_fewer_parameters_than_ranks_is_refused(workers: Pool) -> None:
    expected = "zero1 assigns whole parameters, and there are 1 for 2 processes. Use fewer processes, or ddp."
    assert workers.run(2, refused_owners) == [expected] * 2
