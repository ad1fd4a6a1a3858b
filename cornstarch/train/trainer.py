"""The loop: from a description to a trained model, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.parallel.data import forget_idle_gradients
from cornstarch.train.attribution import DATA, TELLING
from cornstarch.train.config import RunConfig
from cornstarch.train.data.collate import CollatedBatch
from cornstarch.train.data.loader import SkipCounter, StepBatch, StepLoader
from cornstarch.train.evaluation import Evaluation
from cornstarch.train.failure import is_out_of_memory, out_of_memory
from cornstarch.train.judging import Judge, is_stopped_early, is_worth_saving, metric_of, note_metric
from cornstarch.train.observing import Observers
from cornstarch.train.profiling import StepProfiler, ranged, ranged_over
from cornstarch.train.results import Position, RunResult, Status, StepResult, StepTotals
from cornstarch.train.runs import PLAN, RunFolder, check_trace
from cornstarch.train.saving import Announcer, Saver, store_of, to_go_on_from
from cornstarch.train.setup import RunSetup, Standing, assemble, begin, check_given, described_task
from cornstarch.train.shared_failure import SharedFailure
from cornstarch.train.source import load_config
from cornstarch.train.start_check import verify_plan
from cornstarch.train.stopping import Stopping
from cornstarch.train.tasks.module import LossFunction, module_task
from cornstarch.train.tasks.stacking import CollateFunction
from cornstarch.train.tasks.task import Task
from cornstarch.train.telling import Teller
from cornstarch.train.timeline import TimelineRecorder


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

    exact = False
    """Compute in fp32 whatever the precision of the run: trials of plans compare number by number."""

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
        self._standing = standing = Standing.of(config, device)
        self.config, self._layout, self.replica = standing.config, standing.layout, standing.replica
        self.rank, self.ranks = standing.rank, standing.ranks
        if trace:
            check_trace(self._layout.plan.is_pipeline)
        self._given, self._rows, self._device = task, (train_data, evaluation_data), device
        self._allow_changes, self._trace, self._profiled = allow_changes, trace, profile
        self.position = Position()
        self.stopping = Stopping()
        self.folder = RunFolder(self.config.folder)
        console = console or Console(soft_wrap=True)
        self._teller = Teller(self.config, self.folder, console, command, self.rank == 0)
        self._store = store_of(self.config, self.folder)
        self._saves = Announcer(self._store, self._teller.saved)
        self._held = ExitStack()
        self._ready = False
        self._skips: SkipCounter | None = None
        self._failure = SharedFailure()

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

    # ------------------------------------------------------------------ setting up

    def setup(self) -> None:
        """Make everything that a step needs, and go to where the newest checkpoint was made."""
        if not self._ready:
            with self._failure.shared():
                self._set_up()

    def _set_up(self) -> None:
        note, decision = self._teller.note, self._standing.decision
        if self.rank == 0:
            self._held.enter_context(self.folder.claimed())
        checkpoint = to_go_on_from(self._store, self.folder, self.config, self._allow_changes, note)
        self._start = begin(self._standing, self._device, self._rows, self.folder, note, self.exact)
        check_given(self.config, self._given)
        self.task: Task = self._built_task() if self._given is None else self._given
        self.model: nn.Module = self.task.model
        self._take(assemble(self._start, self.task, self._verify_plan, self.stopping, self._held))
        if decision is not None:
            note(decision.text)
        if self.rank == 0:
            self.folder.store_config(self.config)
            if decision is not None:
                self.folder.write(PLAN, decision.file)
        if checkpoint is not None:
            self.position = self._saver.restore(checkpoint)
        self._observers = Observers(self._memory, self._made_recorder(), self._made_profiler(), note)
        self._teller.begun(self, resumed_from=None if checkpoint is None else checkpoint.step)
        self._ready = True

    def _built_task(self) -> Task:
        """Return what is trained, where it is not given."""
        return described_task(self._start)

    def _verify_plan(self) -> None:
        """Refuse to train if the plan computes something else than one process."""
        verify_plan(self.model, self._layout, self.config, self._teller.note)

    def _take(self, made: RunSetup) -> None:
        """Hold what was made, under the names that a loop of one's own uses."""
        start, model, update = made.start, made.model, made.update
        self.placement = start.placement
        self.sources, self.evaluation_sources = start.data.train, start.data.evaluation
        self.parts, self.all_parts = model.parts, model.all_parts
        self.pipeline, self.buckets = model.pipeline, model.buckets
        self.recomputation, self.flops, self.speed = model.recomputation, model.flops, model.speed
        self.features, self.ahead, self._memory = model.features, model.ahead, model.memory
        self.update, self.rates, self.total_steps = update, made.rates, made.total_steps
        self.optimizer, self.scaler, self.averages = update.optimizer, update.scaler, update.averages
        self.exchange, self.evaluator, self.watch = made.exchange, made.evaluator, made.watch
        self.feed, self.clock = made.feed, made.clock
        self._counter, self._balancer, self._passes = made.counter, made.balancer, made.passes
        self._saver, self._judge = Saver(self._store, made), Judge(made)

    def _made_recorder(self) -> TimelineRecorder | None:
        if self.pipeline is None:
            return None
        return TimelineRecorder(self.pipeline, self.folder, self.position.step, self._trace)

    def _made_profiler(self) -> StepProfiler | None:
        if not self._profiled:
            return None
        profiler = StepProfiler(self, self._teller.pause, self._teller.note)
        self._held.callback(profiler.close)
        return profiler

    # ------------------------------------------------------------------ for a loop of one's own

    def batches(self) -> Iterator[StepBatch]:
        """Yield what is left to train on."""
        self.setup()
        if self.position.step >= self.total_steps:
            return
        self._skips = self._start.data.skips(self.position)
        for batch in self._counter.ahead(ranged_over(DATA, self._loader()), self._steps_at_once):
            self._teller.skipped(batch.skipped)
            if self.pipeline is None and self.ahead is None:  # each stage takes what it needs itself
                self.feed.begin(batch)
            yield batch
            if self.position.step >= self.total_steps:
                return

    def _steps_at_once(self) -> int:
        """Return for how many steps, at most, batches are drawn: a step that is profiled draws its own."""
        return 1 if self._observers.want_single_steps else self.total_steps - self.position.step

    def _loader(self) -> StepLoader:
        pin = self.placement.device.type == "cuda"
        return self._start.data.loader(self.task.collator, self.position, self.replica, self._balancer, pin)

    def steps_of_epoch(self, epoch: int) -> int:
        """Return how many batches an epoch has."""
        return self._start.data.steps_of_epoch(epoch)

    def some_batch(self) -> CollatedBatch | None:
        """Return a batch of training data to look at, from the beginning of each source; None if none can be used."""
        return self._start.data.some_batch(self.task.collator)

    def step(self, batch: StepBatch) -> StepResult:
        """Do one step of the optimizer: forward and backward of every portion, then the weights.

        The loss is the sum over all trained tokens of the step divided by their number, however they are cut in
        portions and dealt out to processes. All processes must call it. If none of them has a token to train on,
        because whatever there was is broken, nothing changes and the step does not count.
        """
        self.clock.begins()
        # On their way, at the latest, while the first portion is computed.
        totals_of_all = self._counter.totals(batch)
        position = self.position
        rate = self.rates.set(position.step)
        self.exchange.before_step()
        self._observers.begins()
        loss = self._passes(batch, totals_of_all)
        self.update.unscale()
        totals = totals_of_all()
        self._judge_skipped(batch, totals)
        position.epoch, position.batch = batch.epoch, batch.index + 1
        position.broken += totals.broken
        position.too_long += totals.too_long
        norm: Tensor | None = None
        if totals.trained_tokens:
            if self.ranks > 1:
                forget_idle_gradients(self.model, totals.items)
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

    def _judge_skipped(self, batch: StepBatch, totals: StepTotals) -> None:
        """Refuse, in all processes alike, data of which too much is broken; one process does so while it reads."""
        if self.replica.count == 1 or self._skips is None or self._standing.is_apart:
            return
        self._skips.count(totals.samples, totals.broken, totals.too_long, batch.skipped)
        if batch.ends_epoch:
            self._skips.end_epoch()

    def _changed_weights(self, batch: StepBatch, loss: Tensor) -> Tensor | None:
        """Clip the gradients, change the weights, and return the gradients' norm."""
        norm, divisor = self.update.clip(self.task.wrapped)
        # A scaler has its own answer to infinite gradients: it leaves the step out and scales less.
        self.watch.add(self.position.step + 1, batch, loss, None if self.scaler is not None else norm)
        self._memory.look(self)
        self.update.apply(divisor)
        return norm

    def save(self, metric: float | None = None) -> Path:
        """Write a checkpoint of this moment; with `checkpoint.background`, while training goes on."""
        self.watch.check()
        return self._saver.save(self.position, metric)

    def evaluate(self) -> Evaluation:
        """Measure the model, with its averaged weights if there are any, on the evaluation data."""
        return self._judge.evaluate()

    # ------------------------------------------------------------------ the loop

    def fit(self) -> RunResult:
        """Train until the end, from the newest checkpoint on if there is one, and write a report."""
        with self._failure.shared(), self._held:
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

    def _trained(self) -> Status:
        config, position = self.config, self.position
        for batch in self._observers.over(self.batches()):
            if self.stopping.asked and self.ranks == 1:  # the batch is left for the next start
                return "stopped"
            result = self.step(batch)
            if not result.totals.trained_tokens and not self.exchange.is_apart:
                continue
            with ranged(TELLING):
                self._teller.stepped(result, self)
            is_logged = self._teller.is_logged(result.step, self.total_steps)
            self._observers.stepped(result.step, len(batch.portions), is_logged)
            self._saves.look()
            position.seconds = self._teller.seconds
            metric = None
            if config.loop.evaluate_every and position.step % config.loop.evaluate_every == 0:
                metric = self._evaluated()
            ends = position.step >= self.total_steps or is_stopped_early(config, position)
            if is_worth_saving(config, position, metric) and not ends:  # the end of a run saves it, once
                self._told_save(metric)
            if is_stopped_early(config, position):
                break
            if result.totals.stop:  # the processes know of one another's signals since the step has begun
                return "stopped"
        return "finished"

    def _evaluated(self) -> float | None:
        """Evaluate, remember what is best, and return what decides it."""
        if not self.evaluation_sources:
            return None
        self._observers.interrupt()
        self.watch.check()
        with self._teller.pause():
            record = self.evaluate().record()
        metric = metric_of(self.config, record)
        improved = note_metric(self.config, self.position, metric)
        self._teller.evaluated(record, self.position, improved)
        return float(metric)

    def _told_save(self, metric: float | None) -> None:
        self._observers.interrupt()
        with self._teller.pause():
            self._saves.look(wait=True)
            self._saves.expect(self.save(metric), self.position.step)
        self._saves.look()

    # ------------------------------------------------------------------ the end

    def _closed(self, status: Status) -> RunResult:
        self._teller.show_at_end(self._observers.finish())
        if status == "stopped":
            if self._saver.saved_at != self.position.step:
                self._told_save(self._metric_of_last_evaluation())
            self._saves.look(wait=True)
            self._teller.stopped(self.position)
            return RunResult("stopped", self.position.step, None, folder=self.folder.path)
        if not self.position.ended:
            self._finish()
        self._saves.look(wait=True)
        exchanged = {}
        for modality, record in self._judge.exchanged():
            exchanged[modality] = record
            self._teller.exchanged(modality, record, self.position)
        with self._judge.using():
            self._teller.asked(self)
        return self._ended(exchanged)

    def _as_it_was(self) -> RunResult:
        """Return the result of a run that had ended before."""
        self._teller.note(
            f"The run has ended already, after {self.position.step} steps. To train on, raise loop.steps or "
            "loop.epochs and give --allow-changes; to begin anew: --restart."
        )
        return self._ended(self._teller.earlier_exchanges(), aloud=False)

    def _ended(self, exchanged: dict[str, dict[str, Any]], aloud: bool = True) -> RunResult:
        """Write the report, and return what the run came to."""
        report = self._teller.ended("finished", self.position, aloud=aloud)
        last = self._teller.last_evaluation
        return RunResult("finished", self.position.step, last, exchanged, self.folder.path, report)

    def _finish(self) -> None:
        """Evaluate and save what the last step left, unless that was done."""
        is_evaluated = not self.evaluation_sources or self._teller.last_evaluation_step == self.position.step
        if not is_evaluated:
            if self._saver.saved_at != self.position.step:
                self._told_save(None)  # before an evaluation that may fail
            self._evaluated()
        self.position.ended = True
        self._told_save(self._metric_of_last_evaluation())

    def _metric_of_last_evaluation(self) -> float | None:
        if self._teller.last_evaluation is None or self._teller.last_evaluation_step != self.position.step:
            return None
        return self._teller.last_evaluation.get(self.config.checkpoint.best_by)

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the run."""
        return self.stopping.by_keyboard


__all__ = ["Trainer"]
