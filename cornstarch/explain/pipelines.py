"""Schedules of a pipeline: the product's own lists of actions, simulated, moment by moment."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from cornstarch.errors import ConfigError
from cornstarch.explain.story import (
    NUMBER_BYTES,
    Arrow,
    Box,
    Formula,
    Row,
    Step,
    Story,
    Tone,
    byte_count,
    same_or_range,
)
from cornstarch.plan.communication import send_bytes
from cornstarch.plan.simulate import Event, Timeline, as_text, simulate
from cornstarch.schedule import Action, Kind, Schedule, StageGraph, make_schedule
from cornstarch.schedule.timing import transfers_of

VIRTUAL = 2
"""Stages that each place holds under `interleaved`."""

MOST_FORWARDS = 64
"""Ranks times microbatches of what is drawn: every step draws all that has been done."""

POLICY_OF = {
    "naive": "naive",
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "zero-bubble": "zero_bubble",
}
"""The policy of each topic."""

_TONES: dict[Kind, Tone] = {Kind.F: "f", Kind.B: "b", Kind.I: "i", Kind.W: "w"}
_DOES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "gradients of inputs", Kind.W: "gradients of weights"}
_LEADS = {
    "naive": "One microbatch at a time goes through all stages and back. While one rank works, all others wait; it is "
    "there to compare with.",
    "gpipe": "The batch is cut into microbatches: all forwards, then all backwards. Ranks work at the same time, but "
    "each keeps the activations of every microbatch.",
    "1f1b": "As many forwards as there are stages to the end, then one backward and one forward in turn. It takes as "
    "long as gpipe, and activations are freed much earlier.",
    "interleaved": "As 1f1b, but each rank holds two stages that do not follow one another, so that the first "
    "microbatch reaches the last rank sooner. There are twice as many transfers. Beside each rank stand its stages.",
    "zero-bubble": "Backward is cut in two: gradients of inputs, for which the stage before waits, come first; "
    "gradients of weights, for which nobody waits, fill the gaps.",
}
_BUBBLES = {
    "naive": "(K − 1) / K",
    "gpipe": "(K − 1) / (M + K − 1)",
    "1f1b": "(K − 1) / (M + K − 1)",
    "interleaved": "(K − 1) / (v M + K − 1)",
    "zero-bubble": "(K − 1) / (3 M + K − 1)",
}


def bubble_by_formula(topic: str, places: int, microbatches: int) -> float | None:
    """Return the share of waiting by the formula, for stages that cost the same; None where it does not hold."""
    ahead = places - 1
    if topic == "naive":
        return ahead / places
    if topic == "interleaved":
        return ahead / (VIRTUAL * microbatches + ahead)
    if topic == "zero-bubble":
        return ahead / (3 * microbatches + ahead) if microbatches >= places else None
    return ahead / (microbatches + ahead)


def pipeline_story(topic: str, ranks: int, microbatches: int, elements: int) -> Story:
    """Return a schedule, growing moment by moment.

    elements: the numbers of a microbatch's activations between two stages.
    """
    if ranks * microbatches > MOST_FORWARDS:
        raise ConfigError(
            f"--microbatches {microbatches}: with {ranks} ranks that is too much to draw action by action. "
            f"Use {MOST_FORWARDS // ranks} or fewer."
        )
    graph = StageGraph.chain(ranks, module="stage", virtual_stages=VIRTUAL if topic == "interleaved" else 1)
    schedule = make_schedule(graph, microbatches, POLICY_OF[topic])
    timeline = simulate(schedule)
    moments = sorted({event.start for own in timeline.events for event in own})
    steps = [_step(timeline, moment, number, elements) for number, moment in enumerate(moments)]
    steps.append(_end(timeline))
    return Story(
        topic,
        f"Pipeline: {topic}",
        _LEADS[topic],
        tuple(steps),
        tuple(_formulas(topic, timeline, steps, elements)),
        (
            "Forward, and each half of backward, take one unit of time on every stage; transfers take none. "
            + _held(timeline),
            "The list of actions is the very one that the runtime carries out.",
        ),
        tuple(
            (_TONES[kind], f"{kind} {_DOES[kind]}")
            for kind in Kind
            if kind in {e.kind for e in chain(*timeline.events)}
        ),
    )


def _formulas(topic: str, timeline: Timeline, steps: list[Step], elements: int) -> list[Formula]:
    places, count = len(timeline.events), timeline.schedule.microbatches
    waited = bubble_by_formula(topic, places, count)
    values = f"K = {places}, M = {count}" + (f", v = {VIRTUAL}" if topic == "interleaved" else "")
    sent = tuple(sum(step.sent[place] for step in steps if step.sent) for place in range(places))
    size = send_bytes(NUMBER_BYTES * elements)
    rounds = VIRTUAL if topic == "interleaved" else 1
    # Every edge between two stages carries each microbatch forth and back; the ends of the chain have one edge less.
    edges = rounds * places - 1
    return [
        Formula(
            "Bubble: the share of time that ranks wait",
            _BUBBLES[topic],
            values,
            "holds for M ≥ K only" if waited is None else f"{waited:.1%}",
            f"{timeline.bubble:.1%}",
        ),
        Formula(
            "Bytes that all ranks send together",
            "2 M × (stages − 1) × activation",
            f"2 × {count} × {edges} × {byte_count(size)}",
            byte_count(2 * count * edges * size),
            f"{byte_count(sum(sent))} ({same_or_range(sent)} for each rank)",
        ),
    ]


def _held(timeline: Timeline) -> str:
    by_place = [
        max(timeline.in_flight[stage] for stage in timeline.schedule.graph.at(p)) for p in range(len(timeline.events))
    ]
    return f"The most microbatches that a stage holds activations of, by rank: {', '.join(map(str, by_place))}."


# ------------------------------------------------------------------------------------------------ steps


def _step(timeline: Timeline, moment: float, number: int, elements: int) -> Step:
    """Return how things stand when what begins at a moment has begun."""
    graph = timeline.schedule.graph
    events = [[event for event in own if event.start <= moment] for own in timeline.events]
    new = [own[-1] if own and own[-1].start == moment else None for own in events]
    sends = [_sends(timeline.schedule, event) if event else [] for event in new]
    size = send_bytes(NUMBER_BYTES * elements)
    so_far = max(event.end for own in events for event in own)
    rows = []
    for place, own in enumerate(events):
        busy = own[-1] if own and own[-1].end > moment else None
        boxes = tuple(_box(graph, event, event is new[place]) for event in own)
        rows.append(Row(_name(graph, place), boxes, _doing(busy)))
    arrows = [
        Arrow(place, target, event.end)
        for place, event in enumerate(new)
        if event is not None
        for target in sends[place]
    ]
    return Step(
        f"Time {moment:g}",
        _sentence(timeline, new, events, moment),
        tuple(rows),
        _ruler(timeline),
        tuple(size * len(targets) for targets in sends),
        tuple(arrows),
        as_text(replace(timeline, events=tuple(map(tuple, events)), step=so_far), unit=1.0),
    )


def _end(timeline: Timeline) -> Step:
    graph = timeline.schedule.graph
    rows = [
        Row(
            _name(graph, place),
            tuple(_box(graph, event, False) for event in own),
            f"waits {timeline.bubbles[place]:.1%}",
        )
        for place, own in enumerate(timeline.events)
    ]
    says = (
        f"All gradients are there after {timeline.step:g} units of time: ranks have waited {timeline.bubble:.1%} of "
        "it, which is the bubble; the optimizer steps now, because every microbatch has added its part."
    )
    return Step("The end of the step", says, tuple(rows), _ruler(timeline), text=as_text(timeline, unit=1.0))


def _sends(schedule: Schedule, event: Event) -> list[int]:
    """Return the places that get what an action makes."""
    _, sent = transfers_of(schedule.graph, Action(event.kind, event.stage, event.microbatch))
    return [schedule.graph.nodes[action.other].place for action in sent if action.other is not None]


def _name(graph: StageGraph, place: int) -> str:
    held = ", ".join(str(stage) for stage in graph.at(place))
    return f"rank {place}: {held}" if len(graph.at(place)) > 1 else f"rank {place}"


def _box(graph: StageGraph, event: Event, fresh: bool) -> Box:
    several = f"@{event.stage}" if len(graph.at(event.place)) > 1 else ""
    said = (
        f"stage {event.stage}: {_DOES[event.kind]} of microbatch {event.microbatch}, {event.start:g} to {event.end:g}"
    )
    return Box(event.start, event.end, f"{event.kind}{event.microbatch}{several}", _TONES[event.kind], said, fresh)


def _doing(event: Event | None) -> str:
    return "waits" if event is None else f"{_DOES[event.kind].split(' of ')[0]} {event.microbatch}"


def _ruler(timeline: Timeline) -> tuple[Box, ...]:
    return tuple(Box(unit, unit + 1, str(unit)) for unit in range(round(timeline.step)))


def _sentence(timeline: Timeline, new: list[Event | None], events: list[list[Event]], moment: float) -> str:
    """Say what begins, and why the others do not."""
    graph = timeline.schedule.graph
    several = any(len(graph.at(place)) > 1 for place in range(graph.places))
    begun = []
    for place, event in enumerate(new):
        if event is not None:
            stage = f" at stage {event.stage}" if several else ""
            begun.append(f"rank {place} begins the {_DOES[event.kind]} of microbatch {event.microbatch}{stage}")
    idle = [place for place, own in enumerate(events) if not (own and own[-1].end > moment)]
    done = [place for place in idle if len(events[place]) == len(timeline.events[place])]
    waiting = [place for place in idle if place not in done]
    said = "; ".join(begun)
    said = said[0].upper() + said[1:]
    if waiting:
        first = waiting[0]
        reason = _missing(timeline, first, len(events[first]))
        said += f". {_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}: {reason}"
    if done:
        said += f". {_ranks(done)} {'has' if len(done) == 1 else 'have'} nothing left to do"
    return said + "."


def _missing(timeline: Timeline, place: int, at: int) -> str:
    """Say what the next action of a place waits for."""
    event = timeline.events[place][at]
    graph = timeline.schedule.graph
    whose = f"rank {place}'s next action, the {_DOES[event.kind]} of microbatch {event.microbatch}, needs"
    if event.kind is Kind.F:
        sources = graph.predecessors(event.stage)
        assert sources, "the first stage never waits before a forward"
        return f"{whose} the output of stage {sources[0]}, which is not there yet"
    targets = graph.successors(event.stage)
    if targets:
        return f"{whose} the gradient from stage {targets[0]}, which is not there yet"
    return f"{whose} its forward, which is not done yet"


def _ranks(places: list[int]) -> str:
    if len(places) == 1:
        return f"Rank {places[0]}"
    return f"Ranks {', '.join(map(str, places[:-1]))} and {places[-1]}"
