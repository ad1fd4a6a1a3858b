"""A schedule: what every place does, in which order; printable, comparable, and checked before anything runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.kinds import COMPUTE, SENT_BY, Action, Kind, backward_of
from cornstarch.schedule.timing import times, transfers_of

__all__ = ["Action", "Kind", "Schedule"]


@dataclass(frozen=True)
class Schedule:
    """The actions of one step, by place."""

    graph: StageGraph
    microbatches: int
    name: str
    """The policy that made it."""
    actions: tuple[tuple[Action, ...], ...]
    """By place: computations only, until `with_transfers`."""
    reason: str = ""
    """Why this policy, where it was chosen."""

    def with_transfers(self) -> Schedule:
        """Return the schedule with sends and receives between different places.

        A value is sent right after the computation that makes it, and received right before the one that needs it.
        Places that wait in receives, but not in sends, cannot deadlock. Along each edge, messages are sent and received
        in the same order; between two places with several edges between them, the edges may overtake one another.
        """
        lists = []
        for mine in self.actions:
            found: list[Action] = []
            for action in mine:
                if action.kind in COMPUTE:
                    received, sent = transfers_of(self.graph, action)
                    found += [*received, action, *sent]
            lists.append(tuple(found))
        return replace(self, actions=tuple(lists))

    def check(self) -> None:
        """Raise ValueError that names the first rule that is broken.

        Every action is there once, at its place; what it needs comes before it; nobody waits for ever; transfers, if
        there are any, are all there and in the same order at both ends of an edge.
        """
        if len(self.actions) != self.graph.places:
            raise ValueError(f"There are {self.graph.places} places, but {len(self.actions)} lists of actions.")
        self._check_computations()
        if any(action.kind not in COMPUTE for mine in self.actions for action in mine):
            self._check_transfers()
        times(self.graph, self.actions)

    def _check_computations(self) -> None:
        found = Counter(action for mine in self.actions for action in mine if action.kind in COMPUTE)
        for place, mine in enumerate(self.actions):
            for action in mine:
                if not (0 <= action.stage < len(self.graph.nodes) and 0 <= action.microbatch < self.microbatches):
                    raise ValueError(f"{action}: there is no such stage or microbatch.")
                if (own := self.graph.nodes[action.stage].place) != place:
                    raise ValueError(f"{action} belongs to place {own}, but stands at place {place}.")
                if found[action] > 1:
                    raise ValueError(f"{action} is there {found[action]} times.")
        for stage in range(len(self.graph.nodes)):
            self._check_stage(found, stage)
        rest = [action for action, many in found.items() if many]
        if rest:
            raise ValueError(f"{rest[0]} is not to be done: {self.graph.backward(rest[0].stage)} is computed backward.")

    def _check_stage(self, found: Counter[Action], stage: int) -> None:
        """Check that every microbatch is done at a stage, and cross these actions out."""
        whole, split = ((Kind.F, *backward_of(self.graph, stage, split)) for split in (False, True))
        for microbatch in range(self.microbatches):
            is_split = (
                Action(whole[-1], stage, microbatch) not in found and Action(split[-1], stage, microbatch) in found
            )
            way = split if is_split else whole
            for kind in way:
                if not found.pop(Action(kind, stage, microbatch), 0):
                    raise ValueError(f"{Action(kind, stage, microbatch)} is not there.")

    def _check_transfers(self) -> None:
        if self.actions != self.with_transfers().actions:
            expected = self.with_transfers().actions
            place = next(p for p, mine in enumerate(self.actions) if mine != expected[p])
            pairs = zip((*self.actions[place], None), (*expected[place], None), strict=False)
            found, wanted = next((a, b) for a, b in pairs if a != b)
            raise ValueError(f"Place {place}: found {found} where {wanted or 'nothing'} is to be done.")
        sent, received = self._messages(SENT_BY.values()), self._messages(SENT_BY)
        for receive, send in SENT_BY.items():
            for edge in {(a, b) for kind, a, b in received if kind is receive}:
                if received[receive, *edge] != sent.get((send, *edge)):
                    raise ValueError(f"Messages from stage {edge[0]} to {edge[1]} are not received as they are sent.")

    def _messages(self, kinds: object) -> dict[tuple[Kind, int, int], list[int]]:
        """Return the microbatches of all messages of some kinds, in their order, by kind, source and target."""
        found: dict[tuple[Kind, int, int], list[int]] = {}
        for mine in self.actions:
            for action in mine:
                if action.kind in kinds and action.other is not None:  # type: ignore[operator]
                    ends = (action.stage, action.other)
                    source, target = ends if action.kind in SENT_BY.values() else ends[::-1]
                    found.setdefault((action.kind, source, target), []).append(action.microbatch)
        return found

    def __str__(self) -> str:
        return "\n".join(f"place {place}: {' '.join(map(str, mine))}" for place, mine in enumerate(self.actions))
