"""Losses scaled up, so that small gradients of fp16 do not vanish; down again when large ones overflow."""

from __future__ import annotations

from cornstarch.errors import ConfigError


class LossScale:
    """What losses are multiplied with. It changes with what was found in the gradients of each step.

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
