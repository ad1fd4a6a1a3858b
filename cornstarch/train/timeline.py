"""When the stages of a pipeline did what in a step, beside when they should have: recorded, compared, stored.

A few steps are recorded: the third since the start (the first two make groups and buffers), and the last one that was
logged. What is predicted is simulated from the same schedule, with the costs that were measured in that very step: it
is what the step would have taken if every microbatch cost the same and transfers nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from cornstarch.parallel import processes
from cornstarch.pipeline.apply import Pipeline
from cornstarch.pipeline.runtime import Event
from cornstarch.plan.simulate import simulate
from cornstarch.plan.stages import places_of
from cornstarch.report.timelines import TIMELINE, TRACE, chrome_trace
from cornstarch.schedule.actions import Action, Kind, Schedule
from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.kinds import Result, needs, results
from cornstarch.schedule.policies import make_schedule
from cornstarch.train.runs import RunFolder

THIRD = 3  # step since the start
_TRACED = 3  # steps from there on, with --trace
_DIGITS = 7  # of seconds

Bar = tuple[Action, float, float, float, float]
"""An action: when it began and ended, how long it waited at its beginning, and how much of that for the transfer."""


class TimelineRecorder:
    """Records some steps of a pipelined run. All processes must call its methods at the same steps.

    Args:
        pipeline: This process's stages.
        folder: Where the first process writes.
        first: The step that the run begins after.
        trace: Write a trace for chrome://tracing and Perfetto, too, of more steps.
    """

    def __init__(self, pipeline: Pipeline, folder: RunFolder, first: int, trace: bool) -> None:
        self._pipeline, self._folder, self._trace = pipeline, folder, trace
        self._chosen = range(first + THIRD, first + THIRD + (_TRACED if trace else 1))
        self._began = 0.0
        self._kept: tuple[int, int, float, Sequence[Event]] | None = None
        self._steps: list[dict[str, Any]] = []

    def begins(self) -> None:
        """Note when a step begins: processes tell their times from there on."""
        self._began = time.time()

    def stepped(self, step: int, microbatches: int, is_logged: bool) -> None:
        """Keep what the step did, if it is one of those that are shown."""
        if step in self._chosen or is_logged:
            self._kept = step, microbatches, self._began, self._pipeline.events
        if step in self._chosen:
            self._gather()

    def finish(self) -> None:
        """Write down the last step that was logged, too."""
        self._gather()

    def _own(self, microbatches: int, began: float, events: Sequence[Event]) -> dict[str, Any] | None:
        """Return what this process did; None if another process speaks for its place, or the step was a short one."""
        here = self._pipeline.place_of_rank
        if (here.dp, here.cp, here.tp) != (0, 0, 0) or microbatches != self._pipeline.microbatches:
            return None
        told = [
            (*event.action[:3], *(round(one, _DIGITS) for one in (event.begin, event.end, event.waited)))
            for event in events
        ]
        return {"place": self._pipeline.place, "began": began, "events": told}

    def _gather(self) -> None:
        if self._kept is None or any(step["step"] == self._kept[0] for step in self._steps):
            return
        step, microbatches, began, events = self._kept
        self._kept = None
        found = [one for one in processes.gather_data(self._own(microbatches, began, events)) if one is not None]
        pipeline = self._pipeline
        if len(found) == pipeline.graph.places:
            schedule = make_schedule(pipeline.graph, pipeline.microbatches, pipeline.layout.plan.schedule)
            self._steps.append({"step": step, **compared(schedule, found)})
            if processes.rank() == 0:
                self._write(schedule)

    def _write(self, schedule: Schedule) -> None:
        ranks = [one.ravel().tolist() for one in places_of(self._pipeline.layout)]
        data = {**described(schedule, ranks), "steps": self._steps}
        self._folder.write(TIMELINE, json.dumps(data, separators=(",", ":")) + "\n")
        if self._trace:
            self._folder.write(TRACE, json.dumps(chrome_trace(data), separators=(",", ":")) + "\n")


def described(schedule: Schedule, ranks: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return what is the same in all steps: the places, and the stages at each."""
    graph = schedule.graph
    places = [
        {"name": " + ".join(str(graph.nodes[stage]) for stage in graph.at(place)), "ranks": list(one)}
        for place, one in enumerate(ranks)
    ]
    return {
        "version": 1,
        "schedule": schedule.name,
        "microbatches": schedule.microbatches,
        "places": places,
        "stages": [str(node) for node in graph.nodes],
    }


