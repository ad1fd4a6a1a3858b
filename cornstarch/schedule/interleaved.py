"""Interleaved 1F1B: each place of a module has several of its stages, which shortens the warm-up and the cool-down.

The order is Megatron-LM's (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters").
"""

from __future__ import annotations

from cornstarch.errors import ConfigError
from cornstarch.schedule.actions import Action, Kind, get_backward_kinds
from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.list_scheduler import ActionLine, PlaceActions, assign_to_places, build_phases


def build_interleaved(graph: StageGraph, microbatches: int) -> tuple[PlaceActions, float | None]:
    """Return the interleaved order for modules with several stages per place, and 1F1B for the others.

    The second value is the makespan, if it is known. Modules are processed from the end, because the warm-up of each
    depends on the warm-up of the modules behind it.
    """
    modules: dict[str, list[int]] = {}
    for stage in sorted(range(len(graph.nodes)), key=graph.distance):
        modules.setdefault(graph.nodes[stage].module, []).append(stage)
    lines: list[ActionLine] = []
    leads: dict[int, int] = {}  # by stage, how many forwards it is ahead of its backwards
    for module, stages in modules.items():
        stages.sort(key=lambda stage: graph.nodes[stage].index)
        behind = {target for stage in stages for target in graph.successors(stage)} - {*stages}
        lead = max((leads[target] for target in behind), default=0)
        for line in _build_lines(graph, module, stages, microbatches, lead):
            leads |= _compute_leads(line)
            lines.append(_use_needed_backwards(graph, line))
    return assign_to_places(graph, lines)


def _build_lines(graph: StageGraph, module: str, stages: list[int], microbatches: int, lead: int) -> list[ActionLine]:
    """Return a line for each place of a module, which has a backward for every forward.

    Places process microbatches in groups of as many as there are places: a group through the first stage of each place,
    then through the second, and so on. When a place has sent a group's last microbatch, its first one is back.

    lead: how many forwards the stages behind the module are ahead of their backwards; its last stage is one more.
    """
    places = _get_places(graph, module, stages)
    each = len(stages) // len(places)
    group = len(places) if each > 1 else 1
    if microbatches % group:
        below = microbatches // group * group
        fitting = " or ".join(str(count) for count in (below, below + group) if count)
        raise ConfigError(
            f"schedule = interleaved: {microbatches} microbatches do not divide by the {len(places)} places of "
            f"{module}, which hold {each} stages each.\nUse {fitting} microbatches, or another schedule."
        )
    order = [
        (chunk, first + offset)
        for first in range(0, microbatches, group)
        for chunk in range(each)
        for offset in range(group)
    ]
    # Before the backward of a microbatch, the last place has run the forward of the one that is `lead` after it.
    opening, closing = ([at for at, (c, _) in enumerate(order) if c == chunk] for chunk in (0, each - 1))
    warmup = 1 + max(closing[min(m + lead, microbatches - 1)] - at for m, at in enumerate(opening))
    step = 2 if each > 1 else 1  # a place that is one earlier gets its first gradient two actions later
    lines = []
    for number in range(len(places)):
        at = stages[number :: len(places)]
        forwards = [Action(Kind.F, at[chunk], m) for chunk, m in order]
        backwards = [[Action(Kind.B, at[-1 - chunk], m)] for chunk, m in order]
        lines.append(build_phases(forwards, backwards, warmup + step * (len(places) - 1 - number)))
    return lines


def _get_places(graph: StageGraph, module: str, stages: list[int]) -> list[int]:
    """Return the places of a module, in the order of its stages."""
    found = [graph.nodes[stage].place for stage in stages]
    places = [*dict.fromkeys(found)]
    if found != places * (len(found) // len(places)):
        raise ConfigError(
            f"schedule = interleaved: the stages of {module} are on the places {', '.join(map(str, found))}; "
            "expected all places in turn, again and again."
        )
    return places


def _compute_leads(line: ActionLine) -> dict[int, int]:
    """Return, by stage, by how many microbatches its forwards are ahead of its backwards at most."""
    ahead: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in line:
        ahead[action.stage] = ahead.get(action.stage, 0) + (1 if action.kind is Kind.F else -1)
        most[action.stage] = max(most.get(action.stage, 0), ahead[action.stage])
    return most


def _use_needed_backwards(graph: StageGraph, line: ActionLine) -> ActionLine:
    """Return a line with the backwards that its stages need: `B`, `I` or none."""
    kinds = {action.stage: get_backward_kinds(graph, action.stage) for action in line}
    found: ActionLine = []
    for action in line:
        backwards = [Action(kind, action.stage, action.microbatch) for kind in kinds[action.stage]]
        found += [action] if action.kind is Kind.F else backwards
    return found
