"""Replicas read different samples; the ranks of one read the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, WeightedRandomSampler

from cornstarch.errors import ConfigError
from cornstarch.plugin.loaders import dealt_out


def read(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_samples_are_dealt_out_in_the_order_of_one_process() -> None:
    loader = DataLoader(range(12), batch_size=2)  # type: ignore[arg-type]
    dealt = [read(dealt_out(loader, index, 2)) for index in range(2)]
    together = [sorted(a + b) for a, b in zip(*dealt, strict=True)]
    assert together == read(DataLoader(range(12), batch_size=4))  # type: ignore[arg-type]
    assert dealt_out(loader, 0, 1) is loader


def test_a_shuffled_order_is_the_same_in_a_replica_and_another_in_each_pass() -> None:
    def loader() -> Any:
        return dealt_out(DataLoader(range(32), batch_size=4, shuffle=True, drop_last=True), 1, 2)  # type: ignore[arg-type]

    torch.manual_seed(1)
    one = loader()
    torch.manual_seed(2)  # another process, which has drawn other numbers
    same = loader()
    first, second = read(one), read(one)
    assert (first, second) == (read(same), read(same)) and first != second
    other = dealt_out(DataLoader(range(32), batch_size=4, shuffle=True), 0, 2)  # type: ignore[arg-type]
    assert sorted(sum(first + read(other), [])) == list(range(32))
    assert one.drop_last and one.batch_size == 4


class Endless(IterableDataset):  # type: ignore[type-arg]
    """Samples without numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(14))


def test_of_what_has_no_numbered_samples_batches_are_dealt_out() -> None:
    dealt = [read(dealt_out(DataLoader(Endless(), batch_size=2), index, 3)) for index in range(3)]  # type: ignore[arg-type]
    assert dealt == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    sampler = WeightedRandomSampler([1.0] * 8, 8, generator=torch.Generator().manual_seed(0))
    assert len(dealt_out(DataLoader(range(8), batch_size=2, sampler=sampler), 0, 2)) == 2  # type: ignore[arg-type]
    assert list(dealt_out(["a", "b", "c"], 1, 2)) == ["b"]


def test_a_sampler_that_deals_out_already_must_do_so_to_replicas() -> None:
    sampler: Any = DistributedSampler(range(8), 4, 3)  # type: ignore[arg-type]
    loader = DataLoader(range(8), sampler=sampler)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="deals out to 4 processes, of which this is number 3; there are 2 replicas"):
        dealt_out(loader, 1, 2)
    assert dealt_out(loader, 3, 4) is loader
