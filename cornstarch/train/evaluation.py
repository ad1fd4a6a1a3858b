"""How good a model is on data that it is not trained on, source by source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from torch import nn

from cornstarch.attention.verify import evaluating
from cornstarch.errors import ConfigError
from cornstarch.parallel import processes
from cornstarch.parallel.mesh import Replica
from cornstarch.pipeline.apply import Pipeline
from cornstarch.train.config import RunConfig, SourceConfig
from cornstarch.train.data.collate import CollatedBatch
from cornstarch.train.data.exchange import ExchangedMedia
from cornstarch.train.data.formats import SampleSource
from cornstarch.train.data.loader import SkipCounter, StepLoader
from cornstarch.train.data.order import EpochOrder
from cornstarch.train.data.sample import BrokenSample, MediaKind
from cornstarch.train.precision import Placement
from cornstarch.train.state import random_state, restore_random_state
from cornstarch.train.tasks.task import Measures, Task

_AT_ONCE = 8  # batches that are on their way through a pipeline


@dataclass(frozen=True)
class Evaluation:
    """What was measured on each source."""

    sources: Mapping[str, Measures] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    """Samples."""
    chances: Mapping[str, float] = field(default_factory=dict)
    """With exchanged items: how often a model that looks is right by chance, where that is known."""

    def means(self) -> dict[str, float]:
        """Return the measures over all sources together."""
        return sum(self.sources.values(), Measures({})).means()

    def record(self) -> dict[str, Any]:
        """Return it as a line of metrics."""
        sources = {name: {**sums.means(), "count": self.counts[name]} for name, sums in self.sources.items()}
        for name, chance in self.chances.items():
            sources[name]["chance"] = chance
        return {**self.means(), "sources": sources}


class Evaluator:
    """Evaluates a task on sources; training goes on as if nothing had happened."""

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        sources: Mapping[str, SampleSource],
        placement: Placement,
        replica: Replica | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        self._task, self._config, self._sources, self._placement = task, config, dict(sources), placement
        self._replica, self._pipeline = replica or Replica.here(), pipeline

    def __call__(self) -> Evaluation:
        """Evaluate on all sources."""
        return self._evaluated(lambda source: source)

    def exchanged(self, kind: MediaKind) -> Evaluation:
        """Evaluate with all images (or sounds) exchanged between samples."""
        return self._evaluated(lambda source: ExchangedMedia(source, kind, self._config.seed))

    def _evaluated(self, seen: Callable[[SampleSource], SampleSource]) -> Evaluation:
        sources: dict[str, Measures] = {}
        counts: dict[str, int] = {}
        chances: dict[str, float] = {}
        before = random_state()
        try:
            with evaluating(self._task.model) if self._pipeline is None else self._pipeline.evaluating():
                for name, source in self._sources.items():
                    looked_at = seen(source)
                    if len(looked_at):
                        sources[name], counts[name] = self._measured(looked_at)
                        if isinstance(looked_at, ExchangedMedia) and looked_at.chance is not None:
                            chances[name] = looked_at.chance
        finally:
            restore_random_state(before)
        return Evaluation(sources, counts, chances)

    def _measured(self, source: SampleSource) -> tuple[Measures, int]:
        total, count = Measures({}), 0
        skipped: list[BrokenSample] = []
        batches = self._batches(source)
        while some := list(islice(batches, 1 if self._pipeline is None else _AT_ONCE)):
            count += sum(batch.samples for batch in some)
            skipped += [sample for batch in some for sample in batch.skipped]
            portions = [portion for batch in some for portion in batch.portions]
            for portion, measured in zip(portions, self._measures(portions), strict=True):
                if portion.sample_ids:  # else it is a stand-in, which counts nothing
                    total = total + measured
        own = (total, count, skipped) if self._replica.leads else (Measures({}), 0, [])
        return self._over_processes(*own)

    def _measures(self, portions: list[CollatedBatch]) -> list[Measures]:
        """Return what is measured of each portion; of a pipeline, only the last stage has it."""
        if self._pipeline is None:
            return [self._measure(portion) for portion in portions]
        found = [Measures({}) for _ in portions]
        by_inputs = {id(portion.inputs): portion for portion in portions}

        def measure(model: nn.Module, inputs: Mapping[str, Any]) -> Measures:
            self._task.wrapped = model
            try:
                return self._measure(by_inputs[id(inputs)])
            finally:
                self._task.wrapped = None

        def finish(number: int, measured: Measures) -> None:
            found[number] = measured

        with self._pipeline.called_for(measure):
            self._pipeline.forward([portion.inputs for portion in portions], finish)
        return found

    def _measure(self, portion: CollatedBatch) -> Measures:
        moved = replace(portion, inputs=self._placement.moved(portion.inputs))
        with self._placement.computing():
            return self._task.measure(moved)

    def _over_processes(self, measures: Measures, count: int, skipped: list[BrokenSample]) -> tuple[Measures, int]:
        """Return what all processes have measured together; refuse, in all of them, data that is mostly broken."""
        broken = sum(not sample.too_long for sample in skipped)
        sums = {name: list(pair) for name, pair in measures.sums.items()}
        said = processes.gather_data([count, broken, len(skipped) - broken, sums])
        good, bad, too_long = (sum(one[place] for one in said) for place in range(3))
        if self._replica.count > 1:  # else it was judged while it was read
            skips = SkipCounter(self._config.data.skip_limit, gather=processes.gather_data)
            skips.count(good, bad, too_long, skipped)
            skips.end_epoch()
        found = [Measures({name: (total, number) for name, (total, number) in one[3].items()}) for one in said]
        return sum(found, Measures({})), good

    def _batches(self, source: SampleSource) -> Iterator[Any]:
        loop, data = self._config.loop, self._config.data
        order = EpochOrder([len(source)], [1.0], seed=0, shuffle=False)
        replica = self._replica
        size = loop.batch_size // loop.accumulation // replica.count * replica.count
        return iter(
            StepLoader(
                source,
                order,
                self._task.collator,
                size,
                workers=min(data.workers, -(-len(source) // size)),
                prefetch=data.prefetch,
                rank=replica.index,
                ranks=replica.count,
                epochs=1,
            )
        )


def source_names(configs: list[SourceConfig]) -> list[str]:
    """Return a name for each source: its own, or what its path ends with, numbered where two are the same."""
    names: list[str] = []
    for config in configs:
        name = config.name or config.path.rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1]
        if name in names and config.name is not None:
            raise ConfigError(f"Two sources of data.evaluation are named {name!r}; give each its own name.")
        candidates = (name, *(f"{name} {number}" for number in range(2, len(names) + 2)))
        names.append(next(one for one in candidates if one not in names))
    return names
