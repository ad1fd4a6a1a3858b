"""A plan's pipeline: which places there are, which stages each holds, and what flows between them; no torch.

graph = stage_graph(plan, trains={"vision": [False]})
schedule = make_schedule(graph, microbatches=8, policy=plan.schedule)
places_of(layout, dp=0)[schedule_place]      # the ranks that carry out its list, as an array [cp, tp]

Places are numbered: those of the encoders in the plan's order, stage by stage, then those of the language model.
Encoders that share their ranks have the same places. Encoders inside the language model's first stage are no stages of
their own: what they cost and train is part of that stage. The same holds where all modules share their ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from cornstarch.errors import ConfigError
from cornstarch.plan.layout import Layout
from cornstarch.plan.placement import Ranks
from cornstarch.plan.plan import Plan
from cornstarch.schedule.graph import StageGraph, StageNode

T = TypeVar("T")

Cost = tuple[float, float, float]
"""Forward, backward of inputs, backward of weights: the time of one microbatch."""


def stage_graph(
    layout: Layout | Plan,
    trains: Mapping[str, Sequence[bool]] | None = None,
    costs: Mapping[str, Sequence[Cost]] | None = None,
) -> StageGraph:
    """Return the stages of a plan, encoders first, each module's in their order.

    trains: by module, for each of its stages × virtual_stages parts, whether something in it is trained. Default: all.
    costs: by module, for each of these parts. Default: one each for what is done forward and backward.
    """
    plan = layout.plan if isinstance(layout, Layout) else layout
    trained = {name: _each(plan, name, trains, "trains", True) for name in plan.modules}
    cost: dict[str, list[Cost]] = {name: _each(plan, name, costs, "costs", (1.0, 1.0, 1.0)) for name in plan.modules}
    for given, what in ((trains, "trains"), (costs, "costs")):
        for name in given or {}:
            if name not in plan.modules:
                raise ConfigError(f"{what}: the plan has no module {name!r}; it has {', '.join(plan.modules)}.")

    *encoders, last = plan.modules
    if _run_inside(plan):  # only what is told about them counts: an encoder of which nothing is said is free
        for name in encoders:
            trained[last][0] = trained[last][0] or trained[name][0]
            if costs is not None and name in costs:
                forward, inputs, weights = (a + b for a, b in zip(cost[last][0], cost[name][0], strict=True))
                cost[last][0] = forward, inputs, weights
        encoders = []

    nodes: list[StageNode] = []
    edges: list[tuple[int, int]] = []
    ends: list[int] = []
    for name in (*encoders, last):
        first, module = len(nodes), plan.modules[name]
        start = _first_places(plan)[name]
        for index in range(module.stages * module.virtual_stages):
            place = start + index % module.stages
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
    starts = _first_places(layout.plan)
    return starts[place.modules[-1]] + place.stage


def _run_inside(plan: Plan) -> bool:
    """Say whether encoders are part of the language model's first stage."""
    return len(plan.sharing) == 1


def _first_places(plan: Plan) -> dict[str, int]:
    """Return the place of each module's first stage."""
    found: dict[str, int] = {}
    start = 0
    for modules in plan.sharing:
        found |= dict.fromkeys(modules, start)
        start += plan.sizes(modules)[0]
    return found


def _each(plan: Plan, name: str, given: Mapping[str, Sequence[T]] | None, what: str, default: T) -> list[T]:
    """Return what is given for each part of a module, or the default for each."""
    module = plan.modules[name]
    parts = module.stages * module.virtual_stages
    values = [*(given or {}).get(name, [default] * parts)]
    if len(values) != parts:
        raise ConfigError(f"{what}[{name!r}] has {len(values)} entries; the module has {parts} stages.")
    return values
