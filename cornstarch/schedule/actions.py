"""Schedules: the actions of every place in order, what each action waits for, and when it runs.

A schedule is printable and comparable, and is checked before anything runs. The runtime carries out the same list of
actions that the simulator times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from cornstarch.schedule.graph import Backward, StageGraph


class Kind(StrEnum):
    """The kinds of actions of a place, on a microbatch at one of its stages."""

    F = "F"  # forward
    B = "B"  # backward: the gradients of the weights and, where they are needed, of the inputs, together
    I = "I"  # noqa: E741  # gradients of the inputs only; the whole backward of a frozen stage behind a trained one
    W = "W"  # gradients of the weights only: after `I`, or alone at a stage before which nothing is trained
    SEND_F = "SEND_F"  # send the output to the stage `other`
    RECV_F = "RECV_F"  # receive the output of the stage `other`
    SEND_B = "SEND_B"  # send the gradient of an input back to the stage `other`, where the input came from
    RECV_B = "RECV_B"  # receive the gradient of the output from the stage `other`


COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)
SEND_OF_RECEIVE = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}
_BACKWARD_KINDS: dict[Backward, tuple[tuple[Kind, ...], tuple[Kind, ...]]] = {  # whole, and split
    "none": ((), ()),
    "input": ((Kind.I,), (Kind.I,)),
    "weight": ((Kind.B,), (Kind.W,)),
    "both": ((Kind.B,), (Kind.I, Kind.W)),
}


class Action(NamedTuple):
    kind: Kind
    stage: int  # the stage whose place runs the action
    microbatch: int
    other: int | None = None  # the stage at the other end of a transfer

    def __str__(self) -> str:
        other = "" if self.other is None else f"{'>' if self.kind.startswith('SEND') else '<'}{self.other}"
        return f"{self.kind}{self.microbatch}@{self.stage}{other}"


def get_backward_kinds(graph: StageGraph, stage: int, split: bool = False) -> tuple[Kind, ...]:
    """Return the actions of a stage's backward, in order; `split` separates gradients of inputs and of weights."""
    return _BACKWARD_KINDS[graph.backward(stage)][split]


def get_duration(graph: StageGraph, kind: Kind, stage: int) -> float:
    """Return the duration of an action; transfers take no time of the place itself."""
    # A stage before which nothing is trained sends no gradient, but gradients pass through its layers up to the first
    # one: its whole backward takes both times, whether it is called `B` or `W`.
    node = graph.nodes[stage]
    if kind is Kind.F:
        return node.forward
    if kind is Kind.I:
        return node.backward_input
    if kind is Kind.B or (kind is Kind.W and graph.backward(stage) == "weight"):
        return node.backward_input + node.backward_weight
    return node.backward_weight if kind is Kind.W else 0


ActionResult = tuple[Kind, int, int | None]
"""The result of an action for a microbatch: F a stage's output, I the gradients of its inputs, W those of its weights;
SEND_F and SEND_B a message, with the stage that it goes to."""


def get_results(action: Action) -> tuple[ActionResult, ...]:
    if action.kind is Kind.B:
        return (Kind.I, action.stage, None), (Kind.W, action.stage, None)
    if action.kind in SEND_OF_RECEIVE:
        return ()
    return ((action.kind, action.stage, action.other),)


def get_requirements(graph: StageGraph, kind: Kind, stage: int, other: int | None = None) -> Iterator[ActionResult]:
    """Yield the results that must exist before an action can begin."""
    if kind is Kind.F:
        yield from ((Kind.F, source, None) for source in graph.predecessors(stage))
    elif kind is Kind.W and graph.backward(stage) == "both":
        yield Kind.I, stage, None
    elif kind in (Kind.B, Kind.I, Kind.W):
        yield Kind.F, stage, None
        yield from ((Kind.I, target, None) for target in graph.successors(stage))
    elif kind in SEND_OF_RECEIVE:
        assert other is not None
        yield SEND_OF_RECEIVE[kind], other, stage
    else:
        yield (Kind.F if kind is Kind.SEND_F else Kind.I), stage, None


