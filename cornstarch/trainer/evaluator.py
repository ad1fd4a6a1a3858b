"""How good a model is on data that it is not trained on, source by source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from torch import nn

from cornstarch.attention.mask_verification import use_eval_mode
from cornstarch.checkpoint.random_state import random_state, restore_random_state
from cornstarch.config import RunConfig
from cornstarch.data.collate import CollatedBatch
from cornstarch.data.formats import DataSource
from cornstarch.data.loader import SkipCounter, StepLoader
from cornstarch.data.sample import BrokenSample, MediaKind
from cornstarch.data.sampler import EpochOrder, ShuffledMedia
from cornstarch.engine.train_state import TrainState
from cornstarch.errors import ConfigError
from cornstarch.metrics.results import Position
from cornstarch.parallel import distributed
from cornstarch.parallel.apply import use_whole_sequences
from cornstarch.parallel.data import reshard, use_full_model
from cornstarch.parallel.device import DevicePlacement
from cornstarch.parallel.mesh import Replica
from cornstarch.pipeline.pipeline import Pipeline
from cornstarch.tasks.task import Measures, Task

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
    """Evaluates a task on sources; training goes on as if nothing had happened.

    Args:
        task: What is trained.
        config: The run.
        sources: The evaluation data, by name.
        placement: Where it computes, and in what.
        replica: The processes that evaluate the same samples.
        pipeline: This rank's stages, if the model is split into stages.
        use_weights: Makes the context in which the model has the weights that it would be used with.
    """

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        sources: Mapping[str, DataSource],
        placement: DevicePlacement,
        replica: Replica | None = None,
        pipeline: Pipeline | None = None,
        use_weights: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._task, self._config, self._sources, self._placement = task, config, dict(sources), placement
        self._replica, self._pipeline, self._use_weights = replica or Replica.here(), pipeline, use_weights

    def evaluate(self) -> Evaluation:
        """Evaluate on all sources."""
        with self._use_weights(), use_whole_sequences(self._task.model):
            return self._evaluate_sources(lambda source: source)

    def evaluate_shuffled(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each modality, and what is measured with its items shuffled between samples, if the run asks.

        A model that does not look at its images is as good with those of other samples.
        """
        if not self._config.loop.exchange_check or not self._sources:
            return
        for modality, kind in self._task.modalities().items():
            evaluation = self.evaluate_with_shuffled(kind)
            if evaluation.sources:
                yield modality, evaluation.record()

    def evaluate_with_shuffled(self, kind: MediaKind) -> Evaluation:
        """Evaluate with all images (or sounds) shuffled between samples."""
        with self._use_weights(), use_whole_sequences(self._task.model):
            return self._evaluate_sources(lambda source: ShuffledMedia(source, kind, self._config.seed))

    @contextmanager
    def use_model(self) -> Iterator[None]:
        """Run a block in which the model can generate; all ranks must enter it."""
        with (
            self._use_weights(),
            self._placement.forward_context(),
            use_full_model(self._task.wrapped),
            use_whole_sequences(self._task.model),
            nullcontext() if self._pipeline is None else self._pipeline.use_eval_mode(),
        ):
            yield

    def _evaluate_sources(self, view: Callable[[DataSource], DataSource]) -> Evaluation:
        sources: dict[str, Measures] = {}
        counts: dict[str, int] = {}
        chances: dict[str, float] = {}
        before = random_state()
        try:
            with use_eval_mode(self._task.model) if self._pipeline is None else self._pipeline.use_eval_mode():
                for name, source in self._sources.items():
                    looked_at = view(source)
                    if len(looked_at):
                        sources[name], counts[name] = self._measure_source(looked_at)
                        if isinstance(looked_at, ShuffledMedia) and looked_at.chance is not None:
                            chances[name] = looked_at.chance
        finally:
            restore_random_state(before)
        return Evaluation(sources, counts, chances)

    def _measure_source(self, source: DataSource) -> tuple[Measures, int]:
        total, count = Measures({}), 0
        skipped: list[BrokenSample] = []
        batches = self._batches(source)
        while some := list(islice(batches, 1 if self._pipeline is None else _AT_ONCE)):
            count += sum(batch.samples for batch in some)
            skipped += [sample for batch in some for sample in batch.skipped]
            microbatches = [microbatch for batch in some for microbatch in batch.microbatches]
            for microbatch, measured in zip(microbatches, self._measure_all(microbatches), strict=True):
                if microbatch.sample_ids:  # else it is a stand-in, which counts nothing
                    total = total + measured
        own = (total, count, skipped) if self._replica.is_leader else (Measures({}), 0, [])
        return self._sum_over_ranks(*own)

    def _measure_all(self, microbatches: list[CollatedBatch]) -> list[Measures]:
        """Return what is measured of each microbatch; of a pipeline, only the last stage has it."""
        if self._pipeline is None:
            return [self._measure(microbatch) for microbatch in microbatches]
        found = [Measures({}) for _ in microbatches]
        by_inputs = {id(microbatch.inputs): microbatch for microbatch in microbatches}

        def measure(model: nn.Module, inputs: Mapping[str, Any]) -> Measures:
            self._task.wrapped = model
            try:
                return self._measure(by_inputs[id(inputs)])
            finally:
                self._task.wrapped = None

        def finish(number: int, measured: Measures) -> None:
            found[number] = measured

        with self._pipeline.use_call(measure):
            self._pipeline.forward([microbatch.inputs for microbatch in microbatches], finish)
        return found

    def _measure(self, microbatch: CollatedBatch) -> Measures:
        moved = replace(microbatch, inputs=self._placement.move_batch(microbatch.inputs))
        with self._placement.forward_context():
            return self._task.measure(moved)

    def _sum_over_ranks(self, measures: Measures, count: int, skipped: list[BrokenSample]) -> tuple[Measures, int]:
        """Return what all processes have measured together; refuse, in all of them, data that is mostly broken."""
        broken = sum(not sample.too_long for sample in skipped)
        sums = {name: list(pair) for name, pair in measures.sums.items()}
        said = distributed.all_gather_json([count, broken, len(skipped) - broken, sums])
        good, bad, too_long = (sum(one[place] for one in said) for place in range(3))
        if self._replica.count > 1:  # else it was judged while it was read
            skips = SkipCounter(self._config.data.skip_limit, gather=distributed.all_gather_json)
            skips.count(good, bad, too_long, skipped)
            skips.end_epoch()
        found = [Measures({name: (total, number) for name, (total, number) in one[3].items()}) for one in said]
        return sum(found, Measures({})), good

    def _batches(self, source: DataSource) -> Iterator[Any]:
        loop, data = self._config.loop, self._config.data
        order = EpochOrder([len(source)], [1.0], seed=0, shuffle=False)
        replica = self._replica
        size = loop.batch_size // loop.gradient_accumulation_steps // replica.count * replica.count
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


