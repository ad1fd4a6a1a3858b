"""The loop: from a description to a trained model, step by step."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.launch import current_world
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.parallel import processes
from cornstarch.parallel.apply import whole_sequences
from cornstarch.parallel.data import gradients_kept_here, whole_model
from cornstarch.parallel.mesh import Replica
from cornstarch.pipeline.apply import Pipeline
from cornstarch.plan.layout import Layout, check_executable
from cornstarch.plan.options import APART
from cornstarch.train.attribution import COUNTING, DATA, LOSS, TELLING
from cornstarch.train.budget import fit_activations
from cornstarch.train.checkpoint import Checkpoint, CheckpointStore
from cornstarch.train.clock import StepClock
from cornstarch.train.config import RunConfig
from cornstarch.train.counting import Counter, OwnCounter
from cornstarch.train.data.balancing import balancer_of, told_gain
from cornstarch.train.data.collate import ChatCollator, CollatedBatch
from cornstarch.train.data.feeding import Feed
from cornstarch.train.data.formats import JoinedSources, SampleSource, open_sources
from cornstarch.train.data.loader import SkipCounter, StepBatch, StepLoader
from cornstarch.train.data.order import EpochOrder
from cornstarch.train.data.sample import SampleError
from cornstarch.train.deciding import decide
from cornstarch.train.evaluation import Evaluation, Evaluator, source_names
from cornstarch.train.exchanging import Exchanging
from cornstarch.train.failure import LossWatch, is_out_of_memory, out_of_memory
from cornstarch.train.features.ahead import encoded_ahead
from cornstarch.train.features.keeping import kept_features
from cornstarch.train.flops import RunFlops
from cornstarch.train.optim import LearningRate, apply_hyperparameters, scale_rates
from cornstarch.train.parts import Part
from cornstarch.train.precision import choose_placement
from cornstarch.train.profiling import StepProfiler, as_range, ranged, ranged_over
from cornstarch.train.results import Position, RunResult, Status, StepResult, StepTotals
from cornstarch.train.runs import CHECKPOINTS, METRICS, PLAN, RunFolder, check_trace
from cornstarch.train.source import load_config
from cornstarch.train.speed import check_fp8, not_compiled, speed_up
from cornstarch.train.spreading import Spreading
from cornstarch.train.start_check import verify_plan
from cornstarch.train.state import capture, restore, seed_all
from cornstarch.train.stopping import Stopping
from cornstarch.train.surveying import survey_own_module
from cornstarch.train.tasks import build_task
from cornstarch.train.tasks.module import LossFunction, module_task
from cornstarch.train.tasks.stacking import CollateFunction
from cornstarch.train.tasks.task import Task
from cornstarch.train.telling import Teller
from cornstarch.train.timeline import TimelineRecorder
from cornstarch.train.updating import WeightUpdate

_LOOKED_AT = 20  # samples of a source, to find one that can be used


class Trainer:
    """Trains what a `RunConfig` describes.

    `fit` does it all. For a loop of your own: `setup`, then `step` for each of `batches`, and `save` when you like.

    Args:
        config: The run.
        task: What is trained, if it is made in Python and not described by `config.model`.
        train_data: Rows or samples, if they are not described by `config.data`.
        evaluation_data: The same for evaluation.
        allow_changes: Go on from a checkpoint although the config has changed.
        console: Where progress is told.
        command: What the user typed, for the report.
        device: This process's own, of several.
        trace: Write a trace of some steps of a pipeline, for chrome://tracing and Perfetto.
        profile: Let `fit` profile some steps: a trace of what is computed when, and where the time goes.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        task: Task | None = None,
        train_data: Sequence[Any] | None = None,
        evaluation_data: Sequence[Any] | None = None,
        allow_changes: bool = False,
        console: Console | None = None,
        command: str | None = None,
        device: torch.device | None = None,
        trace: bool = False,
        profile: bool = False,
    ) -> None:
        self._device, self._trace, self._profiled = device, trace, profile
        self.rank, self.ranks = processes.rank(), processes.size()
        world = current_world()
        if world.size != self.ranks and self.ranks == 1:
            raise ConfigError(
                f"This is process {world.rank} of {world.size}, but they do not know one another. Make the trainer "
                "inside `with cornstarch.launch.start_process_group(cornstarch.launch.current_world(), device):`, or "
                "use `cornstarch train`."
            )
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))
        self._decision = decide(config, self.ranks, per_node, device) if config.parallel.auto else None
        self.config = config = config if self._decision is None else self._decision.config
        plan = config.parallel.plan()
        check_executable(plan)  # also in one process, which would leave it out without a word
        if trace:
            check_trace(plan.is_pipeline)
        self._layout = Layout.of(plan, self.ranks, per_node)
        self.replica = Replica.of(self._layout, self.rank)
        self.position = Position()
        self.folder = RunFolder(config.folder)
        self._given = (task, train_data, evaluation_data)
        self._allow_changes = allow_changes
        self._teller = Teller(config, self.folder, console or Console(soft_wrap=True), command, self.rank == 0)
        self._store = CheckpointStore(
            self.folder / CHECKPOINTS,
            config.checkpoint.keep,
            "lower" if config.checkpoint.best_by == "loss" else "higher",
        )
        self._held = ExitStack()
        self._ready = False
        self._saved_at: int | None = None
        self._being_saved: tuple[Path, int] | None = None
        self.stopping = Stopping()

    @classmethod
    def from_objects(
        cls,
        model: nn.Module,
        *,
        train_data: Sequence[Any],
        evaluation_data: Sequence[Any] | None = None,
        loss: LossFunction | None = None,
        collate: CollateFunction | None = None,
        console: Console | None = None,
        **config: Any,
    ) -> Trainer:
        """Return a trainer of a module and data that are there already.

        Args:
            model: What is trained.
            train_data: Rows (dictionaries, or pairs of inputs and labels) by number: a list, a torch data set.
            evaluation_data: The same, not trained on.
            loss: A function of (module, batch) that returns the mean loss over the batch's samples, or a dictionary of
                means with `loss` in it. Without one, `module(**batch)` must return something with a `loss`.
            collate: A function that makes a batch, a dictionary, of a list of rows. Without one, numbers, arrays and
                images are stacked.
            console: Where progress is told.
            config: Sections of a `RunConfig`: `loop={"steps": 100}`, `name="mine"`.
        """
        data = dict(config.pop("data", {}))
        data["train"] = [{"path": "train_data", "format": "given"}]
        if evaluation_data is not None:
            data["evaluation"] = [{"path": "evaluation_data", "format": "given"}]
        described = load_config(None, base={"model": {"given": type(model).__name__}, "data": data, **config})
        task = module_task(model, loss, collate, described.data, described.seed)
        return cls(described, task=task, train_data=train_data, evaluation_data=evaluation_data, console=console)

    # ------------------------------------------------------------------ the three levels

    def fit(self) -> RunResult:
        """Train until the end, from the newest checkpoint on if there is one, and write a report."""
        with self._held:
            was_finished = self.folder.stored_summary().get("status") == "finished"
            self.setup()
            if was_finished and self.position.ended:
                return self._as_it_was()
            with self._teller.telling(self.position, self.total_steps), self.stopping.listening():
                try:
                    status = self._trained() if not self.position.ended else "finished"
                    result = self._closed(status)
                    self.exchange.finish()
                    return result
                except BaseException as error:
                    with suppress(ConfigError):  # a full disk must not hide what went wrong first
                        self._teller.ended("failed", self.position)
                    if is_out_of_memory(error):
                        raise out_of_memory(error, self.model, self.parts, self.config, self.placement) from None
                    raise

    def setup(self) -> None:
        """Make everything that a step needs, and go to where the newest checkpoint was made."""
        if self._ready:
            return
        if self.rank == 0:
            self._held.enter_context(self.folder.claimed())
        checkpoint = self._checkpoint_to_resume()
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        seed_all(self.config.seed)
        self.placement = choose_placement(
            str(self._device or self.config.device), self.config.precision, self.config.attention
        )
        check_fp8(self.config.fp8, self.placement.device)
        self._open_data()
        self._make_model()
        self._make_optimizer()
        self._balance()
        self.evaluator = Evaluator(
            self.task, self.config, self.evaluation_sources, self.placement, self.replica, self.pipeline
        )
        self.watch = LossWatch(self.config, self.placement)
        self.feed = Feed(self.placement)
        self.clock = StepClock.of(self.placement.device)
        if self._decision is not None:
            self._teller.note(self._decision.text)
        if self.rank == 0:
            self.folder.store_config(self.config)
            if self._decision is not None:
                self.folder.write(PLAN, self._decision.file)
        if checkpoint is not None:
            self._resume(checkpoint)
        self._recorder: TimelineRecorder | None = None
        if self.pipeline is not None:
            self._recorder = TimelineRecorder(self.pipeline, self.folder, self.position.step, self._trace)
        self._profiler: StepProfiler | None = None
        if self._profiled:
            self._profiler = StepProfiler(self, self._teller.pause, self._teller.note)
            self._held.callback(self._profiler.close)
        self._teller.begun(self, resumed_from=None if checkpoint is None else checkpoint.step)
        self._ready = True

    def batches(self) -> Iterator[StepBatch]:
        """Yield what is left to train on."""
        self.setup()
        if self.position.step >= self.total_steps:
            return
        for batch in self._counter.ahead(ranged_over(DATA, self._loader()), self._steps_at_once):
            self._teller.skipped(batch.skipped)
            if self.pipeline is None and self.ahead is None:  # each stage takes what it needs itself
                self.feed.begin(batch)
            yield batch
            if self.position.step >= self.total_steps:
                return

    def _steps_at_once(self) -> int:
        """Return for how many steps, at most, batches are drawn: a step that is profiled draws its own."""
        is_profiled = self._profiler is not None and not self._profiler.is_done
        return 1 if is_profiled else self.total_steps - self.position.step

    def step(self, batch: StepBatch) -> StepResult:
        """Do one step of the optimizer: forward and backward of every portion, then the weights.

        The loss is the sum over all trained tokens of the step divided by their number, however they are cut in
        portions and dealt out to processes. All processes must call it. If none of them has a token to train on,
        because whatever there was is broken, nothing changes and the step does not count.
        """
        self.clock.begins()
        # On their way, at the latest, while the first portion is computed.
        totals_of_all = self._counter.totals(batch)
        rate = self.rates.set(self.position.step)
        self.exchange.before_step()
        losses: list[Tensor] = []

        def scaled(number: int, mean: Tensor) -> Tensor:
            """Return what a portion's mean loss adds to the loss of the step, as gradients are to be taken of it."""
            tokens, count = batch.portions[number].trained_tokens, totals_of_all().trained_tokens
            loss = mean if tokens == count else mean * (tokens / max(count, 1))
            losses.append(loss.detach())
            # Gradients are averaged over processes, but each has only its share of the sum.
            loss = loss * self._shares if self._shares > 1 else loss
            return loss if self.scaler is None else self.scaler.scale(loss)

        if self.pipeline is not None:
            if self._recorder is not None:
                self._recorder.begins()
            self.pipeline.train([portion.inputs for portion in batch.portions], scaled)
        else:
            batch = batch if self.ahead is None else self.ahead(batch)
            for number in range(len(batch.portions)):
                with gradients_kept_here(self.task.wrapped, number + 1 < len(batch.portions)):
                    loss = scaled(number, self._loss(self.feed.inputs(batch, number)))
                    if loss.requires_grad:  # a portion of text alone teaches a projector nothing
                        loss.backward()
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum() if losses else self.placement.nothing()
        totals = totals_of_all()
        self._pass(batch, totals)
        position = self.position
        norm: Tensor | None = None
        if totals.trained_tokens:
            self._forget_unused(totals)
            norm = self._changed_weights(batch, loss)
        else:
            self.update.forget()
            if not self.exchange.is_apart:  # others count this step
                return StepResult(position.step, loss, rate, None, totals)
        position.step += 1
        self.exchange.after_step(position.step)
        position.tokens += totals.tokens
        position.samples += totals.samples
        self.clock.ends(batch.waited)
        return StepResult(position.step, loss, rate, norm, totals, batch.waited)

    def _loss(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the mean loss of a portion."""
        moved = self.placement.moved(inputs)
        with ranged(LOSS), self.placement.computing():
            return self.task.loss(moved)

    def _loss_of(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return the mean loss of a portion, computed by what stands for the model."""
        self.task.wrapped = model
        try:
            return self._loss(inputs)
        finally:
            self.task.wrapped = None

    def _pass(self, batch: StepBatch, totals: StepTotals) -> None:
        """Note that a batch is behind the run."""
        self.position.epoch, self.position.batch = batch.epoch, batch.index + 1
        self.position.broken += totals.broken
        self.position.too_long += totals.too_long

    def _forget_unused(self, totals: StepTotals) -> None:
        """Drop the gradients of encoders that no process had an item for: they are those of stand-ins."""
        if self.ranks == 1 or not isinstance(self.model, MultimodalModel):
            return
        for name, count in totals.items.items():
            if not count:
                for parameter in self.model.encoders[name].parameters():
                    parameter.grad = None

    def save(self, metric: float | None = None) -> Path:
        """Write a checkpoint of this moment; with `checkpoint.background`, while training goes on."""
        self.watch.check()
        own = self.exchange.captured()
        with self.exchange.averaged():
            tensors, data = capture(
                self.task.wrapped or self.model,
                self.optimizer,
                ema=None if self.averages is None else self.averages.averages,
                scaler=self.scaler,
            )
            position = processes.broadcast_data(asdict(self.position))  # each has its own clock
            self.position.seconds = position["seconds"]
            data = {**data, **own.data, "position": position, "precision": self.placement.precision}
            how = self.config.checkpoint
            path = self._store.save(
                self.position.step,
                {**tensors, **own.tensors},
                data,
                metric=metric,
                form=how.form,
                wait=not how.background,
            )
        self._saved_at = self.position.step
        return path

    def evaluate(self) -> Evaluation:
        """Measure the model, with its averaged weights if there are any, on the evaluation data."""
        with self._weights_in_use(), whole_sequences(self.model):
            return self.evaluator()

    # ------------------------------------------------------------------ setting up

    def _checkpoint_to_resume(self) -> Checkpoint | None:
        checkpoint = self._store.latest()
        for problem in self._store.problems:
            self._teller.note(f"A damaged checkpoint is passed over: {problem}")
        if checkpoint is None:
            if (self.folder / METRICS).exists():
                self._teller.note("The earlier start left no checkpoint: this one begins at the first step.")
            return None
        changes = self.folder.check_config(self.config)
        if changes and not self._allow_changes:
            raise ConfigError(
                f"{self.folder.path} has a run at step {checkpoint.step} with another config:\n  "
                + "\n  ".join(changes)
                + "\nGo on with the changes: --allow-changes. Begin anew and set the old run aside: --restart. "
                "Or choose another folder: output=<folder>."
            )
        for change in changes:
            self._teller.note(f"Changed since the checkpoint: {change}")
        return checkpoint

    def _open_data(self) -> None:
        _, train_rows, evaluation_rows = self._given
        data = self.config.data
        self.sources = open_sources(data.train, train_rows)
        opened = open_sources(data.evaluation, evaluation_rows)
        self.evaluation_sources: dict[str, SampleSource] = dict(
            zip(source_names(data.evaluation), opened.sources, strict=True)
        )

    def _make_model(self) -> None:
        given = self._given[0]
        if (given is None) == (self.config.model.given is not None):
            raise ConfigError(
                f"model.given = {self.config.model.given}, and {'no' if given is None else 'a'} task was handed over. "
                "A model made in Python goes through Trainer.from_objects, or Trainer(config, task=…)."
            )
        self._spreading = spreading = Spreading(self.config, self._layout, self.placement, self._teller.note)
        self.task: Task = given if given is not None else self._built_task()
        self.model: nn.Module = self.task.model
        if self.ranks > 1:
            survey_own_module(self.model, self._layout.plan, self.some_batch)
        spreading.take(self.task)
        self.recomputation = fit_activations(
            self.model, self.config, self.placement, self.sources, self.replica.count, self._teller.note
        )
        self.flops = RunFlops(self.task, self.config, self._teller.note)  # of the whole model, before it is cut
        self.features = self._held.enter_context(kept_features(self.task, self.config, self.placement))
        if self.ranks > 1:
            spreading.tell()
            self._verify_plan()
            spreading.spread(self._loss_of)
            # Each process drops out other values, but those that compute the same.
            seed_all(self.config.seed + self.replica.share)
        self.speed = speed_up(
            self.model,
            self.placement.device,
            self.config.compile,
            self.config.loop.activation_share,
            not_compiled(self._layout.plan, self.ranks),
            self._teller.note,
            self.config.fp8,
        )
        if spreading.pipeline is None and isinstance(self.model, MultimodalModel):
            for encoder in self.model.encoders.values():
                encoder.settle()
        if self.speed.compiled and isinstance(self.task.collator, ChatCollator):
            self.task.collator.expect_compiled()
        self.pipeline: Pipeline | None = spreading.pipeline
        """This process's stages, where the model is cut into such."""
        self.parts: list[Part] = spreading.parts
        self.all_parts: list[Part] = spreading.all_parts
        """Those of the whole model, to be told of; `parts` are what this process has of them."""
        self.buckets = spreading.buckets
        self._memory = spreading.memory
        self.ahead = encoded_ahead(self.task, self.config, self.placement)

    def _balance(self) -> None:
        """Weigh the samples, if the config says so."""
        self._balancer = balancer_of(
            self.config, self.task.collator, self.sources, self.flops.step, self._layout, self.folder
        )
        if self._balancer is not None:
            self._teller.note(told_gain(self._balancer, self._order, self.config, self.replica.count))

    def _built_task(self) -> Task:
        evaluation = JoinedSources(list(self.evaluation_sources.values()))
        return build_task(self.config, self.sources, evaluation, self._spreading.cuts(self.sources))

    def _verify_plan(self) -> None:
        verify_plan(self.model, self._layout, self.config, self._teller.note)

    def _make_optimizer(self) -> None:
        config = self.config
        modalities = list(self.task.modalities())
        flops = as_range(COUNTING, self.flops.total)
        is_apart = self.ranks > 1 and config.parallel.data.kind in APART
        counter = OwnCounter if is_apart else Counter
        self._counter = counter(modalities, self.replica.size, lambda: self.stopping.asked, flops)
        # Where each process trains by itself, the loss of its own batch is all that it knows.
        self._shares = 1 if is_apart else self.replica.shares
        self.update = WeightUpdate(config, self.parts, self.placement, self.pipeline, self.replica.count)
        self.optimizer, self.scaler, self.averages = self.update.optimizer, self.update.scaler, self.update.averages
        self.total_steps = self._total_steps()
        self.rates = LearningRate(self.optimizer, config.schedule, self.total_steps)
        exchange = self._spreading.exchange(self.optimizer, self.scaler) if self.ranks > 1 else None
        data, trained = self._layout.plan.data, self.update.trained
        self.exchange = Exchanging(exchange, data, trained, self.model, self.optimizer)
        """How replicas keep together, where torch does not see to it alone."""

    def _total_steps(self) -> int:
        loop = self.config.loop
        if loop.steps is not None:
            return loop.steps
        epochs = loop.epochs or 1.0
        whole = int(epochs)
        last = math.ceil(self.steps_of_epoch(whole) * (epochs - whole))
        return sum(map(self.steps_of_epoch, range(whole))) + last

    def steps_of_epoch(self, epoch: int) -> int:
        """Return how many batches an epoch has."""
        return -(-self._order.count(epoch) // self.config.loop.batch_size)

    def some_batch(self) -> CollatedBatch | None:
        """Return a batch of training data to look at, from the beginning of each source; None if none can be used."""
        prepared: list[Any] = []
        for source in self.sources.sources:
            for index in range(min(len(source), _LOOKED_AT)):
                with suppress(SampleError):
                    prepared.append(self.task.collator.prepare(source[index]))
                    break
        return self.task.collator.join(prepared) if prepared else None

    @cached_property
    def _order(self) -> EpochOrder:
        data = self.config.data
        return EpochOrder(
            self.sources.lengths, [source.weight for source in data.train], self.config.seed, data.shuffle
        )

    def _loader(self) -> StepLoader:
        config, position = self.config, self.position
        epochs = None if config.loop.steps is not None else math.ceil(config.loop.epochs or 1.0)
        return StepLoader(
            self.sources,
            self._order,
            self.task.collator,
            config.loop.batch_size,
            config.loop.accumulation,
            workers=config.data.workers,
            prefetch=config.data.prefetch,
            pin=self.placement.device.type == "cuda",
            start=(position.epoch, position.batch),
            rank=self.replica.index,
            ranks=self.replica.count,
            epochs=epochs,
            balancer=self._balancer,
            skips=SkipCounter(config.data.skip_limit),
        )

    def _draws_as(self) -> int:
        """Return the first of the processes that draw the same random numbers as this one."""
        same = (rank for rank in range(self.ranks) if Replica.of(self._layout, rank).share == self.replica.share)
        return next(same)

    def _resume(self, checkpoint: Checkpoint) -> None:
        data = checkpoint.data()
        with checkpoint.tensors() as tensors:
            averages = None if self.averages is None else self.averages.averages
            model = self.task.wrapped or self.model
            restore(tensors, data, model, self.optimizer, ema=averages, scaler=self.scaler, draws_as=self._draws_as())
            self.exchange.restore(tensors, data, self._teller.note)
        # What the config says now wins over what the checkpoint remembers: they differ only if that was allowed.
        apply_hyperparameters(self.optimizer, self.config.optimizer, self.parts, self.update.own_names)
        scale_rates(self.optimizer, self.config.optimizer.scale_rate, self.replica.count)
        known = Position()
        self.position = Position(**{key: value for key, value in data["position"].items() if hasattr(known, key)})
        if self.position.ended and self.position.step < self.total_steps and not self._stopped_early():
            self.position.ended = False  # told to go on: more steps than before
        self._saved_at = checkpoint.step

    # ------------------------------------------------------------------ the loop

    def _trained(self) -> Status:
        config, position = self.config, self.position
        for batch in self.batches() if self._profiler is None else self._profiler.over(self.batches()):
            if self.stopping.asked and self.ranks == 1:  # the batch is left for the next start
                return "stopped"
            result = self.step(batch)
            if not result.totals.trained_tokens and not self.exchange.is_apart:
                continue
            with ranged(TELLING):
                self._teller.stepped(result, self)
            if self._profiler is not None:
                self._profiler.stepped(result.step)
            if self._recorder is not None:
                is_logged = self._teller.is_logged(result.step, self.total_steps)
                self._recorder.stepped(result.step, len(batch.portions), is_logged)
            if (held := self._memory.line()) is not None:
                self._teller.note(held)
            self._tell_saved()
            position.seconds = self._teller.seconds
            metric = None
            if config.loop.evaluate_every and position.step % config.loop.evaluate_every == 0:
                metric = self._evaluated()
            if self._should_save(metric):
                self._told_save(metric)
            if self._stopped_early():
                break
            if result.totals.stop:  # the processes know of one another's signals since the step has begun
                return "stopped"
        return "finished"

    def _changed_weights(self, batch: StepBatch, loss: Tensor) -> Tensor | None:
        """Clip the gradients, change the weights, and return the gradients' norm."""
        norm, divisor = self.update.clip(self.task.wrapped)
        # A scaler has its own answer to infinite gradients: it leaves the step out and scales less.
        self.watch.add(self.position.step + 1, batch, loss, None if self.scaler is not None else norm)
        self._memory.look(self)
        self.update.apply(divisor)
        return norm

    def _evaluated(self) -> float | None:
        """Evaluate, remember what is best, and return what decides it."""
        if not self.evaluation_sources:
            return None
        if self._profiler is not None:
            self._profiler.interrupt()
        self.watch.check()
        with self._teller.pause():
            evaluation = self.evaluate()
        record = evaluation.record()
        name = self.config.checkpoint.best_by
        metric = record.get(name)
        if metric is None:
            raise ConfigError(
                f"checkpoint.best_by = {name}, but the evaluation has only {', '.join(evaluation.means())}."
            )
        improved = self._is_improvement(metric)
        position = self.position
        position.evaluations_without_improvement = 0 if improved else position.evaluations_without_improvement + 1
        if improved:
            position.best, position.best_step = metric, position.step
        self._teller.evaluated(record, position, improved)
        return float(metric)

    def _is_improvement(self, metric: float) -> bool:
        best, stopping = self.position.best, self.config.loop.early_stopping
        if best is None:
            return metric == metric
        least = stopping.least if stopping is not None else 0.0
        gain = best - metric if self.config.checkpoint.best_by == "loss" else metric - best
        return gain > least

    def _stopped_early(self) -> bool:
        stopping = self.config.loop.early_stopping
        return stopping is not None and self.position.evaluations_without_improvement >= stopping.patience

    def _should_save(self, metric: float | None) -> bool:
        every, step = self.config.checkpoint.every, self.position.step
        is_best = metric is not None and self.position.best_step == step
        return is_best or (every is not None and step % every == 0)

    def _told_save(self, metric: float | None) -> None:
        if self._profiler is not None:
            self._profiler.interrupt()
        with self._teller.pause():
            self._tell_saved(wait=True)
            self._being_saved = (self.save(metric), self.position.step)
        self._tell_saved()

    def _tell_saved(self, wait: bool = False) -> None:
        """Tell of a checkpoint once it is there; raise what has failed in the background."""
        if self._being_saved is None:
            return
        if wait:
            self._store.wait()
        else:
            self._store.check()
        if not self._store.is_saving:
            self._teller.saved(*self._being_saved)
            self._being_saved = None

    # ------------------------------------------------------------------ the end

    def _closed(self, status: Status) -> RunResult:
        if self._recorder is not None:
            self._recorder.finish()
        if self._profiler is not None:
            self._teller.show_at_end(self._profiler.finish())
        if status == "stopped":
            if self._saved_at != self.position.step:
                self._told_save(None)
            self._tell_saved(wait=True)
            self._teller.stopped(self.position)
            return RunResult("stopped", self.position.step, None, folder=self.folder.path)
        if not self.position.ended:
            self._finish()
        self._tell_saved(wait=True)
        exchanged = self._exchanged()
        with (
            self._weights_in_use(),
            self.placement.computing(),
            whole_model(self.task.wrapped),
            whole_sequences(self.model),
            nullcontext() if self.pipeline is None else self.pipeline.evaluating(),
        ):
            self._teller.asked(self)
        report = self._teller.ended("finished", self.position)
        last = self._teller.last_evaluation
        return RunResult("finished", self.position.step, last, exchanged, self.folder.path, report)

    def _as_it_was(self) -> RunResult:
        """Return the result of a run that had ended before."""
        position = self.position
        self._teller.note(
            f"The run has ended already, after {position.step} steps. To train on, raise loop.steps or loop.epochs and "
            "give --allow-changes; to begin anew: --restart."
        )
        exchanged = self._teller.earlier_exchanges()
        report = self._teller.ended("finished", position, aloud=False)
        last = self._teller.last_evaluation
        return RunResult("finished", position.step, last, exchanged, self.folder.path, report)

    def _finish(self) -> None:
        """Evaluate and save what the last step left, unless that was done."""
        if self.evaluation_sources and self._saved_at != self.position.step:
            self._told_save(None)  # before an evaluation that may fail
        metric = None
        if self._teller.last_evaluation_step != self.position.step:
            metric = self._evaluated()
        self.position.ended = True
        self._told_save(metric if metric is not None else self._metric_of_last_evaluation())

    def _metric_of_last_evaluation(self) -> float | None:
        if self._teller.last_evaluation is None or self._teller.last_evaluation_step != self.position.step:
            return None
        return self._teller.last_evaluation.get(self.config.checkpoint.best_by)

    def _exchanged(self) -> dict[str, dict[str, Any]]:
        if not self.config.loop.exchange_check or not self.evaluation_sources:
            return {}
        found: dict[str, dict[str, Any]] = {}
        for modality, kind in self.task.modalities().items():
            with self._weights_in_use(), whole_sequences(self.model):
                evaluation = self.evaluator.exchanged(kind)
            if evaluation.sources:
                found[modality] = evaluation.record()
                self._teller.exchanged(modality, found[modality], self.position)
        return found

    @contextmanager
    def _weights_in_use(self) -> Iterator[None]:
        with self.exchange.averaged(), self.update.averaged():
            yield

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the run."""
        return self.stopping.by_keyboard


__all__ = ["Trainer"]
