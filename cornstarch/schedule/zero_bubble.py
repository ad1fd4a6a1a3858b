"""Zero-bubble schedules: backward is split, and the gradients of weights, for which nobody waits, fill the gaps.

After Qi et al. 2023, "Zero Bubble Pipeline Parallelism"; for a chain of equal stages it is their ZB-H1. The orders are
found by a list scheduler, so they exist for any graph and any costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cornstarch.schedule.actions import Action, Kind, get_backward_kinds, get_duration
from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.list_scheduler import (
    ActionLine,
    PlaceActions,
    add_makespan,
    assign_to_places,
    build_stage_lines,
    get_warmup_depths,
    merge_lines,
)


def build_zero_bubble(
    graph: StageGraph, microbatches: int, one_f_one_b: tuple[PlaceActions, float | None]
) -> tuple[PlaceActions, float]:
    """Return the fastest of some orders, in simulation with the graph's costs, and its makespan: at most that of 1F1B.

    No stage has more microbatches in flight than the first stage of its module has with 1F1B. Of equally fast orders
    the first is taken; an order that reaches the lower bound ends the search.

    one_f_one_b: the actions of 1F1B, and their makespan, if it is known.
    """
    best: PlaceActions = ()
    shortest = float("inf")
    bound = compute_lower_bound(graph, microbatches)
    for actions, duration in _build_candidates(graph, microbatches, one_f_one_b):
        if duration < shortest:
            best, shortest = actions, duration
        if shortest <= bound:  # 1F1B cannot be faster, either
            return best, shortest
    one_f_one_b = add_makespan(graph, one_f_one_b)
    if shortest <= one_f_one_b[1]:
        return best, shortest
    # 1F1B itself, except that gradients of inputs are sent before those of weights are computed.
    return add_makespan(graph, (tuple(_split_backwards(graph, mine) for mine in one_f_one_b[0]), None))


def _build_candidates(
    graph: StageGraph, microbatches: int, one_f_one_b: tuple[PlaceActions, float | None]
) -> Iterator[tuple[PlaceActions, float]]:
    """Yield orders and their makespans."""
    own, stages = get_warmup_depths(graph), range(len(graph.nodes))
    first: dict[str, int] = {}  # by module, the microbatches in flight at its first stage with 1F1B
    for node, depth in zip(graph.nodes, own, strict=True):
        first[node.module] = max(first.get(node.module, 0), depth)
    limits = [first[node.module] for node in graph.nodes]
    if all(graph.backward(stage) != "both" for stage in stages):  # there is nothing to split
        actions, duration = add_makespan(graph, one_f_one_b)
        yield tuple(_split_backwards(graph, mine) for mine in actions), duration
    elif graph.places == len(graph.nodes):
        # Gradients of weights as late as the memory allows: best for equal stages, one at each place.
        lags = [limit - depth for limit, depth in zip(limits, own, strict=True)]
        yield add_makespan(graph, assign_to_places(graph, build_stage_lines(graph, microbatches, own, lags)))
    # Whatever is ready, in a line of its own for each kind: better where costs differ, but a greedy choice may lose.
    works = [(kind, s) for s in stages for kind in (Kind.F, *get_backward_kinds(graph, s, split=True))]
    lines = [[Action(kind, stage, m) for m in range(microbatches)] for kind, stage in works]
    yield merge_lines(graph, lines, limits)


def _split_backwards(graph: StageGraph, actions: Sequence[Action]) -> tuple[Action, ...]:
    kinds = {stage: get_backward_kinds(graph, stage, split=True) for stage in {action.stage for action in actions}}
    found: ActionLine = []
    for action in actions:
        is_whole = action.kind is Kind.B
        found += [Action(kind, *action[1:]) for kind in kinds[action.stage]] if is_whole else [action]
    return tuple(found)


def compute_lower_bound(graph: StageGraph, microbatches: int) -> float:
    """Return a makespan that no order can beat.

    A place does all its work after its first input can arrive. Apart from gradients of weights, the last actions of a
    stage are gradients of inputs, after all its forwards; from there gradients travel back to the first weights.
    """
    earliest: dict[int, float] = {}
    back: dict[int, float] = {}  # from the end of a stage's input gradients to the end of its and all earlier backwards
    by_depth = sorted(range(len(graph.nodes)), key=graph.depth)
    last = [get_backward_kinds(graph, stage, split=True)[:1] for stage in range(len(graph.nodes))]
    for stage in by_depth:
        before = graph.predecessors(stage)
        earliest[stage] = max((earliest[source] + graph.nodes[source].forward for source in before), default=0)
        own = graph.nodes[stage].backward_weight if graph.backward(stage) == "both" else 0
        paths = [back[s] + get_duration(graph, kind, s) for s in before for kind in last[s]]
        back[stage] = max([own, *paths])
    bounds: list[float] = []
    for place in range(graph.places):
        stages = graph.at(place)
        works = [(kind, stage) for stage in stages for kind in (Kind.F, *get_backward_kinds(graph, stage, split=True))]
        work = sum(get_duration(graph, kind, stage) for kind, stage in works)
        bounds.append(min(earliest[stage] for stage in stages) + microbatches * work)
    for stage, kinds in enumerate(last):
        needed = sum(get_duration(graph, kind, stage) for kind in (Kind.F, *kinds))
        bounds.append(earliest[stage] + microbatches * needed + back[stage])
    return max(bounds)
