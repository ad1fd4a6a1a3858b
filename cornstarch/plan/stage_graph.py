"""Pipeline stages: where layers are cut, the graph of stages, and the ranks of each; no torch.

A place is the set of ranks that executes one list of actions. Places are numbered: those of the encoders in the plan's
order, stage by stage, then those of the language model. Encoders on the same ranks have the same places. Encoders
inside the language model's first stage are not stages of their own: their costs and trainability belong to that stage.
So do those of encoders that are on the same ranks as the language model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cornstarch.errors import ConfigError
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import Plan
from cornstarch.plan.rank_order import Ranks
from cornstarch.schedule.graph import StageGraph, StageNode

T = TypeVar("T")

Cost = tuple[float, float, float]
"""Forward, backward of inputs, backward of weights: the time of one microbatch."""
Times = Sequence[float] | NDArray[np.float64]


def stage_graph(
    layout: Layout | Plan,
    trains: Mapping[str, Sequence[bool]] | None = None,
    costs: Mapping[str, Sequence[Cost]] | None = None,
) -> StageGraph:
    """Return the stages of a plan, encoders first, each module's in their order.

    Args:
        layout: A plan, or its layout.
        trains: By module, for each of its stages × virtual_stages parts, whether any parameter in it is trained.
            Default: all.
        costs: By module, for each of these parts. Default: 1 for each pass.
    """
    plan = layout.plan if isinstance(layout, Layout) else layout
    trained, cost = _list_parts(plan, trains, "trains", True), _list_parts(plan, costs, "costs", (1.0, 1.0, 1.0))
    *encoders, last = plan.modules
    if len(plan.sharing) == 1:  # encoders belong to the first stage; those without given costs are free
        for name in encoders:
            trained[last][0] = trained[last][0] or trained[name][0]
            if costs is not None and name in costs:
                forward, inputs, weights = (a + b for a, b in zip(cost[last][0], cost[name][0], strict=True))
                cost[last][0] = forward, inputs, weights
        encoders = []

    nodes: list[StageNode] = []
    edges: list[tuple[int, int]] = []
    ends: list[int] = []
    starts = _first_places(plan)
    for name in (*encoders, last):
        first, module = len(nodes), plan.modules[name]
        for index in range(module.stages * module.virtual_stages):
            place = starts[name] + index % module.stages
            nodes.append(StageNode(name, index, place, trained[name][index], *cost[name][index]))
        edges += [(number, number + 1) for number in range(first, len(nodes) - 1)]
        if name == last:
            edges += [(end, first) for end in ends]
        ends.append(len(nodes) - 1)
    return StageGraph(tuple(nodes), tuple(edges))


def places_of(layout: Layout, dp: int = 0) -> list[Ranks]:
    """Return the ranks of every place in one replica, each as an array [cp, tp]."""
    found: dict[int, Ranks] = {}
    for name, start in _first_places(layout.plan).items():
        mesh = layout.mesh(name)
        if not 0 <= dp < mesh.shape[1]:
            raise ConfigError(f"dp = {dp}: expected 0 to {mesh.shape[1] - 1:,}.")
        found |= {start + stage: mesh[stage, dp] for stage in range(mesh.shape[0])}
    return [found[place] for place in range(len(found))]


def place_of(layout: Layout, rank: int) -> int:
    """Return the place that a rank belongs to."""
    place = layout.place(rank)
    return _first_places(layout.plan)[place.modules[-1]] + place.stage


def _first_places(plan: Plan) -> dict[str, int]:
    found: dict[str, int] = {}
    start = 0
    for modules in plan.sharing:
        found |= dict.fromkeys(modules, start)
        start += plan.sizes(modules)[0]
    return found


def _list_parts(plan: Plan, given: Mapping[str, Sequence[T]] | None, what: str, default: T) -> dict[str, list[T]]:
    """Return, by module, the given value of each of its parts, or the default for each."""
    found = {}
    for name, module in plan.modules.items():
        parts = module.stages * module.virtual_stages
        found[name] = [*(given or {}).get(name, [default] * parts)]
        if len(found[name]) != parts:
            raise ConfigError(f"{what}[{name!r}] has {len(found[name])} entries; the module has {parts} stages.")
    for name in given or {}:
        if name not in plan.modules:
            raise ConfigError(f"{what}: the plan has no module {name!r}; it has {', '.join(plan.modules)}.")
    return found


def best_cut(times: Times, stages: int, before: float = 0.0) -> tuple[int, ...]:
    """Return the first layer of each stage that makes the slowest stage fastest, and the others most alike.

    `times` are those of the layers: a frozen layer with nothing trained before it has only its forward pass. Each stage
    has at least one layer. `before` is the time of encoders inside the first stage.
    """
    count = len(times)
    assert 1 <= stages <= count, (stages, count)
    if stages == 1:
        return (0,)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(times, dtype=np.float64))])
    limit = _find_slowest(sums, stages, before) * (1 + 1e-9)
    # Among all cuts within the limit, take the one with the least sum of squares: squares[end, back] is that of the
    # stage of `window - back` layers before `end`. No stage within the limit has more layers than `window`.
    window = max(1, int((np.searchsorted(sums, sums[:-1] + limit, "right") - np.arange(count)).max()) - 1)
    window = min(window + 1, count)
    starts = np.arange(count + 1)[:, None] - window + np.arange(window)[None, :]
    runs = sums[:, None] - sums[np.maximum(starts, 0)]
    squares = np.where((starts > 0) & (runs <= limit), runs, np.inf) ** 2
    first = sums + before
    first[0] = np.inf
    best = np.where(first <= limit, first, np.inf) ** 2
    choices, rows, valid = [], np.arange(count + 1), np.maximum(starts, 0)
    for _ in range(stages - 1):
        costs = best[valid] + squares
        chosen = costs.argmin(axis=1)
        choices.append(starts[rows, chosen])
        best = costs[rows, chosen]
    end, found = count, []
    for choice in reversed(choices):
        end = int(choice[end])
        found.append(end)
    return (0, *reversed(found))


def _find_slowest(sums: NDArray[np.float64], stages: int, before: float) -> float:
    """Return the time of the slowest stage of the cut in which it is fastest; `sums`: of the layers before each.

    A limit is feasible if filling one stage after the other needs no more stages than there are. The least limit above
    an infeasible one with which any stage takes a layer more is tried next.
    """
    ends, count = sums.tolist(), len(sums) - 1
    limit = max(ends[1] + before, float(np.diff(sums).max()), (ends[-1] + before) / stages)
    while True:
        start, taken, higher = 0, -before, float("inf")
        for used in range(1, stages + 1):
            end = min(bisect_right(ends, taken + limit * (1 + 1e-12)) - 1, count - (stages - used))
            end = max(end, start + 1)
            if end == count:
                return limit
            if end < count - (stages - used):
                higher = min(higher, ends[end + 1] - taken)
            start, taken = end, ends[end]
        if higher == float("inf"):  # the last stage has the rest, which the layers left to the others make too long
            higher = ends[count] - ends[start]
        limit = higher


def best_parts(times: Times, stages: int, virtual: int, before: float = 0.0) -> tuple[int, ...]:
    """Return the first layer of each of stages × virtual parts, which are assigned to the stages in turn.

    The better of two cuts is taken: the one with the fastest slowest part, and the one in which each stage has the
    layers that it would have with one part. Part i is on stage i modulo `stages`.
    """
    plain = best_cut(times, stages * virtual, before)
    if virtual == 1:
        return plain
    counts = np.diff([*best_cut(times, stages, before), len(times)]).tolist()
    if min(counts) < virtual:
        return plain
    # With encoders before it, the first place already has the most work in its first part: fewer layers go there.
    sizes = [
        count // virtual + (((virtual - 1 - part) if place == 0 and before else part) < count % virtual)
        for part in range(virtual)
        for place, count in enumerate(counts)
    ]
    in_turn = (0, *np.cumsum(sizes)[:-1].tolist())

    def slowest_stage(starts: tuple[int, ...]) -> float:
        parts = np.add.reduceat(np.asarray(times, dtype=np.float64), starts)
        parts[0] += before
        return float(parts.reshape(-1, stages).sum(axis=0).max())

    return in_turn if slowest_stage(in_turn) < slowest_stage(plain) * (1 - 1e-9) else plain
