"""Replicas read different samples; the ranks of one read the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, WeightedRandomSampler

from cornstarch.api.microbatches import distribute_loader
from cornstarch.errors import ConfigError


def read(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_samples_are_distributed_in_the_order_of_one_process() -> None:
    loader = DataLoader(range(12), batch_size=2)  # type: ignore[arg-type]
    dealt = [read(distribute_loader(loader, index, 2)) for index in range(2)]
    together = [sorted(a + b) for a, b in zip(*dealt, strict=True)]
    assert together == read(DataLoader(range(12), batch_size=4))  # type: ignore[arg-type]
    assert distribute_loader(loader, 0, 1) is loader


def test_a_shuffled_order_is_the_same_in_a_replica_and_another_in_each_pass() -> None:
    def loader() -> Any:
        return distribute_loader(DataLoader(range(32), batch_size=4, shuffle=True, drop_last=True), 1, 2)  # type: ignore[arg-type]

    torch.manual_seed(1)
    one = loader()
    torch.manual_seed(2)  # another process, which has drawn other numbers
    same = loader()
    first, second = read(one), read(one)
    assert (first, second) == (read(same), read(same)) and first != second
    other = distribute_loader(DataLoader(range(32), batch_size=4, shuffle=True), 0, 2)  # type: ignore[arg-type]
    assert sorted(sum(first + read(other), [])) == list(range(32))
    assert one.drop_last and one.batch_size == 4


class Endless(IterableDataset):  # type: ignore[type-arg]
    """Samples without numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(14))


def test_batches_are_distributed_if_samples_have_no_index() -> None:
    dealt = [read(distribute_loader(DataLoader(Endless(), batch_size=2), index, 3)) for index in range(3)]  # type: ignore[arg-type]
    assert dealt == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    sampler = WeightedRandomSampler([1.0] * 8, 8, generator=torch.Generator().manual_seed(0))
    assert len(distribute_loader(DataLoader(range(8), batch_size=2, sampler=sampler), 0, 2)) == 2  # type: ignore[arg-type]
    assert list(distribute_loader(["a", "b", "c"], 1, 2)) == ["b"]


def test_a_distributed_sampler_must_match_the_replicas() -> None:
    sampler: Any = DistributedSampler(range(8), 4, 3)  # type: ignore[arg-type]
    loader = DataLoader(range(8), sampler=sampler)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is for rank 3 of 4; this is replica 1 of 2"):
        distribute_loader(loader, 1, 2)
    assert distribute_loader(loader, 3, 4) is loader
