"""The checkpoints of a run: which one it goes on from, what is in one, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from cornstarch.errors import ConfigError
from cornstarch.parallel import processes
from cornstarch.train.checkpoint import Checkpoint, CheckpointStore
from cornstarch.train.config import RunConfig
from cornstarch.train.judging import is_stopped_early
from cornstarch.train.optim import apply_hyperparameters, scale_rates
from cornstarch.train.results import Position
from cornstarch.train.runs import CHECKPOINTS, METRICS, RunFolder
from cornstarch.train.setup import RunSetup
from cornstarch.train.state import capture, restore


def store_of(config: RunConfig, folder: RunFolder) -> CheckpointStore:
    """Return where a run keeps its checkpoints."""
    how = config.checkpoint
    return CheckpointStore(folder / CHECKPOINTS, how.keep, "lower" if how.best_by == "loss" else "higher")


def to_go_on_from(
    store: CheckpointStore,
    folder: RunFolder,
    config: RunConfig,
    allow_changes: bool,
    note: Callable[[str], None],
) -> Checkpoint | None:
    """Return the newest checkpoint, if there is one and the run is still the same.

    Args:
        store: Where checkpoints are.
        folder: Of the run.
        config: The run, as it is now.
        allow_changes: Go on although the config has changed.
        note: Tells the user something.
    """
    checkpoint = store.latest()
    for problem in store.problems:
        note(f"A damaged checkpoint is passed over: {problem}")
    if checkpoint is None:
        if (folder / METRICS).exists():
            note("The earlier start left no checkpoint: this one begins at the first step.")
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
        note(f"Changed since the checkpoint: {change}")
    return checkpoint


class Saver:
    """Writes what a run is at a moment, and brings it back.

    Args:
        store: Where to.
        setup: The run.
    """

    def __init__(self, store: CheckpointStore, setup: RunSetup) -> None:
        self._store, self._setup = store, setup
        self._model, self._update, self._exchange = setup.model, setup.update, setup.exchange
        self._averages = None if setup.update.averages is None else setup.update.averages.averages
        self.saved_at: int | None = None
        """The step of the newest checkpoint."""

    def save(self, position: Position, metric: float | None) -> Path:
        """Write a checkpoint; all processes must call it.

        Args:
            position: How far the run is; its seconds become those of the first process.
            metric: Decides which checkpoint is the best one.
        """
        start, update = self._setup.start, self._update
        own = self._exchange.captured()
        with self._exchange.averaged():
            tensors, data = capture(
                self._model.task.wrapped or self._model.module,
                update.optimizer,
                ema=self._averages,
                scaler=update.scaler,
            )
            shared = processes.broadcast_data(asdict(position))  # each has its own clock
            position.seconds = shared["seconds"]
            data = {**data, **own.data, "position": shared, "precision": start.placement.precision}
            how = start.config.checkpoint
            path = self._store.save(
                position.step,
                {**tensors, **own.tensors},
                data,
                metric=metric,
                form=how.form,
                wait=not how.background,
            )
        self.saved_at = position.step
        return path

    def restore(self, checkpoint: Checkpoint) -> Position:
        """Put the run where a checkpoint was made, and return how far that is."""
        start, update = self._setup.start, self._update
        config, standing = start.config, start.standing
        data = checkpoint.data()
        with checkpoint.tensors() as tensors:
            restore(
                tensors,
                data,
                self._model.task.wrapped or self._model.module,
                update.optimizer,
                ema=self._averages,
                scaler=update.scaler,
                draws_as=standing.draws_as,
            )
            self._exchange.restore(tensors, data, start.note)
        # What the config says now wins over what the checkpoint remembers: they differ only if that was allowed.
        apply_hyperparameters(update.optimizer, config.optimizer, self._model.parts, update.own_names)
        scale_rates(update.optimizer, config.optimizer.scale_rate, standing.replica.count)
        self.saved_at = checkpoint.step
        known = Position()
        position = Position(**{key: value for key, value in data["position"].items() if hasattr(known, key)})
        if position.ended and position.step < self._setup.total_steps and not is_stopped_early(config, position):
            position.ended = False  # told to go on: more steps than before
        return position


class Announcer:
    """Tells of checkpoints once they are there.

    Args:
        store: Where they are.
        tell: Told the folder and the step.
    """

    def __init__(self, store: CheckpointStore, tell: Callable[[Path, int], None]) -> None:
        self._store, self._tell = store, tell
        self._awaited: tuple[Path, int] | None = None

    def expect(self, path: Path, step: int) -> None:
        """Tell of this one, too."""
        self._awaited = (path, step)

    def look(self, wait: bool = False) -> None:
        """Tell of a checkpoint if it is there now; raise what has failed in the background.

        Args:
            wait: Until it is there.
        """
        if self._awaited is None:
            return
        if wait:
            self._store.wait()
        else:
            self._store.check()
        if not self._store.is_saving:
            self._tell(*self._awaited)
            self._awaited = None


__all__ = ["Announcer", "Saver", "store_of", "to_go_on_from"]
