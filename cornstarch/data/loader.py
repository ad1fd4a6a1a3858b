"""The batches of a run, step by step: loaded by worker processes from any position on, and copied to the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from cornstarch.config import DataConfig
from cornstarch.data.collate import CollatedBatch
from cornstarch.data.formats import DataSource
from cornstarch.data.sample import BrokenSample, Sample, SampleError
from cornstarch.data.sampler import EpochOrder
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.facts import BatchFacts
from cornstarch.parallel.device import DevicePlacement, pin_batch
from cornstarch.plan.load_balancing import SampleAssignment, assign_in_order
from cornstarch.trees import tensors_in

Deal = Callable[[np.ndarray, int, int], SampleAssignment]
"""(samples of a step, replicas, microbatches) -> the places of each replica's samples in the step, by microbatch."""


class Collator(Protocol):
    """Builds batches of samples, as `ChatCollator` does; other tasks have their own."""

    @property
    def data(self) -> DataConfig:
        """The data section of the run's config."""
        ...

    def prepare(self, sample: Sample) -> Any:
        """Prepare one sample; SampleError if it cannot be used."""
        ...

    def join(self, samples: Sequence[Any]) -> CollatedBatch:
        """Return the batch of prepared samples."""
        ...


@dataclass(frozen=True)
class StepBatch:
    """The batch of one step."""

    microbatches: list[CollatedBatch]
    """One forward and backward pass each; their gradients are accumulated."""
    epoch: int
    index: int
    """Number of the batch within its epoch; a resumed run continues at `(epoch, index + 1)`."""
    skipped: list[BrokenSample]
    """Samples skipped in this batch, and in whole batches skipped before it."""
    samples: int = 0
    """The number of samples in the microbatches."""
    ends_epoch: bool = False
    """Whether this is the last batch of its epoch."""
    waited: float = field(default=0.0, compare=False)
    """Seconds that the loop waited for the batch."""

    def pin_memory(self) -> StepBatch:
        """Return the batch in pinned memory, for asynchronous copies to a GPU."""
        return replace(self, microbatches=[one.pin_memory() for one in self.microbatches])

    @property
    def trained_tokens(self) -> int:
        """Labels that count, in all microbatches."""
        return sum(one.trained_tokens for one in self.microbatches)


Gather = Callable[[list[str]], list[list[str]]]
_LISTED = 5  # skipped samples in a message


class SkipCounter:
    """Counts skipped samples, and stops the run when too many of an epoch are broken.

    Args:
        limit: The maximum fraction of broken samples. Samples that are only too long do not count as broken.
        at_least: The number of samples of an epoch before the fraction is checked.
        gather: Returns the lists of all ranks, where samples of all ranks are counted: all ranks must count the same.
    """

    def __init__(self, limit: float, at_least: int = 20, gather: Gather = lambda own: [own]) -> None:
        self.limit, self.at_least, self._gather = limit, at_least, gather
        self.good = self.broken = self.too_long = 0
        self._first: list[BrokenSample] = []
        self.begin_epoch()

    def begin_epoch(self, passed: int = 0) -> None:
        """Reset the fraction; `passed` samples of the epoch were trained on before the run was resumed."""
        self._good, self._broken = passed, 0

    def add(self, good: int, skipped: Sequence[BrokenSample]) -> None:
        """Count samples; ConfigError above the limit."""
        broken = sum(not sample.too_long for sample in skipped)
        self.count(good, broken, len(skipped) - broken, skipped)

    def count(self, good: int, broken: int, too_long: int, skipped: Sequence[BrokenSample]) -> None:
        """Count the samples of all ranks, where `skipped` are those of this rank; ConfigError above the limit."""
        self.good, self._good = self.good + good, self._good + good
        self.broken, self._broken = self.broken + broken, self._broken + broken
        self.too_long += too_long
        self._first += list(skipped)[: _LISTED - len(self._first)]
        if self._good + self._broken >= self.at_least:
            self._check()

    def end_epoch(self) -> None:
        """Check the fraction, however few samples there were."""
        self._check()
        if not self._good:
            raise ConfigError(f"Not one of {self.broken + self.too_long} samples can be used. {self._list_first()}")
        self.begin_epoch()

    def _check(self) -> None:
        total = self._good + self._broken
        if self._broken > self.limit * total:
            raise ConfigError(
                f"{self._broken} of {total} samples are broken, more than `data.skip_limit` = {self.limit:g} allows. "
                f"{self._list_first()}\nRepair them (`cornstarch data check` lists all), or raise the limit."
            )

    def _list_first(self) -> str:
        # Ranks of one replica have the same list.
        lists = dict.fromkeys(map(tuple, self._gather([str(sample) for sample in self._first])))
        return "The first of them:" + "".join([f"\n  {sample}" for one in lists for sample in one][:_LISTED])


