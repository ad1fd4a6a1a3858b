"""The kinds of actions, what each of them waits for, and how long it takes."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from cornstarch.schedule.graph import StageGraph


class Kind(StrEnum):
    """What a place does with a microbatch at one of its stages."""

    F = "F"
    """Forward."""
    B = "B"
    """Backward: the gradients of the inputs, where they are wanted, and of the weights, together."""
    I = "I"  # noqa: E741
    """The gradients of the inputs alone. It is the whole backward of a frozen stage behind a trained one."""
    W = "W"
    """The gradients of the weights alone: after `I`, or by itself at a stage before which nothing is trained."""
    SEND_F = "SEND_F"
    """Hand the output to the stage `other`."""
    RECV_F = "RECV_F"
    """Take the output of the stage `other`."""
    SEND_B = "SEND_B"
    """Hand the gradient of an input back to the stage `other`, where it came from."""
    RECV_B = "RECV_B"
    """Take the gradient of the output from the stage `other`."""


COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)
SENT_BY = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}


class Action(NamedTuple):
    """One thing that a place does."""

    kind: Kind
    stage: int
    """The stage whose place does it."""
    microbatch: int
    other: int | None = None
    """Of a transfer: the stage at the other end."""

    def __str__(self) -> str:
        other = "" if self.other is None else f"{'>' if self.kind.startswith('SEND') else '<'}{self.other}"
        return f"{self.kind}{self.microbatch}@{self.stage}{other}"


def backward_of(graph: StageGraph, stage: int, split: bool = False) -> tuple[Kind, ...]:
    """Return the actions of a stage's backward, in their order.

    split: the gradients of inputs and weights are computed one after the other where there are both.
    """
    backward = graph.backward(stage)
    if backward == "none":
        return ()
    if backward == "input":
        return (Kind.I,)
    if not split:
        return (Kind.B,)
    return (Kind.I, Kind.W) if backward == "both" else (Kind.W,)


def duration(graph: StageGraph, kind: Kind, stage: int) -> float:
    """Return how long an action takes; transfers take no time of the place's own.

    A stage before which nothing is trained sends no gradient, but gradients pass through its layers up to the first:
    its whole backward takes both times, whatever it is called.
    """
    node = graph.nodes[stage]
    if kind is Kind.F:
        return node.forward
    if kind is Kind.I:
        return node.backward_input
    if kind is Kind.B or (kind is Kind.W and graph.backward(stage) == "weight"):
        return node.backward_input + node.backward_weight
    return node.backward_weight if kind is Kind.W else 0


Result = tuple[Kind, int, int | None]
"""What an action leaves behind, for a microbatch: F a stage's output, I the gradients of its inputs, W those of its
weights; SEND_F and SEND_B a message, with the stage that it goes to."""


def results(action: Action) -> tuple[Result, ...]:
    """Return what an action leaves behind."""
    if action.kind is Kind.B:
        return (Kind.I, action.stage, None), (Kind.W, action.stage, None)
    if action.kind in SENT_BY:
        return ()
    return ((action.kind, action.stage, action.other),)


def needs(graph: StageGraph, kind: Kind, stage: int, other: int | None = None) -> Iterator[Result]:
    """Yield what must be there before an action can begin."""
    if kind is Kind.F:
        yield from ((Kind.F, source, None) for source in graph.predecessors(stage))
    elif kind is Kind.W and graph.backward(stage) == "both":
        yield Kind.I, stage, None
    elif kind in (Kind.B, Kind.I, Kind.W):
        yield Kind.F, stage, None
        yield from ((Kind.I, target, None) for target in graph.successors(stage))
    elif kind in SENT_BY:
        assert other is not None
        yield SENT_BY[kind], other, stage
    else:
        yield (Kind.F if kind is Kind.SEND_F else Kind.I), stage, None
