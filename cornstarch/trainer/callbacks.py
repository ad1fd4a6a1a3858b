"""Callbacks: what runs beside the steps of a run. Profile, timeline and memory report of the product are callbacks."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from cornstarch.data.loader import StepBatch
from cornstarch.engine.memory_tracker import MemoryTracker
from cornstarch.errors import ConfigError
from cornstarch.kernels.compile_cache import CompileCache
from cornstarch.launch.attempt_record import StepFile, open_step_file
from cornstarch.metrics.attribution import RANGE, STEP, WINDOW, attribute
from cornstarch.metrics.metrics import Status, StepResult
from cornstarch.metrics.profiler import build_time_table, list_parts, record_forwards, trace_name
from cornstarch.metrics.timeline import DIGITS, compare_step, describe_schedule
from cornstarch.parallel import distributed
from cornstarch.pipeline.runtime import ActionEvent
from cornstarch.plan.stage_graph import places_of
from cornstarch.report import time_breakdown
from cornstarch.report.time_breakdown import ProfileBreakdown
from cornstarch.report.timelines import TIMELINE, TRACE, chrome_trace
from cornstarch.schedule.actions import Schedule
from cornstarch.schedule.policies import make_schedule

if TYPE_CHECKING:
    from cornstarch.trainer.trainer import Trainer

WARM_UP, STEPS = 3, 3  # steps since the start that are not profiled, and then those that are
FIRST_RECORDED = 3  # step since the start whose timeline is recorded: the first two create groups and buffers
COMPILED = 10  # steps since the start in which layers are compiled
_TRACED = 3  # steps from there on, with --trace


class Callback:
    """What a run calls beside its steps. Override what you need; the others do nothing.

    Every rank calls every method at the same steps, so that a callback may use collectives.
    """

    wants_single_steps = False
    """Whether each step must draw its own batch, and none ahead."""

    def on_train_begin(self, trainer: Trainer) -> None:
        """Called once, when the model is ready and the newest checkpoint is loaded."""

    def on_batch_begin(self, trainer: Trainer) -> None:
        """Called before the next batch is drawn."""

    def on_step_begin(self, trainer: Trainer, batch: StepBatch) -> None:
        """Called before the forward pass of a step."""

    def on_step_end(self, trainer: Trainer, result: StepResult, batch: StepBatch, is_logged: bool) -> None:
        """Called after the weights have changed."""

    def on_pause(self, trainer: Trainer) -> None:
        """Called before an evaluation or a checkpoint, which belong to no step."""

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Called with the metrics of an evaluation."""

    def on_save(self, trainer: Trainer, path: Path) -> None:
        """Called when a checkpoint was begun; with `checkpoint.background` it may not be complete yet."""

    def on_train_end(self, trainer: Trainer, status: Status) -> None:
        """Called once, when training has finished or was stopped."""


CALLBACKS: dict[str, Callable[[], Callback]] = {}
"""Callbacks that `Trainer(callbacks=[...])` takes by name."""


def register_callback(name: str, build: Callable[[], Callback]) -> None:
    """Make a callback available by name."""
    CALLBACKS[name] = build


def build_callbacks(wanted: Iterable[Callback | str]) -> list[Callback]:
    """Return callbacks, those given by name from the registry."""
    found: list[Callback] = []
    for one in wanted:
        if isinstance(one, str):
            if one not in CALLBACKS:
                raise ConfigError(f"callbacks: {one!r} is not registered; known are {', '.join(CALLBACKS) or 'none'}.")
            one = CALLBACKS[one]()
        if not isinstance(one, Callback):
            raise ConfigError(f"callbacks: expected a Callback or a registered name; found a {type(one).__name__}.")
        found.append(one)
    return found


def add_builtin_callbacks(trainer: Trainer, resources: ExitStack, trace: bool, profile: bool) -> None:
    """Add the callbacks of the product itself to those of a trainer that is ready for its first step."""
    trainer.callbacks.append(MemoryCallback(trainer.run_model.memory_tracker))
    if (steps := open_step_file()) is not None:
        trainer.callbacks.insert(0, StepCallback(steps))
    if trainer.ranks > 1:
        from cornstarch.trainer.health_callback import HealthCallback  # it derives from `Callback`

        trainer.callbacks.insert(0, HealthCallback(trainer))  # first: what other callbacks do belongs to a step
    if trainer.run_model.acceleration.compiled:
        evaluates = bool(trainer.evaluation_sources and trainer.config.loop.evaluate_every)
        trainer.callbacks.append(CompileCallback(trainer.run_model.compile_cache, evaluates))
    if trainer.pipeline is not None:
        trainer.callbacks.append(TimelineCallback(trainer, trace))
    if profile:
        profiler = ProfilerCallback(trainer)
        resources.callback(profiler.close)
        trainer.callbacks.insert(0, profiler)  # first: its range of a step encloses what other callbacks do


