"""Every sample as often as its weight says, in an order that depends on nothing but the seed."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from fractions import Fraction
from math import lcm
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cornstarch.errors import ConfigError
from cornstarch.train.data.order import EpochOrder

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=4)
weight = st.sampled_from([0.1, 0.25, 0.29, 0.5, 0.75, 1, 1.5, 2, 3.3])


@settings(max_examples=60, deadline=None)
@given(lengths=sizes, seed=st.integers(0, 2**31), epoch=st.integers(0, 5), shuffle=st.booleans())
def test_at_weight_one_every_sample_comes_once_per_epoch(
    lengths: list[int], seed: int, epoch: int, shuffle: bool
) -> None:
    order = EpochOrder(lengths, [1.0] * len(lengths), seed, shuffle)
    found = order.order(epoch)
    assert sorted(found.tolist()) == list(range(sum(lengths))) and order.count(epoch) == len(found)
    if not shuffle:
        assert found.tolist() == sorted(found.tolist())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), lengths=sizes, seed=st.integers(0, 9), shuffle=st.booleans())
def test_weights_rotate_over_epochs(data: st.DataObject, lengths: list[int], seed: int, shuffle: bool) -> None:
    """After any number of epochs no sample is ahead of another of its source by more than one."""
    weights = [data.draw(weight) for _ in lengths]
    order = EpochOrder(lengths, weights, seed, shuffle)
    together = lcm(*(Fraction(str(w)).denominator for w in weights))
    seen: Counter[int] = Counter()
    for epoch in range(min(together, 40)):
        found = order.order(epoch)
        assert len(found) == order.count(epoch)
        seen.update(found.tolist())
        start = 0
        for length, share in zip(lengths, weights, strict=True):
            counts = [seen[start + i] for i in range(length)]
            assert max(counts) - min(counts) <= 1
            assert sum(counts) == int(Fraction(str(share)) * length * (epoch + 1))
            start += length
    if together <= 40:
        start = 0
        for length, share in zip(lengths, weights, strict=True):
            assert {seen[start + i] for i in range(length)} == {int(Fraction(str(share)) * together)}
            start += length


def test_epochs_seeds_and_sources_differ() -> None:
    orders = [EpochOrder([50], [1], seed, True).order(epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    twin = EpochOrder([50, 50], [1, 1], 0, True).order(0)
    first, second = [n for n in twin if n < 50], [n - 50 for n in twin if n >= 50]
    assert first != second


def test_an_epoch_does_not_depend_on_those_before_it() -> None:
    """Also in another process, with hash seeds of its own."""
    one = EpochOrder([30, 20], [1.5, 1], 7, True)
    expected = [one.order(epoch).tolist() for epoch in range(4)]
    assert EpochOrder([30, 20], [1.5, 1], 7, True).order(3).tolist() == expected[3]
    code = (
        "from cornstarch.train.data.order import EpochOrder;"
        "print(EpochOrder([30, 20], [1.5, 1], 7, True).order(3).tolist())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert ran.stdout.strip() == str(expected[3]), ran.stderr


def test_the_order_never_changes() -> None:
    """A run is resumed with a later version too."""
    assert EpochOrder([8], [1], 0, True).order(0).tolist() == FIRST
    assert EpochOrder([4, 3], [1, 2], 5, True).order(2).tolist() == MIXED


FIRST = [0, 3, 1, 5, 2, 4, 7, 6]
MIXED = [6, 1, 6, 4, 3, 0, 2, 5, 4, 5]


def test_every_place_is_as_likely() -> None:
    """Chi-square over where sample 0 comes in 4,000 orders of 8: 7 degrees of freedom, 24.3 at 0.1 %."""
    order = EpochOrder([8], [1], 3, True)
    places = Counter(order.order(epoch).tolist().index(0) for epoch in range(4000))
    assert sum((places[i] - 500) ** 2 / 500 for i in range(8)) < 24.3


def test_ten_million_samples() -> None:
    found = EpochOrder([10_000_000], [1], 0, True).order(0)
    assert found.dtype == np.int64 and found.nbytes == 80_000_000
    assert np.bincount(found, minlength=10_000_000).max() == 1


@pytest.mark.parametrize(("lengths", "weights"), [([], []), ([1], [1, 1]), ([0], [1]), ([3], [0]), ([3], [-1.0])])
def test_mistakes(lengths: list[int], weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="expected at least one source"):
        EpochOrder(lengths, weights, 0, True)
