"""The data of a run: its sources, in which order their samples come, how many steps that makes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cornstarch.parallel import processes
from cornstarch.parallel.mesh import Replica
from cornstarch.train.config import RunConfig
from cornstarch.train.data.balancing import Balancer
from cornstarch.train.data.collate import CollatedBatch
from cornstarch.train.data.formats import JoinedSources, SampleSource, open_sources
from cornstarch.train.data.loader import Collator, SkipCounter, StepLoader
from cornstarch.train.data.order import EpochOrder
from cornstarch.train.data.sample import SampleError
from cornstarch.train.evaluation import source_names
from cornstarch.train.results import Position

_LOOKED_AT = 20  # samples of a source, to find one that can be used

Rows = Sequence[Any]
"""Rows or samples that were made in Python, by number."""


@dataclass(frozen=True)
class RunData:
    """The open sources of a run."""

    config: RunConfig
    train: JoinedSources
    evaluation: Mapping[str, SampleSource]
    """By name."""

    @cached_property
    def order(self) -> EpochOrder:
        """In which order the samples of `train` come."""
        data = self.config.data
        return EpochOrder(self.train.lengths, [source.weight for source in data.train], self.config.seed, data.shuffle)

    def steps_of_epoch(self, epoch: int) -> int:
        """Return how many batches an epoch has."""
        return -(-self.order.count(epoch) // self.config.loop.batch_size)

    def total_steps(self) -> int:
        """Return how many steps the run has."""
        loop = self.config.loop
        if loop.steps is not None:
            return loop.steps
        epochs = loop.epochs or 1.0
        whole = int(epochs)
        last = math.ceil(self.steps_of_epoch(whole) * (epochs - whole))
        return sum(map(self.steps_of_epoch, range(whole))) + last

    def skips(self, position: Position) -> SkipCounter:
        """Return what counts the samples that the ranks leave out together, from a position on."""
        found = SkipCounter(self.config.data.skip_limit, gather=processes.gather_data)
        found.begin_epoch(min(position.batch * self.config.loop.batch_size, self.order.count(position.epoch)))
        return found

    def some_batch(self, collator: Collator) -> CollatedBatch | None:
        """Return a batch of training data to look at, from the beginning of each source; None if none can be used."""
        prepared: list[Any] = []
        for source in self.train.sources:
            for index in range(min(len(source), _LOOKED_AT)):
                with suppress(SampleError):
                    prepared.append(collator.prepare(source[index]))
                    break
        return collator.join(prepared) if prepared else None

    def loader(
        self, collator: Collator, position: Position, replica: Replica, balancer: Balancer | None, pin: bool
    ) -> StepLoader:
        """Return what is left to train on.

        Args:
            collator: What makes batches of samples.
            position: How far the run is.
            replica: Whose samples these are.
            balancer: Deals out the samples of a step; None: they come as they are.
            pin: Whether batches are put in memory that a GPU copies from by itself.
        """
        loop, data = self.config.loop, self.config.data
        return StepLoader(
            self.train,
            self.order,
            collator,
            loop.batch_size,
            loop.accumulation,
            workers=data.workers,
            prefetch=data.prefetch,
            pin=pin,
            start=(position.epoch, position.batch),
            rank=replica.index,
            ranks=replica.count,
            epochs=None if loop.steps is not None else math.ceil(loop.epochs or 1.0),
            balancer=balancer,
        )


def open_data(config: RunConfig, train: Rows | None = None, evaluation: Rows | None = None) -> RunData:
    """Open the sources of a run.

    Args:
        config: The run.
        train: The rows of sources of the format `given`.
        evaluation: The same for evaluation.
    """
    sources = open_sources(config.data.train, train)
    opened = open_sources(config.data.evaluation, evaluation).sources
    return RunData(config, sources, dict(zip(source_names(config.data.evaluation), opened, strict=True)))


__all__ = ["Rows", "RunData", "open_data"]
