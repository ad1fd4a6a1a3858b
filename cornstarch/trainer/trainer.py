"""`Trainer`: from a run's description to a trained model. `fit` is the whole run, `_train` its loop, `step` a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from cornstarch.checkpoint.state_values import seed_all
from cornstarch.checkpoint.weights import open_store
from cornstarch.config import RunConfig
from cornstarch.config.config_file import load_config
from cornstarch.config.run_folder import PLAN, RunFolder, check_trace
from cornstarch.data.device_prefetcher import DevicePrefetcher
from cornstarch.data.formats import JoinedSources
from cornstarch.data.load_balancing import build_balancer, describe_gain
from cornstarch.data.loader import StepBatch, StepLoader, open_data
from cornstarch.data.run_workers import choose_workers
from cornstarch.data.sample import SkipCounter
from cornstarch.engine.acceleration import check_fp8
from cornstarch.engine.bad_steps import BadStepGuard
from cornstarch.engine.context import DistributedContext, build_layout, check_process_group
from cornstarch.engine.failure import LossWatch, SharedFailure, StopSignal, out_of_memory
from cornstarch.engine.fit_memory import choose_microbatches
from cornstarch.engine.plan_requirements import check_optimizer
from cornstarch.engine.run_model import RunModel, build_train_state
from cornstarch.engine.sharded_loading import ShardedLoading
from cornstarch.engine.step_counter import StepCounter, UnsynchronizedStepCounter
from cornstarch.engine.train_step import WeighedLosses
from cornstarch.errors import ConfigError
from cornstarch.metrics.attribution import COUNTING, LOGGING
from cornstarch.metrics.metrics import Position, RunResult, Status, StepClock, StepResult, StepTotals
from cornstarch.metrics.profiler import record_calls, record_range
from cornstarch.parallel import distributed
from cornstarch.parallel.ddp_fsdp import drop_idle_gradients
from cornstarch.parallel.device import choose_placement, is_out_of_memory
from cornstarch.parallel.mesh import Replica
from cornstarch.planner.search_run import choose_plan
from cornstarch.tasks import build_task
from cornstarch.tasks.module import CollateFunction, LossFunction, build_module_task
from cornstarch.tasks.task import Task
from cornstarch.trainer.callbacks import Callback, add_builtin_callbacks, build_callbacks
from cornstarch.trainer.checkpointer import Checkpointer, find_checkpoint
from cornstarch.trainer.evaluator import Evaluation, Evaluator, record_best, should_stop_early
from cornstarch.trainer.metrics_logger import MetricsLogger
from cornstarch.trainer.run_batches import leave_out, yield_batches
from cornstarch.trainer.run_end import finish_run
from cornstarch.verify.twin_trial import verify_plan


class Trainer:
    """Trains what a `RunConfig` describes.

    `fit` does it all. For a loop of your own: `setup`, then `step` for each of `batches`, and `save` when you like.

    Args:
        config: The run.
        task: What is trained, if it is made in Python and not described by `config.model`.
        train_data: Rows or samples, if they are not described by `config.data`.
        evaluation_data: The same for evaluation.
        allow_changes: Resume from a checkpoint although the config has changed.
        console: Where progress is printed.
        command: The command line, for the report.
        device: This process's own, of several.
        trace: Write a trace of some steps of a pipeline, for chrome://tracing and Perfetto.
        profile: Profile some steps: a trace of what is computed when, and where the time goes.
        callbacks: What runs beside the steps: `Callback`s, or names of registered ones.
    """

    exact = False
    """Compute in fp32 whatever the precision of the run, to compare runs number by number."""
    counts_flops = True
    """Whether the FLOPs of each batch are counted; runs of a few steps have no use for them."""

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
        callbacks: Sequence[Callback | str] = (),
    ) -> None:
        check_process_group()
        self.auto_plan = None
        if config.parallel.auto:
            self.auto_plan = choose_plan(config, distributed.world_size(), distributed.ranks_per_node(), device)
            config = self.auto_plan.config
        self.config, self._layout = config, build_layout(config.parallel)
        check_optimizer(config, self._layout)
        if trace:
            check_trace(self._layout.plan.is_pipeline)
        self._given_task, self._rows, self._device = task, (train_data, evaluation_data), device
        self._allow_changes, self._trace, self._profile = allow_changes, trace, profile
        self.rank, self.ranks = distributed.rank(), distributed.world_size()
        self.replica = Replica.of(self._layout, self.rank)
        self.position = Position()
        self.callbacks = build_callbacks(callbacks)
        self.folder = RunFolder(config.folder)
        self.logger = MetricsLogger(config, self.folder, console or Console(soft_wrap=True), command, self.rank == 0)
        self.checkpoints = open_store(config, self.folder.path)
        self.stop_signal = StopSignal()
        self.failure = SharedFailure(config.launch.hang_timeout, config.folder)
        self._resources = ExitStack()
        self._is_ready = False
        self.skips: SkipCounter | None = None
        self.bad_steps: BadStepGuard | None = None
        self.rewinds = 0

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
        callbacks: Sequence[Callback | str] = (),
        **config: Any,
    ) -> Trainer:
        """Return a trainer for a module and data that were made in Python.

        Args:
            model: What is trained.
            train_data: Rows (dictionaries, or pairs of inputs and labels) by number: a list, a torch data set.
            evaluation_data: The same, not trained on.
            loss: A function of (module, batch) that returns the mean loss over the batch's samples, or a dictionary of
                means with `loss` in it. Without one, `module(**batch)` must return something with a `loss`.
            collate: A function that makes a batch, a dictionary, of a list of rows. Without one, numbers, arrays and
                images are stacked.
            console: Where progress is printed.
            callbacks: What runs beside the steps.
            config: Sections of a `RunConfig`: `loop={"steps": 100}`, `name="mine"`.
        """
        data = dict(config.pop("data", {}))
        data["train"] = [{"path": "train_data", "format": "given"}]
        if evaluation_data is not None:
            data["evaluation"] = [{"path": "evaluation_data", "format": "given"}]
        run = load_config(None, base={"model": {"given": type(model).__name__}, "data": data, **config})
        task = build_module_task(model, loss, collate, run.data, run.seed)
        return cls(
            run, task=task, train_data=train_data, evaluation_data=evaluation_data, console=console, callbacks=callbacks
        )

    def fit(self) -> RunResult:
        """Train to the end, from the newest checkpoint if there is one, and write a report."""
        with self.failure.share(), self._resources:
            was_finished = self.folder.read_summary().get("status") == "finished"
            self.setup()
            if was_finished and self.position.ended:
                self.logger.log(
                    f"The run has ended already, after {self.position.step} steps. To train on, raise loop.steps or "
                    "loop.epochs and give --allow-changes; to begin anew: --restart."
                )
                return self.close_run(self.logger.read_shuffled(), write_event=False)
            with self.logger.show_progress(self.position, self.total_steps), self.stop_signal.listen():
                try:
                    status = self._train() if not self.position.ended else "finished"
                    result = finish_run(self, status)
                    self.replica_sync.finish()
                    return result
                except BaseException as error:
                    explained = None
                    if is_out_of_memory(error):  # first: it frees what the failed step holds
                        parts = self.run_model.parts
                        explained = out_of_memory(error, self.model, parts, self.config, self.placement)
                    with suppress(ConfigError, MemoryError):  # a full disk must not hide what went wrong first
                        self.logger.finish("failed", self.position)
                    if explained is not None:
                        raise explained from None
                    raise

    # ------------------------------------------------------------------ setting up

    def setup(self) -> None:
        """Build everything that a step needs, and load the newest checkpoint if there is one."""
        if not self._is_ready:
            with self.failure.share():
                self._set_up()
            self._is_ready = True

    def _set_up(self) -> None:
        config, log = self.config, self.logger.log
        if self.rank == 0:
            self._resources.enter_context(self.folder.claim())
        checkpoint = find_checkpoint(self.checkpoints, self.folder, config, self._allow_changes, log, self._resources)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        seed_all(config.seed)
        placement = choose_placement(str(self._device or config.device), config.precision, config.attention)
        self.placement = replace(placement, exact=self.exact)
        self.context = DistributedContext(self._layout, self.placement)
        check_fp8(config.fp8, self.placement.device)
        self.data = open_data(config, *self._rows)
        self.sources, self.evaluation_sources = self.data.train, self.data.evaluation
        loading = ShardedLoading(config, self.context)
        self.task: Task = self.build_task(loading)
        self.model: nn.Module = self.task.model
        collator = self.task.collator
        self.data_workers = choose_workers(self.data, collator, self.replica, placement.device, log)
        self.data = self.data.plan_packing(collator, self.data_workers)
        choose_microbatches(self.task, config, self.context, self.data, log)
        self.run_model = RunModel(
            self.task, config, self.context, self.data, loading, self._resources, log, self.verify_plan
        )
        self.pipeline = self.run_model.parallel.pipeline  # this rank's stages, if the model is split into stages
        self._build_step()
        if self.auto_plan is not None:
            log(self.auto_plan.text)
        if self.rank == 0:
            self.folder.store_config(config)
            if self.auto_plan is not None:
                self.folder.write(PLAN, self.auto_plan.file)
        if checkpoint is not None:
            self.position = self.checkpointer.restore(checkpoint, log)
        if self.bad_steps is not None:
            self.bad_steps.load(is_resumed=checkpoint is not None)
        add_builtin_callbacks(self, self._resources, self._trace, self._profile)
        self.logger.log_start(self, resumed_from=None if checkpoint is None else checkpoint.step)
        self.call_callbacks("on_train_begin")

    def build_task(self, loading: ShardedLoading) -> Task:
        """Return what is trained: the given task, or the described one with the weights that this rank needs."""
        given = self._given_task
        if (given is None) == (self.config.model.given is not None):
            raise ConfigError(
                f"model.given = {self.config.model.given}, and {'no' if given is None else 'a'} task was handed over. "
                "A model made in Python goes through Trainer.from_objects, or Trainer(config, task=…)."
            )
        if given is not None:
            return given
        evaluation = JoinedSources(list(self.evaluation_sources.values()))
        return build_task(self.config, self.sources, evaluation, loading.cuts(self.sources))

    def verify_plan(self, model: nn.Module) -> None:
        """Refuse a plan under which a tiny twin of the model computes something else than in one process."""
        verify_plan(model, self._layout, self.config, self.logger.log, self._rows[0])

    def _build_step(self) -> None:
        """Build what a step needs beside the model: optimizer, learning rate, counters, evaluator, checkpointer."""
        config, data, flops, collator = self.config, self.data, self.run_model.flops, self.task.collator
        self.total_steps = data.total_steps()
        state = build_train_state(config, self.context, self.task, self.run_model, self.total_steps)
        self.train_step, self.replica_sync, self.rates = state.step, state.replica_sync, state.rates
        self.optimizer, self.scaler, self.averages = state.optimizer, state.step.scaler, state.step.averages
        kind = UnsynchronizedStepCounter if self.context.is_unsynchronized else StepCounter
        count_flops = record_calls(COUNTING, flops.total) if self.counts_flops else None
        signal = self.stop_signal  # a function of `self` would keep the trainer, and its claim on the folder, alive
        self.counter = kind(list(self.task.modalities()), self.replica.size, lambda: signal.is_set, count_flops)
        self._balancer = build_balancer(config, collator, data.train, flops.step, self._layout, self.folder)
        if self._balancer is not None:
            self.logger.log(describe_gain(self._balancer, data, self.replica.count))
        self.watch = LossWatch(config, self.placement, is_shared=not self.context.is_unsynchronized)
        if config.loop.on_bad_loss != "stop":
            models = [self.model] if self.pipeline is None else self.pipeline.models
            self.bad_steps = BadStepGuard(config, data, self.folder, self.replica, models)
        self.feed = DevicePrefetcher(self.placement)
        self.clock = StepClock.for_device(self.placement.device)
        use_weights = state.use_evaluation_weights
        self.evaluator = Evaluator(
            self.task, config, data.evaluation, self.placement, self.replica, self.pipeline, use_weights, data.packed,
            self.data_workers,
        )  # fmt: skip
        self.checkpointer = Checkpointer(self.checkpoints, state, self.logger.log_checkpoint)

    def call_callbacks(self, name: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self, *arguments)

    # ------------------------------------------------------------------ the loop

    def _train(self) -> Status:
        config, position = self.config, self.position
        batches = self.batches()
        while True:
            self.call_callbacks("on_batch_begin")
            if (batch := next(batches, None)) is None:
                return "finished"
            if self.stop_signal.is_set and self.ranks == 1:  # the batch is left for the next start
                return "stopped"
            result = self.step(batch)
            if result.is_left_out or not (result.totals.trained_tokens or self.context.is_unsynchronized):
                continue
            with record_range(LOGGING):
                self.logger.log_step(result, self)
            is_logged = self.logger.is_logged(result.step, self.total_steps)
            self.call_callbacks("on_step_end", result, batch, is_logged)
            self.checkpointer.end_step(position, self.watch.check)
            position.seconds = self.logger.seconds
            metric = None
            if config.loop.evaluate_every and position.step % config.loop.evaluate_every == 0:
                metric = self.evaluate_and_log()
            stops_early = should_stop_early(config, position)
            is_best = metric is not None and position.best_step == position.step
            is_due = config.checkpoint.every is not None and position.step % config.checkpoint.every == 0
            ends = position.step >= self.total_steps or stops_early
            if (is_best or is_due) and not ends:  # the end of a run saves it, once
                self.save_and_log(metric)
            if stops_early:
                return "finished"
            if result.totals.stop:  # ranks know of one another's signals since the step has begun
                return "stopped"

    def batches(self) -> Iterator[StepBatch]:
        """Yield the batches that are left to train on."""
        return yield_batches(self)

    def build_loader(self) -> StepLoader:
        """Return the loader of the batches that are left; `batches` is what a loop wants."""
        pin, own = self.placement.device.type == "cuda", (self.replica, self._balancer, self.data_workers)
        return self.data.build_loader(self.task.collator, self.position, *own, pin)

    def step(self, batch: StepBatch) -> StepResult:
        """Do one optimizer step: forward and backward of every microbatch, then the weights.

        The loss is the sum over all trained tokens of the step divided by their number, however they are split into
        microbatches and over ranks. All ranks must call it. If none of them has a token to train on, because all
        samples are broken, nothing changes and the step does not count. Nor does it with a bad loss, if
        `loop.on_bad_loss` leaves the batch out.
        """
        self.clock.start_step()
        # The totals of all ranks travel while the first microbatch is computed.
        totals_of_all = self.counter.totals(batch)
        position, rate = self.position, self.rates.set(self.position.step)
        self.replica_sync.before_step()
        self.call_callbacks("on_step_begin", batch)
        if self.bad_steps is not None:
            self.bad_steps.before_step()

        count, weights = len(batch.microbatches), [one.trained_tokens for one in batch.microbatches]
        losses = WeighedLosses(self.train_step, weights, lambda: totals_of_all().trained_tokens)
        if self.pipeline is not None:
            inputs = iter([one.inputs for one in batch.microbatches])
        else:
            encoded = batch if self.run_model.prefetch is None else self.run_model.prefetch(batch)
            inputs = (self.feed.inputs(encoded, number) for number in range(count))
        self.train_step.forward_backward(inputs, count, losses)
        loss = losses.sum(self.placement.device)
        self.train_step.unscale()

        totals = totals_of_all()
        self.count_batch(batch, totals)
        norm: Tensor | None = None
        if totals.trained_tokens:
            if self.ranks > 1:
                drop_idle_gradients(self.model, totals.items)
            norm = self.update_weights(batch, loss)
            if self.bad_steps is not None and (bad := self.bad_steps.found) is not None:
                leave_out(self, bad)
                return StepResult(position.step, loss, rate, norm, totals, is_left_out=True)
        else:
            self.train_step.zero_grad()
            if not self.context.is_unsynchronized:  # others count this step
                return StepResult(position.step, loss, rate, None, totals)
        position.step += 1
        self.replica_sync.after_step(position.step)
        position.tokens += totals.tokens
        position.samples += totals.samples
        self.clock.end_step(batch.waited)
        return StepResult(position.step, loss, rate, norm, totals, batch.waited)

    def count_batch(self, batch: StepBatch, totals: StepTotals) -> None:
        """Move the position behind a batch, and count its skipped samples."""
        # All ranks alike refuse data of which too much is broken; one process does so while it reads.
        if self.skips is not None and self.replica.count > 1 and not self.context.is_unsynchronized:
            self.skips.count(totals.samples, totals.broken, totals.too_long, batch.skipped)
            if batch.ends_epoch:
                self.skips.end_epoch()
        position = self.position
        position.epoch, position.batch = batch.epoch, batch.index + 1
        position.broken += totals.broken
        position.too_long += totals.too_long

    def update_weights(self, batch: StepBatch, loss: Tensor) -> Tensor | None:
        """Clip the gradients, step the optimizer, and return the norm that the gradients had."""
        norm = self.train_step.clip()
        # A scaler has its own answer to infinite gradients: it leaves the step out and scales less.
        checked = None if self.scaler is not None else norm
        if self.bad_steps is None:
            self.watch.add(self.position.step + 1, batch, loss, checked)
        elif self.bad_steps.check(self.position, batch, loss, checked):
            self.train_step.leave_out()
            return norm
        self.run_model.memory_tracker.measure(self.optimizer, self.averages)
        self.train_step.update()
        return norm

    def evaluate(self) -> Evaluation:
        """Measure the model, with its averaged weights if there are any, on the evaluation data."""
        return self.evaluator.evaluate()

    def save(self, metric: float | None = None) -> Path:
        """Write a checkpoint of this moment; with `checkpoint.background`, while training goes on."""
        self.watch.check()
        return self.checkpointer.save(self.position, metric)

    def evaluate_and_log(self) -> float | None:
        """Evaluate, remember what is best, and return the metric that decides it."""
        if not self.evaluation_sources:
            return None
        self.call_callbacks("on_pause")
        self.watch.check()
        with self.logger.pause():
            record = self.evaluate().record()
        metric, improved = record_best(self.config, self.position, record)
        self.logger.log_evaluation(record, self.position, improved)
        self.call_callbacks("on_evaluate", record)
        return metric

    def save_and_log(self, metric: float | None) -> None:
        self.call_callbacks("on_pause")
        with self.logger.pause():
            self.checkpointer.check(wait=True)
            path = self.save(metric)
        self.checkpointer.check()
        self.call_callbacks("on_save", path)

    def close_run(self, shuffled: dict[str, dict[str, Any]], write_event: bool = True) -> RunResult:
        """Write the report, and return the result of the run."""
        report = self.logger.finish("finished", self.position, write_event=write_event)
        last = self.logger.last_evaluation
        return RunResult("finished", self.position.step, last, shuffled, self.folder.path, report)

    def close(self) -> None:
        """Release the run folder; `fit` does so itself."""
        self._resources.close()
