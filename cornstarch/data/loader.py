"""The data of a run: its sources, and its batches step by step, loaded by workers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from cornstarch.config import DataConfig, RunConfig, SourceConfig
from cornstarch.data.collate import ChatCollator, CollatedBatch
from cornstarch.data.formats import DataSource, JoinedSources, open_sources
from cornstarch.data.packing_plan import PackedOrder, build_packed_order
from cornstarch.data.sample import BrokenSample, Sample, SampleError, SkipCounter
from cornstarch.data.sampler import EpochOrder
from cornstarch.data.source_fingerprint import check_same_sources
from cornstarch.data.token_lengths import TokenLengths, find_lengths_file
from cornstarch.data.worker_count import allow_open_files
from cornstarch.errors import ConfigError
from cornstarch.metrics.metrics import Position
from cornstarch.parallel import distributed
from cornstarch.parallel.device import pin_batch
from cornstarch.parallel.mesh import Replica
from cornstarch.plan.balancing import SampleAssignment, assign_in_order


class Deal(Protocol):
    """Assigns the samples of a step, or its packed rows, to replicas and microbatches, by their places in the step."""

    def __call__(self, numbers: np.ndarray, ranks: int, microbatches: int) -> SampleAssignment: ...

    def deal_rows(self, rows: Sequence[np.ndarray], ranks: int, microbatches: int, size: int) -> SampleAssignment:
        """Assign at most `size` rows to each microbatch."""


class Collator(Protocol):
    """Builds batches of samples, as `ChatCollator` does; other tasks have their own."""

    @property
    def data(self) -> DataConfig: ...

    def prepare(self, sample: Sample) -> Any:
        """Prepare one sample; SampleError if it cannot be used."""

    def join(self, samples: Sequence[Any]) -> CollatedBatch: ...


@dataclass(frozen=True)
class StepBatch:
    """The batch of one step."""

    microbatches: list[CollatedBatch]  # one forward and backward pass each; their gradients are accumulated
    epoch: int
    index: int  # number of the batch within its epoch; a resumed run continues at `(epoch, index + 1)`
    skipped: list[BrokenSample]  # samples skipped in this batch, and in whole batches skipped before it
    samples: int = 0  # the number of samples in the microbatches
    ends_epoch: bool = False  # whether this is the last batch of its epoch
    waited: float = field(default=0.0, compare=False)  # seconds that the loop waited for the batch

    def pin_memory(self) -> StepBatch:
        """Return the batch in pinned memory, for asynchronous copies to a GPU."""
        pinned = [replace(one, inputs=pin_batch(one.inputs)) for one in self.microbatches]
        return replace(self, microbatches=pinned)

    @property
    def trained_tokens(self) -> int:
        return sum(one.trained_tokens for one in self.microbatches)


@dataclass
class StepLoader:
    """Yields the batches of a run.

    The samples of a step depend on the order and the sizes alone, their assignment to replicas also on their costs, and
    a batch is a function of its samples. So a resumed run gets the same batches as one that never stopped, with any
    number of workers.

    A sample that cannot be used is left out of its batch and reported; a batch without any other sample is skipped.

    With `data.packing` a step is a fixed number of rows of `max_length` tokens (`packed`), and every microbatch has
    the same number of them, some without samples where they do not divide. A sample that is longer than was counted,
    and no longer fits its row, is left out and reported, too.
    """

    source: DataSource
    order: EpochOrder
    collator: Collator
    batch_size: int  # samples per step; with packing, on average
    accumulation: int = 1  # microbatches per step
    workers: int = 0  # processes that prepare batches; 0: this one
    prefetch: int = 2  # batches that each worker prepares in advance
    pin: bool = False  # whether a thread copies the workers' batches to pinned memory
    start: tuple[int, int] = (0, 0)  # epoch and number of the first batch
    rank: int = 0  # the index of this replica; it reads its own samples only
    ranks: int = 1
    """The number of replicas. With several, each has every microbatch of every step: one without a sample for it gets a
    stand-in that counts nothing, because all replicas must run the same collectives."""
    epochs: int | None = None  # the epoch before which it ends; None: never
    balancer: Deal | None = None
    """Assigns the samples of a step to replicas. Default: in order, the same number for each."""
    packed: PackedOrder | None = None
    """The rows of each step. Default: with `data.packing`, they are planned here."""
    skips: SkipCounter | None = None
    """Default: built from the collator's `skip_limit`. One of several replicas sees its own samples only, and may have
    none: the caller then counts the samples of all."""
    _counter: SkipCounter = field(init=False)

    def __post_init__(self) -> None:
        step = self.accumulation * self.ranks
        if self.collator.data.packing and self.packed is None:
            lengths = TokenLengths(self.source, check_packing(self.collator), self.workers)
            self.packed = build_packed_order(self.order, lengths, self.collator.data, self.batch_size)
        if self.batch_size % step and self.packed is None:
            processes = f" × processes = {self.ranks}" if self.ranks > 1 else ""
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
        """Return the steps of an epoch; the last may have fewer samples."""
        if self.packed is not None:
            return self.packed.steps(epoch)
        return -(-self.order.count(epoch) // self.batch_size)

    def __iter__(self) -> Iterator[StepBatch]:
        earlier: list[BrokenSample] = []  # of batches that were skipped as a whole
        self._counter.begin_epoch(count_samples_before(self.order, self.packed, self.batch_size, *self.start))
        asked = time.perf_counter()
        for batch in self._fetch():
            if isinstance(batch, str):
                raise ConfigError(batch)
            if self.ranks == 1:
                self._counter.add(batch.samples, batch.skipped)
                if batch.ends_epoch:
                    self._counter.end_epoch()
            if not batch.microbatches:
                earlier += batch.skipped
                continue
            skipped, earlier = earlier + batch.skipped, []
            yield replace(batch, skipped=skipped, waited=time.perf_counter() - asked)
            asked = time.perf_counter()

    def _fetch(self) -> Iterator[StepBatch | str]:
        steps, places = _StepDataset(self), self._list_places()
        if not self.workers:
            yield from map(steps.__getitem__, places)
            return
        allow_open_files()
        loader: DataLoader[StepBatch | str] = DataLoader(
            steps,
            batch_size=None,  # one item of `steps` is a whole step
            sampler=places,
            num_workers=self.workers,
            prefetch_factor=self.prefetch,
            pin_memory=self.pin,
            # Its own generator: drawing from the global one would change the dropout of a resumed run.
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

    def _list_places(self) -> Iterator[_StepPlace]:
        size = self.batch_size
        epoch, first = self.start
        while self.epochs is None or epoch < self.epochs:
            if self.packed is not None:
                for number, rows, ends_epoch in self.packed.list_steps(epoch, first):
                    yield _StepPlace(epoch, number, np.empty(0, np.int64), ends_epoch, rows)
                epoch, first = epoch + 1, 0
                continue
            numbers = self.order.order(epoch)
            for start in range(first * size, len(numbers), size):
                end = start + size
                yield _StepPlace(epoch, start // size, numbers[start:end].copy(), end >= len(numbers))
            epoch, first = epoch + 1, 0


class _StepPlace(NamedTuple):
    epoch: int
    batch: int  # its number within the epoch
    numbers: np.ndarray  # sample indices, counted through all sources
    ends_epoch: bool
    rows: Sequence[np.ndarray] = ()  # the sample indices of packed rows, instead of `numbers`


def check_packing(collator: Collator) -> ChatCollator:
    """Return a collator that packs rows; others never have `data.packing`, which their tasks refuse."""
    assert isinstance(collator, ChatCollator), type(collator)
    return collator


def count_samples_before(order: EpochOrder, packed: PackedOrder | None, size: int, epoch: int, steps: int) -> int:
    """Return the number of samples in the first steps of an epoch."""
    if packed is not None:
        return packed.count_samples(epoch, steps)
    return min(steps * size, order.count(epoch))


class _StepDataset(Dataset[StepBatch | str]):
    """Builds the batch of a step, in a worker. An error travels as text, without the worker's traceback."""

    def __init__(self, loader: StepLoader) -> None:
        self._source, self._collator = loader.source, loader.collator
        self._rank, self._ranks, self._balancer = loader.rank, loader.ranks, loader.balancer
        self._microbatch_size = loader.batch_size // loader.accumulation
        self._rows = 0  # of a microbatch, if they are packed
        if loader.packed is not None:
            self._rows = loader.packed.rows_per_microbatch(self._ranks, loader.accumulation)
        self._stand_in: CollatedBatch | None = None

    def __getitem__(self, place: _StepPlace) -> StepBatch | str:
        skipped: list[BrokenSample] = []
        microbatches: list[CollatedBatch] = []
        samples = 0
        try:
            assigned = self._deal_rows(place.rows) if self._rows else self._deal_samples(place.numbers)
            for own in assigned[self._rank]:
                if self._rows:
                    rows = [self._prepare_row(place.rows[row], place.epoch, skipped) for row in own]
                    rows += [[] for _ in range(self._rows - len(rows))]
                else:
                    rows = [self._prepare(place.numbers[own], place.epoch, skipped)]
                count = sum(map(len, rows))
                samples += count
                if count:
                    microbatches.append(self._join(rows))
                elif self._ranks > 1:
                    microbatches.append(self._build_stand_in())
        except ConfigError as error:
            return str(error)
        return StepBatch(microbatches, place.epoch, place.batch, skipped, samples, place.ends_epoch)

    def _deal_samples(self, numbers: np.ndarray) -> SampleAssignment:
        count = -(-len(numbers) // self._microbatch_size)
        if self._balancer is not None:
            return self._balancer(numbers, self._ranks, count)
        return assign_in_order(len(numbers), self._ranks, count, self._microbatch_size)

    def _deal_rows(self, rows: Sequence[np.ndarray]) -> SampleAssignment:
        size = self._rows * self._ranks  # rows of a microbatch of all replicas
        count = -(-len(rows) // size)
        if self._balancer is not None:
            return self._balancer.deal_rows(rows, self._ranks, count, self._rows)
        return assign_in_order(len(rows), self._ranks, count, size)

    def _join(self, rows: list[list[Any]]) -> CollatedBatch:
        return check_packing(self._collator).join_rows(rows) if self._rows else self._collator.join(rows[0])

    def _prepare_row(self, numbers: np.ndarray, epoch: int, skipped: list[BrokenSample]) -> list[Any]:
        """Return the samples of a row, without those at its end that are longer than was counted."""
        limit, good, used = self._collator.data.max_length, [], 0
        for number in numbers.tolist():
            for sample in self._prepare(np.array([number]), epoch, skipped):
                length = len(sample.input_ids)
                if used + length <= limit:
                    good.append(sample)
                    used += length
                    continue
                reason = f"has {length} tokens, and a sample of its row more than were counted: no room is left for it"
                skipped.append(BrokenSample(self._source.name(number), reason))
        return good

    def _build_stand_in(self) -> CollatedBatch:
        """Return a batch that can be computed but counts nothing."""
        if self._stand_in is None:
            for number in range(len(self._source)):
                if good := self._prepare(np.array([number]), 0, []):
                    break
            else:
                raise ConfigError(f"Not one of {len(self._source)} samples can be used.")
            joined = self._join([good, *([] for _ in range(self._rows - 1))])
            self._stand_in = replace(joined, sample_ids=[], tokens=0, trained_tokens=0, items={})
        return self._stand_in

    def _prepare(self, numbers: np.ndarray, epoch: int, skipped: list[BrokenSample]) -> list[Any]:
        good = []
        for number in numbers.tolist():
            try:
                sample = self._source[number]
                good.append(self._collator.prepare(replace(sample, epoch=epoch) if epoch else sample))
            except SampleError as error:
                skipped.append(BrokenSample.of(self._source.name(number), error))
        return good


# ------------------------------------------------------------------------------------------------ the data of a run

_TRIED = 20  # samples of a source, to find one that can be used


@dataclass(frozen=True)
class RunData:
    config: RunConfig
    train: JoinedSources
    evaluation: Mapping[str, DataSource]  # by name
    packed: PackedOrder | None = None  # the rows of each step, with `data.packing` (`plan_packing`)

    @cached_property
    def order(self) -> EpochOrder:
        data = self.config.data
        return EpochOrder(self.train.lengths, [source.weight for source in data.train], self.config.seed, data.shuffle)

    def plan_packing(self, collator: Collator, workers: int = 0) -> RunData:
        """Return the data with the rows of all steps, if they are packed; all ranks must call it, and count together.

        Without `loop.steps` all samples are counted, because the learning rate depends on the number of steps.
        """
        data, loop = self.config.data, self.config.loop
        if not data.packing:
            return self
        chat = check_packing(collator)
        file = find_lengths_file(chat, data.train, self.config.model.model_dump(mode="json"))
        lengths = TokenLengths(self.train, chat, workers, file)
        with lengths.share():
            if loop.steps is None:
                lengths(np.arange(len(self.train)))
            packed = build_packed_order(self.order, lengths, data, loop.batch_size)
            found = replace(self, packed=packed)
            packed.plan_steps(found.total_steps())
        return found

    def steps_of_epoch(self, epoch: int) -> int:
        if self.packed is None:
            return -(-self.order.count(epoch) // self.config.loop.batch_size)
        if self.config.loop.steps is None:
            return self.packed.steps(epoch)
        return self.packed.estimate_steps(epoch)  # not all lengths are known

    def describe_steps(self, ranks: int) -> str:
        """Return the size of a step, and a hint if the rows of a step do not divide over replicas and microbatches."""
        loop, packed = self.config.loop, self.packed
        if packed is None:
            return f"{loop.batch_size} samples"
        rows, length = packed.rows_per_step, packed.max_length
        each = packed.rows_per_microbatch(ranks, loop.microbatches)
        computed = -(-rows // (each * ranks)) * each * ranks
        text = f"{rows} packed row{'s' if rows > 1 else ''} of {length:,} tokens"
        if computed > rows:
            unit = ranks * loop.microbatches
            tokens = -(-rows // unit) * unit * length
            text += (
                f" (and {computed - rows} empty: {rows} do not divide over {ranks} replicas × "
                f"{loop.microbatches} microbatches; data.tokens_per_step={tokens} would)"
            )
        return text

    def total_steps(self) -> int:
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
        size = self.config.loop.batch_size
        counter.begin_epoch(count_samples_before(self.order, self.packed, size, position.epoch, position.batch))
        return counter

    def peek_batch(self, collator: Collator, count: int = 1) -> CollatedBatch | None:
        """Return a batch with the first usable samples of each training source; None if there are none."""
        prepared: list[Any] = []
        for source in self.train.sources:
            wanted = len(prepared) + count
            for index in range(min(len(source), _TRIED)):
                with suppress(SampleError):
                    prepared.append(collator.prepare(source[index]))
                if len(prepared) == wanted:
                    break
        return collator.join(prepared) if prepared else None

    def build_loader(
        self,
        collator: Collator,
        position: Position,
        replica: Replica,
        balancer: Deal | None,
        workers: int,
        pin: bool,
    ) -> StepLoader:
        """Return the loader of a replica's batches, from a position on; `pin` copies them to pinned memory."""
        loop, data = self.config.loop, self.config.data
        return StepLoader(
            self.train,
            self.order,
            collator,
            loop.batch_size,
            loop.microbatches,
            workers=workers,
            prefetch=data.prefetch,
            pin=pin,
            start=(position.epoch, position.batch),
            rank=replica.index,
            ranks=replica.count,
            epochs=None if loop.steps is not None else math.ceil(loop.epochs or 1.0),
            balancer=balancer,
            packed=self.packed,
        )


def open_data(
    config: RunConfig, train: Sequence[Any] | None = None, evaluation: Sequence[Any] | None = None
) -> RunData:
    """Open the sources of a run; `train` and `evaluation` are the rows of sources of the format `given`."""
    sources = open_sources(config.data.train, train)
    opened = open_sources(config.data.evaluation, evaluation).sources
    check_same_sources(config.data.train, sources.sources, "data.train")
    check_same_sources(config.data.evaluation, opened, "data.evaluation")
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
