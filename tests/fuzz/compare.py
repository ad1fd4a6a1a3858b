"""How far a run in several processes is from the same run in one.

Compared are every parameter's *movement*, the norms of gradients, every logged value that is no time or memory, the
evaluation, the model's answers, and the weights that are read back from the checkpoint. A parameter may be off by
`TOLERANCE` times the scale of its movement: the largest change of any of its numbers in one process, but at least
`FLOOR` times the largest change in the whole model (the gradient of a key's bias is zero in truth, and its movement
is rounding alone), and a few units in the last place of the weights themselves.

In bf16 and fp16, rounding differs wherever sums are split, so norms of differences are compared with norms of movements
instead of number by number. How much rounding is, one process shows: the bound is a few times the distance between one
process in half precision and one process in fp32, and never less than `HALF`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.fuzz.work import Outcome, Values

TOLERANCE = 1e-4
FLOOR = 1e-2
HALF = 0.1
FLIPPED = 0.15
"""In half precision: how far an accuracy may be off, because the likeliest of two equally likely words is another."""
_TIMES = 4.0  # the distance between half precision and fp32 that several processes may be off
_ULPS = 8  # units in the last place: each step rounds the weights once, the steps' own rounding adds up
_LEFT_OUT = {"time", "tokens_per_second", "samples_per_second", "items_per_second", "seconds", "step_time",
             "data_wait", "copy_wait", "memory", "features", "text", "recompilations", "eager_layers",
             "expert_balance"}  # fmt: skip
_COMPARED_LINES = ("train", "evaluation", "shuffled")


@dataclass(frozen=True)
class Difference:
    """One thing that is off: how far, in units of what is allowed."""

    what: str
    times: float
    """More than 1 is a failure."""
    text: str


def compare(
    found: Sequence[Outcome], alone: Outcome, exact: Outcome | None = None, tolerance: float = TOLERANCE
) -> list[Difference]:
    """Return all that several processes did otherwise than one, the farthest first; what is equal is left out.

    Args:
        found: Of each rank.
        alone: Of one process.
        exact: Of one process in fp32, where the others compute in half precision.
        tolerance: In fp32.
    """
    bound = _bound_of_numbers(alone, exact, tolerance)
    differences = [
        *_compare_norms(found, alone, bound),
        *_compare_metrics(found[0].metrics, alone.metrics, bound),
    ]
    for what, parts, expected in (
        ("parameter", [one.parameters for one in found], alone.parameters),
        ("averaged parameter", [one.averaged for one in found], alone.averaged),
    ):
        differences += _compare_weights(parts, expected, _Bounds(alone, exact, tolerance), what)
    if exact is None and found[0].answers != alone.answers:
        text = f"answers {found[0].answers} instead of {alone.answers}"
        differences.append(Difference("answers", math.inf, text))
    return sorted((one for one in differences if not one.times <= 1), key=lambda one: -one.times)


def compare_loaded(loaded: Values, found: Sequence[Outcome]) -> list[Difference]:
    """Return how the weights that one process reads back differ from those that were trained."""
    trained: Values = {}
    for one in found:
        trained |= one.used
    differences = _names(loaded, trained, "in the checkpoint")
    for name in loaded.keys() & trained.keys():
        if not np.array_equal(loaded[name], trained[name]):
            off = _largest(loaded[name] - trained[name]) if loaded[name].shape == trained[name].shape else math.inf
            text = f"{name} is read back from the checkpoint with a difference of {off:.1e}"
            differences.append(Difference(f"checkpoint {name}", math.inf, text))
    return differences


def worst(found: Sequence[Outcome], alone: Outcome) -> float:
    """Return the farthest movement, in units of its scale; for the table."""
    merged: Values = {}
    for one in found:
        merged |= one.parameters
    scales = movement_scales(alone.parameters, alone.start)
    shared = merged.keys() & scales.keys()
    return max((_largest(merged[n] - alone.parameters[n]) / scales[n] for n in shared), default=0.0)


def has_moved(alone: Outcome) -> bool:
    """Whether training changed anything; if not, equal weights show nothing."""
    return any(not np.array_equal(value, alone.start[name]) for name, value in alone.parameters.items())


def movement_scales(end: Values, start: Values) -> dict[str, float]:
    """Return by parameter how far it moved, or what counts as such at least."""
    moved = {name: _largest(value - start[name]) for name, value in end.items()}
    floor = FLOOR * max(moved.values(), default=0.0)
    eps = float(np.finfo(np.float32).eps)
    # So much rounding of the weights themselves is as much as the tolerance allows.
    rounding = {name: _ULPS * eps * _largest(value) / TOLERANCE for name, value in end.items()}
    return {name: max(size, floor, rounding[name], 1e-30) for name, size in moved.items()}


class _Bounds:
    """How far each parameter may be off.

    Args:
        alone: Of one process.
        exact: The same in fp32, where it is in half precision.
        tolerance: In fp32.
    """

    def __init__(self, alone: Outcome, exact: Outcome | None, tolerance: float) -> None:
        self._alone, self._exact, self._tolerance = alone, exact, tolerance
        self._scales = movement_scales(alone.parameters, alone.start)

    def measure(self, name: str, found: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
        """Return how far a parameter is off, and how far it may be."""
        if self._exact is None:
            return _largest(found - expected) / self._scales[name], self._tolerance
        size = _size_in_half(name, self._alone)
        noise = _norm(self._alone.parameters[name] - self._exact.parameters[name]) / size
        return _norm(found - expected) / size, max(HALF, _TIMES * noise)


def _compare_weights(parts: Sequence[Values], expected: Values, bounds: _Bounds, what: str) -> list[Difference]:
    differences: list[Difference] = []
    merged: Values = {}
    for part in parts:
        for name, value in part.items():
            if name in merged and not np.array_equal(merged[name], value, equal_nan=True):
                off = _largest(merged[name] - value)
                differences.append(Difference(f"ranks {name}", math.inf, f"{name} differs by {off:.1e} between ranks"))
            merged[name] = value
    differences += _names(merged, expected, f"as {what}")
    for name in merged.keys() & expected.keys():
        if merged[name].shape != expected[name].shape:
            text = f"{what} {name} has shape {merged[name].shape} instead of {expected[name].shape}"
            differences.append(Difference(f"{what} {name}", math.inf, text))
            continue
        off, bound = bounds.measure(name, merged[name], expected[name])
        if not off <= bound:  # NaN is off
            text = f"{what} {name} is off by {off:.1e} of its movement (allowed {bound:.0e})"
            differences.append(Difference(f"{what} {name}", off / bound if off == off else math.inf, text))
    return differences


def _size_in_half(name: str, alone: Outcome) -> float:
    """Return the norm of a parameter's movement, or of a movement that is a tenth of the largest in the model.

    A parameter that hardly moves (LoRA's first matrix, while the second is zero) does so by products of roundings.
    """
    moved = {key: _norm(value - alone.start[key]) for key, value in alone.parameters.items()}
    largest = max(size / math.sqrt(alone.parameters[key].size) for key, size in moved.items())
    return max(moved[name], 0.1 * largest * math.sqrt(alone.parameters[name].size), 1e-30)


def _bound_of_numbers(alone: Outcome, exact: Outcome | None, tolerance: float) -> float:
    """Return how far losses and norms may be off, relative to themselves."""
    if exact is None:
        return tolerance
    pairs = [(a, b) for a, b in zip(alone.norms, exact.norms, strict=False) if a is not None and b is not None]
    noise = [abs(a - b) / max(abs(b), 1e-30) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    return max(HALF, _TIMES * max(noise, default=0.0))


def _compare_norms(found: Sequence[Outcome], alone: Outcome, bound: float) -> list[Difference]:
    differences = []
    for rank, one in enumerate(found):
        # A run that was resumed has its own steps only.
        expected = alone.norms[len(alone.norms) - len(one.norms) :]
        for step, (a, b) in enumerate(zip(one.norms, expected, strict=False)):
            if (text := _off(a, b, bound)) is not None:
                what = f"gradient norm of step {step + 1} on rank {rank}"
                differences.append(Difference(what, text[0], f"{what} is {a} instead of {b}"))
                break
    return differences


def _compare_metrics(
    found: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]], bound: float
) -> list[Difference]:
    lines, others = (
        {(line["kind"], line["step"], line.get("modality")): line for line in one if line["kind"] in _COMPARED_LINES}
        for one in (found, expected)
    )
    differences = []
    # A run that evaluates at its end and is resumed has evaluated in between; one without a break has not.
    last = max((line["step"] for line in expected), default=0)
    between = {key for key in lines.keys() ^ others.keys() if key[0] != "train" and key[1] != last}
    if missing := sorted(map(str, (lines.keys() ^ others.keys()) - between)):
        differences.append(Difference("metrics", math.inf, f"lines only on one side: {', '.join(missing)}"))
    for key in sorted(lines.keys() & others.keys(), key=str):
        a, b = _flatten(lines[key]), _flatten(others[key])
        for name in sorted(a.keys() | b.keys()):
            far = _off(a.get(name), b.get(name), bound)
            if far is not None and bound > TOLERANCE and "accuracy" in name and abs(a[name] - b[name]) <= FLIPPED:
                continue
            if far is not None:
                what = f"{key[0]} {name} of step {key[1]}"
                differences.append(Difference(what, far[0], f"{what} is {a.get(name)} instead of {b.get(name)}"))
    return differences


def _off(found: Any, expected: Any, bound: float) -> tuple[float] | None:
    """Return how far two values are apart in units of the bound, if more than allowed."""
    if isinstance(found, int | float) and isinstance(expected, int | float):
        if found == expected or (math.isnan(found) and math.isnan(expected)):
            return None
        times = abs(found - expected) / (bound * max(abs(expected), 1e-30))
        return None if times <= 1 else (times if times == times else math.inf,)
    return None if found == expected else (math.inf,)


def _flatten(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if key in _LEFT_OUT:
            continue
        if isinstance(inner, Mapping):
            flat |= _flatten(inner, f"{before}{key}.")
        else:
            flat[before + key] = inner
    return flat


def _names(found: Values, expected: Values, where: str) -> list[Difference]:
    odd = sorted(found.keys() ^ expected.keys())
    if not odd:
        return []
    some = ", ".join(f"{name} ({'extra' if name in found else 'missing'})" for name in odd[:4])
    return [Difference("names", math.inf, f"{len(odd)} names only on one side {where}: {some}")]


def _largest(value: np.ndarray) -> float:
    return float(np.abs(value).max()) if value.size else 0.0


def _norm(value: np.ndarray) -> float:
    return float(np.linalg.norm(value.astype(np.float64)))
