"""What a run's data will cost it, before it runs: sizes of samples from headers, and who would wait for whom.

    found = inspect_data(config)
    found.facts, found.waits, found.too_long

No image and no sound is decoded, and a model that is composed of parts is made without weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from cornstarch.compute.flops import FlopCounter
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.packing import first_fit_decreasing
from cornstarch.plan.balancing import Costs, Dealt, balance, deal, dominated, loads, step_work
from cornstarch.plan.facts import DataFacts
from cornstarch.train.build import build_model, build_processor
from cornstarch.train.config import RunConfig
from cornstarch.train.data.check import evenly
from cornstarch.train.data.collate import ChatCollator
from cornstarch.train.data.formats import SampleSource, open_sources
from cornstarch.train.data.loader import Collator
from cornstarch.train.data.order import EpochOrder
from cornstarch.train.data.sample import BrokenSample, SampleError, SampleTooLongError
from cornstarch.train.data.sizes import SampleSize, SampleSizer
from cornstarch.train.recompute import recompute_activations
from cornstarch.train.tasks.build import build_task

_STEPS = 12  # that are looked at for each number of replicas
_MOST_REPLICAS = 1024

Watched = Callable[[Sequence[int]], Iterable[int]]
"""Goes through the numbers of samples, and may show how far it is."""


@dataclass(frozen=True)
class Waiting:
    """A step on so many replicas: its time over the least possible, where nothing is padded and nobody waits."""

    replicas: int
    samples: float
    """Of one portion of a replica."""
    padded: float
    """A row for each sample, dealt out as they come."""
    padded_balanced: float
    packed: float
    packed_balanced: float
    dominated: tuple[str, ...]
    """Phases in which one sample alone is more than a replica's even share, in some of the steps."""

    def time(self, packing: bool, balanced: bool) -> float:
        """Return the one of the four."""
        if packing:
            return self.packed_balanced if balanced else self.packed
        return self.padded_balanced if balanced else self.padded


@dataclass(frozen=True)
class SourceSizes:
    """How many samples of a source were looked at."""

    name: str
    samples: int
    looked_at: int
    good: int
    """Those of them that will be trained on."""
    weight: float = 1.0
    """How often each comes per epoch."""


