"""Fixed orders: so many forwards ahead, then one backward and one forward in turn.

A *line* is what one stage does, or the stages of one module at one place, in its order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.greedy import arrange
from cornstarch.schedule.kinds import Action, Kind, backward_of
from cornstarch.schedule.timing import makespan, times

Line = list[Action]
Lists = tuple[tuple[Action, ...], ...]
"""The actions of each place."""


def depths(graph: StageGraph) -> list[int]:
    """Return how many microbatches each stage has under way with 1F1B: one for each stage to the end, and its own.

    With equal stages, the gradient of the first then comes back just when the next forward would be one too many.
    """
    return [graph.distance(stage) + 1 for stage in range(len(graph.nodes))]


def stage_lines(
    graph: StageGraph, microbatches: int, ahead: Sequence[int], lags: Sequence[int] | None = None
) -> list[Line]:
    """Return a line for each stage.

    ahead: by stage, the forwards before its first backward.
    lags: by stage, how many microbatches the gradients of weights come after those of inputs. Default: together.
    """
    lines = []
    for stage in range(len(graph.nodes)):
        forwards = [Action(Kind.F, stage, m) for m in range(microbatches)]
        kinds = backward_of(graph, stage, split=lags is not None)
        backwards: list[tuple[Action, ...]] = [
            tuple([Action(kind, stage, m) for kind in kinds]) for m in range(microbatches)
        ]
        if lags is not None and len(kinds) > 1:
            backwards = _lagging(backwards, min(lags[stage], microbatches))  # more is no later
        lines.append(in_turn(forwards, backwards, ahead[stage]))
    return lines


def _lagging(backwards: Sequence[tuple[Action, ...]], lag: int) -> list[tuple[Action, ...]]:
    """Return backwards of two actions each, the second of them `lag` microbatches after the first."""
    none: list[tuple[Action, ...]] = [()] * lag
    first = [*(backward[:1] for backward in backwards), *none]
    second = [*none, *(backward[1:] for backward in backwards)]
    return [one + other for one, other in zip(first, second, strict=True)]


def in_turn(forwards: Sequence[Action], backwards: Sequence[Iterable[Action]], ahead: int) -> Line:
    """Return so many forwards, then one backward and one forward in turn, then the other backwards."""
    line = [*forwards[:ahead]]
    for backward, forward in zip_longest(backwards, forwards[ahead:]):
        line += backward or ()
        line += () if forward is None else (forward,)
    return line


def by_place(graph: StageGraph, lines: Sequence[Line]) -> tuple[Lists, float | None]:
    """Return the lines, by place, and how long they take, where that comes out by the way.

    A place that has several lines does the actions at their heads as they become due.
    """
    places = [graph.nodes[line[0].stage].place for line in lines]
    if len({*places}) < len(places):
        return arrange(graph, lines)
    return tuple(tuple(line) for _, line in sorted(zip(places, lines, strict=True), key=lambda pair: pair[0])), None


def timed(graph: StageGraph, found: tuple[Lists, float | None]) -> tuple[Lists, float]:
    """Return the actions of each place, and how long they take."""
    lists, took = found
    return lists, makespan(times(graph, lists)) if took is None else took
