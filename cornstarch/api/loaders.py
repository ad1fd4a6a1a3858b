"""Data loaders of replicas: the same batches on all ranks of a replica, other batches on other replicas."""

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

# Options of a loader that is rebuilt with another sampler.
_KEPT = (
    "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn",
    "multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip
_SEED = 1024


class ReplicaSampler(DistributedSampler[Any]):
    """The sample indices of one replica; if shuffled, each epoch has another order without `set_epoch`."""

    def __iter__(self) -> Iterator[Any]:
        """Return the indices of one epoch."""
        order = super().__iter__()
        self.set_epoch(self.epoch + 1)
        return order


class ReplicaBatches:
    """Every `count`-th batch of a loader that yields the same batches on all ranks; an incomplete round is dropped."""

    def __init__(self, loader: Iterable[Any], index: int, count: int) -> None:
        self.loader, self.index, self.count = loader, index, count

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this replica."""
        rounds = zip(*[iter(self.loader)] * self.count, strict=False)
        return (batches[self.index] for batches in rounds)

    def __len__(self) -> int:
        """Return the number of batches of a replica."""
        return len(self.loader) // self.count  # type: ignore[arg-type]


def build_replica_loader(
    dataset: Dataset[Any], index: int, count: int, shuffle: bool, seed: int, options: dict[str, Any]
) -> DataLoader[Any]:
    """Return a loader for one of `count` replicas; `options` are those of a `DataLoader`."""
    drops = bool(options.get("drop_last"))
    sampler = ReplicaSampler(dataset, count, index, shuffle=shuffle, seed=seed, drop_last=drops)
    # The workers of all ranks of a replica draw the same random numbers.
    generator = torch.Generator().manual_seed(seed + index)
    return DataLoader(dataset, sampler=sampler, generator=generator, **options)


def distribute_loader(loader: Any, index: int, count: int) -> Any:
    """Return a loader that yields the batches of one of `count` replicas, unless it already does.

    Samples of a `DataLoader` with torch's own sampler are distributed; of any other loader, batches are.
    """
    if not isinstance(loader, DataLoader):
        return loader if count == 1 else ReplicaBatches(loader, index, count)
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        if (sampler.num_replicas, sampler.rank) != (count, index):
            raise ConfigError(
                f"The dataloader's DistributedSampler is for rank {sampler.rank} of {sampler.num_replicas}; this is "
                f"replica {index} of {count}. Leave the sampler out: boost distributes the samples."
            )
        return loader
    is_plain = type(sampler) in (RandomSampler, SequentialSampler) and type(loader.batch_sampler) is BatchSampler
    draws_all_once = not isinstance(sampler, RandomSampler) or (
        not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )
    if not is_plain or isinstance(loader.dataset, IterableDataset) or not draws_all_once:
        return loader if count == 1 else ReplicaBatches(loader, index, count)
    shuffles = isinstance(sampler, RandomSampler)
    if count == 1 and not shuffles:
        return loader
    given = getattr(sampler, "generator", None) or loader.generator
    seed = _SEED if given is None else given.initial_seed()
    options = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    return build_replica_loader(loader.dataset, index, count, shuffles, seed, options)
