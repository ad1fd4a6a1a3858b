"""Pipeline schedules: the action lists of `cornstarch.schedule`, simulated and drawn moment by moment."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from cornstarch.errors import ConfigError
from cornstarch.explain import story
from cornstarch.explain.story import NUMBER_BYTES, DiagramBox, DiagramRow, Formula, Story, StoryStep, Tone
from cornstarch.plan.communication import send_bytes
from cornstarch.plan.simulate import SimulatedAction, Timeline, as_text, simulate
from cornstarch.schedule import Action, Kind, StageGraph, make_schedule
from cornstarch.schedule.actions import get_transfers

VIRTUAL = 2
"""Stages of each place under `interleaved`."""
_MAX_FORWARDS = 64  # ranks times microbatches: every step draws all actions so far

_TONES: dict[Kind, Tone] = {Kind.F: "f", Kind.B: "b", Kind.I: "i", Kind.W: "w"}
_ACTIONS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "gradients of inputs", Kind.W: "gradients of weights"}
_LEADS = {
    "naive": "One microbatch at a time goes through all stages and back. While one rank works, all others wait; it is "
    "there to compare with.",
    "gpipe": "The batch is cut into microbatches: all forwards, then all backwards. Ranks work at the same time, but "
    "each keeps the activations of every microbatch.",
    "1f1b": "As many forwards as there are stages to the end, then one backward and one forward in turn. It takes as "
    "long as gpipe, and activations are freed much earlier.",
    "interleaved": "As 1f1b, but each rank holds two stages that do not follow one another, so that the first "
    "microbatch reaches the last rank sooner. There are twice as many transfers. The stages of a rank are listed "
    "beside it.",
    "zero-bubble": "Backward is cut in two: gradients of inputs, for which the stage before waits, come first; "
    "gradients of weights, for which nobody waits, fill the gaps.",
}
POLICY_OF = {name: name.replace("-", "_") for name in _LEADS}
"""The policy of each topic."""
_BUBBLES = {
    "naive": "(K − 1) / K",
    "gpipe": "(K − 1) / (M + K − 1)",
    "1f1b": "(K − 1) / (M + K − 1)",
    "interleaved": "(K − 1) / (v M + K − 1)",
    "zero-bubble": "(K − 1) / (3 M + K − 1)",
}


def compute_bubble(topic: str, places: int, microbatches: int) -> float | None:
    """Return the bubble by the formula for stages of equal cost; None where the formula does not hold."""
    ahead = places - 1
    if topic == "naive":
        return ahead / places
    if topic == "interleaved":
        return ahead / (VIRTUAL * microbatches + ahead)
    if topic == "zero-bubble":
        return ahead / (3 * microbatches + ahead) if microbatches >= places else None
    return ahead / (microbatches + ahead)


def build_pipeline(topic: str, ranks: int, microbatches: int, elements: int) -> Story:
    """Return a schedule that grows moment by moment; `elements` are a microbatch's numbers between two stages."""
    if ranks * microbatches > _MAX_FORWARDS:
        raise ConfigError(
            f"--microbatches {microbatches}: with {ranks} ranks that is too much to draw action by action. "
            f"Use {_MAX_FORWARDS // ranks} or fewer."
        )
    graph = StageGraph.chain(ranks, module="stage", virtual_stages=VIRTUAL if topic == "interleaved" else 1)
    schedule = make_schedule(graph, microbatches, POLICY_OF[topic])
    timeline = simulate(schedule)
    moments = sorted({event.start for own in timeline.events for event in own})
    steps = [_build_step(timeline, moment, elements) for moment in moments]
    # The end of the step is the picture of its last moment, without new actions.
    rows = []
    for row, bubble in zip(steps[-1].rows, timeline.bubbles, strict=True):
        boxes = [replace(box, fresh=False) for box in row.boxes]
        rows.append(DiagramRow(row.name, boxes, f"waits {bubble:.1%}"))
    description = (
        f"All gradients are there after {timeline.step:g} units of time: ranks have waited {timeline.bubble:.1%} of "
        "it, which is the bubble; the optimizer steps now, because every microbatch has added its part."
    )
    text = as_text(timeline, unit=1.0)
    steps.append(StoryStep("The end of the step", description, rows, steps[-1].head, text=text))
    in_flight = [max(timeline.in_flight[stage] for stage in graph.at(place)) for place in range(len(timeline.events))]
    kinds = {event.kind for event in chain(*timeline.events)}
    return Story(
        topic,
        f"Pipeline: {topic}",
        _LEADS[topic],
        steps,
        _build_formulas(topic, timeline, steps, elements),
        [
            "Forward, and each half of backward, take one unit of time on every stage; transfers take none. The most "
            f"microbatches that a stage holds activations of, by rank: {', '.join(map(str, in_flight))}.",
            "The list of actions is the very one that the runtime carries out.",
        ],
        [(_TONES[kind], f"{kind} {_ACTIONS[kind]}") for kind in Kind if kind in kinds],
    )


