"""Records when the stages of a pipeline did what in a step, and compares it with the simulated schedule.

A few steps are recorded: the third since the start (the first two create groups and buffers), and the last one that was
logged. The prediction simulates the same schedule with the costs measured in that very step: the time the step would
take if every microbatch cost the same and transfers were free.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any

from cornstarch.config.run_folder import RunFolder
from cornstarch.parallel import distributed
from cornstarch.pipeline.pipeline import Pipeline
from cornstarch.pipeline.runtime import ActionEvent
from cornstarch.plan.simulate import simulate
from cornstarch.plan.stage_graph import places_of
from cornstarch.report.timelines import TIMELINE, TRACE, chrome_trace
from cornstarch.schedule.actions import Action, Kind, Schedule, get_requirements, get_results
from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.policies import make_schedule

FIRST_RECORDED = 3  # step since the start
_TRACED = 3  # steps from there on, with --trace
_DIGITS = 7  # of seconds

TimedAction = tuple[Action, float, float, float, float]
"""An action, its begin and end, how long it waited at its begin, and how much of that for a transfer."""


class TimelineRecorder:
    """Records some steps of a pipelined run. All ranks must call its methods at the same steps.

    Rank 0 writes to `folder`; `first` is the step that the run starts or resumes after. With `trace`, more steps are
    recorded, and a trace for chrome://tracing and Perfetto is written.
    """

    def __init__(self, pipeline: Pipeline, folder: RunFolder, first: int, trace: bool) -> None:
        self._pipeline, self._folder, self._trace = pipeline, folder, trace
        self._chosen = range(first + FIRST_RECORDED, first + FIRST_RECORDED + (_TRACED if trace else 1))
        self._began = 0.0
        self._last: tuple[int, int, float, Sequence[ActionEvent]] | None = None
        self._steps: list[dict[str, Any]] = []

    def start_step(self) -> None:
        self._began = time.time()

    def end_step(self, step: int, microbatches: int, is_logged: bool) -> None:
        """Keep the events of the step if it will be shown."""
        if step in self._chosen or is_logged:
            self._last = step, microbatches, self._began, self._pipeline.events
        if step in self._chosen:
            self.finish()

    def finish(self) -> None:
        """Gather and write the last step that was kept."""
        if self._last is None or any(step["step"] == self._last[0] for step in self._steps):
            return
        step, microbatches, began, events = self._last
        self._last = None
        pipeline, here, local = self._pipeline, self._pipeline.place_of_rank, None
        # One rank reports each place, unless the step was a shorter one.
        if (here.dp, here.cp, here.tp) == (0, 0, 0) and microbatches == pipeline.microbatches:
            rows = [
                (*event.action[:3], *(round(one, _DIGITS) for one in (event.begin, event.end, event.waited)))
                for event in events
            ]
            local = {"place": pipeline.place, "began": began, "events": rows}
        found = [one for one in distributed.all_gather_json(local) if one is not None]
        if len(found) == pipeline.graph.places:
            schedule = make_schedule(pipeline.graph, pipeline.microbatches, pipeline.layout.plan.schedule)
            self._steps.append({"step": step, **compare_step(schedule, found)})
            if distributed.rank() == 0:
                self._write(schedule)

    def _write(self, schedule: Schedule) -> None:
        ranks = [one.ravel().tolist() for one in places_of(self._pipeline.layout)]
        data = {**describe_schedule(schedule, ranks), "steps": self._steps}
        self._folder.write(TIMELINE, json.dumps(data, separators=(",", ":")) + "\n")
        if self._trace:
            self._folder.write(TRACE, json.dumps(chrome_trace(data), separators=(",", ":")) + "\n")


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
            [[*action[:3], *(round(one, _DIGITS) for one in times)] for action, *times in own] for own in actions
        ],
    }
