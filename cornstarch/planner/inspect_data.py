"""Inspect the data of a run before it starts: sizes of samples from headers, and load imbalance between replicas.

No image or sound is decoded, and a composed model is built without weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from cornstarch.config import RunConfig
from cornstarch.cost.flops import FlopCounter
from cornstarch.data.collate import ChatCollator
from cornstarch.data.data_report import select_evenly
from cornstarch.data.formats import DataSource, open_sources
from cornstarch.data.load_balancing import LoadBalancer, SampleSize, SampleSizer
from cornstarch.data.loader import Collator
from cornstarch.data.packing_plan import fill_rows
from cornstarch.data.sample import BrokenSample, SampleError, SampleTooLongError
from cornstarch.data.sampler import EpochOrder
from cornstarch.engine.recompute import recompute_activations
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.plan import balancing
from cornstarch.plan.balancing import SampleCosts, balance, compute_loads
from cornstarch.plan.data_statistics import DataStatistics
from cornstarch.tasks.build import build_task
from cornstarch.tasks.build_model import build_model
from cornstarch.tasks.task import build_processor

_STEPS = 12  # simulated steps for each number of replicas
_MOST_REPLICAS = 1024

Progress = Callable[[Sequence[int]], Iterable[int]]
"""Iterates over the numbers of samples, and may show progress."""


@dataclass(frozen=True)
class LoadImbalance:
    """The time of a step on a number of replicas, over the least possible: without padding and without waiting."""

    replicas: int
    samples: float
    """Of one microbatch of a replica."""
    padded: float
    """One row per sample, distributed in their order."""
    padded_balanced: float
    packed: float
    packed_balanced: float
    dominated: tuple[str, ...]
    """Phases in which one sample alone exceeds the even load of a replica, in some of the steps."""

    def time(self, packing: bool, balanced: bool) -> float:
        if packing:
            return self.packed_balanced if balanced else self.packed
        return self.padded_balanced if balanced else self.padded


@dataclass(frozen=True)
class SourceSizes:
    """The inspected samples of a source."""

    name: str
    samples: int
    looked_at: int
    good: int
    """The usable ones among them."""
    weight: float = 1.0
    """How often each is drawn per epoch."""


@dataclass(frozen=True)
class Inspection:
    """The sizes of the samples of a run."""

    config: RunConfig
    phases: tuple[str, ...]
    """Encoders, then the language model."""
    sources: list[SourceSizes]
    sizes: list[SampleSize]
    """Of the usable samples."""
    broken: list[BrokenSample]
    too_long: list[BrokenSample]
    """Samples above `data.max_length`; with `too_long: cut` they are truncated, else left out."""
    waits: list[LoadImbalance] = field(default_factory=list)
    """By number of replicas."""

    @property
    def costs(self) -> SampleCosts:
        """[phases, samples]"""
        return np.array([[size.work[phase] for size in self.sizes] for phase in self.phases])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, as trained on."""
        return np.array([min(size.tokens, self.config.data.max_length) for size in self.sizes])

    @property
    def fill(self) -> float:
        """The fraction of tokens in packed rows that are no padding, over an epoch of the inspected samples."""
        rows = _pack_rows(self, np.arange(len(self.sizes)))
        return float(self.lengths.sum()) / (len(rows) * self.config.data.max_length)

    @property
    def facts(self) -> DataStatistics:
        weights = [one.weight * one.samples / one.good for one in self.sources for _ in range(one.good)]

        def mean(values: Iterable[float]) -> float:
            return float(np.average(list(values), weights=weights))

        items = {name: mean(size.items[name] for size in self.sizes) for name in self.phases[:-1]}
        tokens = {name: mean(size.item_tokens[name] for size in self.sizes) for name in items}
        data = self.config.data
        return DataStatistics(
            tokens=mean(self.lengths),
            items=items,
            item_tokens={name: tokens[name] / count if count else 0.0 for name, count in items.items()},
            largest_tokens=int(self.lengths.max()),
            straggler={one.replicas: max(one.time(data.packing, data.balance != "off"), 1.0) for one in self.waits},
        )


