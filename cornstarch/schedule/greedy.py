"""A list scheduler: places that are free take the most urgent action that can begin, as time goes by.

A *line* is a sequence of actions of one place that keep their order among themselves; all actions of a kind at a stage
are in the same line. A place with several lines takes, of the actions at their heads that can begin, the most urgent:
gradients that others wait for, then forwards, then gradients of weights, which so fill the gaps; early microbatches
first, and of these what has the longest way to go.

What comes out is the order of an execution that took place, so places that follow it never wait in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.kinds import Action, Kind, duration, needs, results

_URGENCY = {Kind.B: 0, Kind.I: 0, Kind.F: 1, Kind.W: 2}
_END = -1


def arrange(
    graph: StageGraph, lines: Sequence[Sequence[Action]], limits: Sequence[int] | None = None
) -> tuple[tuple[tuple[Action, ...], ...], float]:
    """Return the actions of all lines, by place, in the order in which places would take them, and when all is done.

    limits: by stage, how many microbatches it may hold whose backward is not done; a forward beyond that waits.
    """
    run = _Run(graph, lines, limits)
    while run.events:
        run.proceed()
    taken = tuple(tuple([lines[line][at] for line, at in own]) for own in run.taken)
    assert sum(map(len, taken)) == sum(map(len, lines)), "lines wait for one another"
    return taken, run.now


class _Run:
    """One execution: what is missing for each action, what can begin, and who is busy until when.

    An action is a number, `work × microbatches + microbatch`; its work is its kind and stage, numbered, too.
    """

    def __init__(self, graph: StageGraph, lines: Sequence[Sequence[Action]], limits: Sequence[int] | None) -> None:
        works = [*{(action.kind, action.stage): 0 for line in lines for action in line}]
        number = {work: index for index, work in enumerate(works)}
        self.many = many = 1 + max((action.microbatch for line in lines for action in line), default=0)
        self.lines = [[number[a.kind, a.stage] * many + a.microbatch for a in line] + [_END] for line in lines]
        self.line_of = {number[a.kind, a.stage]: line for line, actions in enumerate(lines) for a in actions}
        self.place_of = [graph.nodes[line[0].stage].place if line else 0 for line in lines]
        self.stage_of = [stage for _, stage in works]
        self.lasts = [duration(graph, *work) for work in works]
        self._number_needs(graph, works)
        self._number_urgency(graph, works)

        # A stage holds a microbatch from its forward to the end of its backward.
        self.keeps = [kind is Kind.F and graph.wants_gradient(stage) for kind, stage in works]
        self.frees = [
            kind in (Kind.B, Kind.W) or (kind is Kind.I and graph.backward(stage) == "input") for kind, stage in works
        ]
        self.room = [*limits] if limits is not None else [len(works) * many] * len(graph.nodes)
        self.blocked: list[list[int]] = [[] for _ in graph.nodes]  # lines whose next forward has no room

        self.now: float = 0
        self.heads = [0] * len(lines)
        self.taken: list[list[tuple[int, int]]] = [[] for _ in range(graph.places)]  # (line, which of its actions)
        self.events: list[tuple[float, int, int]] = []  # (end of an action, its place, its line)
        self.ready: list[list[tuple[int, int]]] = [[] for _ in range(graph.places)]  # (urgency, line)
        self.is_free = [True] * graph.places
        for line in range(len(lines)):
            self._offer(line)
        for place in range(graph.places):
            self._start(place)

    def _number_needs(self, graph: StageGraph, works: Sequence[tuple[Kind, int]]) -> None:
        """Count what each action waits for, and note by work which others wait for it."""
        wanted = [{*needs(graph, *work)} for work in works]
        makers = {result: index for index, work in enumerate(works) for result in results(Action(*work, 0))}
        self.missing = [len(needed) for needed in wanted for _ in range(self.many)]
        self.dependents: list[list[int]] = [[] for _ in works]
        for work, needed in enumerate(wanted):
            for result in needed:
                self.dependents[makers[result]].append(work)

    def _number_urgency(self, graph: StageGraph, works: Sequence[tuple[Kind, int]]) -> None:
        """Make one number of kind, microbatch and length of the way; it grows by `step` with each microbatch."""
        self.step = len(graph.nodes)
        self.urgency = []
        for kind, stage in works:
            way = graph.distance(stage) if kind is Kind.F else graph.depth(stage)
            self.urgency.append(_URGENCY[kind] * self.many * self.step + self.step - way)

    def proceed(self) -> None:
        """Go on to when the next actions end, and let every place that is free then start another one."""
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
        """Do what follows from the end of the action at a line's head; note the places that have more to choose."""
        work, microbatch = divmod(self.lines[line][self.heads[line]], self.many)
        self.heads[line] += 1
        for dependent in self.dependents[work]:
            action = dependent * self.many + microbatch
            self.missing[action] -= 1
            if not self.missing[action]:
                other = self.line_of[dependent]
                if other != line and self.lines[other][self.heads[other]] == action:
                    self._offer(other)
                    places.add(self.place_of[other])
        if self.frees[work]:
            stage = self.stage_of[work]
            self.room[stage] += 1
            if self.blocked[stage]:
                self._offer(self.blocked[stage].pop())
        self._offer(line)

    def _offer(self, line: int) -> None:
        """Let a line's place take the action at its head, if nothing is missing for it."""
        action = self.lines[line][self.heads[line]]
        if action != _END and not self.missing[action]:
            work, microbatch = divmod(action, self.many)
            heappush(self.ready[self.place_of[line]], (self.urgency[work] + microbatch * self.step, line))

    def _start(self, place: int) -> None:
        """Let a place take the most urgent action that it may."""
        ready = self.ready[place]
        while ready:
            line = heappop(ready)[1]
            head = self.heads[line]
            work = self.lines[line][head] // self.many
            if self.keeps[work]:
                stage = self.stage_of[work]
                if not self.room[stage]:
                    self.blocked[stage].append(line)
                    continue
                self.room[stage] -= 1
            self.is_free[place] = False
            self.taken[place].append((line, head))
            heappush(self.events, (self.now + self.lasts[work], place, line))
            return
