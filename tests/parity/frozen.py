"""Every combination of what is trained and what is frozen, in a pipeline: encoder and language model on three ranks."""

from __future__ import annotations

from itertools import product

from cornstarch.engine.sharded_loading import ShardedLoading
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.tasks.task import Task
from cornstarch.trainer.recording_trainer import RecordingTrainer
from tests.parity.cell import STEPS, Outcome, make_trainer, outcome_of
from tests.parity.rows import ROWS
from tests.parity.samples import alike

SCHEDULES = ("gpipe", "1f1b", "zero_bubble")
PARTS = ("encoder", "projector", "language model")
COMBINATIONS = [trained for trained in product((False, True), repeat=3) if any(trained)]
"""Whether the encoder, the projector and the language model are trained."""

_MODULES = {"vision": {}, "language_model": {"stages": 2}}


class _Frozen(RecordingTrainer):
    """A run in which just some parts are trained."""

    trained = (True, True, True)

    def build_task(self, loading: ShardedLoading) -> Task:
        """Return the task, with the parts frozen."""
        task = super().build_task(loading)
        encoder, projector, language_model = self.trained
        assert isinstance(task.model, MultimodalModel)
        task.model.train(encoders_mode={"vision": (encoder, projector)}, llm_mode=language_model)
        return task


def run_frozen(trained: tuple[bool, bool, bool], schedule: str | None, tokenizer: str, folder: str) -> Outcome:
    """Do the steps in this process, one of several or alone."""
    kind = type("Frozen", (_Frozen,), {"trained": trained})
    parallel = {} if schedule is None else {"modules": _MODULES, "schedule": schedule}
    samples = alike(ROWS["packed"].make, STEPS * 8)
    loop = {"steps": STEPS, "batch_size": 8, "accumulation": 4}
    return outcome_of(make_trainer("packed", samples, loop, parallel, tokenizer, folder, kind=kind))
