"""Interleaved 1F1B: each place of a module holds several of its stages, which shortens the wait at both ends of a step.

The order is Megatron-LM's (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters").
"""

from __future__ import annotations

from cornstarch.errors import ConfigError
from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.kinds import Action, Kind, backward_of
from cornstarch.schedule.orders import Line, Lists, by_place, in_turn


def interleaved(graph: StageGraph, microbatches: int) -> tuple[Lists, float | None]:
    """Return that order for every module with several stages per place, and 1F1B for the others; its time, if known.

    Modules are looked at from the end, because how far ahead one runs depends on how far those behind it do.
    """
    modules: dict[str, list[int]] = {}
    for stage in sorted(range(len(graph.nodes)), key=graph.distance):
        modules.setdefault(graph.nodes[stage].module, []).append(stage)
    lines: list[Line] = []
    leads: dict[int, int] = {}  # by stage, how many forwards it is ahead of its backwards
    for module, stages in modules.items():
        stages.sort(key=lambda stage: graph.nodes[stage].index)
        behind = {target for stage in stages for target in graph.successors(stage)} - {*stages}
        lead = max((leads[target] for target in behind), default=0)
        for line in _lines(graph, module, stages, microbatches, lead):
            leads |= _leads(line)
            lines.append(_without_needless(graph, line))
    return by_place(graph, lines)


def _lines(graph: StageGraph, module: str, stages: list[int], microbatches: int, lead: int) -> list[Line]:
    """Return a line for each place of a module, which has a backward for every forward.

    Places take microbatches in groups of as many as there are places: a group through the first stage of each place,
    then through the second, and so on. When a place has passed a group's last microbatch on, its first is back.

    lead: how many forwards the stages behind the module are ahead of their backwards; its last stage is one more.
    """
    places = _places(graph, module, stages)
    each = len(stages) // len(places)
    group = len(places) if each > 1 else 1
    _check_fits(module, len(places), each, microbatches, group)
    order = [
        (chunk, first + offset)
        for first in range(0, microbatches, group)
        for chunk in range(each)
        for offset in range(group)
    ]
    # Before the backward of a microbatch, the last place has done the forward of the one that is `lead` after it.
    opening, closing = ([at for at, (c, _) in enumerate(order) if c == chunk] for chunk in (0, each - 1))
    ahead = 1 + max(closing[min(m + lead, microbatches - 1)] - at for m, at in enumerate(opening))
    step = 2 if each > 1 else 1  # a place that is one earlier gets its first gradient two actions later
    lines = []
    for number in range(len(places)):
        at = stages[number :: len(places)]
        forwards = [Action(Kind.F, at[chunk], m) for chunk, m in order]
        backwards = [[Action(Kind.B, at[-1 - chunk], m)] for chunk, m in order]
        lines.append(in_turn(forwards, backwards, ahead + step * (len(places) - 1 - number)))
    return lines


def _places(graph: StageGraph, module: str, stages: list[int]) -> list[int]:
    """Return the places of a module, in the order of its stages."""
    held = [graph.nodes[stage].place for stage in stages]
    places = [*dict.fromkeys(held)]
    if held != places * (len(held) // len(places)):
        raise ConfigError(
            f"schedule = interleaved: the stages of {module} stand on the places {', '.join(map(str, held))}; "
            "expected all places in turn, again and again."
        )
    return places


def _check_fits(module: str, places: int, each: int, microbatches: int, group: int) -> None:
    if microbatches % group == 0:
        return
    below = microbatches // group * group
    fitting = " or ".join(str(many) for many in (below, below + group) if many)
    raise ConfigError(
        f"schedule = interleaved: {microbatches} microbatches do not divide by the {places} places of {module}, which "
        f"hold {each} stages each.\nUse {fitting} microbatches, or another schedule."
    )


def _leads(line: Line) -> dict[int, int]:
    """Return, by stage, by how many microbatches its forwards are ahead of its backwards at most."""
    ahead: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in line:
        ahead[action.stage] = ahead.get(action.stage, 0) + (1 if action.kind is Kind.F else -1)
        most[action.stage] = max(most.get(action.stage, 0), ahead[action.stage])
    return most


def _without_needless(graph: StageGraph, line: Line) -> Line:
    """Return a line with the backwards that its stages have: `B`, `I` or none at all."""
    kinds = {action.stage: backward_of(graph, action.stage) for action in line}
    found: Line = []
    for action in line:
        if action.kind is Kind.F:
            found.append(action)
        else:
            found += [Action(kind, action.stage, action.microbatch) for kind in kinds[action.stage]]
    return found