def compared(schedule: Schedule, recorded: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a step as it was and as it is predicted from its own costs.

    recorded: of each place: `place`, `began` (the time of day), `events` (kind, stage, microbatch, begin, end, waited).
    """
    real = _placed(schedule.graph, recorded)
    known = replace(schedule, graph=measured(schedule, real))
    timeline = simulate(known)
    simulated: list[list[Bar]] = [
        [(Action(event.kind, event.stage, event.microbatch), event.start, event.end, 0.0, 0.0) for event in own]
        for own in timeline.events
    ]
    return {
        "began": min(one["began"] for one in recorded),
        "real": _told(real),
        "predicted": _told(simulated),
    }


def _placed(graph: StageGraph, recorded: Sequence[Mapping[str, Any]]) -> list[list[Bar]]:
    """Return what each place did, on one clock that begins with the first action."""
    by_place = sorted(recorded, key=lambda one: one["place"])
    clock = min(one["began"] for one in by_place)
    bars = [
        [
            (Action(Kind(kind), stage, m), one["began"] - clock + begin, one["began"] - clock + end, waited)
            for kind, stage, m, begin, end, waited in one["events"]
        ]
        for one in by_place
    ]
    first = min((begin for own in bars for _, begin, _, _ in own), default=0.0)
    there: dict[tuple[Result, int], float] = {}
    for own in bars:
        for action, _, end, _ in own:
            there |= {(result, action.microbatch): end for result in results(action)}
    transferred = _transferred(graph, there)
    return [
        [
            (action, begin - first, end - first, waited, transferred(action, begin, waited))
            for action, begin, end, waited in own
        ]
        for own in bars
    ]


def _transferred(
    graph: StageGraph, there: Mapping[tuple[Result, int], float]
) -> Callable[[Action, float, float], float]:
    """Return what says how long an action waited for something that another place had made already."""

    def transferred(action: Action, begin: float, waited: float) -> float:
        made = [
            there[result, action.microbatch]
            for result in needs(graph, action.kind, action.stage)
            if graph.nodes[result[1]].place != graph.nodes[action.stage].place and (result, action.microbatch) in there
        ]
        # Clocks of several machines differ a little: never more than it waited, never less than nothing.
        return min(waited, max(0.0, begin + waited - max(made, default=begin + waited)))

    return transferred


def measured(schedule: Schedule, bars: Sequence[Sequence[Bar]]) -> StageGraph:
    """Return the graph with the costs of a step: the mean over microbatches, of which some may have nothing to do."""
    spent: dict[tuple[Kind, int], float] = {}
    for own in bars:
        for action, begin, end, waited, _ in own:
            key = (action.kind, action.stage)
            spent[key] = spent.get(key, 0.0) + max(0.0, end - begin - waited)
    nodes = []
    for number, node in enumerate(schedule.graph.nodes):
        forward, whole, inputs, weights = (
            spent.get((kind, number), 0.0) / schedule.microbatches for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
        )
        # What is not split is only told as a whole; how it is shared out between the two changes nothing.
        nodes.append(
            replace(node, forward=forward, backward_input=inputs + whole / 2, backward_weight=weights + whole / 2)
        )
    return StageGraph(tuple(nodes), schedule.graph.edges)


def _told(bars: Sequence[Sequence[Bar]]) -> dict[str, Any]:
    seconds = max((end for own in bars for _, _, end, _, _ in own), default=0.0)
    busy = [sum(end - begin - waited for _, begin, end, waited, _ in own) for own in bars]
    bubbles = [1 - one / seconds if seconds else 0.0 for one in busy]
    return {
        "seconds": seconds,
        "bubble": fmean(bubbles) if bubbles else 0.0,
        "bubbles": bubbles,
        "transfers": [sum(transfer for *_, transfer in own) for own in bars],
        "events": [[[*action[:3], *(round(one, _DIGITS) for one in times)] for action, *times in own] for own in bars],
    }


__all__ = ["TimelineRecorder", "compared", "described", "measured"]
