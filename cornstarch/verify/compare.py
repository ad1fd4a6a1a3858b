"""Compares the recorded steps of two runs: losses, gradients, parameters and module outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

TOLERANCE = 1e-4
"""How far a number may be off: this times (its own size + FLOOR × the largest number beside it)."""
FLOOR = 1e-2
NUMBERS, RECORD = "numbers-{}.safetensors", "record.json"


@dataclass(frozen=True)
class PartDifference:
    """How far the gradients and the parameters of one part are off."""

    part: str
    gradients: float
    parameters: float
    begins: str | None
    """The wrong gradient that is computed first: the last one of the part in the order of the model."""
    missing: tuple[str, ...]
    """Gradients that only one of the two records has."""


@dataclass(frozen=True)
class Difference:
    """How far a record is from that of one process; 0 is equal to the bit."""

    loss: float
    parts: list[PartDifference]
    output: str | None = None
    """The first module whose output, of the same shape in both, is another one."""

    @property
    def is_equal(self) -> bool:
        """Whether rounding explains it."""
        wrong = [one for one in self.parts if one.missing or max(one.gradients, one.parameters) > TOLERANCE]
        return self.loss <= TOLERANCE and not wrong

    @property
    def begins(self) -> str | None:
        """The module where it begins: that of the first wrong output, or else of the first wrong gradient."""
        if self.output is not None:
            return self.output
        wrong = [one.begins for one in self.parts if one.begins is not None]
        return wrong[-1].rpartition(".")[0] if wrong else None


def compare_records(found: Path, expected: Path) -> Difference:
    """Compare two records."""
    ours, theirs = (json.loads((folder / RECORD).read_text(encoding="utf-8")) for folder in (found, expected))
    a, b = _numbers(found), _numbers(expected)
    pairs = zip(ours["losses"] + ours["norms"], theirs["losses"] + theirs["norms"], strict=True)
    loss = max(abs(x - y) / (abs(y) or 1.0) for x, y in pairs if x is not None)
    parts = [_part_difference(name, parameters, a, b) for name, parameters in theirs["parts"].items()]
    return Difference(loss, parts, _first_output(ours, theirs, a, b))


def _numbers(folder: Path) -> dict[str, Tensor]:
    """Return what all processes have written."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("numbers*.safetensors")):
        found |= load_file(file)
    assert found, f"{folder} has no numbers to compare"
    return found


def _first_output(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> str | None:
    """Return the first module that put out something else; what is cut has another shape, and says nothing."""
    shapes: dict[str, list[int]] = ours.get("outputs", {})
    for name, shape in theirs.get("outputs", {}).items():
        key = f"output {name}"
        if shapes.get(name) == shape and compute_deviations(found, {key: expected[key]}).get(key, 0.0) > 10 * TOLERANCE:
            return name
    return None


def _part_difference(
    part: str, names: list[str], found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> PartDifference:
    own = set(names)
    keys = [key for key in sorted({*found, *expected}) if key.split(" ")[-1] in own]
    both = {key for key in keys if key in found and key in expected}
    missing = tuple(key for key in keys if key not in both)
    off = {
        kind: compute_deviations(found, {key: expected[key] for key in both if key.startswith(kind)})
        for kind in ("gradient", "parameter")
    }
    order = {name: number for number, name in enumerate(names)}
    wrong = sorted((order[key.split(" ")[-1]], key) for key, far in off["gradient"].items() if far > TOLERANCE)
    begins = wrong[-1][1].split(" ")[-1] if wrong else None
    largest = {kind: max(values.values(), default=0.0) for kind, values in off.items()}
    return PartDifference(part, largest["gradient"], largest["parameter"], begins, missing)


def compute_deviations(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return how far each number is off: the largest |a − b| / (|b| + FLOOR × the largest |b| of all)."""
    there = {name: value for name, value in expected.items() if value.numel()}
    floor = FLOOR * max((float(value.abs().max()) for value in there.values()), default=0.0)
    return {
        name: float(((found[name] - value).abs() / (value.abs() + floor).clamp(min=1e-30)).max())
        for name, value in there.items()
    }
