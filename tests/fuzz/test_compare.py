"""What counts as equal: rounding, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.fuzz.compare import TOLERANCE, compare, compare_loaded
from tests.fuzz.work import Outcome

START = {"a": np.ones((4, 4), np.float32), "b": np.zeros(3, np.float32)}
END = {"a": START["a"] + np.float32(0.01), "b": START["b"] + np.float32(0.01)}
LINES: list[dict[str, Any]] = [
    {"kind": "train", "step": 1, "time": 1.0, "loss": 2.0, "grad_norm": 1.5, "learning_rate": 0.1, "tokens": 9},
    {"kind": "evaluation", "step": 1, "time": 1.0, "loss": 3.0, "sources": {"held-out": {"loss": 3.0, "count": 2}}},
]
ALONE = Outcome(END, {}, START, [1.5], LINES)


def found(**changes: Any) -> Outcome:
    return replace(Outcome(dict(END), {}, {}, [1.5], LINES), **changes)


def off(name: str, share: float) -> dict[str, np.ndarray]:
    """Return the weights with one number that moved by so much more than it should have."""
    values = {key: value.copy() for key, value in END.items()}
    values[name].flat[0] += np.float32(0.01 * share)
    return values


def lines(**changes: Any) -> list[dict[str, Any]]:
    return [{**LINES[0], **changes}, LINES[1]]


@pytest.mark.parametrize(
    "ranks",
    [
        [found()],
        [found(), found(metrics=[])],
        [found(parameters={"a": END["a"]}), found(parameters={"b": END["b"]})],
        [found(parameters=off("b", TOLERANCE / 2))],
        [found(metrics=lines(loss=2.0 * (1 + TOLERANCE / 2), time=7.0))],
    ],
    ids=["equal", "one rank logs", "stages", "rounding", "rounding of a loss"],
)
def test_equal(ranks: list[Outcome]) -> None:
    assert compare(ranks, ALONE) == []


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([found(parameters=off("b", 0.01))], "parameter b is off by 1.0e-02"),
        ([found(parameters=off("a", 0.01))], "parameter a is off by 1.0e-02"),
        ([found(parameters={"a": END["a"]})], "b (missing)"),
        ([found(parameters={**END, "c": END["b"]})], "c (extra)"),
        ([found(parameters={**END, "b": END["b"][:2]})], "has shape (2,) instead of (3,)"),
        ([found(parameters={**END, "b": END["b"] * np.float32(np.nan)})], "parameter b is off by nan"),
        ([found(), found(parameters=off("b", 1e-6))], "b differs by"),
        ([found(averaged=END)], "as averaged parameter"),
        ([found(norms=[1.6])], "gradient norm of step 1 on rank 0 is 1.6 instead of 1.5"),
        ([found(norms=[None])], "is None instead of 1.5"),
        ([found(metrics=lines(learning_rate=0.2))], "learning_rate of step 1 is 0.2 instead of 0.1"),
        ([found(metrics=lines(tokens=10))], "tokens of step 1 is 10 instead of 9"),
        ([found(metrics=LINES[:1])], "lines only on one side"),
        ([found(answers=["a cat"])], "answers ['a cat'] instead of []"),
    ],
)
def test_different(ranks: list[Outcome], said: str) -> None:
    assert any(said in one.text for one in compare(ranks, ALONE)), compare(ranks, ALONE)


def test_half_precision_is_measured_by_its_distance_from_fp32() -> None:
    noise = replace(ALONE, parameters={name: value + np.float32(0.001) for name, value in END.items()})
    near, far = off("b", 0.2), off("b", 2.0)
    assert compare([found(parameters=near)], ALONE, exact=noise) == []
    assert compare([found(parameters=far)], ALONE, exact=noise)
    assert compare([found(parameters=near)], ALONE, exact=ALONE)


def test_checkpoint() -> None:
    assert compare_loaded(END, [found()]) == []
    assert compare_loaded(off("b", 1e-6), [found()])
    assert "b (missing)" in compare_loaded({"a": END["a"]}, [found()])[0].text
    assert compare_loaded(END, [found(averaged=off("b", 0.1))])  # what is used are the averaged weights
