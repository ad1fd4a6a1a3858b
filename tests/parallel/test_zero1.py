"""ZeRO-1: parameters divided among ranks."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cornstarch.parallel.flat_shards import lay_out_flat
from cornstarch.plan.balancing import assign_largest_first
from tests import zoo
from tests.parallel.work import collect_refused_owners, count_sent_bytes, step_shards
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


def compute_expected_values(dtypes: bool, ranks: int = 2) -> dict[str, Tensor]:
    """Return the parameters after both steps: the gradient of all numbers is the mean of 1, 2, … over ranks."""
    with zoo.reproducible(0):
        values = {f"p{n}": torch.randn(n + 1, 3).t() for n in range(5)}
    if dtypes:
        values["p1"] = values["p1"].to(torch.bfloat16)
    mean = sum(range(1, ranks + 1)) / ranks
    for number, value in enumerate(values.values()):
        for gradient in (mean, 1 / ranks if number == 3 else mean):
            value -= 0 if number == 2 else gradient
    return values


@pytest.mark.parametrize("dtypes", [False, True], ids=["one type", "two types"])
@pytest.mark.parametrize("keep_whole", [False, True], ids=["flat", "whole"])
def test_ranks_step_shards_and_all_have_the_result(workers: Pool, keep_whole: bool, dtypes: bool) -> None:
    found = workers.run(2, step_shards, keep_whole, dtypes, None)
    for one in found:
        torch.testing.assert_close(one["values"], compute_expected_values(dtypes))
        assert one["missing"] == (["p2"] if "p2" in one["shapes"] else [])  # no rank has a gradient of it
    whole = {f"p{n}": 3 * (n + 1) for n in range(5)}
    for name, size in whole.items():
        shapes = [one["shapes"][name] for one in found if name in one["shapes"]]
        assert sum(math.prod(shape) for shape in shapes) == size
        assert not keep_whole or shapes == [(3, size // 3)]
    if not keep_whole:  # equal shares, but for what is padded
        shares = [sum(math.prod(shape) for shape in one["shapes"].values()) for one in found]
        assert max(shares) <= 45 / 2 + 3 * 4 * 2 and any(len(one["shapes"]) < 5 for one in found)


def test_subgroup_divides_parameters_among_its_ranks(workers: Pool) -> None:
    other, *found = workers.run(3, step_shards, False, False, [1, 2])
    assert other is None
    for one in found:
        torch.testing.assert_close(one["values"], compute_expected_values(False))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_sends_as_much_as_ddp(workers: Pool, ranks: int) -> None:
    for kind in ("ddp", "zero1"):
        for sent, formula in workers.run(ranks, count_sent_bytes, kind):
            assert sent == pytest.approx(formula, rel=0.02), kind


def test_fewer_whole_parameters_than_ranks_are_refused(workers: Pool) -> None:
    expected = "zero1 gives whole parameters to ranks for this optimizer, and there are 1 for 2 processes."
    assert all(said.startswith(expected) for said in workers.run(2, collect_refused_owners))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 5), st.sampled_from([1, 4]), st.booleans())
def test_flat_layout_has_every_tensor_once(sizes: list[int], ranks: int, unit: int, keep_whole: bool) -> None:
    starts, shard = lay_out_flat(sizes, ranks, unit, keep_whole)
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    assert all(start % unit == 0 for start in starts) and shard % unit == 0
    ordered = sorted(zip(starts, ends, strict=True))
    assert all(end <= start for (_, end), (start, _) in pairwise(ordered)) and ordered[-1][1] <= ranks * shard
    if keep_whole:
        assert all(start // shard == (end - 1) // shard for start, end in ordered)
    else:
        assert ranks * shard < sum(sizes) + unit * (len(sizes) + ranks)
