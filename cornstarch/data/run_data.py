"""The data of a run: its sources, the order of their samples, and the number of steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cornstarch.config import RunConfig, SourceConfig
from cornstarch.data.collate import CollatedBatch
from cornstarch.data.formats import DataSource, JoinedSources, open_sources
from cornstarch.data.load_balancing import LoadBalancer
from cornstarch.data.loader import Collator, SkipCounter, StepLoader
from cornstarch.data.sample import SampleError
from cornstarch.data.sampler import EpochOrder
from cornstarch.errors import ConfigError
from cornstarch.metrics.metrics import Position
from cornstarch.parallel import distributed
from cornstarch.parallel.mesh import Replica

_TRIED = 20  # samples of a source, to find one that can be used


@dataclass(frozen=True)
class RunData:
    """The open sources of a run."""

    config: RunConfig
    train: JoinedSources
    evaluation: Mapping[str, DataSource]
    """By name."""

    @cached_property
    def order(self) -> EpochOrder:
        """The order of the training samples."""
        data = self.config.data
        return EpochOrder(self.train.lengths, [source.weight for source in data.train], self.config.seed, data.shuffle)

    def steps_of_epoch(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""
        return -(-self.order.count(epoch) // self.config.loop.batch_size)

    def total_steps(self) -> int:
        """Return the number of steps of the run."""
        loop = self.config.loop
        if loop.steps is not None:
            return loop.steps
        epochs = loop.epochs or 1.0
        whole = int(epochs)
        last = math.ceil(self.steps_of_epoch(whole) * (epochs - whole))
        return sum(map(self.steps_of_epoch, range(whole))) + last

    def build_skip_counter(self, position: Position) -> SkipCounter:
        """Return the counter of the samples that all ranks skip, from a position on."""
        counter = SkipCounter(self.config.data.skip_limit, gather=distributed.all_gather_json)
        counter.begin_epoch(min(position.batch * self.config.loop.batch_size, self.order.count(position.epoch)))
        return counter

    def peek_batch(self, collator: Collator) -> CollatedBatch | None:
        """Return a batch with the first usable sample of each training source; None if there is none."""
        prepared: list[Any] = []
        for source in self.train.sources:
            for index in range(min(len(source), _TRIED)):
                with suppress(SampleError):
                    prepared.append(collator.prepare(source[index]))
                    break
        return collator.join(prepared) if prepared else None

    def build_loader(
        self, collator: Collator, position: Position, replica: Replica, balancer: LoadBalancer | None, pin: bool
    ) -> StepLoader:
        """Return the loader of a replica's batches, from a position on; `pin` copies them to pinned memory."""
        loop, data = self.config.loop, self.config.data
        return StepLoader(
            self.train,
            self.order,
            collator,
            loop.batch_size,
            loop.gradient_accumulation_steps,
            workers=data.workers,
            prefetch=data.prefetch,
            pin=pin,
            start=(position.epoch, position.batch),
            rank=replica.index,
            ranks=replica.count,
            epochs=None if loop.steps is not None else math.ceil(loop.epochs or 1.0),
            balancer=balancer,
        )


def open_data(
    config: RunConfig, train: Sequence[Any] | None = None, evaluation: Sequence[Any] | None = None
) -> RunData:
    """Open the sources of a run; `train` and `evaluation` are the rows of sources of the format `given`."""
    sources = open_sources(config.data.train, train)
    opened = open_sources(config.data.evaluation, evaluation).sources
    return RunData(config, sources, dict(zip(source_names(config.data.evaluation), opened, strict=True)))


def source_names(configs: list[SourceConfig]) -> list[str]:
    """Return a name for each source: its own, or the end of its path, numbered where two are equal."""
    names: list[str] = []
    for config in configs:
        name = config.name or config.path.rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1]
        if name in names and config.name is not None:
            raise ConfigError(f"Two sources of data.evaluation are named {name!r}; give each its own name.")
        candidates = (name, *(f"{name} {number}" for number in range(2, len(names) + 2)))
        names.append(next(one for one in candidates if one not in names))
    return names
