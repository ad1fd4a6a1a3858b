"""When each action of given lists begins and ends, if every place does its own in order and waits for what it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.kinds import Action, Kind, Result, duration, needs, results

Span = tuple[float, float]
"""Beginning and end."""


class Deadlock(ValueError):
    """Some places wait for one another, or for what nobody does."""


Transfers = float | Mapping[tuple[int, int], float]
"""How long what one stage made takes to another place: always the same, or by edge of the graph, which then takes as
long in both directions; an edge that is not named takes no time."""


def times(graph: StageGraph, actions: Sequence[Sequence[Action]], transfer: Transfers = 0) -> list[list[Span]]:
    """Return beginning and end of every action, by place.

    Receives wait, sends do not. What another place made is there `transfer` later; the place that needs it may compute
    in the meantime, as long as its next action needs something else. Costs that are fractions are added up exactly.
    """
    known = _Rules(graph, actions, transfer)
    rules = known.of
    ends: list[float | None] = [None] * (len(known.numbers) * known.many)
    waiting: dict[int, list[int]] = {}  # the places that wait for a result
    spans: list[list[Span]] = [[] for _ in actions]
    to_do = [*range(len(actions))]
    while to_do:
        place = to_do.pop()
        mine, own = actions[place], spans[place]
        clock = own[-1][1] if own else 0
        for index in range(len(own), len(mine)):  # the busiest loop of all: large schedules have 10^5 actions
            kind, stage, microbatch, other = mine[index]
            lasts, required, left = rules[kind, stage, other]
            start = clock
            for number, later in required:
                end = ends[number + microbatch]
                if end is None:
                    waiting.setdefault(number + microbatch, []).append(place)
                    break
                if end + later > start:
                    start = end + later
            else:
                clock = start + lasts
                own.append((start, clock))
                for number in left:
                    ends[number + microbatch] = clock
                    if number + microbatch in waiting:
                        to_do += waiting.pop(number + microbatch)
                continue
            break
    stuck = {place: mine[len(spans[place])] for place, mine in enumerate(actions) if len(spans[place]) < len(mine)}
    if stuck:
        raise Deadlock(_told(graph, known, ends, stuck))
    return spans


class _Rules:
    """Duration, needs and results of every kind of action that there is, looked up once for all microbatches.

    A result of a microbatch is a number: that of the result, plus the microbatch.
    """

    def __init__(self, graph: StageGraph, actions: Sequence[Sequence[Action]], transfer: Transfers) -> None:
        self.many = 1 + max((action.microbatch for mine in actions for action in mine), default=0)
        self.numbers: dict[Result, int] = {}
        self.of: dict[Result, tuple[float, tuple[tuple[int, float], ...], tuple[int, ...]]] = {}
        for kind, stage, other in {(a.kind, a.stage, a.other): 0 for mine in actions for a in mine}:
            place = graph.nodes[stage].place
            required = tuple(
                (self.number(result), _lag(transfer, result[1], stage) if graph.nodes[result[1]].place != place else 0)
                for result in needs(graph, kind, stage, other)
            )
            left = tuple(self.number(result) for result in results(Action(kind, stage, 0, other)))
            self.of[kind, stage, other] = duration(graph, kind, stage), required, left

    def number(self, result: Result) -> int:
        """Return the number of a result, a new one if it has none yet."""
        return self.numbers.setdefault(result, len(self.numbers) * self.many)


def _lag(transfer: Transfers, one: int, other: int) -> float:
    """Return how long something takes between two stages, whichever of them makes it."""
    if not isinstance(transfer, Mapping):
        return transfer
    return transfer.get((one, other), transfer.get((other, one), 0))


def _told(
    graph: StageGraph, rules: _Rules, ends: Sequence[float | None], stuck: Mapping[int, Action], most: int = 8
) -> str:
    """Return who waits for what."""
    said = []
    for place, action in [*stuck.items()][:most]:
        missing = [
            f"{kind}{action.microbatch}@{stage}"
            for kind, stage, other in needs(graph, action.kind, action.stage, action.other)
            if ends[rules.numbers[kind, stage, other] + action.microbatch] is None
        ]
        said.append(f"place {place} at {action} for {' and '.join(missing)}")
    return f"Places wait for ever: {'; '.join(said)}{'; …' if len(stuck) > most else ''}."


def makespan(spans: Sequence[Sequence[Span]]) -> float:
    """Return when everything is done."""
    return max((own[-1][1] for own in spans if own), default=0)


def transfers_of(graph: StageGraph, action: Action) -> tuple[list[Action], list[Action]]:
    """Return what a place receives right before a computation, and sends right after it."""
    stage, microbatch, kind = action.stage, action.microbatch, action.kind
    nodes, place = graph.nodes, graph.nodes[action.stage].place
    before = [other for other in graph.predecessors(stage) if nodes[other].place != place]
    behind = [other for other in graph.successors(stage) if nodes[other].place != place]
    if kind is Kind.F:
        received = [Action(Kind.RECV_F, stage, microbatch, other) for other in before]
        return received, [Action(Kind.SEND_F, stage, microbatch, other) for other in behind]
    received, sent = [], []
    if kind is not Kind.W or graph.backward(stage) == "weight":
        received = [Action(Kind.RECV_B, stage, microbatch, other) for other in behind]
    if kind is not Kind.W:
        back = [other for other in before if graph.sends_gradient(other, stage)]
        sent = [Action(Kind.SEND_B, stage, microbatch, other) for other in back]
    return received, sent
