"""The memory of a simulated step over time: an independent reference for peaks and for microbatches in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cornstarch.plan.pipeline_cost import PipelineCost
from cornstarch.plan.predict import Prediction
from cornstarch.plan.simulate import SimulatedAction, Timeline
from cornstarch.schedule import Kind


class MemoryLevel(NamedTuple):
    """The memory of a place from a moment on."""

    time: float
    bytes: float


def memory_levels(
    timeline: Timeline, kept: Sequence[float], working: Sequence[float] | None = None
) -> tuple[tuple[MemoryLevel, ...], ...]:
    """Return, by place, the bytes of activations from each moment at which they change.

    Saved activations live from the start of a forward pass to the end of its backward pass. `kept`: by stage, the
    bytes of a microbatch saved for its backward pass; `working`: those in use while it computes, beside the saved.
    """
    return tuple(_list_levels(timeline, own, kept, working or [0.0] * len(kept)) for own in timeline.events)


def _list_levels(
    timeline: Timeline, own: Sequence[SimulatedAction], kept: Sequence[float], working: Sequence[float]
) -> tuple[MemoryLevel, ...]:
    graph, size = timeline.schedule.graph, 0.0
    found = [MemoryLevel(0.0, 0.0)]
    for event in own:
        backward = graph.backward(event.stage)
        if event.kind is Kind.F and backward != "none":
            size += kept[event.stage]
        found.append(MemoryLevel(event.start, size + working[event.stage]))
        if event.kind in (Kind.B, Kind.W) or (event.kind is Kind.I and backward == "input"):
            size -= kept[event.stage]
        found.append(MemoryLevel(event.end, size))
    pairs = zip(found, [*found[1:], None], strict=True)  # of several at one moment the last counts
    return tuple(level for level, then in pairs if then is None or then.time > level.time)


def memory_over_time(one: Prediction, pipeline: PipelineCost) -> tuple[tuple[MemoryLevel, ...], ...]:
    """Return, by place, the bytes of each of its ranks, from each moment at which they change.

    Gradients exist from the end of the first backward pass, or all the time in DDP's buckets. The fullest moment is
    at most `peak`, which ignores when the stages of a place are fullest.
    """
    inside = [pipeline.stages[name][0] for name in pipeline.encoders] if one.candidate.has_encoders_inside else []
    kept, working = [], []
    for node in one.timeline.schedule.graph.nodes:
        stages = [pipeline.stages[node.module][node.index], *(inside if node.index == 0 else [])]
        kept.append(sum(stage.kept for stage in stages))
        working.append(max(stage.working for stage in stages))
    found = []
    for memory, levels in zip(one.memory, memory_levels(one.timeline, kept, working), strict=True):
        own = one.timeline.events[memory.place]
        first = next((event.end for event in own if event.kind is not Kind.F), one.step)
        after = memory.states.peak()
        before = after - (0 if memory.states.gradients_stay else memory.states.gradients)
        found.append(tuple(MemoryLevel(time, (before if time < first else after) + size) for time, size in levels))
    return tuple(found)
