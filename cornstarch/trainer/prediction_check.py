"""Compares the steps of a run with what its plan predicted, and says so when they part."""

from __future__ import annotations

from statistics import median
from typing import Any

from cornstarch.planner.expected_step import ExpectedStep
from cornstarch.report.number_format import format_error, format_step_time

_WARM_UP = 10  # steps in which layers are compiled and memory is allocated
_ENOUGH = 20  # steps after which a comparison is worth telling


class PredictionCheck:
    """Takes the times of a run's steps as they are logged.

    Steps may be shorter than predicted because samples are: predictions assume rows of a certain length, and are scaled
    to the tokens that steps really had. What is compared is the median.
    """

    def __init__(self, expected: ExpectedStep, first: int = 0) -> None:
        self.expected = expected
        self._first, self._counted = first + _WARM_UP, 0
        self._ratios: list[float] = []
        self._real: list[float] = []
        self._is_told = False

    def add(self, step: int, steps: int, seconds: float, tokens: float) -> float:
        """Add the mean time and tokens of the last steps; return the seconds that were predicted for one."""
        predicted = self.expected.scale(tokens)
        if step - steps >= self._first and seconds > 0:
            self._counted += steps
            self._ratios.append(seconds / predicted)
            self._real.append(seconds)
        return predicted

    @property
    def ratio(self) -> float | None:
        """The median of real over predicted times; None before there are enough steps."""
        return median(self._ratios) if self._counted >= _ENOUGH else None

    def read_new(self) -> str | None:
        """Return what to tell the user, once: that steps differ from the prediction by more than its tolerance."""
        ratio = self.ratio
        if self._is_told or ratio is None or abs(ratio - 1) <= self.expected.tolerance:
            return None
        self._is_told = True
        longer = f"{ratio - 1:.0%} longer" if ratio > 1 else f"{1 - ratio:.0%} shorter"
        real = median(self._real)
        predicted = f"{format_step_time(real / ratio)}{format_error(self.expected.error)}"
        text = (
            f"A step takes {format_step_time(real)}, {longer} than the {predicted} that were predicted for "
            f"{self.expected.cluster}. Where the time goes: cornstarch train --profile."
        )
        if not self.expected.is_measured:
            text += (
                " To predict from measurements: cornstarch doctor --measure --output FILE, and parallel.cluster=FILE."
            )
        return text

    def describe(self) -> dict[str, Any]:
        """Return what the report shows."""
        return {
            "cluster": self.expected.cluster, "seconds": self.expected.seconds, "ratio": self.ratio,
            "tolerance": self.expected.tolerance, "error": self.expected.error,
        }  # fmt: skip
