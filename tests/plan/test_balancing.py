"""Samples assignment out by cost: all of them, once, the same everywhere, and close to the best there is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cornstarch.errors import ConfigError
from cornstarch.plan.balancing import (
    SampleAssignment,
    assign_in_order,
    assign_surplus,
    balance,
    compute_efficiency,
    compute_loads,
    compute_step_work,
    find_dominated_phases,
)
from tests.pipeline import measured


def heavy(phases: int, samples: int, seed: int) -> np.ndarray:
    """Costs with a long tail; every other sample has nothing to do in the first phases."""
    random = np.random.default_rng(seed)
    costs = random.lognormal(3, 1, (phases, samples))
    costs[:-1] *= random.random((phases - 1, samples)) < 0.5
    return costs


def places(assignment: SampleAssignment) -> list[int]:
    return sorted(int(place) for microbatches in assignment for one in microbatches for place in one)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_every_sample_is_assigned_once(seed: int, padded: bool) -> None:
    random = np.random.default_rng(seed)
    ranks, microbatches = int(random.integers(1, 9)), int(random.integers(1, 5))
    samples = int(random.integers(1, 60))
    assignment = balance(heavy(3, samples, seed), ranks, microbatches, padded)
    assert [len(one) for one in assignment] == [microbatches] * ranks
    assert places(assignment) == list(range(samples))
    assert all(np.all(np.diff(one) > 0) for own in assignment for one in own)
    if samples >= ranks * microbatches:
        assert all(len(one) for own in assignment for one in own)  # or others would wait for a stand-in
    else:
        assert max(len(one) for own in assignment for one in own) == 1


def test_samples_without_cost_are_distributed() -> None:
    assignment = balance(np.zeros((2, 12)), 3, 2)
    assert {len(one) for own in assignment for one in own} == {2}


def as_they_come(count: int, ranks: int, microbatch: int) -> list[list[list[int]]]:
    """The rule written out: the next samples are a microbatch, cut into pieces that differ by one at most."""
    starts = range(0, count, microbatch)
    pieces = [np.array_split(np.arange(count)[start : start + microbatch], ranks) for start in starts]
    return [[piece[rank].tolist() for piece in pieces] for rank in range(ranks)]


@pytest.mark.parametrize(("count", "ranks", "microbatch"), [(16, 2, 8), (13, 3, 6), (5, 4, 4), (8, 1, 2)])
def test_assign_in_order_follows_the_batch(count: int, ranks: int, microbatch: int) -> None:
    assignment = assign_in_order(count, ranks, -(-count // microbatch), microbatch)
    assert [[one.tolist() for one in own] for own in assignment] == as_they_come(count, ranks, microbatch)


def best_of_all(costs: np.ndarray, ranks: int, time: Callable[[SampleAssignment], float]) -> float:
    """Try every assignment that gives each replica a sample."""
    ways = np.array(list(product(range(ranks), repeat=costs.shape[1])))
    every = (tuple((np.flatnonzero(way == rank),) for rank in range(ranks)) for way in ways)
    return min(time(assignment) for assignment in every if all(len(own[0]) for own in assignment))


def test_balance_is_close_to_brute_force() -> None:
    """Seven samples on three replicas: all 2,187 ways are tried."""
    ratios = []
    for seed in range(30):
        costs = heavy(2, 7, seed)
        best = best_of_all(
            costs, 3, lambda assignment, costs=costs: compute_step_work(compute_loads(costs, assignment))
        )
        ratios.append(compute_step_work(compute_loads(costs, balance(costs, 3))) / best)
    assert min(ratios) >= 1 - 1e-9 and max(ratios) < 1.35 and np.mean(ratios) < 1.03


def test_balance_is_close_to_brute_force_with_padding() -> None:
    """The sum of all phases is evened then."""

    def slowest(costs: np.ndarray, assignment: SampleAssignment) -> float:
        return float(compute_loads(costs, assignment, padded=True).sum((1, 2)).max())

    ratios = []
    for seed in range(30):
        costs = heavy(2, 7, seed)
        best = best_of_all(costs, 3, lambda assignment, costs=costs: slowest(costs, assignment))
        ratios.append(slowest(costs, balance(costs, 3, padded=True)) / best)
    assert min(ratios) >= 1 - 1e-9 and max(ratios) < 1.35 and np.mean(ratios) < 1.05


def test_balance_makes_every_phase_even() -> None:
    """32 replicas, 64 samples each; the first phase has a hundredth of the work, and is evened, too."""
    costs = heavy(2, 2048, 0) * np.array([[0.02], [1.0]])
    assert costs[0].sum() < 0.02 * costs[1].sum() and find_dominated_phases(costs, 32) == [False, False]
    work = compute_loads(costs, balance(costs, 32)).sum(1)
    assert (work.mean(0) / work.max(0) > 0.95).all()
    before = compute_loads(costs, assign_in_order(2048, 32, 1)).sum(1)
    assert (before.mean(0) / before.max(0) < 0.85).all()


def test_an_uneven_phase_does_not_unbalance_the_others() -> None:
    """Three of 512 samples have audio, which must not unbalance the language model."""
    costs = np.stack([np.zeros(512), np.random.default_rng(0).lognormal(3, 0.5, 512)])
    costs[0, :3] = 0.01 * costs[1].mean()
    work = compute_loads(costs, balance(costs, 32)).sum(1)[:, 1]
    assert work.mean() / work.max() > 0.98


def test_microbatches_are_even_and_the_heaviest_comes_first() -> None:
    costs = np.random.default_rng(0).uniform(1, 10, (2, 512))
    work = compute_loads(costs, balance(costs, 4, 8)).sum(2)
    assert (np.diff(work, axis=1) <= 1e-6 * work.max()).all()
    assert work.max() / work.mean() < 1.05


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_balance_is_never_worse_than_in_order(seed: int, padded: bool) -> None:
    """Nearly alike samples, where there is little to gain."""
    costs = np.random.default_rng(seed).uniform(9, 10, (3, 24))
    before, after = (
        compute_loads(costs, one, padded) for one in (assign_in_order(24, 4, 2), balance(costs, 4, 2, padded))
    )
    assert compute_step_work(after) <= compute_step_work(before) * (1 + 1e-6)


def test_a_dominating_sample_gets_a_replica_of_its_own() -> None:
    costs = np.ones((1, 33))
    costs[0, 7] = 100
    assignment = balance(costs, 4)
    assert [7] in [own[0].tolist() for own in assignment]
    assert find_dominated_phases(costs, 4) == [True] and find_dominated_phases(costs, 1) == [False]


def test_padded_rows_are_grouped_by_length() -> None:
    lengths = np.array([[1000.0, 10, 10, 10, 1000, 10, 10, 10, 10, 10]])
    assignment = balance(lengths, 2, 2, padded=True)
    longest = [set(lengths[0, one]) for own in assignment for one in own]
    assert all(len(one) == 1 for one in longest)
    assert compute_step_work(compute_loads(lengths, assignment, True)) < 0.6 * compute_step_work(
        compute_loads(lengths, assign_in_order(10, 2, 2), True)
    )


@pytest.mark.parametrize("padded", [False, True])
def test_balance_is_independent_of_units_and_summation_order(padded: bool) -> None:
    """All processes must come to the same result, also on machines that add in another order."""
    costs = heavy(3, 200, 5)
    first = balance(costs, 8, 2, padded)
    for other in (costs * 1e12, np.asfortranarray(costs), costs.astype(np.longdouble).astype(np.float64)):
        again = balance(other, 8, 2, padded)
        assert [[a.tolist() for a in own] for own in again] == [[a.tolist() for a in own] for own in first]


def test_efficiency_equals_a_hand_computed_one() -> None:
    """Phases [2, 4] and [1, 1]: the slowest have 4 + 1, the mean is 3 + 1."""
    costs = np.array([[2.0, 4.0], [1.0, 1.0]])
    work = compute_loads(costs, assign_in_order(2, 2, 1))
    assert work.tolist() == [[[2.0, 1.0]], [[4.0, 1.0]]]
    assert compute_step_work(work) == 5.0 and compute_efficiency(work) == 0.8
    two = np.array([[[1.0], [3.0]], [[3.0], [1.0]]])
    assert compute_step_work(two) == 4.0 and compute_step_work(two, every_microbatch=True) == 6.0


def test_padding_equals_hand_computed_loads() -> None:
    """Rows of 5 and 2 are filled up to 5 and 5; what was needed is 7 and 1."""
    work = compute_loads(np.array([[5.0, 2.0, 1.0]]), ((np.array([0, 1]),), (np.array([2]),)), padded=True)
    assert work.tolist() == [[[10.0]], [[1.0]]]
    assert compute_efficiency(work, needed=8.0) == pytest.approx(4 / 10)


@pytest.mark.parametrize("costs", [np.ones(3), np.array([[np.nan]]), np.array([[-1.0]])])
def test_impossible_costs_are_refused(costs: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="costs|Costs"):
        balance(costs, 2)


def test_the_benchmark_reports_higher_efficiency() -> None:
    script = measured.script("balancing")
    page, good = script.report(2, 32)
    assert good and "32 replicas, 2 steps" in page and "at least 0." in page
    found = script.measure(32, 16, 1, 4, seed=1)
    assert np.mean(found.before) < 0.7 and np.mean(found.after) > 0.9


# ---------------------------------------------------------------------------------------------------- items

SIZES = st.lists(st.lists(st.integers(1, 60), max_size=12), min_size=1, max_size=9)


def sum_loads(sizes: list[list[int]], takers: list[list[int]]) -> list[int]:
    found = [0] * len(sizes)
    for own, whose in zip(sizes, takers, strict=True):
        for size, taker in zip(own, whose, strict=True):
            found[taker] += size
    return found


@given(SIZES)
def test_only_surplus_moves_and_no_rank_waits_longer(sizes: list[list[int]]) -> None:
    takers = assign_surplus(sizes)
    before, after = [sum(own) for own in sizes], sum_loads(sizes, takers)
    moved = [(owner, taker) for owner, whose in enumerate(takers) for taker in whose if taker != owner]
    assert takers == assign_surplus([list(own) for own in sizes])
    assert sum(after) == sum(before) and max(after) <= max(before)
    for owner, own in enumerate(sizes):
        kept = [size for size, taker in zip(own, takers[owner], strict=True) if taker == owner]
        assert bool(kept) == bool(own)  # an owner of items keeps at least one
        if before[owner] * len(sizes) <= sum(before):
            assert kept == own  # at most an even part: nothing moves
    if moved:
        assert max(after) <= 0.95 * max(before)
        assert all(after[taker] <= max(after) and before[owner] * len(sizes) > sum(before) for owner, taker in moved)


@given(SIZES)
def test_assign_surplus_is_nearly_even(sizes: list[list[int]]) -> None:
    """No rank has more than an even part and one item, unless moving gains little."""
    after = sum_loads(sizes, assign_surplus(sizes))
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
def test_assign_surplus_equals_hand_computed_assignments(sizes: list[list[int]], expected: list[list[int]]) -> None:
    assert assign_surplus(sizes) == expected