def _build_formulas(topic: str, timeline: Timeline, steps: list[StoryStep], elements: int) -> list[Formula]:
    places, count = len(timeline.events), timeline.schedule.microbatches
    bubble = compute_bubble(topic, places, count)
    values = f"K = {places}, M = {count}" + (f", v = {VIRTUAL}" if topic == "interleaved" else "")
    by_formula = "holds for M ≥ K only" if bubble is None else f"{bubble:.1%}"
    sent, size = story.sum_sent(steps), send_bytes(NUMBER_BYTES * elements)
    # Every edge between two stages carries each microbatch once forward and once backward.
    edges = len(timeline.schedule.graph.nodes) - 1
    return [
        Formula("Bubble: the fraction of time that ranks wait", _BUBBLES[topic], values, by_formula,
                f"{timeline.bubble:.1%}"),
        Formula("Bytes that all ranks send together", "2 M × (stages − 1) × activation",
                f"2 × {count} × {edges} × {story.format_byte_count(size)}",
                story.format_byte_count(2 * count * edges * size),
                f"{story.format_byte_count(sum(sent))} ({story.format_range(sent)} for each rank)"),
    ]  # fmt: skip


def _build_step(timeline: Timeline, moment: float, elements: int) -> StoryStep:
    """Return the state after the actions of a moment have begun."""
    graph = timeline.schedule.graph
    events = [[event for event in own if event.start <= moment] for own in timeline.events]
    new = [own[-1] if own and own[-1].start == moment else None for own in events]
    size = send_bytes(NUMBER_BYTES * elements)
    rows, arrows, sent = [], [], []
    for place, own in enumerate(events):
        busy = own[-1] if own and own[-1].end > moment else None
        stages = graph.at(place)
        boxes = []
        for event in own:
            action = f"{_ACTIONS[event.kind]} of microbatch {event.microbatch}"
            tooltip = f"stage {event.stage}: {action}, {event.start:g} to {event.end:g}"
            text = f"{event.kind}{event.microbatch}" + (f"@{event.stage}" if len(stages) > 1 else "")
            box = DiagramBox(event.start, event.end, text, _TONES[event.kind], tooltip, event is new[place])
            boxes.append(box)
        doing = f"{_ACTIONS[busy.kind].split(' of ')[0]} {busy.microbatch}" if busy else "waits"
        name = f"rank {place}" + (f": {', '.join(map(str, stages))}" if len(stages) > 1 else "")
        rows.append(DiagramRow(name, boxes, doing))
        targets = []  # the places that receive the output of the new action
        if (begun := new[place]) is not None:
            _, sends = get_transfers(graph, Action(begun.kind, begun.stage, begun.microbatch))
            targets = [graph.nodes[send.other].place for send in sends if send.other is not None]
            arrows += [story.Arrow(place, target, begun.end) for target in targets]
        sent.append(size * len(targets))
    so_far = max(event.end for own in events for event in own)
    return StoryStep(
        f"Time {moment:g}",
        _describe_moment(timeline, new, events, moment),
        rows,
        story.build_head(range(round(timeline.step))),
        sent,
        arrows,
        as_text(replace(timeline, events=tuple(map(tuple, events)), step=so_far), unit=1.0),
    )


def _describe_moment(
    timeline: Timeline, new: list[SimulatedAction | None], events: list[list[SimulatedAction]], moment: float
) -> str:
    """Describe the actions that begin, and what the other ranks wait for."""
    graph = timeline.schedule.graph
    several = any(len(graph.at(place)) > 1 for place in range(graph.places))
    begun = []
    for place, event in enumerate(new):
        if event is not None:
            stage = f" at stage {event.stage}" if several else ""
            begun.append(f"rank {place} begins the {_ACTIONS[event.kind]} of microbatch {event.microbatch}{stage}")
    idle = [place for place, own in enumerate(events) if not (own and own[-1].end > moment)]
    done = [place for place in idle if len(events[place]) == len(timeline.events[place])]
    waiting = [place for place in idle if place not in done]
    text = "; ".join(begun)
    text = text[0].upper() + text[1:]
    if waiting:
        first = waiting[0]
        event = timeline.events[first][len(events[first])]
        needed, missing = "its forward", "done"
        if event.kind is Kind.F:
            needed, missing = f"the output of stage {graph.predecessors(event.stage)[0]}", "there"
        elif targets := graph.successors(event.stage):
            needed, missing = f"the gradient from stage {targets[0]}", "there"
        action = f"rank {first}'s next action, the {_ACTIONS[event.kind]} of microbatch {event.microbatch}"
        reason = f"{action}, needs {needed}, which is not {missing} yet"
        text += f". {_format_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}: {reason}"
    if done:
        text += f". {_format_ranks(done)} {'has' if len(done) == 1 else 'have'} nothing left to do"
    return text + "."


def _format_ranks(places: list[int]) -> str:
    if len(places) == 1:
        return f"Rank {places[0]}"
    return f"Ranks {', '.join(map(str, places[:-1]))} and {places[-1]}"