@dataclass(frozen=True)
class Inspection:
    """What was found."""

    config: RunConfig
    phases: tuple[str, ...]
    """Encoders, then the language model."""
    sources: list[SourceSizes]
    sizes: list[SampleSize]
    """Of the samples that will be trained on."""
    broken: list[BrokenSample]
    too_long: list[BrokenSample]
    """Samples above `data.max_length`; with `too_long: cut` their end is cut off, else they are left out."""
    waits: list[Waiting] = field(default_factory=list)
    """By number of replicas."""

    @property
    def costs(self) -> Costs:
        """[phases, samples]"""
        return np.array([[size.work[phase] for size in self.sizes] for phase in self.phases])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, as trained on."""
        return np.array([min(size.tokens, self.config.data.max_length) for size in self.sizes])

    @property
    def facts(self) -> DataFacts:
        """What a planner needs of it."""
        weights = [one.weight * one.samples / one.good for one in self.sources for _ in range(one.good)]

        def mean(values: Iterable[float]) -> float:
            return float(np.average(list(values), weights=weights))

        items = {name: mean(size.items[name] for size in self.sizes) for name in self.phases[:-1]}
        tokens = {name: mean(size.item_tokens[name] for size in self.sizes) for name in items}
        data = self.config.data
        return DataFacts(
            tokens=mean(self.lengths),
            items=items,
            item_tokens={name: tokens[name] / count if count else 0.0 for name, count in items.items()},
            largest_tokens=int(self.lengths.max()),
            straggler={one.replicas: max(one.time(data.packing, data.balance != "off"), 1.0) for one in self.waits},
        )


def inspect_data(config: RunConfig, most: int | None = None, watched: Watched = iter) -> Inspection:
    """Look at the sizes of a run's training data.

    Args:
        config: The run: its model, its data, and what a step is.
        most: Look at so many samples of each source, evenly spread, instead of all.
        watched: Shows how far it is.
    """
    source = open_sources(config.data.train)
    sizer = sizer_of(config, source)
    found = Inspection(config, sizer.phases, [], [], [], [])
    for place, (one, said) in enumerate(zip(source.sources, config.data.train, strict=True)):
        before = len(found.sizes)
        numbers = evenly(len(one), most)
        for number in watched(numbers):
            _look(sizer, one, number, found)
        good = len(found.sizes) - before
        found.sources.append(SourceSizes(f"train.{place}", len(one), len(numbers), good, said.weight))
    if not found.sizes:
        first = "".join(f"\n  {sample}" for sample in [*found.broken, *found.too_long][:5])
        looked = sum(one.looked_at for one in found.sources)
        raise ConfigError(f"Not one of {looked} samples can be used. The first of them:{first}")
    found.waits.extend(_waits(found))
    return found


def _look(sizer: SampleSizer, source: SampleSource, number: int, found: Inspection) -> None:
    """Add what is known of one sample."""
    data = sizer.data
    try:
        size = sizer(source[number])
    except SampleError as error:
        kept = found.too_long if isinstance(error, SampleTooLongError) else found.broken
        kept.append(BrokenSample.of(source.name(number), error))
        return
    if size.tokens > data.max_length:
        reason = f"has {size.tokens} tokens, max_length is {data.max_length}"
        found.too_long.append(BrokenSample(source.name(number), reason, too_long=True))
        if data.too_long != "cut":
            return
    found.sizes.append(size)


def sizer_of(config: RunConfig, train: SampleSource) -> SampleSizer:
    """Return what tells the sizes of samples for a run's model.

    A composed model is made without weights; any other is built as for the run.
    """
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
            f"The model is a {type(model).__name__}: only conversations and documents for language models are weighed."
            "\n  For other data: cornstarch data check CONFIG"
        )
    if config.loop.activation_checkpointing:
        recompute_activations(model)
    return SampleSizer(collator, FlopCounter(model).step)


# ------------------------------------------------------------------------------------------------ who waits for whom


def _waits(found: Inspection) -> list[Waiting]:
    loop = found.config.loop
    portion = loop.batch_size // loop.accumulation
    replicas = [n for n in (2**k for k in range(_MOST_REPLICAS.bit_length())) if portion % n == 0]
    costs, lengths = found.costs, found.lengths
    steps = _steps(found)
    return [_waiting(n, loop.accumulation, [(costs[:, one], lengths[one]) for one in steps], found) for n in replicas]


def _steps(found: Inspection) -> list[np.ndarray]:
    """Return the samples of some steps, drawn as a run draws them."""
    config, size = found.config, found.config.loop.batch_size
    sources = [one for one in found.sources if one.good]
    order = EpochOrder([s.good for s in sources], [s.weight for s in sources], config.seed, config.data.shuffle)
    numbers, epoch = order.order(0), 1
    while len(numbers) < size:
        numbers, epoch = np.concatenate([numbers, order.order(epoch)]), epoch + 1
    count = max(min(len(numbers) // size, _STEPS), 1)
    return [numbers[step * size : (step + 1) * size] for step in range(count)]


def _waiting(replicas: int, portions: int, steps: Sequence[tuple[Costs, np.ndarray]], found: Inspection) -> Waiting:
    times, least, heavy = np.zeros(4), 0.0, np.zeros(len(found.phases), bool)
    for costs, lengths in steps:
        as_they_come = deal(costs.shape[1], replicas, portions)
        ways = [
            loads(costs, as_they_come, True),
            loads(costs, balance(costs, replicas, portions, padded=True), True),
            _packed_loads(costs, lengths, as_they_come, found.config.data.max_length),
            _packed_loads(costs, lengths, balance(costs, replicas, portions), found.config.data.max_length),
        ]
        times += [step_work(way) for way in ways]
        least += float(costs.sum()) / replicas
        heavy |= np.array(dominated(costs, replicas)) & (replicas > 1)
    ratios = times / max(least, 1e-30)
    names = tuple(name for name, is_heavy in zip(found.phases, heavy, strict=True) if is_heavy)
    samples = steps[0][0].shape[1] / replicas / portions
    padded, padded_balanced, packed, packed_balanced = (float(one) for one in ratios)
    return Waiting(replicas, samples, padded, padded_balanced, packed, packed_balanced, names)


def _packed_loads(costs: Costs, lengths: np.ndarray, dealt: Dealt, limit: int) -> np.ndarray:
    """Return the work of samples that are packed in rows, with what fills up the rows of a portion to the fullest."""
    found = loads(costs, dealt)
    for rank, portions in enumerate(dealt):
        for number, places in enumerate(portions):
            if len(places):
                rows = first_fit_decreasing(lengths[places].tolist(), limit)
                fullest = max(int(lengths[places][row].sum()) for row in rows)
                found[rank, number, -1] *= len(rows) * fullest / lengths[places].sum()
    return found


__all__ = ["Inspection", "SourceSizes", "Waiting", "inspect_data", "sizer_of"]
