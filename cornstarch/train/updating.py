"""What a step does with its gradients: clip them, let the optimizer change the weights, average those over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cornstarch.compat import divides_gradients, step_dividing
from cornstarch.errors import ConfigError
from cornstarch.parallel import processes
from cornstarch.parallel.clipping import clip_gradients, clipping_divisor
from cornstarch.parallel.zero1 import OwnedParameters
from cornstarch.train.attribution import CLIPPING, OPTIMIZER
from cornstarch.train.optim import AveragedWeights, make_optimizer, scale_rates
from cornstarch.train.profiling import ranged

if TYPE_CHECKING:
    from cornstarch.pipeline.apply import Pipeline
    from cornstarch.train.config import RunConfig
    from cornstarch.train.parts import Part
    from cornstarch.train.precision import Placement


class WeightUpdate:
    """The optimizer of a run, and everything that goes with it.

    Args:
        config: The run.
        parts: What this process has of the model.
        placement: Where it computes, and in what.
        pipeline: Whose stages the parts are, if there is one.
        replicas: That learn from a batch together.
        shares: Over how many ranks the loss of a step is shared out.
    """

    def __init__(
        self,
        config: RunConfig,
        parts: Sequence[Part],
        placement: Placement,
        pipeline: Pipeline | None,
        replicas: int,
        shares: int,
    ) -> None:
        self._most, self._pipeline, self._shares = config.optimizer.clip, pipeline, shares
        self.trained: Mapping[str, nn.Parameter] = {
            name: parameter for part in parts for name, parameter in part.trained.items()
        }
        """The parameters that change, by name."""
        self._clipped = list(self.trained.values())
        self.owned: OwnedParameters | None = None
        """zero1: those of which this process has the optimizer's states."""
        if not processes.is_alone() and config.parallel.data.kind == "zero1":
            group = None if pipeline is None else pipeline.data_group
            self.owned = OwnedParameters(self.trained, group, is_stage=pipeline is not None)
        self.optimizer = make_optimizer(config.optimizer, parts, self.own_names)
        scale_rates(self.optimizer, config.optimizer.scale_rate, replicas)
        # Sharded gradients have their norm elsewhere, too, and a scaler divides them itself.
        self._divides = processes.is_alone() and placement.precision != "fp16" and divides_gradients(self.optimizer)
        self.scaler = placement.loss_scale()
        """Keeps small gradients of fp16 from vanishing."""
        self._is_finite = True
        if self.scaler is not None and any(p.dtype == torch.float16 for p in self._clipped):
            raise ConfigError("precision = fp16 needs trained weights in fp32: leave `dtype` out, or set it to fp32.")
        self.averages = AveragedWeights(self.trained, config.loop.ema) if config.loop.ema else None
        """Weights averaged over time, if the run asks for them."""

    @property
    def own_names(self) -> frozenset[str] | None:
        """The names of `owned`; None: all."""
        return None if self.owned is None else self.owned.names

    def unscale(self) -> None:
        """Undo the scale of the losses in the gradients of a step.

        Of all parameters, not only of those that this rank steps (zero1): all of them are clipped.
        """
        if self.scaler is not None:
            self.scaler.unscale(self._clipped, self._shares)

    def clip(self, wrapped: nn.Module | None) -> tuple[Tensor | None, Tensor | None]:
        """Clip gradients and return their norm; or return also what the optimizer is to divide them by.

        Args:
            wrapped: What is called instead of the model.
        """
        if self._most is None and self.scaler is None:
            return None, None
        with ranged(CLIPPING):
            if self._divides:
                assert self._most is not None
                return clipping_divisor(self._clipped, self._most)
            if self.scaler is None:
                return self._clip(wrapped), None
            norm = self._clip(wrapped)
            self._is_finite = bool(torch.isfinite(norm))  # of all ranks' gradients: they agree
            return None if self._most is None else norm, None

    def _clip(self, wrapped: nn.Module | None) -> Tensor:
        most = float("inf") if self._most is None else self._most
        if self._pipeline is None:
            return clip_gradients(wrapped, self._clipped, most)
        holders, copies = self._pipeline.holders, self._pipeline.copies()
        return clip_gradients(None, self._clipped, most, holders, copies, self._pipeline.device)

    def apply(self, divisor: Tensor | None) -> None:
        """Change the weights, and forget the gradients.

        Args:
            divisor: What gradients are to be divided by, if `clip` has not divided them itself.
        """
        with ranged(OPTIMIZER):
            if divisor is not None:
                step_dividing(self.optimizer, divisor)
            elif self._is_finite:
                self.optimizer.step()
            if self.scaler is not None:  # a step whose gradients overflow is left out
                self.scaler.update(self._is_finite)
            if self.owned is not None:
                self.owned.share()
            self.forget()
            if self.averages is not None:
                self.averages.update()

    def forget(self) -> None:
        """Drop the gradients."""
        for parameter in self._clipped:
            parameter.grad = None

    def averaged(self) -> AbstractContextManager[None]:
        """Run a block with the weights that are averaged over time, if there are any."""
        return nullcontext() if self.averages is None else self.averages.in_use()


__all__ = ["WeightUpdate"]
