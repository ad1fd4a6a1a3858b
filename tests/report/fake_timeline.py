"""A timeline of a pipelined run, made by simulation: as if every place had begun and waited so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cornstarch.metrics.timeline import compare_step, describe_schedule
from cornstarch.plan.simulate import simulate
from cornstarch.schedule.actions import Schedule
from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.policies import make_schedule

BEGAN = 1_767_225_700.0


def record_events(schedule: Schedule, transfer: float = 0.0, unit: float = 0.01) -> list[dict[str, Any]]:
    """Return what the places of a schedule would record if a cost of 1 took `unit` seconds.

    A place is at its next action as soon as it is done with the one before, and waits there.
    """
    found = []
    for place, own in enumerate(simulate(schedule, transfer).events):
        events: list[list[Any]] = []
        free = 0.0
        for event in own:
            times = (free * unit, event.end * unit, (event.start - free) * unit)
            events.append([event.kind, event.stage, event.microbatch, *times])
            free = event.end
        found.append({"place": place, "began": BEGAN, "events": events})
    return found


def data(
    policy: str = "zero_bubble",
    graph: StageGraph | None = None,
    microbatches: int = 6,
    steps: tuple[int, ...] = (3, 90),
) -> dict[str, Any]:
    """Return what timeline.json holds."""
    graph = graph or StageGraph.branches({"vision": 1, "audio": 1}, 2)
    schedule = make_schedule(graph, microbatches, policy)
    found = [
        {"step": step, **compare_step(schedule, record_events(schedule, transfer=0.1 * (n + 1)))}
        for n, step in enumerate(steps)
    ]
    for n, step in enumerate(found):
        step["began"] += n
    return {**describe_schedule(schedule, [[place] for place in range(graph.places)]), "steps": found}


def write(folder: Path, **options: Any) -> Path:
    """Put a timeline into a run's folder."""
    (folder / "timeline.json").write_text(json.dumps(data(**options)))
    return folder