def inspect_data(config: RunConfig, most: int | None = None, progress: Progress = iter) -> Inspection:
    """Return the sizes of a run's training data: of `most` samples of each source, at even distances, or of all."""
    source = open_sources(config.data.train)
    sizer = build_sizer(config, source)
    data = sizer.data
    found = Inspection(config, sizer.phases, [], [], [], [])
    for place, (one, said) in enumerate(zip(source.sources, config.data.train, strict=True)):
        before = len(found.sizes)
        numbers = select_evenly(len(one), most)
        for number in progress(numbers):
            try:
                size = sizer(one[number])
            except SampleError as error:
                kept = found.too_long if isinstance(error, SampleTooLongError) else found.broken
                kept.append(BrokenSample.of(one.name(number), error))
                continue
            if size.tokens > data.max_length:
                reason = f"has {size.tokens} tokens, max_length is {data.max_length}"
                found.too_long.append(BrokenSample(one.name(number), reason, too_long=True))
            if size.tokens <= data.max_length or data.too_long == "cut":
                found.sizes.append(size)
        good = len(found.sizes) - before
        found.sources.append(SourceSizes(f"train.{place}", len(one), len(numbers), good, said.weight))
    if not found.sizes:
        first = "".join(f"\n  {sample}" for sample in [*found.broken, *found.too_long][:5])
        inspected = sum(one.looked_at for one in found.sources)
        raise ConfigError(f"Not one of {inspected} samples can be used. The first of them:{first}")
    microbatches, steps = config.loop.microbatches, _draw_steps(found)
    powers = (2**k for k in range(_MOST_REPLICAS.bit_length()))
    replicas = [n for n in powers if config.loop.batch_size // microbatches % n == 0]
    found.waits.extend(_compute_imbalance(n, microbatches, steps, found) for n in replicas)
    return found


def build_sizer(config: RunConfig, train: DataSource) -> SampleSizer:
    """Return the sizer of samples for a run's model: built without weights if it is composed of parts."""
    with torch.random.fork_rng(devices=[]):
        if config.model.language_model is not None:
            model: nn.Module = build_model(config.model, weights=False)
            assert isinstance(model, MultimodalModel)
            collator: Collator = ChatCollator(build_processor(config.model, model), config.data)
        else:
            task = build_task(config, train)
            model, collator = task.model, task.collator
    if not isinstance(collator, ChatCollator):
        raise ConfigError(
            f"The model is a {type(model).__name__}: only conversations and documents for language models have sizes."
            "\n  For other data: cornstarch data check CONFIG"
        )
    if config.loop.activation_checkpointing:
        recompute_activations(model)
    return SampleSizer(collator, FlopCounter(model).step)


def _draw_steps(found: Inspection) -> list[np.ndarray]:
    """Return the samples of some steps, in the order of the run."""
    config, size = found.config, found.config.loop.batch_size
    sources = [one for one in found.sources if one.good]
    order = EpochOrder([s.good for s in sources], [s.weight for s in sources], config.seed, config.data.shuffle)
    numbers, epoch = order.order(0), 1
    while len(numbers) < size:
        numbers, epoch = np.concatenate([numbers, order.order(epoch)]), epoch + 1
    count = max(min(len(numbers) // size, _STEPS), 1)
    return [numbers[step * size : (step + 1) * size] for step in range(count)]


def _pack_rows(found: Inspection, numbers: np.ndarray) -> list[np.ndarray]:
    data, lengths = found.config.data, found.lengths
    rows = fill_rows(numbers, lengths.__getitem__, data.max_length, data.packing_buffer)
    return [np.array(row) for row in rows]


def _compute_imbalance(
    replicas: int, microbatches: int, steps: Sequence[np.ndarray], found: Inspection
) -> LoadImbalance:
    all_costs, times, least = found.costs, np.zeros(2), 0.0
    heavy = np.zeros(len(found.phases), bool)
    for numbers in steps:
        costs = all_costs[:, numbers]
        in_order = balancing.assign_in_order(costs.shape[1], replicas, microbatches)
        ways = [in_order, balance(costs, replicas, microbatches, padded=True)]
        times += [balancing.compute_step_work(compute_loads(costs, way, True)) for way in ways]
        least += float(costs.sum()) / replicas
        heavy |= np.array(balancing.find_dominated_phases(costs, replicas)) & (replicas > 1)
    padded, padded_balanced = (times / max(least, 1e-30)).tolist()
    packed, packed_balanced = _compute_packed_times(replicas, microbatches, steps, found)
    names = tuple(name for name, is_heavy in zip(found.phases, heavy, strict=True) if is_heavy)
    samples = len(steps[0]) / replicas / microbatches
    return LoadImbalance(replicas, samples, padded, padded_balanced, packed, packed_balanced, names)


def _compute_packed_times(
    replicas: int, microbatches: int, steps: Sequence[np.ndarray], found: Inspection
) -> tuple[float, float]:
    """Return the time of packed steps over the least possible, for rows in order and balanced."""
    data, lengths = found.config.data, found.lengths
    balancer = LoadBalancer(found.costs, padded=False)
    per_step = data.tokens_per_step or found.config.loop.batch_size * float(lengths.mean())
    count = max(math.ceil(per_step / data.max_length - 1e-9), 1)
    rows = _pack_rows(found, np.concatenate(steps))
    size = -(-count // (replicas * microbatches))
    padding = float(balancer.costs[-1].sum()) / max(int(lengths.sum()), 1)  # work of a token of padding
    times, least = np.zeros(2), 0.0
    for begin in range(0, len(rows), count):
        some = rows[begin : begin + count]
        if begin and len(some) < count:
            break  # the end of an epoch
        used = -(-len(some) // (size * replicas))
        costs = np.stack([balancer.costs[:, row].sum(1) for row in some], axis=1)
        tokens = np.array([[lengths[row].sum() for row in some]], float)
        ways = (
            balancing.assign_in_order(len(some), replicas, used, size * replicas),
            balancer.deal_rows(some, replicas, used, size),
        )
        for place, dealt in enumerate(ways):
            loads = compute_loads(costs, dealt)
            loads[..., -1] += (size * data.max_length - compute_loads(tokens, dealt)[..., 0]) * padding
            times[place] += balancing.compute_step_work(loads)
        least += float(costs.sum()) / replicas
    packed, balanced = (times / max(least, 1e-30)).tolist()
    return packed, balanced
