"""The checkpoints of a run: find the one to resume from, save, restore, and load the model for inference or export."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from cornstarch.attention.mask_verification import use_eval_mode
from cornstarch.checkpoint import Checkpoint, CheckpointStore
from cornstarch.checkpoint.coordinator import Coordinator
from cornstarch.checkpoint.peer_memory import open_peer_memory
from cornstarch.checkpoint.state import capture, restore, restore_weights
from cornstarch.checkpoint.state_values import random_state, restore_random_state, seed_all
from cornstarch.checkpoint.weights import CheckpointChoice, open_checkpoint
from cornstarch.config import RunConfig
from cornstarch.config.run_folder import METRICS, RunFolder, read_run_config
from cornstarch.data.collate import CollatedBatch
from cornstarch.data.formats import open_sources
from cornstarch.data.sample import SampleError
from cornstarch.engine.model_parts import cast_parts, split_into_parts
from cornstarch.engine.optimizer import apply_hyperparameters, scale_rates
from cornstarch.engine.run_model import TrainState
from cornstarch.errors import ConfigError
from cornstarch.metrics.metrics import Position
from cornstarch.parallel import distributed
from cornstarch.parallel.device import DTYPES, DevicePlacement, choose_placement
from cornstarch.tasks import Task, build_task
from cornstarch.trainer.evaluator import should_stop_early

_COMPARED = 4  # samples, after an export
_TRIED = 100
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""Relative to the largest logit: merging adapters into weights rounds differently."""


def find_checkpoint(
    store: CheckpointStore, folder: RunFolder, config: RunConfig, allow_changes: bool, log: Callable[[str], None],
    resources: ExitStack,
) -> Checkpoint | None:  # fmt: skip
    """Return the newest checkpoint, if there is one; refuse a changed config unless `allow_changes`.

    A folder of its own for checkpoints is kept from other runs until `resources` are released.
    """
    if config.checkpoint.folder is not None:
        Coordinator.default().run_on_first(lambda: _keep_claim(store, resources))
    store.memory = open_peer_memory(folder.path, is_used=config.checkpoint.peer is not None)
    checkpoint = _find_newest(store, log)
    if checkpoint is None:
        if (folder / METRICS).exists():
            log("The earlier start left no checkpoint: this one begins at the first step.")
        return None
    changes = folder.check_config(config)
    if changes and not allow_changes:
        raise ConfigError(
            f"{folder.path} has a run at step {checkpoint.step} with another config:\n  "
            + "\n  ".join(changes)
            + "\nGo on with the changes: --allow-changes. Begin anew and set the old run aside: --restart. "
            "Or choose another folder: output=<folder>."
        )
    for change in changes:
        log(f"Changed since the checkpoint: {change}")
    return checkpoint


def _keep_claim(store: CheckpointStore, resources: ExitStack) -> None:
    resources.enter_context(store.claim())