def get_transfers(graph: StageGraph, action: Action) -> tuple[list[Action], list[Action]]:
    """Return the receives right before a computation, and the sends right after it."""
    stage, microbatch, kind = action.stage, action.microbatch, action.kind
    nodes, place = graph.nodes, graph.nodes[action.stage].place
    before = [other for other in graph.predecessors(stage) if nodes[other].place != place]
    after = [other for other in graph.successors(stage) if nodes[other].place != place]
    receive, send, sources, targets = Kind.RECV_F, Kind.SEND_F, before, after
    if kind is not Kind.F:
        receive, send = Kind.RECV_B, Kind.SEND_B
        sources = after if kind is not Kind.W or graph.backward(stage) == "weight" else []
        targets = [other for other in before if kind is not Kind.W and graph.sends_gradient(other, stage)]
    received = [Action(receive, stage, microbatch, other) for other in sources]
    return received, [Action(send, stage, microbatch, other) for other in targets]


@dataclass(frozen=True)
class Schedule:
    """The actions of one step, by place."""

    graph: StageGraph
    microbatches: int
    name: str  # the policy that built it
    actions: tuple[tuple[Action, ...], ...]  # by place: computations only, until `with_transfers`
    reason: str = ""  # why this policy was chosen, if it was chosen automatically

    def with_transfers(self) -> Schedule:
        """Return the schedule with sends and receives between different places."""
        # A value is sent right after the computation that produces it, and received right before the one that needs it.
        # Places wait in receives, but not in sends, so they cannot deadlock. Along each edge, messages are sent and
        # received in the same order; messages of different edges between two places may overtake one another.
        lists: list[list[Action]] = [[] for _ in self.actions]
        for mine, found in zip(self.actions, lists, strict=True):
            for action in mine:
                if action.kind in COMPUTE:
                    received, sent = get_transfers(self.graph, action)
                    found += [*received, action, *sent]
        return replace(self, actions=tuple(map(tuple, lists)))

    def check(self) -> None:
        """Raise ValueError with the first rule that is broken.

        Every action occurs once, at its place, after the results that it needs; no place waits for ever; transfers, if
        there are any, are complete and in the same order at both ends of an edge.
        """
        if len(self.actions) != self.graph.places:
            raise ValueError(f"There are {self.graph.places} places, but {len(self.actions)} lists of actions.")
        self._check_computations()
        if any(action.kind not in COMPUTE for mine in self.actions for action in mine):
            self._check_transfers()
        compute_times(self.graph, self.actions)

    def _check_computations(self) -> None:
        found = Counter(action for mine in self.actions for action in mine if action.kind in COMPUTE)
        for place, mine in enumerate(self.actions):
            for action in mine:
                if not (0 <= action.stage < len(self.graph.nodes) and 0 <= action.microbatch < self.microbatches):
                    raise ValueError(f"{action}: there is no such stage or microbatch.")
                if (own := self.graph.nodes[action.stage].place) != place:
                    raise ValueError(f"{action} belongs to place {own}, but is listed at place {place}.")
                if found[action] > 1:
                    raise ValueError(f"{action} is listed {found[action]} times.")
        for stage in range(len(self.graph.nodes)):
            whole, split = ((Kind.F, *get_backward_kinds(self.graph, stage, split)) for split in (False, True))
            for m in range(self.microbatches):
                is_split = Action(whole[-1], stage, m) not in found and Action(split[-1], stage, m) in found
                for kind in split if is_split else whole:
                    if not found.pop(Action(kind, stage, m), 0):
                        raise ValueError(f"{Action(kind, stage, m)} is missing.")
        if rest := [action for action, count in found.items() if count]:
            backward = self.graph.backward(rest[0].stage)
            raise ValueError(f"{rest[0]} is superfluous: the backward of its stage computes {backward}.")

    def _check_transfers(self) -> None:
        expected = self.with_transfers().actions
        if self.actions != expected:
            place = next(p for p, mine in enumerate(self.actions) if mine != expected[p])
            pairs = zip((*self.actions[place], None), (*expected[place], None), strict=False)
            found, wanted = next((a, b) for a, b in pairs if a != b)
            raise ValueError(f"Place {place}: found {found}; expected {wanted or 'nothing'}.")
        messages: dict[tuple[Kind, int, int], list[int]] = {}  # microbatches, by kind, source and target
        for mine in self.actions:
            for action in mine:
                if action.other is not None:
                    ends = (action.stage, action.other)
                    source, target = ends[::-1] if action.kind in SEND_OF_RECEIVE else ends
                    messages.setdefault((action.kind, source, target), []).append(action.microbatch)
        for (kind, source, target), received in messages.items():
            if kind in SEND_OF_RECEIVE and received != messages.get((SEND_OF_RECEIVE[kind], source, target)):
                raise ValueError(f"Messages from stage {source} to {target} are not received in the order of sending.")

    def __str__(self) -> str:
        return "\n".join(f"place {place}: {' '.join(map(str, mine))}" for place, mine in enumerate(self.actions))


