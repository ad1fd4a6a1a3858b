"""Orders of actions: lines with a fixed order, and a list scheduler that merges the lines of one place.

A *line* is a sequence of actions of one place that keep their order among themselves; all actions of a kind at a stage
are in the same line. A place with several lines is simulated: of the actions at the heads of its lines that can begin,
it takes the most urgent one. Gradients that other stages wait for come first, then forwards, then gradients of weights,
which so fill the gaps; early microbatches come first, and of these the action with the longest way to go.

The result is the order of an execution that took place, so places that follow it never wait in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from cornstarch.schedule import actions as rules
from cornstarch.schedule.actions import Action, Kind, get_backward_kinds
from cornstarch.schedule.graph import StageGraph

ActionLine = list[Action]
PlaceActions = tuple[tuple[Action, ...], ...]  # the actions of each place
PlaceOrder = tuple[PlaceActions, float | None]
"""The actions of each place, and their makespan if it is known already."""

_URGENCY = {Kind.B: 0, Kind.I: 0, Kind.F: 1, Kind.W: 2}
_END = -1


def get_warmup_depths(graph: StageGraph) -> list[int]:
    """Return the forwards before each stage's first backward with 1F1B: one for each stage to the end, and its own."""
    # With equal stages, the first gradient then arrives just when another forward would exceed the memory.
    return [graph.distance(stage) + 1 for stage in range(len(graph.nodes))]


def build_stage_lines(
    graph: StageGraph, microbatches: int, warmup: Sequence[int], lags: Sequence[int] | None = None
) -> list[ActionLine]:
    """Return a line for each stage.

    warmup: by stage, the number of forwards before its first backward.
    lags: by stage, by how many microbatches the gradients of weights follow those of inputs. Default: together.
    """
    lines = []
    for stage in range(len(graph.nodes)):
        forwards = [Action(Kind.F, stage, m) for m in range(microbatches)]
        kinds = get_backward_kinds(graph, stage, split=lags is not None)
        backwards = [tuple([Action(kind, stage, m) for kind in kinds]) for m in range(microbatches)]
        if lags is not None and len(kinds) > 1:
            none: list[tuple[Action, ...]] = [()] * min(lags[stage], microbatches)
            inputs = [*(backward[:1] for backward in backwards), *none]
            weights = [*none, *(backward[1:] for backward in backwards)]
            backwards = [one + other for one, other in zip(inputs, weights, strict=True)]
        lines.append(build_phases(forwards, backwards, warmup[stage]))
    return lines


def build_phases(forwards: Sequence[Action], backwards: Sequence[Iterable[Action]], warmup: int) -> ActionLine:
    """Return the three phases of 1F1B; GPipe has no steady state, because its warm-up takes all forwards."""
    # warm-up: forwards only, until the first gradient can be back
    line = [*forwards[:warmup]]
    # steady state: one backward, one forward, so the number of microbatches in flight stays the same
    steady = forwards[warmup:]
    for backward, forward in zip(backwards, steady, strict=False):
        line += (*backward, forward)
    # cool-down: the backwards that are left
    for backward in backwards[len(steady) :]:
        line += backward
    return line


def assign_to_places(graph: StageGraph, lines: Sequence[ActionLine]) -> PlaceOrder:
    """Return the actions of each place; lines of the same place are merged, which also gives the makespan."""
    places = [graph.nodes[line[0].stage].place for line in lines]
    if len({*places}) < len(places):
        return merge_lines(graph, lines)
    return tuple(tuple(line) for _, line in sorted(zip(places, lines, strict=True), key=lambda pair: pair[0])), None


def add_makespan(graph: StageGraph, found: PlaceOrder) -> tuple[PlaceActions, float]:
    """Compute the makespan of an order if it is not known."""
    actions, duration = found
    return actions, rules.makespan(rules.compute_times(graph, actions)) if duration is None else duration


def merge_lines(
    graph: StageGraph, lines: Sequence[Sequence[Action]], limits: Sequence[int] | None = None
) -> tuple[PlaceActions, float]:
    """Return the actions of all lines, by place, in the order in which places would take them, and the makespan."""
    # limits: by stage, how many microbatches may be in flight; a forward beyond that waits for a backward.
    run = _ListScheduler(graph, lines, limits)
    while run.events:
        run.advance()
    taken = tuple(tuple([lines[line][at] for line, at in own]) for own in run.taken)
    assert sum(map(len, taken)) == sum(map(len, lines)), "lines wait for one another"
    return taken, run.now


