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
        lines_of = {(kind, stage): line for line, own in enumerate(lines) for kind, stage, _, _ in own}
        works = [*lines_of]
        self.line_of = [*lines_of.values()]
        self.many = many = 1 + max((max(microbatch for _, _, microbatch, _ in own) for own in lines if own), default=0)
        first = {work: index * many for index, work in enumerate(works)}
        self.lines = [[first[kind, stage] + microbatch for kind, stage, microbatch, _ in own] + [_END] for own in lines]
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
        self.ready: list[list[int]] = [[] for _ in range(graph.places)]  # urgencies, which tell the line
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
        self.missing.append(1)  # for _END: it never begins
        self.dependents: list[list[int]] = [[] for _ in works]
        for work, needed in enumerate(wanted):
            for result in needed:
                self.dependents[makers[result]].append(work)

    def _number_urgency(self, graph: StageGraph, works: Sequence[tuple[Kind, int]]) -> None:
        """Make one number of kind, microbatch, length of the way and line, for each action: small ones are urgent."""
        self.urgency: list[int] = []
        step = len(graph.nodes)
        for work, (kind, stage) in enumerate(works):
            way = graph.distance(stage) if kind is Kind.F else graph.depth(stage)
            first = _URGENCY[kind] * self.many * step + step - way
            line, lines = self.line_of[work], len(self.lines)
            self.urgency += [(first + microbatch * step) * lines + line for microbatch in range(self.many)]

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
        if self.frees[work]:
            stage = self.stage_of[work]
            self.room[stage] += 1
            if self.blocked[stage]:
                self._offer(self.blocked[stage].pop())
        self._offer(line)

    def _offer(self, line: int) -> None:
        """Let a line's place take the action at its head, if there is one and nothing is missing for it."""
        action = self.lines[line][self.heads[line]]
        if not self.missing[action]:
            heappush(self.ready[self.place_of[line]], self.urgency[action])

    def _start(self, place: int) -> None:
        """Let a place take the most urgent action that it may."""
        ready = self.ready[place]
        while ready:
            line = heappop(ready) % len(self.heads)
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
