"""Evaluation: metrics on data that is not trained on, source by source, and answers to some samples for the report."""

from __future__ import annotations

import shutil
import wave
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from cornstarch.attention.mask_verification import use_eval_mode
from cornstarch.checkpoint.state_values import random_state, restore_random_state
from cornstarch.config import RunConfig
from cornstarch.config.run_folder import SAMPLES
from cornstarch.data.collate import CollatedBatch
from cornstarch.data.formats import DataSource
from cornstarch.data.loader import StepLoader, check_packing
from cornstarch.data.media import load_audio, load_image
from cornstarch.data.packing_plan import PackedOrder
from cornstarch.data.sample import BrokenSample, Media, MediaKind, Sample, SampleError, SkipCounter
from cornstarch.data.sampler import EpochOrder, ShuffledMedia
from cornstarch.data.token_lengths import TokenLengths
from cornstarch.errors import ConfigError
from cornstarch.kernels.compile import run_eagerly
from cornstarch.metrics.metrics import Position
from cornstarch.parallel import distributed
from cornstarch.parallel.activity import here
from cornstarch.parallel.context import use_whole_rows
from cornstarch.parallel.ddp_fsdp import use_full_model
from cornstarch.parallel.device import DevicePlacement
from cornstarch.parallel.mesh import Replica
from cornstarch.pipeline.pipeline import Pipeline
from cornstarch.tasks.task import Measures, Task

_AT_ONCE = 8  # batches that are in flight in a pipeline
_MAX_SIDE = 256  # pixels of an image in the report
_SAMPLE_RATE = 16_000


@dataclass(frozen=True)
class Evaluation:
    """The measures of each source."""

    sources: Mapping[str, Measures] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    """Samples."""
    chances: Mapping[str, float] = field(default_factory=dict)
    """With shuffled items: how often a model that looks is right by chance, where that is known."""

    def means(self) -> dict[str, float]:
        return sum(self.sources.values(), Measures({})).means()

    def record(self) -> dict[str, Any]:
        sources = {name: {**sums.means(), "count": self.counts[name]} for name, sums in self.sources.items()}
        for name, chance in self.chances.items():
            sources[name]["chance"] = chance
        return {**self.means(), "sources": sources}


