"""Zero-bubble schedules: backward is split, and gradients of weights, for which nobody waits, fill the gaps.

After Qi et al. 2023, "Zero Bubble Pipeline Parallelism"; for a chain of equal stages it is their ZB-H1. The orders are
found by a list scheduler, so there is one for any graph and any costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.greedy import arrange
from cornstarch.schedule.kinds import Action, Kind, backward_of, duration
from cornstarch.schedule.orders import Line, Lists, by_place, depths, stage_lines, timed


def zero_bubble(graph: StageGraph, microbatches: int, usual: tuple[Lists, float | None]) -> tuple[Lists, float]:
    """Return the fastest of some orders, in simulation with the graph's costs, and its time: never more than 1F1B's.

    No stage holds more microbatches than the fullest of its module does with 1F1B. Of equally fast orders the first is
    taken; one that cannot be beaten ends the search.

    usual: 1F1B, and its time, if it is known.
    """
    best: Lists = ()
    least = float("inf")
    bound = least_time(graph, microbatches)
    for lists, took in _candidates(graph, microbatches, usual):
        if took < least:
            best, least = lists, took
        if least <= bound:  # 1F1B takes no less, either
            return best, least
    usual = timed(graph, usual)
    if least <= usual[1]:
        return best, least
    # 1F1B itself, but that gradients of inputs are on their way before those of weights are computed.
    return timed(graph, (tuple(_split(graph, mine) for mine in usual[0]), None))


def _candidates(
    graph: StageGraph, microbatches: int, usual: tuple[Lists, float | None]
) -> Iterator[tuple[Lists, float]]:
    """Yield orders and how long each takes."""
    own, fullest = depths(graph), _fullest(graph)
    if all(graph.backward(stage) != "both" for stage in range(len(graph.nodes))):  # there is nothing to split
        lists, took = timed(graph, usual)
        yield tuple(_split(graph, mine) for mine in lists), took
    elif graph.places == len(graph.nodes):
        # Gradients of weights as late as the memory allows: best for equal stages, one at each place.
        lags = [most - depth for most, depth in zip(fullest, own, strict=True)]
        yield timed(graph, by_place(graph, stage_lines(graph, microbatches, own, lags)))
    # What can be done when it can be done: better where costs differ, but a greedy choice may lose in the end.
    yield arrange(graph, _lines(graph, microbatches), fullest)


def _split(graph: StageGraph, actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return a place's actions with each backward split in two."""
    kinds = {stage: backward_of(graph, stage, split=True) for stage in {action.stage for action in actions}}
    found: Line = []
    for action in actions:
        whole = action.kind is Kind.B
        found += [Action(kind, *action[1:]) for kind in kinds[action.stage]] if whole else [action]
    return tuple(found)


def _fullest(graph: StageGraph) -> list[int]:
    """Return, by stage, how many microbatches the first stage of its module holds with 1F1B."""
    first: dict[str, int] = {}
    for node, depth in zip(graph.nodes, depths(graph), strict=True):
        first[node.module] = max(first.get(node.module, 0), depth)
    return [first[node.module] for node in graph.nodes]


def _lines(graph: StageGraph, microbatches: int) -> list[Line]:
    """Return a line for each kind of action at each stage: only microbatches keep their order."""
    works = [(kind, s) for s in range(len(graph.nodes)) for kind in (Kind.F, *backward_of(graph, s, split=True))]
    return [[Action(kind, stage, m) for m in range(microbatches)] for kind, stage in works]


def least_time(graph: StageGraph, microbatches: int) -> float:
    """Return a time that no order can beat.

    A place does all its work after its first input can be there. The last that a stage does, gradients of weights left
    out, are gradients of inputs, after all its forwards; from there they go back to where the first weights are.
    """
    earliest: dict[int, float] = {}
    back: dict[int, float] = {}  # from the end of a stage's gradients of inputs to that of its and all earlier ones
    by_depth = sorted(range(len(graph.nodes)), key=graph.depth)
    last = [backward_of(graph, stage, split=True)[:1] for stage in range(len(graph.nodes))]
    for stage in by_depth:
        before = graph.predecessors(stage)
        earliest[stage] = max((earliest[source] + graph.nodes[source].forward for source in before), default=0)
        own = graph.nodes[stage].backward_weight if graph.backward(stage) == "both" else 0
        ways = [back[s] + duration(graph, kind, s) for s in before for kind in last[s]]
        back[stage] = max([own, *ways])
    bounds: list[float] = []
    for place in range(graph.places):
        stages = graph.at(place)
        works = [(kind, stage) for stage in stages for kind in (Kind.F, *backward_of(graph, stage, split=True))]
        work = sum(duration(graph, kind, stage) for kind, stage in works)
        bounds.append(min(earliest[stage] for stage in stages) + microbatches * work)
    for stage, kinds in enumerate(last):
        needed = sum(duration(graph, kind, stage) for kind in (Kind.F, *kinds))
        bounds.append(earliest[stage] + microbatches * needed + back[stage])
    return max(bounds)
