"""Batches that are the same in all ranks of a replica, and others in other replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from cornstarch.errors import ConfigError

# What a loader is made with again; the sampler is another one.
_KEPT = (
    "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn",
    "multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip
_SEED = 1024


class ReplicaSampler(DistributedSampler[Any]):
    """Numbers of the samples of one replica; when it is shuffled, each pass has another order by itself."""

    def __iter__(self) -> Iterator[Any]:
        """Return the numbers of one pass."""
        order = super().__iter__()
        self.set_epoch(self.epoch + 1)
        return order


class DealtOut:
    """Every so-many-th of the batches of a loader, which all ranks read; the last round is left out if not full.

    Args:
        loader: Yields the same batches in all ranks.
        index: This replica.
        count: All replicas.
    """

    def __init__(self, loader: Iterable[Any], index: int, count: int) -> None:
        self.loader, self.index, self.count = loader, index, count

    def __iter__(self) -> Iterator[Any]:
        """Yield this replica's batches."""
        batches = iter(self.loader)
        while True:
            dealt: list[Any] = []
            for _ in range(self.count):
                try:
                    dealt.append(next(batches))
                except StopIteration:
                    return
            yield dealt[self.index]

    def __len__(self) -> int:
        """Return how many batches a replica gets."""
        return len(self.loader) // self.count  # type: ignore[arg-type]


def replica_loader(
    dataset: Dataset[Any], index: int, count: int, shuffle: bool, seed: int, options: dict[str, Any]
) -> DataLoader[Any]:
    """Return a loader of the batches of one of `count` replicas; `options` are those of a `DataLoader`."""
    drops = bool(options.get("drop_last"))
    sampler = ReplicaSampler(dataset, count, index, shuffle=shuffle, seed=seed, drop_last=drops)
    # Workers of all ranks of a replica draw the same random numbers.
    numbers = torch.Generator().manual_seed(seed + index)
    return DataLoader(dataset, sampler=sampler, generator=numbers, **options)


def dealt_out(loader: Any, index: int, count: int) -> Any:
    """Return a loader that yields the batches of one of `count` replicas, if it does not do so already.

    Of a `DataLoader` without a sampler of its own, samples are dealt out; of anything else, batches.
    """
    if not isinstance(loader, DataLoader):
        return loader if count == 1 else DealtOut(loader, index, count)
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        if (sampler.num_replicas, sampler.rank) != (count, index):
            raise ConfigError(
                f"The dataloader's DistributedSampler deals out to {sampler.num_replicas} processes, of which this is "
                f"number {sampler.rank}; there are {count} replicas, and this is number {index}. Leave the sampler "
                "out: boost deals out by itself."
            )
        return loader
    is_plain = type(sampler) in (RandomSampler, SequentialSampler) and type(loader.batch_sampler) is BatchSampler
    if not is_plain or isinstance(loader.dataset, IterableDataset) or _draws_some(sampler):
        return loader if count == 1 else DealtOut(loader, index, count)
    shuffles = isinstance(sampler, RandomSampler)
    if count == 1 and not shuffles:
        return loader
    given = getattr(sampler, "generator", None) or loader.generator
    seed = _SEED if given is None else given.initial_seed()
    options = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    return replica_loader(loader.dataset, index, count, shuffles, seed, options)


def _draws_some(sampler: Any) -> bool:
    """Say whether a sampler draws other than every sample once."""
    return isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(sampler.data_source)
    )


__all__ = ["DealtOut", "ReplicaSampler", "dealt_out", "replica_loader"]
