"""Losses scaled up, so that small gradients of fp16 do not vanish; down again when large ones overflow.

torch's `GradScaler` looks at the gradients of one optimizer in one process. Here the norm of all gradients, wherever
they are, decides: whether it is finite is known to all ranks alike, so that all of them step, or none does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.compat import multiply_all
from cornstarch.errors import ConfigError
from cornstarch.parallel.data import local_value


class LossScale:
    """What losses are multiplied with. It changes with what was found in the gradients of each step.

    A step is: backward of `value` × loss, `unscale`, the norm of all gradients, the optimizer's step if the norm is
    finite, `update`.

    Args:
        initial: At first.
        growth_factor: By how much it grows after `growth_interval` steps of finite gradients.
        backoff_factor: What it is multiplied with after `hysteresis` steps of infinite ones.
        growth_interval: Steps.
        hysteresis: Steps.
        least: The least it can be.
        most: The most it can be.
    """

    def __init__(
        self,
        initial: float = 2**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        least: float = 1.0,
        most: float = 2**32,
    ) -> None:
        if not (0 < least <= initial <= most):
            raise ConfigError(
                f"min_scale = {least}, initial_scale = {initial}, max_scale = {most}: expected numbers above 0 in "
                "this order."
            )
        if not (growth_factor >= 1 and 0 < backoff_factor <= 1 and growth_interval >= 1 and hysteresis >= 1):
            raise ConfigError(
                f"growth_factor = {growth_factor}, backoff_factor = {backoff_factor}, growth_interval = "
                f"{growth_interval}, hysteresis = {hysteresis}: expected at least 1, at most 1 and above 0, at least "
                "1, at least 1."
            )
        self.value = float(initial)
        self._growth, self._backoff, self._interval = growth_factor, backoff_factor, growth_interval
        self._hysteresis, self._least, self._most = hysteresis, float(least), float(most)
        self._finite = self._infinite = 0

    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss to take gradients of."""
        return loss * self.value

    @torch.no_grad()
    def unscale(self, parameters: Sequence[nn.Parameter], factor: float = 1.0) -> None:
        """Divide gradients by the scale.

        Args:
            parameters: All that this rank holds.
            factor: What gradients are multiplied with besides.
        """
        gradients = [local_value(parameter.grad) for parameter in parameters if parameter.grad is not None]
        multiply_all(gradients, torch.tensor(factor / self.value))

    def get_scale(self) -> float:
        """Return `value`, by the name that torch's `GradScaler` has for it."""
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """Return the state, by the names of torch's `GradScaler`."""
        return {
            "scale": self.value,
            "growth_factor": self._growth,
            "backoff_factor": self._backoff,
            "growth_interval": self._interval,
            "_growth_tracker": self._finite,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.value, self._finite = float(state["scale"]), int(state["_growth_tracker"])
        self._growth, self._backoff = float(state["growth_factor"]), float(state["backoff_factor"])
        self._interval = int(state["growth_interval"])

    def update(self, is_finite: bool) -> None:
        """Note whether all gradients of a step were finite."""
        if not is_finite:
            self._finite, self._infinite = 0, self._infinite + 1
            if self._infinite >= self._hysteresis:
                self.value = max(self._least, self.value * self._backoff)
                self._infinite = 0
            return
        self._finite += 1
        if self._finite >= self._interval:
            self.value = min(self._most, self.value * self._growth)
            self._finite = self._infinite = 0


__all__ = ["LossScale"]