class StepCallback(Callback):
    """Keeps the number of the step where the supervisor of this process finds it after a crash."""

    def __init__(self, steps: StepFile) -> None:
        self._steps = steps

    def on_batch_begin(self, trainer: Trainer) -> None:
        self._steps.write(trainer.position.step + 1)


class ProfilerCallback(Callback):
    """Profiles some steps; a step lasts from when its batch is asked for until its weights have changed.

    These are the fourth to the sixth step since the start: before them kernels are loaded, layers compiled and memory
    allocated. A shorter run profiles its last steps. An evaluation or a checkpoint ends the recording.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._pause, self._log = trainer.logger.pause, trainer.logger.log
        self._folder, self._device = trainer.folder, trainer.placement.device
        programs = trainer.pipeline.programs.values() if trainer.pipeline is not None else ()
        # A rank with several stages has a copy of the model for each.
        self._modules = list_parts([trainer.model, *(program.model for program in programs)])
        self._steps_done, left = trainer.position.step, trainer.total_steps - trainer.position.step
        self._first = self._steps_done + min(WARM_UP + 1, left)
        self._last = self._steps_done + min(WARM_UP + STEPS, left)
        self._notes: list[str] = []
        if left <= WARM_UP:
            self._notes.append(f"The run has {left} steps: these times include the one-time work at its start.")
        self._profile: profile | None = None
        self._is_in_window = False
        self._contexts = ExitStack()
        self._step: record_function | None = None
        self._steps: list[int] = []
        self._result: ProfileBreakdown | None = None  # on rank 0

    @property
    def wants_single_steps(self) -> bool:  # type: ignore[override]
        """Until the profile is complete: batches drawn ahead would be in the wrong step."""
        return self._profile is not None or not self._steps

    def on_batch_begin(self, trainer: Trainer) -> None:
        step = self._steps_done + 1
        if not self.wants_single_steps or self._step is not None:
            return
        if self._profile is None and step >= self._first - 1:
            # One step early: starting the profiler takes time, and the GPU must be busy when the first step begins.
            self._start()
        if self._profile is not None:
            if not self._is_in_window and step >= self._first:
                self._contexts.enter_context(record_function(RANGE + WINDOW))
                self._is_in_window = True
            self._step = record_function(f"{RANGE}{STEP} {step}")
            self._step.__enter__()

    def on_step_end(self, trainer: Trainer, result: StepResult, batch: StepBatch, is_logged: bool) -> None:
        self._steps_done = result.step
        if self._step is None:
            return
        self._close_step()
        if self._is_in_window:
            self._steps.append(result.step)
            if result.step >= self._last:
                self._stop()

    def on_pause(self, trainer: Trainer) -> None:
        """End the recording: an evaluation or a checkpoint would be counted as part of a step."""
        if self._profile is not None and self._steps:
            self._stop()
        else:
            self.close()

    def on_train_end(self, trainer: Trainer, status: Status) -> None:
        self.on_pause(trainer)
        if not self._steps:
            self._log("--profile: there was no step to profile.")
        if self._result is not None:
            trainer.logger.show_at_end(build_time_table(self._result))

    def close(self) -> None:
        """Stop the profiler and discard the recording."""
        self._close_step()
        self._contexts.close()
        self._profile, self._is_in_window = None, False

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or Kineto prints when it starts and stops
        self._synchronize()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._profile.start()
        self._contexts.callback(self._profile.stop)
        self._contexts.enter_context(record_forwards(self._modules))

    def _close_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _stop(self) -> None:
        self._synchronize()
        recorded = self._profile
        assert recorded is not None
        self.close()
        with self._pause():
            self._write(recorded)

    def _write(self, recorded: profile) -> None:
        """Write this rank's trace; rank 0 writes the times of all ranks."""
        ranks = distributed.world_size()
        found = [one for one in distributed.all_gather_json(self._write_trace(recorded)) if one is not None]
        if not found or distributed.rank() != 0:
            return
        missing = [f"{ranks - len(found)} processes could not write their traces."] if len(found) < ranks else []
        device = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "the CPU"
        data = {"version": 1, "steps": self._steps, "device": device, "notes": self._notes + missing, "ranks": found}
        try:
            self._folder.write(time_breakdown.PROFILE, json.dumps(data, indent=1) + "\n")
        except ConfigError as error:  # a full disk, say, must not stop the run
            self._log(f"The profile could not be written: {error}")
        self._result = time_breakdown.read_time_breakdown(data)
        self._log(f"profiled: {self._folder / trace_name(0, ranks)}, for chrome://tracing and Perfetto")

    def _write_trace(self, recorded: profile) -> dict[str, Any] | None:
        """Write this rank's trace; return where its time went, or None if the trace could not be written."""
        rank = distributed.rank()
        unfinished = self._folder / f".profile-{rank}.unfinished.json"
        try:
            try:
                recorded.export_chrome_trace(str(unfinished))
                content = unfinished.read_bytes()
            finally:
                unfinished.unlink(missing_ok=True)
            self._folder.write(trace_name(rank, distributed.world_size()), gzip.compress(content, 5))
        except (ConfigError, OSError) as error:
            self._log(f"The trace of the profile could not be written: {error}")
            return None
        parts = list(dict.fromkeys(name for name, _ in self._modules))
        return {"rank": rank, **attribute(json.loads(content), parts, len(self._steps))}


