"""Policies: a graph of stages and a number of microbatches become the list of actions of every place.

naive        one microbatch at a time
gpipe        all forwards, then all backwards
1f1b         as many forwards as there are stages to the end, then one backward and one forward in turn
interleaved  1f1b with several stages per place, in groups of microbatches
zero_bubble  gradients of inputs first; those of weights fill the gaps
auto         1f1b, interleaved or zero_bubble: the one that takes least in simulation

A stage with nothing trained in it or before it has forwards only. A frozen one behind a trained one computes the
gradients of its inputs: `I`. All others have `B`; under zero_bubble `I` and `W` instead, or `W` alone where there is no
gradient to pass on.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Literal, get_args

from cornstarch.errors import ConfigError
from cornstarch.schedule.actions import Schedule
from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.interleaved import interleaved
from cornstarch.schedule.kinds import Kind
from cornstarch.schedule.orders import Lists, by_place, depths, stage_lines, timed
from cornstarch.schedule.zero_bubble import zero_bubble

Policy = Literal["naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "auto"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


def make_schedule(graph: StageGraph, microbatches: int, policy: str = "1f1b") -> Schedule:
    """Return what every place does in a step of so many microbatches."""
    if policy not in POLICIES:
        raise ConfigError(f"schedule = {policy!r}: expected one of {', '.join(POLICIES)}.")
    if type(microbatches) is not int or microbatches < 1:
        raise ConfigError(f"microbatches = {microbatches!r}: expected a whole number of at least 1.")
    with without_collection():
        if policy == "auto":
            return _best(graph, microbatches)
        return Schedule(graph, microbatches, policy, _lists(graph, microbatches, policy)[0])


@contextmanager
def without_collection() -> Iterator[None]:
    """Do not look for cycles among 10^5 new actions, which have none: it would take a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _lists(graph: StageGraph, microbatches: int, policy: str) -> tuple[Lists, float | None]:
    """Return the actions of every place, and how long they take where that came out by the way."""
    if policy == "interleaved":
        return interleaved(graph, microbatches)
    if policy == "zero_bubble":
        return zero_bubble(graph, microbatches, _lists(graph, microbatches, "1f1b"))
    stages = len(graph.nodes)
    ahead = {"naive": [1] * stages, "gpipe": [microbatches] * stages, "1f1b": depths(graph)}[policy]
    return by_place(graph, stage_lines(graph, microbatches, ahead))


def _best(graph: StageGraph, microbatches: int) -> Schedule:
    """Return the fastest schedule in simulation whose memory does not grow with the number of microbatches.

    Of equally fast ones the first is taken: it is the simplest.
    """
    found = {"1f1b": timed(graph, _lists(graph, microbatches, "1f1b"))}
    left_out = ""
    if _has_virtual_stages(graph):
        try:
            found["interleaved"] = timed(graph, interleaved(graph, microbatches))
        except ConfigError as error:
            left_out = f"; not {str(error).splitlines()[0].removeprefix('schedule = ')}"
    found["zero_bubble"] = zero_bubble(graph, microbatches, found["1f1b"])
    best = min(found, key=lambda policy: found[policy][1])
    others = [f"{float(took):.6g} with {policy}" for policy, (_, took) in found.items() if policy != best]
    reason = f"{best} takes {float(found[best][1]):.6g} in simulation, against {' and '.join(others)}{left_out}"
    return Schedule(graph, microbatches, best, found[best][0], reason)


def _has_virtual_stages(graph: StageGraph) -> bool:
    held = [(node.module, node.place) for node in graph.nodes]
    return len({*held}) < len(held)


def in_flight(schedule: Schedule) -> list[int]:
    """Return, by stage, the largest number of microbatches whose activations are held at once.

    They are held from the forward to the end of the backward; a stage without a backward holds none.
    """
    graph = schedule.graph
    backward = [graph.backward(stage) for stage in range(len(graph.nodes))]
    held, most = [0] * len(graph.nodes), [0] * len(graph.nodes)
    for action in chain(*schedule.actions):
        stage = action.stage
        if action.kind is Kind.F and backward[stage] != "none":
            held[stage] += 1
            most[stage] = max(most[stage], held[stage])
        elif action.kind in (Kind.B, Kind.W) or (action.kind is Kind.I and backward[stage] == "input"):
            held[stage] -= 1
    return most
