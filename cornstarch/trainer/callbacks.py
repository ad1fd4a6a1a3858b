"""Callbacks: what runs beside the steps of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cornstarch.data.loader import StepBatch
from cornstarch.engine.memory_tracker import MemoryTracker
from cornstarch.errors import ConfigError
from cornstarch.metrics.metrics import Status, StepResult
from cornstarch.metrics.profiler import StepProfiler
from cornstarch.metrics.timeline import TimelineRecorder

if TYPE_CHECKING:
    from cornstarch.trainer.trainer import Trainer


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
    if trainer.pipeline is not None:
        recorder = TimelineRecorder(trainer.pipeline, trainer.folder, trainer.position.step, trace)
        trainer.callbacks.append(TimelineCallback(recorder))
    if profile:
        profiler = StepProfiler(trainer)
        resources.callback(profiler.close)
        # First: its range of a step encloses what other callbacks do.
        trainer.callbacks.insert(0, ProfilerCallback(profiler))


class ProfilerCallback(Callback):
    """Profiles a few steps; a step lasts from when its batch is asked for until its weights have changed."""

    def __init__(self, profiler: StepProfiler) -> None:
        self.profiler = profiler

    @property
    def wants_single_steps(self) -> bool:  # type: ignore[override]
        """Until the profile is complete: batches drawn ahead would be in the wrong step."""
        return not self.profiler.is_done

    def on_batch_begin(self, trainer: Trainer) -> None:
        self.profiler.start_step()

    def on_step_end(self, trainer: Trainer, result: StepResult, batch: StepBatch, is_logged: bool) -> None:
        self.profiler.end_step(result.step)

    def on_pause(self, trainer: Trainer) -> None:
        self.profiler.interrupt()  # an evaluation or a checkpoint would be counted as part of a step

    def on_train_end(self, trainer: Trainer, status: Status) -> None:
        trainer.logger.show_at_end(self.profiler.finish())


class TimelineCallback(Callback):
    """Records when the stages of a pipeline did what."""

    def __init__(self, recorder: TimelineRecorder) -> None:
        self._recorder = recorder

    def on_step_begin(self, trainer: Trainer, batch: StepBatch) -> None:
        self._recorder.start_step()

    def on_step_end(self, trainer: Trainer, result: StepResult, batch: StepBatch, is_logged: bool) -> None:
        self._recorder.end_step(result.step, len(batch.microbatches), is_logged)

    def on_train_end(self, trainer: Trainer, status: Status) -> None:
        self._recorder.finish()


class MemoryCallback(Callback):
    """Reports, once, the measured memory beside the estimate."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self.tracker = tracker

    def on_step_end(self, trainer: Trainer, result: StepResult, batch: StepBatch, is_logged: bool) -> None:
        if (line := self.tracker.line()) is not None:
            trainer.logger.log(line)