# ------------------------------------------------------------------------------------------------ steps


@dataclass
class StepLoader:
    """Yields the batches of a run.

    The samples of a step depend on the order and the sizes alone, their assignment to replicas also on their costs, and
    a batch is a function of its samples. So a resumed run gets the same batches as one that never stopped, with any
    number of workers.

    A sample that cannot be used is left out of its batch and reported; a batch without any other sample is skipped.
    """

    source: DataSource
    order: EpochOrder
    collator: Collator
    batch_size: int
    """Samples per step."""
    accumulation: int = 1
    """Microbatches per step."""
    workers: int = 0
    """Processes that prepare batches; 0: this one."""
    prefetch: int = 2
    """Batches that each worker prepares in advance."""
    pin: bool = False
    """Whether a thread copies the workers' batches to pinned memory."""
    start: tuple[int, int] = (0, 0)
    """Epoch and number of the first batch."""
    rank: int = 0
    """The index of this replica; it reads its own samples only."""
    ranks: int = 1
    """The number of replicas. With several, each has every microbatch of every step: one without a sample for it gets a
    stand-in that counts nothing, because all replicas must run the same collectives."""
    epochs: int | None = None
    """The epoch before which it ends; None: never."""
    balancer: Deal | None = None
    """Assigns the samples of a step to replicas. Default: in order, the same number for each."""
    skips: SkipCounter | None = None
    """Default: built from the collator's `skip_limit`. One of several replicas sees its own samples only, and may have
    none: the caller then counts the samples of all."""
    _counter: SkipCounter = field(init=False)

    def __post_init__(self) -> None:
        step = self.accumulation * self.ranks
        if self.batch_size % step:
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
        return -(-self.order.count(epoch) // self.batch_size)

    def __iter__(self) -> Iterator[StepBatch]:
        earlier: list[BrokenSample] = []  # of batches that were skipped as a whole
        self._counter.begin_epoch(min(self.start[1] * self.batch_size, self.order.count(self.start[0])))
        asked = time.perf_counter()
        for fetched in self._fetch():
            if fetched.batch is None:
                raise ConfigError(fetched.error)
            batch = fetched.batch
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

    def _fetch(self) -> Iterator[_FetchedStep]:
        steps, places = _StepDataset(self), _StepSampler(self)
        if not self.workers:
            yield from map(steps.__getitem__, places)
            return
        loader: DataLoader[_FetchedStep] = DataLoader(
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


@dataclass(frozen=True)
class _StepPlace:
    """The samples of one step, for a worker."""

    epoch: int
    index: int
    numbers: np.ndarray
    """Sample indices, counted through all sources."""
    ends_epoch: bool


@dataclass(frozen=True)
class _FetchedStep:
    """A worker's result. An error travels as text: an exception would carry the worker's traceback."""

    batch: StepBatch | None
    error: str = ""

    def pin_memory(self) -> _FetchedStep:
        """Return the batch in pinned memory; called by a thread of the DataLoader."""
        return self if self.batch is None else replace(self, batch=self.batch.pin_memory())


class _StepSampler(Sampler[_StepPlace]):
    """All steps of a run, from the loader's start on."""

    def __init__(self, loader: StepLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[_StepPlace]:
        size, epochs = self._loader.batch_size, self._loader.epochs
        epoch, first = self._loader.start
        while epochs is None or epoch < epochs:
            numbers = self._loader.order.order(epoch)
            for start in range(first * size, len(numbers), size):
                end = start + size
                yield _StepPlace(epoch, start // size, numbers[start:end].copy(), end >= len(numbers))
            epoch, first = epoch + 1, 0


class _StepDataset(Dataset[_FetchedStep]):
    """Builds the batch of a step, in the workers."""

    def __init__(self, loader: StepLoader) -> None:
        self._source, self._collator = loader.source, loader.collator
        self._rank, self._ranks, self._balancer = loader.rank, loader.ranks, loader.balancer
        self._microbatch_size = loader.batch_size // loader.accumulation
        self._stand_in: CollatedBatch | None = None

    def __getitem__(self, place: _StepPlace) -> _FetchedStep:
        try:
            return _FetchedStep(self._build(place))
        except ConfigError as error:
            return _FetchedStep(None, str(error))

    def _build(self, place: _StepPlace) -> StepBatch:
        skipped: list[BrokenSample] = []
        microbatches: list[CollatedBatch] = []
        samples = 0
        for own in self._select(place.numbers):
            good = self._prepare(place.numbers[own], place.epoch, skipped)
            samples += len(good)
            if good:
                microbatches.append(self._collator.join(good))
            elif self._ranks > 1:
                microbatches.append(self._build_stand_in())
        return StepBatch(microbatches, place.epoch, place.index, skipped, samples, place.ends_epoch)

    def _select(self, numbers: np.ndarray) -> Sequence[np.ndarray]:
        """Return the places of this replica's samples in a step, by microbatch."""
        microbatches = -(-len(numbers) // self._microbatch_size)
        if self._balancer is not None:
            return self._balancer(numbers, self._ranks, microbatches)[self._rank]
        return assign_in_order(len(numbers), self._ranks, microbatches, self._microbatch_size)[self._rank]

    def _build_stand_in(self) -> CollatedBatch:
        """Return a batch that can be computed but counts nothing."""
        if self._stand_in is None:
            for number in range(len(self._source)):
                if good := self._prepare(np.array([number]), 0, []):
                    break
            else:
                raise ConfigError(f"Not one of {len(self._source)} samples can be used.")
            joined = self._collator.join(good)
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


# ------------------------------------------------------------------------------------------------ to the device


@dataclass(frozen=True)
class _PendingCopy:
    microbatch: CollatedBatch
    inputs: dict[str, Any]
    """On the device, but not to be read before `done`."""
    done: torch.cuda.Event


class DevicePrefetcher:
    """Copies microbatches to a GPU while it computes: one ahead, so that memory for two is in use.

    A GPU runs behind the CPU. The copy is issued on a stream of its own as soon as a batch is loaded, and overlaps with
    the step before it; on the compute stream it would wait for that step. On a CPU nothing is copied.
    """

    def __init__(self, placement: DevicePlacement) -> None:
        self._placement = placement
        self._stream = torch.cuda.Stream(placement.device) if placement.device.type == "cuda" else None
        self._next: _PendingCopy | None = None
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, batch: StepBatch, number: int = 0) -> None:
        """Start to copy a microbatch, if there is one of this number. Its tensors must not change any more."""
        if self._stream is None or number >= len(batch.microbatches):
            return
        microbatch = batch.microbatches[number]
        with torch.cuda.stream(self._stream):
            inputs = self._placement.move_batch(pin_batch(microbatch.inputs))
            done = torch.cuda.Event()
            done.record(self._stream)
        self._next = _PendingCopy(microbatch, inputs, done)

    def inputs(self, batch: StepBatch, number: int) -> dict[str, Any]:
        """Return a microbatch's inputs on the device, and start to copy the next."""
        microbatch = batch.microbatches[number]
        if self._stream is None:
            return self._placement.move_batch(microbatch.inputs)
        if self._next is None or self._next.microbatch is not microbatch:
            self.begin(batch, number)
        pending, self._next = self._next, None
        assert pending is not None
        self._wait(pending)
        self.begin(batch, number + 1)
        return pending.inputs

    def _wait(self, pending: _PendingCopy) -> None:
        """Let the compute stream wait for a copy, and measure the wait."""
        stream = torch.cuda.current_stream(self._placement.device)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(pending.done)
        after.record(stream)
        self._waits.append((before, after))
        facts = pending.inputs.get("facts")
        places = facts.places.values() if isinstance(facts, BatchFacts) else ()
        for tensor in (*tensors_in(pending.inputs), *places):
            tensor.record_stream(stream)  # or the allocator could reuse its memory for the next copy while it is read

    def wait_seconds(self) -> float:
        """Return the seconds that the GPU waited for copies since the last call, without waits in progress."""
        over = [pair for pair in self._waits if pair[1].query()]
        self._waits = [pair for pair in self._waits if pair not in over]
        return sum(before.elapsed_time(after) for before, after in over) / 1000