@contextmanager
def use_evaluation_weights(state: TrainState) -> Iterator[None]:
    """Run a block with weights averaged over processes and over time, where the run has such."""
    with state.exchange.use_averaged_weights(), state.step.use_averages():
        try:
            yield
        finally:
            # Before the trained weights return: what is still gathered would keep the averaged ones, and the next
            # step would be computed with them.
            reshard(state.wrapped_module)


# ---------------------------------------------------------------------------------------------------- what is best


def read_metric(config: RunConfig, record: Mapping[str, Any]) -> float:
    """Return what decides which moment is the best, from what `Evaluation.record` returned."""
    name = config.checkpoint.best_by
    metric = record.get(name)
    if metric is None:
        there = ", ".join(key for key in record if key != "sources")
        raise ConfigError(f"checkpoint.best_by = {name}, but the evaluation has only {there}.")
    return metric


def record_metric(config: RunConfig, position: Position, metric: float) -> bool:
    """Remember an evaluation in the position of the run; say whether it is the best so far."""
    improved = _is_improvement(config, position.best, metric)
    position.evaluations_without_improvement = 0 if improved else position.evaluations_without_improvement + 1
    if improved:
        position.best, position.best_step = metric, position.step
    return improved


def _is_improvement(config: RunConfig, best: float | None, metric: float) -> bool:
    if best is None:
        return metric == metric
    stopping = config.loop.early_stopping
    least = stopping.min_delta if stopping is not None else 0.0
    gain = best - metric if config.checkpoint.best_by == "loss" else metric - best
    return gain > least


def should_stop_early(config: RunConfig, position: Position) -> bool:
    """Say whether the run has not become better for so long that it ends."""
    stopping = config.loop.early_stopping
    return stopping is not None and position.evaluations_without_improvement >= stopping.patience


def should_save(config: RunConfig, position: Position, metric: float | None) -> bool:
    """Say whether a checkpoint is made after a step, in which `metric` was measured if there was an evaluation."""
    every, step = config.checkpoint.every, position.step
    is_best = metric is not None and position.best_step == step
    return is_best or (every is not None and step % every == 0)
