"""The batches of a run, step by step, from any place on and with any number of worker processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from cornstarch.errors import ConfigError
from cornstarch.plan.balancing import Dealt, deal
from cornstarch.train.config import DataConfig
from cornstarch.train.data.collate import CollatedBatch
from cornstarch.train.data.formats import SampleSource
from cornstarch.train.data.order import EpochOrder
from cornstarch.train.data.sample import BrokenSample, Sample, SampleError

Deal = Callable[[np.ndarray, int, int], Dealt]
"""(samples of a step, processes, portions) -> the places of each process's samples in the step, by portion."""


class Collator(Protocol):
    """Makes batches of samples, as `ChatCollator` does; other tasks have their own."""

    @property
    def data(self) -> DataConfig:
        """What the run says about its data."""
        ...

    def prepare(self, sample: Sample) -> Any:
        """Prepare one sample, or raise SampleError if it cannot be used."""
        ...

    def join(self, samples: Sequence[Any]) -> CollatedBatch:
        """Return the batch of prepared samples."""
        ...


@dataclass(frozen=True)
class StepBatch:
    """What one step trains on."""

    portions: list[CollatedBatch]
    """One forward and backward each; their gradients are added up."""
    epoch: int
    index: int
    """Number of the batch within its epoch; training goes on after it at `(epoch, index + 1)`."""
    skipped: list[BrokenSample]
    """Samples that were left out here, and in whole batches that were passed over before it."""
    samples: int = 0
    """Samples in the portions."""
    ends_epoch: bool = False
    """Whether it is the last of its epoch."""
    waited: float = field(default=0.0, compare=False)
    """Seconds that passed between asking for it and getting it."""

    def pin_memory(self) -> StepBatch:
        """Return the same, ready to be copied to a GPU while something else goes on."""
        return replace(self, portions=[portion.pin_memory() for portion in self.portions])

    @property
    def trained_tokens(self) -> int:
        """Labels that count, in all portions."""
        return sum(portion.trained_tokens for portion in self.portions)


@dataclass(frozen=True)
class _Place:
    """One step, as the worker is told it."""

    epoch: int
    index: int
    numbers: np.ndarray
    """Samples, counted through all sources."""
    ends_epoch: bool


@dataclass(frozen=True)
class _Fetched:
    """What a worker sends back. A mistake travels as its text: an exception would come with the worker's traceback."""

    place: _Place
    batch: StepBatch | None
    mistake: str = ""

    def pin_memory(self) -> _Fetched:
        """Return the same in pinned memory; a thread of the loader calls it."""
        return self if self.batch is None else replace(self, batch=self.batch.pin_memory())


Gather = Callable[[list[str]], list[list[str]]]
_LISTED = 5  # samples that were left out, in a message


class SkipCounter:
    """Counts samples that were left out, and stops the run when too many of an epoch are broken.

    Args:
        limit: The largest share of broken samples. Samples that are only too long do not count as broken.
        at_least: So many samples of an epoch are looked at before the share is judged.
        gather: Returns what all ranks say, where the samples of all ranks are counted: all must then count the same.
    """

    def __init__(self, limit: float, at_least: int = 20, gather: Gather = lambda own: [own]) -> None:
        self.limit, self.at_least, self._gather = limit, at_least, gather
        self.good = 0
        self.broken = 0
        self.too_long = 0
        self._first: list[BrokenSample] = []
        self.begin_epoch()

    def begin_epoch(self, passed: int = 0) -> None:
        """Judge anew; `passed` samples of the epoch have been trained on before the run was resumed."""
        self._good, self._broken = passed, 0

    def add(self, good: int, skipped: Sequence[BrokenSample]) -> None:
        """Count, and raise ConfigError above the limit."""
        broken = sum(not sample.too_long for sample in skipped)
        self.count(good, broken, len(skipped) - broken, skipped)

    def count(self, good: int, broken: int, too_long: int, skipped: Sequence[BrokenSample]) -> None:
        """Count the samples of all ranks, and raise ConfigError above the limit; `skipped` are those of this rank."""
        self.good, self._good = self.good + good, self._good + good
        self.broken, self._broken = self.broken + broken, self._broken + broken
        self.too_long += too_long
        self._first += list(skipped)[: _LISTED - len(self._first)]
        if self._good + self._broken >= self.at_least:
            self._judge()

    def end_epoch(self) -> None:
        """Judge what there was, however little."""
        self._judge()
        if not self._good:
            raise ConfigError(f"Not one of {self.broken + self.too_long} samples can be used. {self._listed()}")
        self.begin_epoch()

    def _judge(self) -> None:
        seen = self._good + self._broken
        if self._broken > self.limit * seen:
            raise ConfigError(
                f"{self._broken} of {seen} samples are broken, more than `data.skip_limit` = {self.limit:g} allows. "
                f"{self._listed()}\nRepair them (`cornstarch data check` lists all), or raise the limit."
            )

    def _listed(self) -> str:
        # All ranks of a replica have the same list.
        lists = dict.fromkeys(map(tuple, self._gather([str(sample) for sample in self._first])))
        return "The first of them:" + "".join([f"\n  {sample}" for one in lists for sample in one][:_LISTED])