class _ListScheduler:
    """A simulated execution: which results each action still needs, which actions can begin, and who is busy.

    An action is an integer, `work × microbatches + microbatch`; a work is a pair of kind and stage, also numbered.
    Large schedules have 10^5 actions, so everything that is looked up per action is in flat lists.
    """

    def __init__(self, graph: StageGraph, lines: Sequence[Sequence[Action]], limits: Sequence[int] | None) -> None:
        lines_of = {(kind, stage): line for line, own in enumerate(lines) for kind, stage, _, _ in own}
        works = [*lines_of]
        self.line_of = [*lines_of.values()]
        self.many = many = 1 + max((max(microbatch for _, _, microbatch, _ in own) for own in lines if own), default=0)
        first = {work: index * many for index, work in enumerate(works)}
        self.lines = [[first[kind, stage] + microbatch for kind, stage, microbatch, _ in own] + [_END] for own in lines]
        self.place_of = [graph.nodes[line[0].stage].place if line else 0 for line in lines]
        self.stage_of = [stage for _, stage in works]
        self.durations = [rules.get_duration(graph, *work) for work in works]
        # How many results each action waits for, and by work, which others wait for it.
        wanted = [{*rules.get_requirements(graph, *work)} for work in works]
        makers = {result: index for index, work in enumerate(works) for result in rules.get_results(Action(*work, 0))}
        self.missing = [len(needed) for needed in wanted for _ in range(many)]
        self.missing.append(1)  # for _END: it never begins
        self.dependents: list[list[int]] = [[] for _ in works]
        for number, needed in enumerate(wanted):
            for result in needed:
                self.dependents[makers[result]].append(number)

        # Kind, microbatch, distance to go and line of each action, in one integer; small ones are urgent.
        self.urgency: list[int] = []
        step = len(graph.nodes)
        for (kind, stage), line in zip(works, self.line_of, strict=True):
            distance = graph.distance(stage) if kind is Kind.F else graph.depth(stage)
            base = _URGENCY[kind] * many * step + step - distance
            self.urgency += [(base + microbatch * step) * len(lines) + line for microbatch in range(many)]

        # A microbatch is in flight at a stage from its forward to the end of its backward.
        self.acquires = [kind is Kind.F and graph.wants_gradient(stage) for kind, stage in works]
        self.releases = [
            kind in (Kind.B, Kind.W) or (kind is Kind.I and graph.backward(stage) == "input") for kind, stage in works
        ]
        self.free_slots = [*limits] if limits is not None else [len(works) * many] * len(graph.nodes)
        self.blocked: list[list[int]] = [[] for _ in graph.nodes]  # lines whose next forward has no free slot

        self.now: float = 0
        self.heads = [0] * len(lines)
        self.taken: list[list[tuple[int, int]]] = [[] for _ in range(graph.places)]  # (line, index in the line)
        self.events: list[tuple[float, int, int]] = []  # (end of an action, its place, its line)
        self.ready: list[list[int]] = [[] for _ in range(graph.places)]  # heaps of urgencies, which encode the line
        self.is_free = [True] * graph.places
        for line in range(len(lines)):
            self._offer(line)
        for place in range(graph.places):
            self._start(place)

    def advance(self) -> None:
        """Advance to the end of the next actions, and let every place that is free then start another one."""
        events, is_free = self.events, self.is_free
        self.now = now = events[0][0]
        places = set()
        while events and events[0][0] == now:
            _, place, line = heappop(events)
            is_free[place] = True
            places.add(place)
            self._complete(line, places)
        for place in places:
            if is_free[place]:
                self._start(place)

    def _complete(self, line: int, places: set[int]) -> None:
        """Complete the action at a line's head; add the places that can begin more actions."""
        lines, heads, missing, many = self.lines, self.heads, self.missing, self.many
        work, microbatch = divmod(lines[line][heads[line]], many)
        heads[line] += 1
        for dependent in self.dependents[work]:
            action = dependent * many + microbatch
            missing[action] -= 1
            if not missing[action]:
                other = self.line_of[dependent]
                if other != line and lines[other][heads[other]] == action:
                    heappush(self.ready[self.place_of[other]], self.urgency[action])
                    places.add(self.place_of[other])
        if self.releases[work]:
            stage = self.stage_of[work]
            self.free_slots[stage] += 1
            if self.blocked[stage]:
                self._offer(self.blocked[stage].pop())
        self._offer(line)

    def _offer(self, line: int) -> None:
        action = self.lines[line][self.heads[line]]
        if not self.missing[action]:
            heappush(self.ready[self.place_of[line]], self.urgency[action])

    def _start(self, place: int) -> None:
        ready = self.ready[place]
        while ready:
            line = heappop(ready) % len(self.heads)
            head = self.heads[line]
            work = self.lines[line][head] // self.many
            if self.acquires[work]:
                stage = self.stage_of[work]
                if not self.free_slots[stage]:
                    self.blocked[stage].append(line)
                    continue
                self.free_slots[stage] -= 1
            self.is_free[place] = False
            self.taken[place].append((line, head))
            heappush(self.events, (self.now + self.durations[work], place, line))
            return
