"""The end of a run: its last checkpoint and evaluations, answers of the finished model, and the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cornstarch.metrics.metrics import RunResult, Status

if TYPE_CHECKING:
    from cornstarch.trainer.trainer import Trainer


def finish_run(trainer: Trainer, status: Status) -> RunResult:
    """Save what the run has come to, evaluate it, and write the report; all ranks must call it."""
    position, logger, checkpointer = trainer.position, trainer.logger, trainer.checkpointer
    trainer.call_callbacks("on_train_end", status)
    if status == "stopped":
        if checkpointer.saved_at != position.step:
            trainer.save_and_log(logger.metric_at(position.step))
        checkpointer.check(wait=True)
        logger.log_stop(position)
        return RunResult("stopped", position.step, None, folder=trainer.folder.path)
    if not position.ended:
        if trainer.evaluation_sources and logger.last_evaluation_step != position.step:
            if checkpointer.saved_at != position.step:
                trainer.save_and_log(None)  # before an evaluation, which may fail
            trainer.evaluate_and_log()
        position.ended = True
        trainer.save_and_log(logger.metric_at(position.step))
    checkpointer.check(wait=True)
    shuffled = {}
    for modality, record in trainer.evaluator.evaluate_shuffled():
        shuffled[modality] = record
        logger.log_shuffled(modality, record, position)
    with trainer.evaluator.use_model():
        logger.log_answers(trainer)
    return trainer.close_run(shuffled)
