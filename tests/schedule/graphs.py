"""Stage graphs to draw from, and an execution with a queue of actions per place: an independent reference."""

from __future__ import annotations

from collections import deque
from fractions import Fraction

from hypothesis import strategies as st

from cornstarch.schedule import Action, Kind, Schedule, StageGraph, StageNode

POLICIES_OF_ANY_GRAPH = ("naive", "gpipe", "1f1b", "zero_bubble", "auto")


@st.composite
def graphs(draw: st.DrawFn, equal: bool = False, trained: bool = False) -> StageGraph:
    """Draw encoders of different depths that meet at a language model: on their own places, or some on the same.

    equal: every stage costs the same.
    trained: everything is trained.
    """
    encoders = {f"encoder_{i}": draw(st.integers(1, 3)) for i in range(draw(st.integers(0, 3)))}
    modules = {**encoders, "language_model": draw(st.integers(1, 5))}
    spread = draw(st.sampled_from(["own", "colocated", "any"]))
    cost = st.just(1) if equal else st.fractions(0, 4, max_denominator=8)
    width = max(encoders.values(), default=0) if spread == "colocated" else sum(encoders.values())
    nodes: list[StageNode] = []
    edges: list[tuple[int, int]] = []
    ends = []
    for module, stages in modules.items():
        is_last, first = module == "language_model", len(nodes)
        start = width if is_last else 0 if spread == "colocated" else first
        for index in range(stages):
            trains = trained or draw(st.booleans())
            costs = [draw(cost) for _ in range(3)]
            nodes.append(StageNode(module, index, start + index, trains, *costs))  # type: ignore[arg-type]
        edges += [(number, number + 1) for number in range(first, len(nodes) - 1)]
        edges += [(end, first) for end in ends] if is_last else []
        ends.append(len(nodes) - 1)
    if spread == "any":  # stages on arbitrary places
        places = draw(st.lists(st.integers(0, 2), min_size=len(nodes), max_size=len(nodes)))
        names = {place: number for number, place in enumerate(dict.fromkeys(places))}
        nodes = [_move(node, names[place]) for node, place in zip(nodes, places, strict=True)]
    return StageGraph(tuple(nodes), tuple(edges))


def _move(node: StageNode, place: int) -> StageNode:
    return StageNode(node.module, node.index, place, *list(vars(node).values())[3:])


def whole(graph: StageGraph) -> StageGraph:
    """Return the graph with whole numbers as costs, which floats add up exactly."""
    nodes = [
        StageNode(n.module, n.index, n.place, n.trains, *(float(Fraction(c) * 840) for c in list(vars(n).values())[4:]))
        for n in graph.nodes
    ]
    return StageGraph(tuple(nodes), graph.edges)


def run_as_processes(schedule: Schedule) -> list[Action]:
    """Carry out a schedule with transfers: places take turns, a receive waits for its message, a send never waits.

    Messages travel along their edge in order, as they do between processes. Whatever a computation needs must have been
    computed at its own place, or received there. Returns the computations in the order in which they were done.
    """
    graph = schedule.graph
    channels: dict[tuple[Kind, int, int], deque[int]] = {}
    known: list[set[tuple[str, int, int]]] = [set() for _ in schedule.actions]
    todo = [deque(mine) for mine in schedule.actions]
    done: list[Action] = []
    moved = True
    while moved:
        moved = False
        for place, mine in enumerate(todo):
            while mine and _carry_out(graph, mine[0], known[place], channels):
                if "_" not in mine[0].kind:
                    done.append(mine[0])
                mine.popleft()
                moved = True
    assert not any(todo), f"stuck at {[str(mine[0]) for mine in todo if mine]}"
    assert not any(channels.values()), "messages that nobody received"
    return done


def _carry_out(
    graph: StageGraph,
    action: Action,
    known: set[tuple[str, int, int]],
    channels: dict[tuple[Kind, int, int], deque[int]],
) -> bool:
    """Do one action; return whether it could be done, which only a receive may not yet."""
    kind, stage, microbatch, other = action
    if kind in (Kind.SEND_F, Kind.SEND_B):
        assert other is not None
        assert ("output" if kind is Kind.SEND_F else "gradient", stage, microbatch) in known
        channels.setdefault((kind, stage, other), deque()).append(microbatch)
    elif kind in (Kind.RECV_F, Kind.RECV_B):
        assert other is not None
        sent = channels.get((Kind.SEND_F if kind is Kind.RECV_F else Kind.SEND_B, other, stage))
        if not sent:
            return False
        assert sent.popleft() == microbatch, "another microbatch arrived"
        known.add(("output" if kind is Kind.RECV_F else "gradient", other, microbatch))
    elif kind is Kind.F:
        assert all(("output", source, microbatch) in known for source in graph.predecessors(stage))
        known.add(("output", stage, microbatch))
    else:
        assert ("output", stage, microbatch) in known
        targets = graph.successors(stage)
        if kind is Kind.W and graph.backward(stage) == "both":
            assert ("gradient", stage, microbatch) in known
        else:
            assert all(("gradient", target, microbatch) in known for target in targets)
        if kind is not Kind.W:
            known.add(("gradient", stage, microbatch))
    return True
