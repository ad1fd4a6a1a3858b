"""The batches of a run that are left to train on, without those whose loss was bad; going back to a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cornstarch.data.loader import StepBatch
from cornstarch.engine.bad_steps import BadStep
from cornstarch.engine.failure import TrainingError
from cornstarch.metrics.attribution import DATA
from cornstarch.metrics.profiler import record_waits

if TYPE_CHECKING:
    from cornstarch.trainer.trainer import Trainer


def yield_batches(trainer: Trainer) -> Iterator[StepBatch]:
    """Yield the batches that are left to train on, those after a checkpoint again if the run has gone back to it."""
    trainer.setup()
    guard, position = trainer.bad_steps, trainer.position

    def steps_ahead() -> int:  # for how many steps batches may be drawn at once
        is_single = any(callback.wants_single_steps for callback in trainer.callbacks)
        return 1 if is_single else trainer.total_steps - position.step

    if guard is not None and guard.rewinds and trainer.checkpointer.saved_at is None:
        trainer.save_and_log(None)  # there is something to go back to from the first step on
    while position.step < trainer.total_steps:
        rewinds = trainer.rewinds
        trainer.skips = trainer.data.build_skip_counter(position)
        for batch in trainer.counter.ahead(record_waits(DATA, trainer.build_loader()), steps_ahead):
            trainer.logger.log_skipped(batch.skipped)
            if guard is not None and (bad := guard.find(batch)) is not None:
                trainer.count_batch(batch, trainer.counter.totals(batch)())
                trainer.logger.log_left_out(bad, position, is_again=True)
                continue
            # Stages take what they need themselves, and a prefetch replaces the images.
            if trainer.pipeline is None and trainer.run_model.prefetch is None:
                trainer.feed.begin(batch)
            yield batch
            if position.step >= trainer.total_steps:
                return
            if trainer.rewinds > rewinds:
                break  # the loader begins behind the checkpoint
        else:
            return


def leave_out(trainer: Trainer, bad: BadStep) -> None:
    """Go on without a batch whose loss is bad: from the weights before it, or from the newest checkpoint."""
    guard = trainer.bad_steps
    assert guard is not None
    guard.leave_out(bad)
    guard.undo()
    if guard.rewinds:
        _rewind(trainer, bad)
    else:
        trainer.logger.log_left_out(bad, trainer.position)


def _rewind(trainer: Trainer, bad: BadStep) -> None:
    """Restore the newest checkpoint in this process; all ranks must call it."""
    trainer.call_callbacks("on_pause")
    with trainer.logger.pause():
        trainer.checkpointer.check(wait=True)
        checkpoint = trainer.checkpoints.latest()
        if checkpoint is None:
            raise TrainingError(
                f"{bad.describe()}\n  loop.on_bad_loss = rewind: there is no checkpoint to go back to in "
                f"{trainer.checkpoints.folder}."
            )
        trainer.position.assign(trainer.checkpointer.restore(checkpoint, trainer.logger.log))
    trainer.rewinds += 1
    trainer.logger.rewind(bad, trainer.position)
