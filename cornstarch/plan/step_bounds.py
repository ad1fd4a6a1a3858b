"""Lower bounds of the time of a step whose layers are cut: no simulation of it is shorter; no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cornstarch.plan.pipeline_cost import PipelineCost


def find_least_passes(pipeline: PipelineCost) -> float:
    """Return a lower bound of the time of all passes.

    Before a place starts, a microbatch must reach it; then it does its work for all; then the last microbatch goes on
    to the end. With zero_bubble, gradients of weights may be delayed to the end, so only the others count before the
    last microbatch leaves.
    """
    every = (work + max(tail, late) for work, tail, late in _list_place_bounds(pipeline))
    return max(_find_round_trips(pipeline), *every)


def find_least_step(pipeline: PipelineCost) -> float:
    """Return a lower bound of the time of a step: of all passes, or of those of a place and its reduction."""
    pairs = zip(_list_place_bounds(pipeline), pipeline.tails, strict=True)
    return max(pipeline.least_passes, *(work + late + end for (work, _, late), end in pairs))


def _list_place_bounds(pipeline: PipelineCost) -> list[tuple[float, float, float]]:
    """By place, bounds of: the end of what others wait for, the time from there to the end, its work after it."""
    heads, tails = _find_least_paths(pipeline)
    many, split = pipeline.candidate.microbatches, pipeline.candidate.schedule == "zero_bubble"
    found = []
    for stages in pipeline.places:
        head = min(heads[stage.module, stage.index] for stage in stages)
        tail = min(tails[stage.module, stage.index] for stage in stages)
        work = many * sum(stage.total for stage in stages)
        needed = many * sum(stage.forward + stage.inputs for stage in stages) if split else work
        found.append((head + needed, tail, work - needed))
    return found


def _find_round_trips(pipeline: PipelineCost) -> float:
    """Return a lower bound of 1F1B: a stage waits for the gradient of a microbatch before it begins W later ones.

    W are in flight at it, so M microbatches take M / W round trips from the stage to the end and back.
    """
    if pipeline.candidate.schedule != "1f1b":
        return 0.0
    (heads, tails), lag, bound = _find_least_paths(pipeline), pipeline.transfers, 0.0
    inside = pipeline.candidate.has_encoders_inside
    beyond = 0.0  # from the output of a stage to the return of its gradient
    for name in (pipeline.last, *(pipeline.encoders if not inside else ())):
        trip = beyond
        for stage in reversed(pipeline.stages[name]):
            key = name, stage.index
            trip += stage.total + 2 * lag[key]
            if inside and stage.index == 0:
                trip += sum(pipeline.stages[encoder][0].total for encoder in pipeline.encoders)
            if stage.has_backward:
                rounds, left = divmod(pipeline.candidate.microbatches - 1, stage.after + 1)
                end = heads[key] + (rounds + 1) * trip + left * stage.backward
                bound = max(bound, end + tails[key])
        beyond = trip if name == pipeline.last else beyond
    return bound


def _find_least_paths(pipeline: PipelineCost) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]:
    """Return, by stage, lower bounds of the time to reach it, and from its end to the end of the step."""
    split, lag = pipeline.candidate.schedule == "zero_bubble", pipeline.transfers
    inside = pipeline.candidate.has_encoders_inside
    heads: dict[tuple[str, int], float] = {}
    tails: dict[tuple[str, int], float] = {}
    start = back = 0.0  # at the language model's first stage
    for name in (*pipeline.encoders, pipeline.last):
        head, tail = (start, back) if name == pipeline.last else (0.0, 0.0)
        for stage in pipeline.stages[name]:
            heads[name, stage.index], tails[name, stage.index] = head, tail
            away = lag[name, stage.index]
            head += stage.forward + away
            tail = away + tail + (stage.inputs if split else stage.backward) if stage.has_backward else 0.0
        if name != pipeline.last and not inside:
            start, back = max(start, head), max(back, tail)
    if inside:  # encoders belong to the first stage
        for name in pipeline.encoders:
            heads[name, 0], tails[name, 0] = 0.0, 0.0
    # A frozen encoder has no backward of its own: its last microbatch still passes through the language model.
    final = pipeline.stages[pipeline.last][-1]
    onward = sum(stage.forward + lag[pipeline.last, stage.index] for stage in pipeline.stages[pipeline.last])
    onward += tails[pipeline.last, final.index] + final.inputs
    for name in pipeline.encoders:
        rest = onward
        for stage in reversed(pipeline.stages[name]):
            rest += lag[name, stage.index]
            if not stage.has_backward and not inside:
                tails[name, stage.index] = rest
            rest += stage.forward
    return heads, tails
