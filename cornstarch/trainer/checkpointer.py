"""The checkpoints of a run: find the one to resume from, save, and restore."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from cornstarch.checkpoint import Checkpoint, CheckpointStore
from cornstarch.checkpoint.state import capture, restore
from cornstarch.config import RunConfig
from cornstarch.config.run_folder import CHECKPOINTS, METRICS, RunFolder
from cornstarch.engine.optimizer import apply_hyperparameters, scale_rates
from cornstarch.engine.train_state import TrainState
from cornstarch.errors import ConfigError
from cornstarch.metrics.results import Position
from cornstarch.parallel import distributed
from cornstarch.trainer.evaluator import should_stop_early


def build_store(config: RunConfig, folder: RunFolder) -> CheckpointStore:
    """Return the checkpoint store of a run."""
    better: Literal["lower", "higher"] = "lower" if config.checkpoint.best_by == "loss" else "higher"
    return CheckpointStore(folder / CHECKPOINTS, config.checkpoint.keep, better)


def find_checkpoint(
    store: CheckpointStore, folder: RunFolder, config: RunConfig, allow_changes: bool, log: Callable[[str], None]
) -> Checkpoint | None:
    """Return the newest checkpoint, if there is one; refuse a changed config unless `allow_changes`."""
    checkpoint = store.latest()
    for problem in store.problems:
        log(f"A damaged checkpoint is passed over: {problem}")
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


class Checkpointer:
    """Saves and restores the state of a run; `log_complete(folder, step)` is called for each complete checkpoint."""

    def __init__(self, store: CheckpointStore, state: TrainState, log_complete: Callable[[Path, int], None]) -> None:
        self._store, self._state, self._log_complete = store, state, log_complete
        self._averages = None if state.step.averages is None else state.step.averages.averages
        self._pending: tuple[Path, int] | None = None
        self.saved_at: int | None = None
        """The step of the newest checkpoint."""

    def save(self, position: Position, metric: float | None) -> Path:
        """Save a checkpoint; all ranks must call it. With `checkpoint.background` it is complete later: see `check`.

        The seconds of `position` become those of rank 0. `metric` decides which checkpoint is the best one.
        """
        state = self._state
        own = state.exchange.capture()
        with state.exchange.use_averaged_weights():
            tensors, data = capture(state.wrapped_module, state.optimizer, ema=self._averages, scaler=state.step.scaler)
            shared = distributed.broadcast_json(asdict(position))  # each rank has its own clock
            position.seconds = shared["seconds"]
            data = {**data, **own.data, "position": shared, "precision": state.context.placement.precision}
            options = state.config.checkpoint
            path = self._store.save(
                position.step,
                {**tensors, **own.tensors},
                data,
                metric=metric,
                form=options.form,
                wait=not options.background,
            )
        self.saved_at = position.step
        self._pending = (path, position.step)
        return path

    def check(self, wait: bool = False) -> None:
        """Log a checkpoint that is complete now, or after a wait; raise a failure of the background save."""
        if self._pending is None:
            return
        if wait:
            self._store.wait()
        else:
            self._store.check()
        if not self._store.is_saving:
            self._log_complete(*self._pending)
            self._pending = None

    def restore(self, checkpoint: Checkpoint, log: Callable[[str], None]) -> Position:
        """Restore the run from a checkpoint and return its position."""
        state, config = self._state, self._state.config
        optimizer, owned = state.optimizer, state.step.owned
        data = checkpoint.data()
        with checkpoint.tensors() as tensors:
            restore(
                tensors,
                data,
                state.wrapped_module,
                optimizer,
                ema=self._averages,
                scaler=state.step.scaler,
                draws_as=state.context.random_source,
            )
            state.exchange.restore(tensors, data, log)
        # The config wins over the hyperparameters in the checkpoint: they differ only with allow_changes.
        apply_hyperparameters(optimizer, config.optimizer, state.model.parts, None if owned is None else owned.names)
        scale_rates(optimizer, config.optimizer.scale_rate, state.context.replica.count)
        self.saved_at = checkpoint.step
        known = Position()
        position = Position(**{key: value for key, value in data["position"].items() if hasattr(known, key)})
        if position.ended and position.step < state.total_steps and not should_stop_early(config, position):
            position.ended = False  # the config asks for more steps than before
        return position