TimeSpan = tuple[float, float]  # beginning and end

TransferTimes = float | Mapping[tuple[int, int], float]
"""The time of a transfer to another place: always the same, or by edge of the graph, in both directions; edges that are
not listed take no time."""


class DeadlockError(ValueError):
    """Some places wait for one another, or for a result that no action produces."""


def compute_times(
    graph: StageGraph, actions: Sequence[Sequence[Action]], transfer: TransferTimes = 0
) -> list[list[TimeSpan]]:
    """Return beginning and end of every action, by place, if each place runs its actions in order."""
    # Receives wait, sends do not. A result of another place arrives `transfer` later; meanwhile, the place that needs
    # it may compute, as long as its next action needs something else. Costs that are fractions are added up exactly.
    rules = _ActionRules(graph, actions, transfer)
    ends: list[float | None] = [None] * (len(rules.indices) * rules.microbatches)
    waiting: dict[int, list[int]] = {}  # the places that wait for a result
    spans: list[list[TimeSpan]] = [[] for _ in actions]
    to_do = [*range(len(actions))]
    while to_do:
        place = to_do.pop()
        mine, own = actions[place], spans[place]
        clock = own[-1][1] if own else 0
        for index in range(len(own), len(mine)):  # the busiest loop of all: large schedules have 10^5 actions
            kind, stage, microbatch, other = mine[index]
            duration, required, produced = rules.by_action[kind, stage, other]
            start = clock
            for result, lag in required:
                end = ends[result + microbatch]
                if end is None:
                    waiting.setdefault(result + microbatch, []).append(place)
                    break
                if end + lag > start:
                    start = end + lag
            else:
                clock = start + duration
                own.append((start, clock))
                for result in produced:
                    ends[result + microbatch] = clock
                    if result + microbatch in waiting:
                        to_do += waiting.pop(result + microbatch)
                continue
            break
    stuck = {place: mine[len(spans[place])] for place, mine in enumerate(actions) if len(spans[place]) < len(mine)}
    if stuck:
        raise DeadlockError(_describe_deadlock(graph, rules, ends, stuck))
    return spans


class _ActionRules:
    """Duration, requirements and results of each kind of action at each stage, looked up once for all microbatches.

    The result of a microbatch is an integer: the index of the result, plus the microbatch.
    """

    def __init__(self, graph: StageGraph, actions: Sequence[Sequence[Action]], transfer: TransferTimes) -> None:
        self.microbatches = 1 + max((action.microbatch for mine in actions for action in mine), default=0)
        self.indices: dict[ActionResult, int] = {}
        self.by_action: dict[ActionResult, tuple[float, tuple[tuple[int, float], ...], tuple[int, ...]]] = {}
        for kind, stage, other in {(a.kind, a.stage, a.other): 0 for mine in actions for a in mine}:
            required = tuple(
                (self._index(result), _get_lag(graph, transfer, result[1], stage))
                for result in get_requirements(graph, kind, stage, other)
            )
            produced = tuple(self._index(result) for result in get_results(Action(kind, stage, 0, other)))
            self.by_action[kind, stage, other] = get_duration(graph, kind, stage), required, produced

    def _index(self, result: ActionResult) -> int:
        return self.indices.setdefault(result, len(self.indices) * self.microbatches)


def _get_lag(graph: StageGraph, transfer: TransferTimes, one: int, other: int) -> float:
    if graph.nodes[one].place == graph.nodes[other].place:
        return 0
    return transfer.get((one, other), transfer.get((other, one), 0)) if isinstance(transfer, Mapping) else transfer


def _describe_deadlock(
    graph: StageGraph, rules: _ActionRules, ends: Sequence[float | None], stuck: Mapping[int, Action], limit: int = 8
) -> str:
    waits = []
    for place, action in [*stuck.items()][:limit]:
        missing = [
            f"{kind}{action.microbatch}@{stage}"
            for kind, stage, other in get_requirements(graph, action.kind, action.stage, action.other)
            if ends[rules.indices[kind, stage, other] + action.microbatch] is None
        ]
        waits.append(f"place {place} at {action} for {' and '.join(missing)}")
    return f"Places wait for ever: {'; '.join(waits)}{'; …' if len(stuck) > limit else ''}."


def makespan(spans: Sequence[Sequence[TimeSpan]]) -> float:
    return max((own[-1][1] for own in spans if own), default=0)