class TimelineCallback(Callback):
    """Records when the stages of a pipeline did what: in the third step since the start, and the last logged one.

    With `trace`, more steps are recorded, and a trace for chrome://tracing and Perfetto is written.
    """

    def __init__(self, trainer: Trainer, trace: bool) -> None:
        assert trainer.pipeline is not None
        self._pipeline, self._folder, self._trace = trainer.pipeline, trainer.folder, trace
        first = trainer.position.step + FIRST_RECORDED
        self._chosen = range(first, first + (_TRACED if trace else 1))
        self._began = 0.0
        self._last: tuple[int, int, float, Sequence[ActionEvent]] | None = None
        self._steps: list[dict[str, Any]] = []

    def on_step_begin(self, trainer: Trainer, batch: StepBatch) -> None:
        self._began = time.time()

    def on_step_end(self, trainer: Trainer, result: StepResult, batch: StepBatch, is_logged: bool) -> None:
        """Keep the events of the step if it will be shown."""
        if result.step in self._chosen or is_logged:
            self._last = result.step, len(batch.microbatches), self._began, self._pipeline.events
        if result.step in self._chosen:
            self._write_last()

    def on_train_end(self, trainer: Trainer, status: Status) -> None:
        self._write_last()

    def _write_last(self) -> None:
        """Gather and write the last step that was kept."""
        if self._last is None or any(step["step"] == self._last[0] for step in self._steps):
            return
        step, microbatches, began, events = self._last
        self._last = None
        pipeline, here, local = self._pipeline, self._pipeline.place_of_rank, None
        # One rank reports each place, unless the step was a shorter one.
        if (here.dp, here.cp, here.tp) == (0, 0, 0) and microbatches == pipeline.microbatches:
            rows = [
                (*event.action[:3], *(round(one, DIGITS) for one in (event.begin, event.end, event.waited)))
                for event in events
            ]
            local = {"place": pipeline.place, "began": began, "events": rows}
        found = [one for one in distributed.all_gather_json(local) if one is not None]
        if len(found) == pipeline.graph.places:
            schedule = make_schedule(pipeline.graph, pipeline.microbatches, pipeline.layout.plan.schedule)
            self._steps.append({"step": step, **compare_step(schedule, found)})
            if distributed.rank() == 0:
                self._write(schedule)

    def _write(self, schedule: Schedule) -> None:
        ranks = [one.ravel().tolist() for one in places_of(self._pipeline.layout)]
        data = {**describe_schedule(schedule, ranks), "steps": self._steps}
        self._folder.write(TIMELINE, json.dumps(data, separators=(",", ":")) + "\n")
        if self._trace:
            self._folder.write(TRACE, json.dumps(chrome_trace(data), separators=(",", ":")) + "\n")


class MemoryCallback(Callback):
    """Reports, once, the measured memory beside the estimate."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self.tracker = tracker

    def on_step_end(self, trainer: Trainer, result: StepResult, batch: StepBatch, is_logged: bool) -> None:
        if (line := self.tracker.line()) is not None:
            trainer.logger.log(line)


class CompileCallback(Callback):
    """Logs what torch compiled in a step or an evaluation, and why it compiled again; keeps it for the next start.

    Layers without gradients are compiled with the last of the first steps: an error in that, or a lack of memory, shows
    soon, and lengths have varied by then. An evaluation that comes earlier compiles them itself.
    """

    def __init__(self, cache: CompileCache | None, evaluates: bool) -> None:
        self._cache, self._compiles_evaluation, self._steps = cache, evaluates, 0

    def on_step_end(self, trainer: Trainer, result: StepResult, batch: StepBatch, is_logged: bool) -> None:
        self._steps += 1
        if self._compiles_evaluation and self._steps == COMPILED:
            with trainer.logger.pause():
                trainer.evaluator.compile_layers(batch.microbatches[0])
        trainer.logger.log_compilations(trainer.run_model.acceleration, result.step)
        if self._cache is not None:
            self._cache.save_when_settled(self._count(trainer), result.step)

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        self._compiles_evaluation = False
        trainer.logger.log_compilations(trainer.run_model.acceleration, trainer.position.step)

    def on_save(self, trainer: Trainer, path: Path) -> None:
        if self._cache is not None:
            self._cache.save(self._count(trainer))

    def on_train_end(self, trainer: Trainer, status: Status) -> None:
        if self._cache is not None:
            self._cache.save(self._count(trainer))

    def _count(self, trainer: Trainer) -> int:
        return len(trainer.run_model.acceleration.compile_log.compilations)