@dataclass
class StepLoader:
    """Yields the batches of a run.

    Which samples a step has depends on the order and the sizes alone, who gets which of them also on what they cost,
    and a batch is a function of its samples: so the batches from a place on are the same as if the run had never
    stopped, whatever the number of workers.

    A sample that cannot be used is left out of its batch and reported; a batch without any other is passed over.
    """

    source: SampleSource
    order: EpochOrder
    collator: Collator
    batch_size: int
    """Samples per step."""
    accumulation: int = 1
    """Portions that a step's samples are cut into."""
    workers: int = 0
    """Processes that prepare batches; 0: this one does."""
    prefetch: int = 2
    """Batches that each worker prepares ahead."""
    pin: bool = False
    """Whether a thread puts what workers have made in memory that a GPU copies from by itself."""
    start: tuple[int, int] = (0, 0)
    """Epoch and number of the first batch."""
    rank: int = 0
    """This process among those that share the steps; it reads its own samples only."""
    ranks: int = 1
    """Processes. With several, every portion of every step is there on each of them: one that has no sample for it gets
    a stand-in that counts nothing, because all have to do the same."""
    epochs: int | None = None
    """The epoch before which it ends; None: never."""
    balancer: Deal | None = None
    """Deals out the samples of a step. Default: as they come, the same number for each process."""
    skips: SkipCounter | None = None
    """Default: made from the collator's `skip_limit`. Of several processes each sees its own samples only, and may have
    none: nothing is judged here then, but by whoever knows what all of them have."""
    _counter: SkipCounter = field(init=False)

    def __post_init__(self) -> None:
        if self.batch_size % (self.accumulation * self.ranks):
            processes = f" × processes = {self.ranks}" if self.ranks > 1 else ""
            step = self.accumulation * self.ranks
            raise ConfigError(
                f"batch_size = {self.batch_size} is no multiple of accumulation = {self.accumulation}{processes}.\n"
                f"Use {step}, {2 * step} or another multiple of {step}."
            )
        if sum(self.order.lengths) != len(self.source):
            raise ConfigError(f"The order is of {sum(self.order.lengths)} samples, the source has {len(self.source)}.")
        self._counter = self.skips or SkipCounter(self.collator.data.skip_limit)

    def __len__(self) -> int:
        """Steps of the first epoch; with fractional weights others may have one more or less."""
        return self.steps(0)

    def steps(self, epoch: int) -> int:
        """Steps of an epoch; the last may have fewer samples."""
        return -(-self.order.count(epoch) // self.batch_size)

    def __iter__(self) -> Iterator[StepBatch]:
        passed_over: list[BrokenSample] = []
        passed = min(self.start[1] * self.batch_size, self.order.count(self.start[0]))
        self._counter.begin_epoch(passed)
        asked = time.perf_counter()
        for fetched in self._fetched():
            if fetched.batch is None:
                raise ConfigError(fetched.mistake)
            batch = fetched.batch
            if self.ranks == 1:
                self._counter.add(batch.samples, batch.skipped)
                if batch.ends_epoch:
                    self._counter.end_epoch()
            if not batch.portions:
                passed_over += batch.skipped
                continue
            skipped, passed_over = passed_over + batch.skipped, []
            yield replace(batch, skipped=skipped, waited=time.perf_counter() - asked)
            asked = time.perf_counter()

    def _fetched(self) -> Iterator[_Fetched]:
        steps = _Steps(
            self.source, self.collator, self.batch_size // self.accumulation, self.rank, self.ranks, self.balancer
        )
        places = _Places(self.order, self.batch_size, self.start, self.epochs)
        if not self.workers:
            yield from map(steps.__getitem__, places)
            return
        loader: DataLoader[_Fetched] = DataLoader(
            steps,
            batch_size=None,  # one item of `steps` is a whole step
            sampler=places,
            num_workers=self.workers,
            prefetch_factor=self.prefetch,
            pin_memory=self.pin,
            # Its own random numbers: taking one of the model's would make a resumed run's dropout another.
            generator=torch.Generator(),
        )
        try:
            yield from loader
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise ConfigError(
                f"A process that prepares data has died: {error}. Most often memory ran out: use fewer `data.workers`, "
                "or a smaller `data.prefetch`."
            ) from error


class _Places(Sampler[_Place]):
    """All steps of a run, from one on."""

    def __init__(self, order: EpochOrder, batch_size: int, start: tuple[int, int], epochs: int | None) -> None:
        self._order, self._size, self._start, self._epochs = order, batch_size, start, epochs

    def __iter__(self) -> Iterator[_Place]:
        epoch, first = self._start
        while self._epochs is None or epoch < self._epochs:
            numbers = self._order.order(epoch)
            for start in range(first * self._size, len(numbers), self._size):
                end = start + self._size
                yield _Place(epoch, start // self._size, numbers[start:end].copy(), end >= len(numbers))
            epoch, first = epoch + 1, 0


class _Steps(Dataset[_Fetched]):
    """Makes the batch of a step; it lives in the workers."""

    def __init__(
        self, source: SampleSource, collator: Collator, portion: int, rank: int, ranks: int, balancer: Deal | None
    ) -> None:
        self._source, self._collator, self._portion = source, collator, portion
        self._rank, self._ranks, self._balancer = rank, ranks, balancer
        self._stand_in: CollatedBatch | None = None

    def __getitem__(self, place: _Place) -> _Fetched:
        try:
            return _Fetched(place, self._made(place))
        except ConfigError as error:
            return _Fetched(place, None, str(error))

    def _made(self, place: _Place) -> StepBatch:
        skipped: list[BrokenSample] = []
        portions: list[CollatedBatch] = []
        samples = 0
        for own in self._own(place.numbers):
            good = self._prepared(place.numbers[own], place.epoch, skipped)
            samples += len(good)
            if good:
                portions.append(self._collator.join(good))
            elif self._ranks > 1:
                portions.append(self._nothing())
        return StepBatch(portions, place.epoch, place.index, skipped, samples, place.ends_epoch)

    def _own(self, numbers: np.ndarray) -> Sequence[np.ndarray]:
        """Return the places of this process's samples in a step, portion by portion."""
        portions = -(-len(numbers) // self._portion)
        if self._balancer is not None:
            return self._balancer(numbers, self._ranks, portions)[self._rank]
        return deal(len(numbers), self._ranks, portions, self._portion)[self._rank]

    def _nothing(self) -> CollatedBatch:
        """Return a batch that can be computed and counts nothing."""
        if self._stand_in is None:
            for number in range(len(self._source)):
                good = self._prepared(np.array([number]), 0, [])
                if good:
                    break
            else:
                raise ConfigError(f"Not one of {len(self._source)} samples can be used.")
            joined = self._collator.join(good)
            self._stand_in = replace(joined, sample_ids=[], tokens=0, trained_tokens=0, items={})
        return self._stand_in

    def _prepared(self, numbers: np.ndarray, epoch: int, skipped: list[BrokenSample]) -> list[Any]:
        good = []
        for number in numbers.tolist():
            try:
                sample = self._source[number]
                good.append(self._collator.prepare(replace(sample, epoch=epoch) if epoch else sample))
            except SampleError as error:
                skipped.append(BrokenSample.of(self._source.name(number), error))
        return good
