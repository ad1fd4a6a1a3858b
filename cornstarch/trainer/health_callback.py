"""`HealthCallback`: says where each rank is, and compares what ranks do and hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cornstarch.data.loader import StepBatch
from cornstarch.health.heartbeat import StepTimer
from cornstarch.metrics.metrics import Status, StepResult
from cornstarch.parallel.activity import here
from cornstarch.trainer.callbacks import Callback

if TYPE_CHECKING:
    from cornstarch.trainer.trainer import Trainer


class HealthCallback(Callback):
    """Keeps `cornstarch.parallel.activity` up to date, and logs ranks that are slow.

    Before the weights of a step change, ranks compare what they did, and from time to time what they hold.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._watch, self._timer = trainer.failure.watch, StepTimer()
        self._counts_data_waits = bool(trainer.data_workers)
        here.step, here.steps = trainer.position.step, 0
        if self._watch is not None and trainer.rank == 0:
            self._watch.log = trainer.logger.log

    def on_train_begin(self, trainer: Trainer) -> None:
        here.enter("between")

    def on_batch_begin(self, trainer: Trainer) -> None:
        self._timer.begin()
        here.enter("data")

    def on_step_begin(self, trainer: Trainer, batch: StepBatch) -> None:
        here.step = trainer.position.step + 1
        here.enter("step")
        if self._counts_data_waits:  # without workers it is the training thread's own CPU time
            here.data_seconds += batch.waited

    def on_step_end(self, trainer: Trainer, result: StepResult, batch: StepBatch, is_logged: bool) -> None:
        here.enter("between")
        here.steps += 1
        here.seconds = self._timer.end()
        self._log_slow_ranks(trainer)

    def on_pause(self, trainer: Trainer) -> None:
        here.enter("pause")

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        here.enter("between")

    def on_save(self, trainer: Trainer, path: Path) -> None:
        here.enter("between")

    def on_train_end(self, trainer: Trainer, status: Status) -> None:
        here.enter("end")

    def _log_slow_ranks(self, trainer: Trainer) -> None:
        if self._watch is None or trainer.rank != 0:
            return
        for note in self._watch.read_notes():
            trainer.logger.log_event(note.step, "slow", note.text, is_shown=False)  # printed when it was noted
        for straggler, host in self._watch.read_stragglers():
            trainer.logger.log_event(straggler.step, "slow", straggler.describe(host))