class Evaluator:
    """Evaluates a task on sources, given by name; training goes on as if nothing had happened.

    `replica` has the ranks that evaluate the same samples, `pipeline` this rank's stages, if the model is split into
    stages, and `use_weights` makes the context in which the model has the weights that it would be used with. Batches
    have the shape of `packed`, the rows of the training data, if there are any; `workers` processes prepare them.
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
        packed: PackedOrder | None = None,
        workers: int = 0,
    ) -> None:
        self._task, self._config, self._sources, self._placement = task, config, dict(sources), placement
        self._replica, self._pipeline, self._use_weights = replica or Replica.here(), pipeline, use_weights
        self._packed, self._workers = packed, workers
        self._lengths: dict[str, TokenLengths] = {}  # of packed samples, by the description of their source

    def evaluate(self) -> Evaluation:
        return self._evaluate_sources(lambda source: source)

    def evaluate_shuffled(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each modality, and what is measured with its items shuffled between samples, if the run asks."""
        # A model that does not look at its images is as good with those of other samples.
        if not self._config.loop.exchange_check or not self._sources:
            return
        for modality, kind in self._task.modalities().items():
            evaluation = self.evaluate_with_shuffled(kind)
            if evaluation.sources:
                yield modality, evaluation.record()

    def evaluate_with_shuffled(self, kind: MediaKind) -> Evaluation:
        return self._evaluate_sources(lambda source: ShuffledMedia(source, kind, self._config.seed))

    @contextmanager
    def use_model(self) -> Iterator[None]:
        """Run a block in which the model can generate; all ranks must enter it."""
        with (
            self._use_weights(),
            self._placement.forward_context(),
            use_full_model(self._task.wrapped),
            use_whole_rows(self._task.model),
            run_eagerly(),
            nullcontext() if self._pipeline is None else self._pipeline.use_eval_mode(),
        ):
            yield

    def _evaluate_sources(self, view: Callable[[DataSource], DataSource]) -> Evaluation:
        sources: dict[str, Measures] = {}
        counts: dict[str, int] = {}
        chances: dict[str, float] = {}
        with self._begin_evaluation():
            for name, source in self._sources.items():
                viewed = view(source)
                if len(viewed):
                    sources[name], counts[name] = self._measure_source(viewed)
                    if isinstance(viewed, ShuffledMedia) and viewed.chance is not None:
                        chances[name] = viewed.chance
        return Evaluation(sources, counts, chances)

    @contextmanager
    def _begin_evaluation(self) -> Iterator[None]:
        """Run a block in which the model is evaluated; random numbers go on after it as before."""
        model = self._task.model
        in_eval_mode = use_eval_mode(model) if self._pipeline is None else self._pipeline.use_eval_mode()
        before = random_state()
        try:
            with self._use_weights(), use_whole_rows(model), in_eval_mode:
                yield
        finally:
            restore_random_state(before)

    def compile_layers(self, microbatch: CollatedBatch) -> None:
        """Measure a batch that was trained on, only to compile the layers for evaluations; all ranks must call it."""
        with self._begin_evaluation():
            self._measure_all([microbatch])

    def _measure_source(self, source: DataSource) -> tuple[Measures, int]:
        """Return the measures of all ranks together, and the number of samples."""
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
        if not self._replica.is_leader:
            total, count, skipped = Measures({}), 0, []
        broken = sum(not sample.too_long for sample in skipped)
        sums = {name: list(pair) for name, pair in total.sums.items()}
        gathered = distributed.all_gather_json([count, broken, len(skipped) - broken, sums])
        good, bad, too_long = (sum(one[place] for one in gathered) for place in range(3))
        if self._replica.count > 1:  # all ranks refuse data that is mostly broken; one process does so while it reads
            skips = SkipCounter(self._config.data.skip_limit, gather=distributed.all_gather_json)
            skips.count(good, bad, too_long, skipped)
            skips.end_epoch()
        found = [Measures({name: (total, number) for name, (total, number) in one[3].items()}) for one in gathered]
        return sum(found, Measures({})), good

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

        with self._pipeline.use_call(measure):
            self._pipeline.forward([microbatch.inputs for microbatch in microbatches], found.__setitem__)
        return found

    def _measure(self, microbatch: CollatedBatch) -> Measures:
        moved = replace(microbatch, inputs=self._placement.move_batch(microbatch.inputs))
        here.progress += 1  # an evaluation may take hours, in which ranks do not wait for one another
        with self._placement.forward_context():
            return self._task.measure(moved)

    def _batches(self, source: DataSource) -> Iterator[Any]:
        loop, data, replica = self._config.loop, self._config.data, self._replica
        order = EpochOrder([len(source)], [1.0], seed=0, shuffle=False)
        size = max(loop.batch_size // loop.microbatches // replica.count, 1) * replica.count
        workers = min(self._workers, -(-len(source) // size))
        ranks: dict[str, Any] = {"rank": replica.index, "ranks": replica.count}
        ranks["packed"] = self._pack_rows(source, order)
        loader = StepLoader(
            source, order, self._task.collator, size, workers=workers, prefetch=data.prefetch, epochs=1, **ranks
        )
        return iter(loader)

    def _pack_rows(self, source: DataSource, order: EpochOrder) -> PackedOrder | None:
        """Return the rows of a source, as many at a time as a training microbatch of all replicas has."""
        collator, data = self._task.collator, self._config.data
        if self._packed is None:
            return None
        if source.description not in self._lengths:
            lengths = TokenLengths(source, check_packing(collator), self._workers)
            with lengths.share():
                lengths(order.order(0))
            self._lengths[source.description] = lengths
        count = self._replica.count
        rows = self._packed.rows_per_microbatch(count, self._config.loop.microbatches) * count
        return PackedOrder(order, self._lengths[source.description], data.max_length, rows, data.packing_buffer)


def record_best(config: RunConfig, position: Position, record: Mapping[str, Any]) -> tuple[float, bool]:
    """Remember an evaluation (`Evaluation.record`); return the metric that decides, and whether it is the best."""
    name = config.checkpoint.best_by
    metric = record.get(name)
    if metric is None:
        there = ", ".join(key for key in record if key != "sources")
        raise ConfigError(f"checkpoint.best_by = {name}, but the evaluation has only {there}.")
    if position.best is None:
        improved = metric == metric  # not NaN
    else:
        gain = position.best - metric if name == "loss" else metric - position.best
        stopping = config.loop.early_stopping
        improved = gain > (0.0 if stopping is None else stopping.min_delta)
    position.evaluations_without_improvement = 0 if improved else position.evaluations_without_improvement + 1
    if improved:
        position.best, position.best_step = metric, position.step
    return float(metric), improved


def should_stop_early(config: RunConfig, position: Position) -> bool:
    """Return whether the run has not become better for so long that it ends."""
    stopping = config.loop.early_stopping
    return stopping is not None and position.evaluations_without_improvement >= stopping.patience


def collect_answers(
    task: Task, sources: Mapping[str, DataSource], count: int, folder: Path | None, max_pixels: int
) -> list[dict[str, Any]]:
    """Return the model's answers to some samples of each source, and store their media in the run's folder.

    All ranks must call it: they generate together. Only the rank with a `folder` writes and gets the answers.
    """
    chosen = list(_choose_samples(task, sources, count))
    with use_eval_mode(task.model):
        answers = task.answer([sample for _, sample in chosen])
    if folder is None:
        return []
    found = []
    try:
        shutil.rmtree(folder / SAMPLES, ignore_errors=True)
        (folder / SAMPLES).mkdir(exist_ok=True)
        for number, ((source, sample), answer) in enumerate(zip(chosen, answers, strict=False)):
            truth, question = task.truth(sample), _write_question(sample, folder, number, max_pixels)
            one = {"id": sample.id, "source": source, "question": question, "truth": truth, "answer": answer}
            found.append({**one, "right": answer.strip() == truth.strip()})
    except OSError as error:
        raise ConfigError(f"{folder / SAMPLES} cannot be written: {error.strerror or error}.") from error
    return found


def _choose_samples(task: Task, sources: Mapping[str, DataSource], count: int) -> Iterator[tuple[str, Sample]]:
    """Yield samples that have an answer, evenly from each source."""
    counts = [len(part) for part in np.array_split(np.arange(count), max(len(sources), 1))]
    for (name, source), wanted in zip(sources.items(), counts, strict=True):
        found = 0
        # Indices all over the source, and then more: the first samples may be broken, or have no answer.
        places = (np.linspace(0, len(source) - 1, number).astype(int).tolist() for number in (wanted, 4 * wanted))
        for index in dict.fromkeys(index for some in places for index in some):
            if found == wanted:
                break
            try:
                sample = source[index]
                task.collator.prepare(sample)
            except SampleError:
                continue
            if task.truth(sample):
                found += 1
                yield name, sample


def _write_question(sample: Sample, folder: Path, number: int, max_pixels: int) -> list[dict[str, str]]:
    """Return the question as texts and names of files, which are written."""
    if sample.messages:
        content = [part for message in sample.messages[:-1] for part in (*message.content, "\n")][:-1]
    else:
        content = [value for value in sample.fields.values() if isinstance(value, Media)] or [
            str(sample.fields[name]) for name in ("source", "text") if name in sample.fields
        ]
    return [
        {"text": part}
        if isinstance(part, str)
        else {part.kind: _write_media(part, folder, f"{SAMPLES}/{number}_{place}", max_pixels)}
        for place, part in enumerate(content)
    ]


def _write_media(media: Media, folder: Path, name: str, max_pixels: int) -> str:
    """Write a medium small enough for a page; return its name in the folder."""
    if media.kind == "image":
        image = load_image(media, max_pixels)
        image.thumbnail((_MAX_SIDE, _MAX_SIDE))
        image.save(folder / f"{name}.png")
        return f"{name}.png"
    source, features = media.source, None  # a sound may be given as features
    if isinstance(source, str) and source.endswith(".npy"):
        features = np.asarray(np.load(source, allow_pickle=False), dtype=np.float32)
    elif isinstance(source, np.ndarray) and source.ndim == 2:
        features = source.astype(np.float32)
    if features is not None:
        np.save(folder / f"{name}.npy", features, allow_pickle=False)
        return f"{name}.npy"
    sound = load_audio(media, _SAMPLE_RATE)
    with wave.open(str(folder / f"{name}.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_SAMPLE_RATE)
        file.writeframes((np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes())
    return f"{name}.wav"
