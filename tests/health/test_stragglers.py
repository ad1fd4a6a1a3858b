"""Ranks that are slower than the median are named."""

from __future__ import annotations

import pytest

from cornstarch.health.heartbeat import Heartbeat
from cornstarch.health.stragglers import StragglerWatch


def beats(steps: int, *work: float) -> list[Heartbeat]:
    """Return what ranks post after so many steps, of which each works so long on one."""
    return [Heartbeat(rank, steps, steps=steps, step=steps, busy=steps * one) for rank, one in enumerate(work)]


@pytest.mark.parametrize(
    ("work", "named"),
    [
        ((0.1, 0.1), []),
        ((0.1, 0.16), [1]),
        ((0.1, 0.14), []),
        ((0.1, 0.1, 0.1, 0.4), [3]),
        ((0.3, 0.1, 0.1, 0.4), [0, 3]),
        ((0.001, 0.003), []),  # of steps of 0.2 s that is nothing
    ],
)
def test_a_rank_is_named_that_works_half_again_as_long(work: tuple[float, ...], named: list[int]) -> None:
    watch = StragglerWatch(20.0)
    assert watch.add(beats(10, *work), 0.0) == []
    assert watch.add(beats(60, *work), 10.0) == []
    found = watch.add(beats(110, *work), 20.0)
    assert [one.rank for one in found] == named
    if named:
        assert "the others wait for it" in found[0].describe("node") and found[0].step == 110


def test_few_steps_say_nothing() -> None:
    watch = StragglerWatch(20.0)
    watch.add(beats(10, 1.0, 9.0), 0.0)
    assert watch.add(beats(12, 1.0, 9.0), 20.0) == []
    assert [one.rank for one in watch.add(beats(20, 1.0, 9.0), 100.0)] == [1]
