"""One training step: microbatches → forward and backward → reduce → clip → optimizer.

`Trainer`, `Booster` and `PipelineEngine` all run this step. They differ in where microbatches come from and in how the
loss of one is weighed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.compat import divides_gradients, step_dividing
from cornstarch.engine.optimizer import AveragedWeights
from cornstarch.engine.parallelize import ParallelModel
from cornstarch.errors import ConfigError
from cornstarch.kernels.master_weights import GradientSums
from cornstarch.metrics.attribution import CLIPPING, OPTIMIZER
from cornstarch.metrics.profiler import record_range
from cornstarch.parallel import distributed
from cornstarch.parallel.ddp_fsdp import defer_gradient_sync
from cornstarch.parallel.gradients import LossScale, clip_gradients, compute_clip_divisor

Inputs = Mapping[str, Any]
LossOf = Callable[[int, Any], Tensor]
"""Takes the number of a microbatch and the model's output; returns the weighed loss."""


class TrainStep:
    """The step of one optimizer over a parallel model.

    Calling it does a whole step. `forward_backward`, `unscale`, `clip` and `update` are its phases, for callers that do
    something in between.

    Args:
        model: What `parallelize` returned.
        trained: The parameters of this rank that take gradients; with ZeRO-1 its shards of them.
        optimizer: Updates them; None if this rank has none to update.
        max_grad_norm: Gradients are clipped to this norm, over all parameters on all ranks.
        loss_scale: For fp16: keeps small gradients from vanishing.
        loss_shards: The number of ranks that each compute a part of the loss.
        averages: The moving average of the weights, if there is one.
        needs_norm: Whether `clip` computes the norm although nothing is clipped.
    """

    def __init__(
        self,
        model: ParallelModel,
        trained: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        max_grad_norm: float | None = None,
        loss_scale: LossScale | None = None,
        loss_shards: int = 1,
        averages: AveragedWeights | None = None,
        needs_norm: bool = False,
    ) -> None:
        self.model, self.optimizer, self.max_grad_norm, self.averages = model, optimizer, max_grad_norm, averages
        self.scaler, self._needs_norm = loss_scale, needs_norm
        self._trained, self._loss_shards = list(trained), loss_shards
        if loss_scale is not None and any(parameter.dtype == torch.float16 for parameter in trained):
            raise ConfigError("precision = fp16 needs trained weights in fp32: leave `dtype` out, or set it to fp32.")
        # An optimizer that divides gradients while it reads them saves a pass over all of them. Not with shards, whose
        # norm is on other ranks, too, nor with a scaler, which divides them itself.
        self._optimizer_divides = (
            distributed.is_single_process()
            and loss_scale is None
            and optimizer is not None
            and divides_gradients(optimizer)
        )
        self._divisor: Tensor | None = None
        self._sums = GradientSums(self._trained)
        self.before_update: Callable[[], None] | None = None
        """Called before the weights change; it may raise."""
        self.is_finite = True
        """Whether the gradients of the last fp16 step were finite; if not, the step is left out."""

    def __call__(self, microbatches: Sequence[Inputs], loss_of: LossOf) -> Tensor | None:
        """Do a whole step; return the norm of the gradients before clipping, None if nothing is clipped."""
        self.forward_backward(microbatches, len(microbatches), loss_of)
        self.unscale()
        norm = self.clip()
        self.update()
        return norm

    def forward_backward(
        self, microbatches: Iterable[Inputs], count: int, loss_of: LossOf, *, backward: bool = True
    ) -> None:
        """Run all microbatches and leave their gradients, reduced over ranks, in the parameters.

        Args:
            microbatches: The inputs of each, the same on all ranks of a replica; a pipeline takes them all at once.
            count: How many there are.
            loss_of: Called where the loss is computed, once for each.
            backward: False runs forward alone.
        """
        model = self.model
        if model.pipeline is not None:
            run = model.pipeline.train if backward else model.pipeline.forward
            run(list(microbatches), loss_of)
            return
        zero1 = model.zero1 if backward else None
        sums = self._sums.collect() if backward and count > 1 else nullcontext()
        with sums, model.balance_encoders() if backward else nullcontext():
            for number, inputs in enumerate(microbatches):
                # Gradients are reduced once, with the last microbatch.
                is_last = number + 1 >= count
                overlap = zero1.overlap_reduction() if zero1 is not None and is_last else nullcontext()
                with defer_gradient_sync(model.wrapped, backward and not is_last), overlap:
                    loss = loss_of(number, model.call(model.callable_module, inputs))
                    if backward and loss.requires_grad:  # text alone teaches a projector nothing
                        loss.backward()
        if zero1 is not None:
            zero1.reduce_gradients()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return this rank's part of the step's loss, scaled as gradients are to be taken of it."""
        # In fp16 the number of shards is multiplied in when gradients are unscaled: here it could make them overflow
        # where they do not in one process.
        if self.scaler is not None:
            return self.scaler.scale(loss)
        # Gradients are averaged over ranks, but each rank has only its part of the sum.
        return loss * self._loss_shards if self._loss_shards > 1 else loss

    def unscale(self) -> None:
        """Undo the scale of the losses: of all gradients, because all are clipped, also those that others step."""
        if self.scaler is not None:
            self.scaler.unscale(self._trained, self._loss_shards)

    def clip(self) -> Tensor | None:
        """Clip gradients by their norm over all ranks; return that norm, None if no one asks for it."""
        if self.max_grad_norm is None and self.scaler is None and not self._needs_norm:
            return None
        max_norm = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        with record_range(CLIPPING):
            if self._optimizer_divides:
                norm, self._divisor = compute_clip_divisor(self._trained, max_norm)
                return norm
            if (pipeline := self.model.pipeline) is None:
                is_divided = self.model.zero1 is not None
                norm = clip_gradients(self.model.wrapped, self._trained, max_norm, is_divided=is_divided)
            else:  # a tied weight counts on the first stage that has it, or the norm would count it twice
                shared = pipeline.holders, pipeline.copies(), pipeline.device
                norm = clip_gradients(None, self._trained, max_norm, *shared)
            if self.scaler is not None:
                self.is_finite = bool(torch.isfinite(norm))  # the norm is that of all ranks, so they agree
            return None if self.max_grad_norm is None and not self._needs_norm else norm

    def update(self) -> None:
        """Step the optimizer, drop the gradients, and update the moving average of the weights."""
        if self.before_update is not None:
            self.before_update()
        with record_range(OPTIMIZER):
            if self._divisor is not None:
                assert self.optimizer is not None
                step_dividing(self.optimizer, self._divisor)
                self._divisor = None
            elif self.is_finite and self.optimizer is not None:
                self.optimizer.step()
            self.finish_update()
            self.zero_grad()
            if self.averages is not None:
                self.averages.update()

    def finish_update(self) -> None:
        """Adjust the loss scale, and with ZeRO-1 send every rank the parameters that others have stepped."""
        if self.scaler is not None:  # a step whose gradients overflow was left out
            self.scaler.update(self.is_finite)
        if self.model.zero1 is not None:
            self.model.zero1.gather_parameters()

    def leave_out(self) -> None:
        """Drop the gradients of a step: weights, states, averages and the loss scale stay as they are."""
        self._divisor, self.is_finite = None, True
        self.zero_grad()

    def zero_grad(self) -> None:
        for parameter in self._trained:
            parameter.grad = None

    def use_averages(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the moving average of its weights, if there is one."""
        return nullcontext() if self.averages is None else self.averages.in_use()


class WeighedLosses:
    """Weighs the mean losses of microbatches, so that they add up to the mean over all trained tokens of a step.

    A mean of means would count tokens of short microbatches more.
    """

    def __init__(self, step: TrainStep, weights: Sequence[int], total: Callable[[], int]) -> None:
        self._step, self._weights, self._total = step, weights, total
        self._losses: list[Tensor] = []

    def __call__(self, number: int, mean: Tensor) -> Tensor:
        """Return what a microbatch's mean loss adds to the step's, as gradients are to be taken of it."""
        # Asked for only now: the totals of all ranks travel while the first microbatch is computed.
        weight, total = self._weights[number], self._total()
        loss = mean if weight == total else mean * (weight / max(total, 1))
        self._losses.append(loss.detach())
        return self._step.scale_loss(loss)

    def sum(self, device: torch.device) -> Tensor:
        """Return this rank's part of the step's loss."""
        if not self._losses:
            return torch.zeros((), device=device)
        return self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).sum()
