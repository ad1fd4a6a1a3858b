"""Ways to train a case wrongly, for the tests of the fuzz itself; called in place of `work.train`."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

from torch import Tensor

from cornstarch.data.loader import StepBatch
from cornstarch.errors import ConfigError
from cornstarch.metrics.metrics import StepResult
from cornstarch.parallel import distributed
from tests.fuzz import work
from tests.fuzz.case import Case
from tests.fuzz.work import ObservedTrainer, Outcome, Refusal


def _train_with(name: str, replacement: Any, *arguments: Any) -> Outcome | Refusal:
    if distributed.is_single_process():  # one process does it right
        return work.train(*arguments)
    with mock.patch.object(ObservedTrainer, name, replacement):
        return work.train(*arguments)


def scale_one_gradient(case: Case, *arguments: Any) -> Outcome | Refusal:
    """Train with the gradient of one matrix a hundredth too large."""
    right = ObservedTrainer.update_weights

    def wrong(self: ObservedTrainer, batch: StepBatch, loss: Tensor) -> Tensor | None:
        matrix = next(p for name, p in self.model.named_parameters() if name.endswith("layers.0.mlp.up_proj.weight"))
        assert matrix.grad is not None
        matrix.grad.mul_(1.01)
        return right(self, batch, loss)

    return _train_with("update_weights", wrong, case, *arguments)


def train_alone(case: Case, *arguments: Any) -> Outcome | Refusal:
    """Train one rank with a gradient of its own."""
    right = ObservedTrainer.update_weights

    def wrong(self: ObservedTrainer, batch: StepBatch, loss: Tensor) -> Tensor | None:
        if distributed.rank() == 1:
            next(p for p in self.model.parameters() if p.grad is not None).grad.zero_()  # type: ignore[union-attr]
        return right(self, batch, loss)

    return _train_with("update_weights", wrong, case, *arguments)


def log_another_rate(case: Case, *arguments: Any) -> Outcome | Refusal:
    """Train rightly, and log a learning rate that is not the one that was used."""
    right = ObservedTrainer.step

    def wrong(self: ObservedTrainer, batch: StepBatch) -> StepResult:
        result = right(self, batch)
        return StepResult(**{**vars(result), "learning_rate": 2 * result.learning_rate})

    return _train_with("step", wrong, case, *arguments)


def hang(case: Case, *arguments: Any) -> Outcome | Refusal:
    """Let one rank wait for ever."""
    if distributed.rank() == 1:
        threading.Event().wait()
    return work.train(case, *arguments) if distributed.is_single_process() else Refusal("one rank waits", 0)


def wait_in_all_ranks(case: Case, *arguments: Any) -> Outcome | Refusal:
    """Let all ranks wait for ever."""
    if not distributed.is_single_process():
        threading.Event().wait()
    return work.train(case, *arguments)


def raise_error(case: Case, *arguments: Any) -> Outcome | Refusal:
    """Fail in one rank."""
    if distributed.rank() == 1:
        raise RuntimeError("something odd")
    return work.train(case, *arguments)


def _refuse(self: ObservedTrainer, batch: StepBatch) -> StepResult:
    raise ConfigError("this cannot work")


def refuse_before_any_step(case: Case, *arguments: Any) -> Outcome | Refusal:
    """Refuse on all ranks."""
    return _train_with("step", _refuse, case, *arguments)


def refuse_after_a_step(case: Case, *arguments: Any) -> Outcome | Refusal:
    """Refuse on all ranks, too late."""
    right = ObservedTrainer.step

    def late(self: ObservedTrainer, batch: StepBatch) -> StepResult:
        return right(self, batch) if not self.norms else _refuse(self, batch)

    return _train_with("step", late, case, *arguments)


def refuse_on_one_rank(case: Case, *arguments: Any) -> Outcome | Refusal:
    """Refuse on one rank, while the other is done."""
    if distributed.rank() == 1:
        return Refusal("this cannot work", 0)
    return work.train({**case, "world": 1}, *arguments) if distributed.is_single_process() else Outcome({}, {}, {}, [])
