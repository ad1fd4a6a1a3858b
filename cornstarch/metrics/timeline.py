"""Compares a recorded step of a pipeline, when its stages did what, with the simulated schedule.

The prediction simulates the same schedule with the costs measured in that very step: the time the step would take if
every microbatch cost the same and transfers were free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any

from cornstarch.plan.simulate import simulate
from cornstarch.schedule.actions import Action, Kind, Schedule, get_requirements, get_results
from cornstarch.schedule.graph import StageGraph

DIGITS = 7  # of seconds

TimedAction = tuple[Action, float, float, float, float]
"""An action, its begin and end, how long it waited at its begin, and how much of that for a transfer."""


def describe_schedule(schedule: Schedule, ranks: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return what all steps have in common: the places, and the stages at each."""
    stages = [str(node) for node in schedule.graph.nodes]
    places = [
        {"name": " + ".join(stages[stage] for stage in schedule.graph.at(place)), "ranks": list(one)}
        for place, one in enumerate(ranks)
    ]
    shared = {"version": 1, "schedule": schedule.name, "microbatches": schedule.microbatches}
    return {**shared, "places": places, "stages": stages}


def compare_step(schedule: Schedule, recorded: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a recorded step, and its simulation with the costs of that step."""
    # `recorded` has each `place`, `began` (the time of day) and `events`: kind, stage, microbatch, begin, end, waited.
    real = _align_clocks(schedule.graph, recorded)
    timeline = simulate(replace(schedule, graph=measure_costs(schedule, real)))
    simulated: list[list[TimedAction]] = [
        [(Action(event.kind, event.stage, event.microbatch), event.start, event.end, 0.0, 0.0) for event in own]
        for own in timeline.events
    ]
    began = min(one["began"] for one in recorded)
    return {"began": began, "real": _summarize(real), "predicted": _summarize(simulated)}


def _align_clocks(graph: StageGraph, recorded: Sequence[Mapping[str, Any]]) -> list[list[TimedAction]]:
    """Return the actions of each place, on one clock that starts with the first action."""
    by_place = sorted(recorded, key=lambda one: one["place"])
    clock = min(one["began"] for one in by_place)
    actions = [
        [
            (Action(Kind(kind), stage, m), one["began"] - clock + begin, one["began"] - clock + end, waited)
            for kind, stage, m, begin, end, waited in one["events"]
        ]
        for one in by_place
    ]
    first = min((begin for own in actions for _, begin, _, _ in own), default=0.0)
    ready: dict[Any, float] = {}  # when each result was computed
    for action, _, end, _ in chain.from_iterable(actions):
        ready |= {(result, action.microbatch): end for result in get_results(action)}

    def transfer(action: Action, begin: float, waited: float) -> float:
        """Return how long an action waited for a result that another place had already computed."""
        inputs = [
            ready[result, action.microbatch]
            for result in get_requirements(graph, action.kind, action.stage)
            if graph.nodes[result[1]].place != graph.nodes[action.stage].place and (result, action.microbatch) in ready
        ]
        # Clocks of several hosts differ a little, so that the difference may be negative or longer than the wait.
        return min(waited, max(0.0, begin + waited - max(inputs, default=begin + waited)))

    return [
        [
            (action, begin - first, end - first, waited, transfer(action, begin, waited))
            for action, begin, end, waited in own
        ]
        for own in actions
    ]


def measure_costs(schedule: Schedule, actions: Sequence[Sequence[TimedAction]]) -> StageGraph:
    """Return the graph with the costs of a step: means over all microbatches, also those without work for a stage."""
    spent: defaultdict[tuple[Kind, int], float] = defaultdict(float)
    for own in actions:
        for action, begin, end, waited, _ in own:
            spent[action.kind, action.stage] += max(0.0, end - begin - waited)
    nodes = []
    for number, node in enumerate(schedule.graph.nodes):
        forward, whole, inputs, weights = (
            spent[kind, number] / schedule.microbatches for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
        )
        # An undivided backward is measured as a whole; how it is divided between the two changes nothing.
        inputs, weights = inputs + whole / 2, weights + whole / 2
        nodes.append(replace(node, forward=forward, backward_input=inputs, backward_weight=weights))
    return StageGraph(tuple(nodes), schedule.graph.edges)


def _summarize(actions: Sequence[Sequence[TimedAction]]) -> dict[str, Any]:
    seconds = max((end for own in actions for _, _, end, _, _ in own), default=0.0)
    busy = [sum(end - begin - waited for _, begin, end, waited, _ in own) for own in actions]
    bubbles = [1 - one / seconds if seconds else 0.0 for one in busy]
    return {
        "seconds": seconds,
        "bubble": fmean(bubbles) if bubbles else 0.0,
        "bubbles": bubbles,
        "transfers": [sum(transfer for *_, transfer in own) for own in actions],
        "events": [
            [[*action[:3], *(round(one, DIGITS) for one in times)] for action, *times in own] for own in actions
        ],
    }
