"""Forward and backward of a step: every portion, in this process or over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.parallel.data import gradients_kept_here
from cornstarch.parallel.lending import lending, lends
from cornstarch.parallel.loss_scale import LossScale
from cornstarch.pipeline.apply import Pipeline
from cornstarch.train.attribution import LOSS
from cornstarch.train.counting import Totals
from cornstarch.train.data.feeding import Feed
from cornstarch.train.data.loader import StepBatch
from cornstarch.train.features.ahead import EncodedAhead
from cornstarch.train.precision import Placement
from cornstarch.train.profiling import ranged
from cornstarch.train.tasks.task import Task


class PortionLoss:
    """The mean loss of a portion, where and as the run computes it.

    Args:
        task: What is trained.
        placement: Where, and in what precision.
    """

    def __init__(self, task: Task, placement: Placement) -> None:
        self.task, self.placement = task, placement

    def __call__(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the mean loss of a portion."""
        moved = self.placement.moved(inputs)
        with ranged(LOSS), self.placement.computing():
            return self.task.loss(moved)

    def computed_by(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return it, computed by what stands for the model: a stage of it."""
        self.task.wrapped = model
        try:
            return self(inputs)
        finally:
            self.task.wrapped = None


class Passes:
    """Forward and backward of all portions of a step.

    Args:
        loss: Of a portion.
        feed: Brings portions to the device.
        pipeline: This process's stages, if the model is cut into such.
        ahead: Encodes the items of several portions at once, if the run can.
        scaler: Keeps small gradients of fp16 from vanishing.
        shares: Over how many processes the loss of a step is shared out.
    """

    def __init__(
        self,
        loss: PortionLoss,
        feed: Feed,
        pipeline: Pipeline | None,
        ahead: EncodedAhead | None,
        scaler: LossScale | None,
        shares: int,
    ) -> None:
        self._loss, self._feed, self._pipeline, self._ahead = loss, feed, pipeline, ahead
        self._scaler, self._shares = scaler, shares
        self._lends = lends(loss.task.model)

    def __call__(self, batch: StepBatch, totals: Totals) -> Tensor:
        """Add the gradients of a step to the parameters, and return this process's share of its loss.

        Args:
            batch: What this process trains on.
            totals: Waits for what all processes have together; asked when the first loss is there.
        """
        losses: list[Tensor] = []

        def scaled(number: int, mean: Tensor) -> Tensor:
            """Return what a portion's mean loss adds to the loss of the step, as gradients are to be taken of it."""
            tokens, count = batch.portions[number].trained_tokens, totals().trained_tokens
            loss = mean if tokens == count else mean * (tokens / max(count, 1))
            losses.append(loss.detach())
            if self._scaler is not None:  # gradients are multiplied by the shares when they are unscaled: in fp16 the
                return self._scaler.scale(loss)  # factor could make them overflow where they do not in one process
            # Gradients are averaged over processes, but each has only its share of the sum.
            return loss * self._shares if self._shares > 1 else loss

        if self._pipeline is not None:
            self._pipeline.train([portion.inputs for portion in batch.portions], scaled)
        else:
            with lending(self._loss.task.model) if self._lends else nullcontext():
                self._one_by_one(batch if self._ahead is None else self._ahead(batch), scaled)
        if not losses:
            return self._loss.placement.nothing()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _one_by_one(self, batch: StepBatch, scaled: Callable[[int, Tensor], Tensor]) -> None:
        """Do the passes of one portion after the other."""
        for number in range(len(batch.portions)):
            with gradients_kept_here(self._loss.task.wrapped, number + 1 < len(batch.portions)):
                loss = scaled(number, self._loss(self._feed.inputs(batch, number)))
                if loss.requires_grad:  # a portion of text alone teaches a projector nothing
                    loss.backward()


__all__ = ["Passes", "PortionLoss"]
