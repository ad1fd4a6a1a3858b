"""Samples dealt out by cost: all of them, once, the same everywhere, and close to the best there is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from cornstarch.errors import ConfigError
from cornstarch.plan.balancing import Dealt, balance, deal, dominated, efficiency, loads, step_work
from tests.pipeline import measured


def heavy(phases: int, samples: int, seed: int) -> np.ndarray:
    """Costs with a long tail; every other sample has nothing to do in the first phases."""
    random = np.random.default_rng(seed)
    costs = random.lognormal(3, 1, (phases, samples))
    costs[:-1] *= random.random((phases - 1, samples)) < 0.5
    return costs


def places(dealt: Dealt) -> list[int]:
    return sorted(int(place) for portions in dealt for one in portions for place in one)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_every_sample_is_somewhere_once(seed: int, padded: bool) -> None:
    random = np.random.default_rng(seed)
    ranks, portions = int(random.integers(1, 9)), int(random.integers(1, 5))
    samples = int(random.integers(1, 60))
    dealt = balance(heavy(3, samples, seed), ranks, portions, padded)
    assert [len(one) for one in dealt] == [portions] * ranks
    assert places(dealt) == list(range(samples))
    assert all(np.all(np.diff(one) > 0) for own in dealt for one in own)
    if samples >= ranks * portions:
        assert all(len(one) for own in dealt for one in own)  # or others would wait for a stand-in
    else:
        assert max(len(one) for own in dealt for one in own) == 1


def test_samples_that_cost_nothing_are_spread() -> None:
    dealt = balance(np.zeros((2, 12)), 3, 2)
    assert {len(one) for own in dealt for one in own} == {2}


def as_they_come(count: int, ranks: int, portion: int) -> list[list[list[int]]]:
    """The rule written out: the next samples are a portion, cut into pieces that differ by one at most."""
    starts = range(0, count, portion)
    pieces = [np.array_split(np.arange(count)[start : start + portion], ranks) for start in starts]
    return [[piece[rank].tolist() for piece in pieces] for rank in range(ranks)]


@pytest.mark.parametrize(("count", "ranks", "portion"), [(16, 2, 8), (13, 3, 6), (5, 4, 4), (8, 1, 2)])
def test_dealt_out_as_they_come(count: int, ranks: int, portion: int) -> None:
    dealt = deal(count, ranks, -(-count // portion), portion)
    assert [[one.tolist() for one in own] for own in dealt] == as_they_come(count, ranks, portion)


def best_of_all(costs: np.ndarray, ranks: int, time: Callable[[Dealt], float]) -> float:
    """Try every way to deal out samples that leaves nobody without."""
    ways = np.array(list(product(range(ranks), repeat=costs.shape[1])))
    every = (tuple((np.flatnonzero(way == rank),) for rank in range(ranks)) for way in ways)
    return min(time(dealt) for dealt in every if all(len(own[0]) for own in dealt))


def test_close_to_brute_force() -> None:
    """Seven samples on three replicas: all 2,187 ways are tried."""
    ratios = []
    for seed in range(30):
        costs = heavy(2, 7, seed)
        best = best_of_all(costs, 3, lambda dealt, costs=costs: step_work(loads(costs, dealt)))
        ratios.append(step_work(loads(costs, balance(costs, 3))) / best)
    assert min(ratios) >= 1 - 1e-9 and max(ratios) < 1.35 and np.mean(ratios) < 1.03


def test_close_to_brute_force_where_rows_are_filled_up() -> None:
    """The sum of all phases is evened then."""

    def slowest(costs: np.ndarray, dealt: Dealt) -> float:
        return float(loads(costs, dealt, padded=True).sum((1, 2)).max())

    ratios = []
    for seed in range(30):
        costs = heavy(2, 7, seed)
        best = best_of_all(costs, 3, lambda dealt, costs=costs: slowest(costs, dealt))
        ratios.append(slowest(costs, balance(costs, 3, padded=True)) / best)
    assert min(ratios) >= 1 - 1e-9 and max(ratios) < 1.35 and np.mean(ratios) < 1.05


def test_every_phase_is_even() -> None:
    """32 replicas, 64 samples each; the first phase has a hundredth of the work, and is evened, too."""
    costs = heavy(2, 2048, 0) * np.array([[0.02], [1.0]])
    assert costs[0].sum() < 0.02 * costs[1].sum() and dominated(costs, 32) == [False, False]
    work = loads(costs, balance(costs, 32)).sum(1)
    assert (work.mean(0) / work.max(0) > 0.95).all()
    before = loads(costs, deal(2048, 32, 1)).sum(1)
    assert (before.mean(0) / before.max(0) < 0.85).all()


def test_a_phase_that_cannot_be_even_costs_the_others_nothing() -> None:
    """Three of 512 samples have sounds: nobody else gets less to do because of them."""
    costs = np.stack([np.zeros(512), np.random.default_rng(0).lognormal(3, 0.5, 512)])
    costs[0, :3] = 0.01 * costs[1].mean()
    work = loads(costs, balance(costs, 32)).sum(1)[:, 1]
    assert work.mean() / work.max() > 0.98


def test_portions_of_a_replica_are_even_and_the_heaviest_comes_first() -> None:
    costs = np.random.default_rng(0).uniform(1, 10, (2, 512))
    work = loads(costs, balance(costs, 4, 8)).sum(2)
    assert (np.diff(work, axis=1) <= 1e-6 * work.max()).all()
    assert work.max() / work.mean() < 1.05


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_it_is_never_worse_than_as_they_come(seed: int, padded: bool) -> None:
    """Nearly alike samples, where there is little to gain."""
    costs = np.random.default_rng(seed).uniform(9, 10, (3, 24))
    before, after = (loads(costs, one, padded) for one in (deal(24, 4, 2), balance(costs, 4, 2, padded)))
    assert step_work(after) <= step_work(before) * (1 + 1e-6)


def test_a_dominating_sample_is_alone() -> None:
    costs = np.ones((1, 33))
    costs[0, 7] = 100
    dealt = balance(costs, 4)
    assert [7] in [own[0].tolist() for own in dealt]
    assert dominated(costs, 4) == [True] and dominated(costs, 1) == [False]


def test_filled_up_rows_come_together_by_length() -> None:
    lengths = np.array([[1000.0, 10, 10, 10, 1000, 10, 10, 10, 10, 10]])
    dealt = balance(lengths, 2, 2, padded=True)
    longest = [set(lengths[0, one]) for own in dealt for one in own]
    assert all(len(one) == 1 for one in longest)
    assert step_work(loads(lengths, dealt, True)) < 0.6 * step_work(loads(lengths, deal(10, 2, 2), True))


@pytest.mark.parametrize("padded", [False, True])
def test_the_unit_of_costs_and_the_order_of_sums_do_not_matter(padded: bool) -> None:
    """All processes must come to the same result, also on machines that add in another order."""
    costs = heavy(3, 200, 5)
    first = balance(costs, 8, 2, padded)
    for other in (costs * 1e12, np.asfortranarray(costs), costs.astype(np.longdouble).astype(np.float64)):
        again = balance(other, 8, 2, padded)
        assert [[a.tolist() for a in own] for own in again] == [[a.tolist() for a in own] for own in first]


def test_efficiency_by_hand() -> None:
    """Phases [2, 4] and [1, 1]: the slowest have 4 + 1, the mean is 3 + 1."""
    costs = np.array([[2.0, 4.0], [1.0, 1.0]])
    work = loads(costs, deal(2, 2, 1))
    assert work.tolist() == [[[2.0, 1.0]], [[4.0, 1.0]]]
    assert step_work(work) == 5.0 and efficiency(work) == 0.8
    two = np.array([[[1.0], [3.0]], [[3.0], [1.0]]])
    assert step_work(two) == 4.0 and step_work(two, every_portion=True) == 6.0


def test_padding_by_hand() -> None:
    """Rows of 5 and 2 are filled up to 5 and 5; what was needed is 7 and 1."""
    work = loads(np.array([[5.0, 2.0, 1.0]]), ((np.array([0, 1]),), (np.array([2]),)), padded=True)
    assert work.tolist() == [[[10.0]], [[1.0]]]
    assert efficiency(work, needed=8.0) == pytest.approx(4 / 10)


@pytest.mark.parametrize("costs", [np.ones(3), np.array([[np.nan]]), np.array([[-1.0]])])
def test_costs_that_are_none(costs: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="costs|Costs"):
        balance(costs, 2)


def test_the_benchmark() -> None:
    script = measured.script("balancing")
    page, good = script.report(2, 32)
    assert good and "32 replicas, 2 steps" in page and "at least 0." in page
    found = script.measure(32, 16, 1, 4, seed=1)
    assert np.mean(found.before) < 0.7 and np.mean(found.after) > 0.9