def _find_newest(store: CheckpointStore, log: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest intact checkpoint, of those on disk and the copies in memory."""
    memory = store.memory
    copy = None if memory is None else memory.newest()
    for problem in [] if memory is None else memory.problems:
        log(f"A damaged copy in memory is passed over: {problem}")
    if copy is not None:
        saved = Coordinator.default().run_on_first(lambda: max((one.step for one in store.list()), default=-1))
        if copy.step > saved:
            log(f"Going on from the copy in memory of step {copy.step}; the newest checkpoint on disk: "
                f"{'none' if saved < 0 else f'step {saved}'}.")  # fmt: skip
            return copy
    checkpoint = store.latest()
    for problem in store.problems:
        log(f"A damaged checkpoint is passed over: {problem}")
    return checkpoint


class Checkpointer:
    """Saves and restores the state of a run; `log_complete(folder, step)` is called for each complete checkpoint."""

    def __init__(self, store: CheckpointStore, state: TrainState, log_complete: Callable[[Path, int], None]) -> None:
        self._store, self._state, self._log_complete = store, state, log_complete
        self._averages = None if state.step.averages is None else state.step.averages.averages
        self._pending: tuple[Path, int] | None = None
        self.saved_at: int | None = None
        """The step of the newest checkpoint."""

    def save(self, position: Position, metric: float | None) -> Path:
        """Save a checkpoint; all ranks must call it. With `checkpoint.background` it is complete later: see `check`."""
        options = self._state.config.checkpoint
        with self._capture(position) as (tensors, data):
            path = self._store.save(
                position.step, tensors, data, metric=metric, form=options.form, wait=not options.background
            )
        self.saved_at = position.step
        self._pending = (path, position.step)
        return path

    @contextmanager
    def _capture(self, position: Position) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Give the tensors and the data of the run at this moment; all ranks must call it."""
        state = self._state
        own_tensors, own_data = state.capture_sync()
        with state.replica_sync.use_averaged_weights():
            tensors, data = capture(state.wrapped_module, state.optimizer, ema=self._averages, scaler=state.step.scaler)
            shared = distributed.broadcast_json(asdict(position))  # each rank has its own clock
            position.seconds = shared["seconds"]
            data = {**data, **own_data, "position": shared, "precision": state.context.placement.precision}
            yield {**tensors, **own_tensors}, data

    def end_step(self, position: Position, check_losses: Callable[[], None]) -> None:
        """Copy the state into memory if it is due, and log a checkpoint that is complete now."""
        self.check()
        options, memory = self._state.config.checkpoint, self._store.memory
        if memory is None or options.peer is None or position.step % options.peer:
            return
        is_saved_anyway = options.every is not None and position.step % options.every == 0 and not options.background
        if not is_saved_anyway and position.step < self._state.total_steps:
            check_losses()  # a state that is not finite must not replace the last good one
            with self._capture(position) as (tensors, data):
                memory.copy(position.step, tensors, data, wait=not options.background)

    def check(self, wait: bool = False) -> None:
        """Log a checkpoint that is complete now, or after a wait; raise a failure of the background save."""
        memory = self._store.memory
        if memory is not None:
            memory.check()
        if self._pending is None:
            return
        if wait:
            self._store.wait()
        else:
            self._store.check()
        if not self._store.is_saving:
            self._log_complete(*self._pending)
            if memory is not None:
                memory.drop(until=self._pending[1])
            self._pending = None

    def restore(self, checkpoint: Checkpoint, log: Callable[[str], None]) -> Position:
        """Restore the run from a checkpoint and return its position."""
        state, config = self._state, self._state.config
        optimizer = state.optimizer
        data = checkpoint.data()
        with _name_checkpoint(checkpoint), checkpoint.tensors() as tensors:
            module, scaler, source = state.wrapped_module, state.step.scaler, state.context.random_source
            restore(tensors, data, module, optimizer, ema=self._averages, scaler=scaler, draws_as=source)
            state.restore_sync(tensors, data, log)
            position = Position.read(data["position"])
        # The config wins over the hyperparameters in the checkpoint: they differ only with allow_changes.
        apply_hyperparameters(optimizer, config.optimizer, state.model.parts, state.trained)
        scale_rates(optimizer, config.optimizer.scale_rate, state.context.replica.count)
        memory = self._store.memory
        if memory is not None:
            memory.drop(after=checkpoint.step)  # a run that was set back must not go on from what it gave up
        is_copy = memory is not None and checkpoint.folder.parent == memory.folder
        self.saved_at = None if is_copy else checkpoint.step
        if position.ended and position.step < state.total_steps and not should_stop_early(config, position):
            position.ended = False  # the config asks for more steps than before
        return position


@contextmanager
def _name_checkpoint(checkpoint: Checkpoint) -> Iterator[None]:
    """Name the checkpoint if what it has cannot be restored; its checksums are right, but it may be from anywhere."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(
            f"{checkpoint.folder} cannot be restored: it does not have what a run writes ({type(error).__name__}: "
            f"{error}). Delete it to go on from the one before, or begin anew: --restart."
        ) from error


@dataclass(frozen=True)
class LoadedRun:
    """A run's model, ready for inference."""

    config: RunConfig
    task: Task
    placement: DevicePlacement
    step: int


def load_run(folder: Path, which: CheckpointChoice | int = "best", device: str = "auto") -> LoadedRun:
    """Load the model of a run from a checkpoint, with averaged weights if the run has them."""
    config = read_run_config(folder)
    if config.model.given is not None:
        raise ConfigError(
            f"{folder}: its model ({config.model.given}) was built in Python and cannot be rebuilt from here. Load a "
            "checkpoint with cornstarch.checkpoint.state.restore_weights, or describe the model with `model.factory`."
        )
    checkpoint = open_checkpoint(folder, which)
    data = checkpoint.data()
    with _name_checkpoint(checkpoint):
        placement = DevicePlacement(choose_placement(device, "fp32").device, data["precision"])
        dtype = DTYPES[placement.precision]
    before = random_state()
    try:
        seed_all(config.seed)  # frozen parts without stored weights get the same random weights as in the run
        task = build_task(config)
    finally:
        restore_random_state(before)
    cast_parts(split_into_parts(task.model, config.model, config.optimizer), dtype)
    with _name_checkpoint(checkpoint), checkpoint.tensors() as tensors:
        restore_weights(tensors, data, task.model, averaged=config.loop.ema_decay is not None)
    task.model.to(placement.device).eval()
    return LoadedRun(config, task, placement, checkpoint.step)


def export_run(run: LoadedRun, folder: Path, *, compare: bool = True) -> float | None:
    """Write the model to a new folder, load it, and return the largest difference of logits, relative to the largest.

    Raise ConfigError if it is more than rounding.
    """
    batch = _comparison_batch(run) if compare else None
    try:
        run.task.save(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{folder} cannot be written: {reason}. It was removed; the run is unchanged.") from error
    if batch is None:
        return None
    inputs = run.placement.move_batch(batch.inputs)
    loaded = run.task.load(folder).to(run.placement.device).eval()
    with use_eval_mode(run.task.model), torch.no_grad(), run.placement.forward_context():
        mine, theirs = (run.task.logits(model, inputs).float() for model in (run.task.model, loaded))
    difference = float((mine - theirs).abs().max() / mine.abs().max().clamp_min(1e-12))
    if not difference <= _TOLERANCE[run.placement.dtype]:
        raise ConfigError(
            f"The model in {folder} is not the run's: its logits differ by {difference:.1e} of the largest, expected "
            f"at most {_TOLERANCE[run.placement.dtype]:.0e}. Please report this; the run itself is unchanged."
        )
    return difference


def _comparison_batch(run: LoadedRun) -> CollatedBatch:
    data = run.config.data
    try:
        sources = open_sources(data.evaluation or data.train)
    except ConfigError as error:
        raise ConfigError(f"{error}\nWithout data the export cannot be compared with the run: --unchecked.") from error
    prepared = []
    for index in range(min(len(sources), _TRIED)):
        with suppress(SampleError):
            prepared.append(run.task.collator.prepare(sources[index]))
        if len(prepared) == _COMPARED:
            break
    if not prepared:
        raise ConfigError("None of the first samples can be used to compare the export with the run: --unchecked.")
    return run.task.collator.join(prepared)
