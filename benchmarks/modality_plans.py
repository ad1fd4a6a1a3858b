"""Plans of the nine models: the number of stages, their layers, their placement and their schedule.

Our plans are those that the product's own search finds (`cornstarch.plan.search`), on devices with free links and
unlimited memory: the number of stages of each module, the layers of each stage, the placement of encoders, the number
of model chunks of the language model, and the schedule. tp and cp are those of the published evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from nine_models import DEVICES, ENCODER_DEVICES, FIXED, LANGUAGE, LANGUAGE_DEVICES, MICROBATCHES, Cost, Model, run_cost
from virtual_devices import Job

from cornstarch.plan.candidates import SearchSpace
from cornstarch.plan.cluster import Cluster, Device, Link
from cornstarch.plan.data_options import RankPlacement
from cornstarch.plan.predict import Prediction
from cornstarch.plan.search import search
from cornstarch.plan.simulate import Timeline, simulate
from cornstarch.schedule.graph import StageGraph, StageNode
from cornstarch.schedule.policies import make_schedule

USUAL = "1f1b"
VIRTUAL = (2, 3, 4)  # model chunks of the language model per place, with interleaving
FREE_LINK = Link(1e30, 0.0)
DEVICES_ALONE = Cluster(1, DEVICES, Device("device", 2**60), FREE_LINK, FREE_LINK, name=f"{DEVICES} devices")
APART: tuple[RankPlacement, ...] = ("own",)
ANYWHERE: tuple[RankPlacement, ...] = ("own", "colocated", "first_stage")
# Stages of the language model in the published evaluation of colocated encoders, ignoring frozen parts.
PUBLISHED = {
    "VLM-S": 5,
    "VLM-M": 4,
    "VLM-L": 4,
    "ALM-S": 5,
    "ALM-M": 5,
    "ALM-L": 5,
    "VALM-S": 5,
    "VALM-M": 3,
    "VALM-L": 4,
}

Runs = tuple[tuple[Cost, ...], ...]
"""Layers, by stage."""


@dataclass(frozen=True)
class Part:
    """The stages of a module."""

    module: str
    runs: Runs
    trains: tuple[bool, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """The stages of a model and their schedule."""

    words: str
    parts: tuple[Part, ...]
    """Encoders, then the language model, unless all are one chain."""
    devices: int
    policy: str = USUAL

    def graph(self, scale: float = 1.0) -> StageGraph:
        """Return the stages; `scale` is seconds per 10^12 operations."""
        nodes: list[StageNode] = []
        edges: list[tuple[int, int]] = []
        ends: list[int] = []
        for part in self.parts:
            first = len(nodes)
            for index, layers in enumerate(part.runs):
                forward, inputs, weights = (scale * sum(one) for one in zip(*layers, strict=True))
                place, trains = part.places[index], part.trains[index]
                nodes.append(StageNode(part.module, index, place, trains, forward, inputs, weights))
            edges += pairwise(range(first, len(nodes)))
            if part.module == LANGUAGE:
                edges += [(end, first) for end in ends]
            ends.append(len(nodes) - 1)
        return StageGraph(tuple(nodes), tuple(edges))

    def job(self, scale: float, steps: int) -> Job:
        """Return the work of the virtual devices."""
        layers = tuple(
            tuple((scale * a, scale * b, scale * c) for a, b, c in run) for part in self.parts for run in part.runs
        )
        return Job(self.graph(scale), layers, MICROBATCHES, self.policy, steps)

    @cached_property
    def timeline(self) -> Timeline:
        """The step time, in 10^12 operations of a device."""
        return simulate(make_schedule(self.graph(), MICROBATCHES, self.policy))

    @property
    def simulated(self) -> float:
        """The step time."""
        return self.timeline.step


# ---------------------------------------------------------------------------------------------------- our plans


def found(
    model: Model, ranks: tuple[RankPlacement, ...] = ANYWHERE, schedules: tuple[str, ...] = (USUAL, "interleaved")
) -> Plan:
    """Return the plan that the product's search finds, for the allowed placements of encoders."""
    space = SearchSpace(ranks, ("ddp",), schedules, VIRTUAL, checkpointing=(True,), microbatches=(MICROBATCHES,))
    best = search(run_cost(model, 1e12, FIXED), DEVICES_ALONE, space, runners_up=0).best
    assert best is not None, model.name
    plan = carried_out(model, best)
    assert abs(plan.simulated / best.step - 1) < 1e-6, (model.name, plan.words, plan.simulated, best.step)
    return plan


def carried_out(model: Model, best: Prediction) -> Plan:
    """Return a predicted plan with the layers of its stages, for execution on virtual devices."""
    choice, parts, words = best.candidate, [], []
    *encoders, (_, last) = choice.modules
    place = 0
    for name, plan in () if choice.has_encoders_inside else encoders:
        runs = _cut(_spread(model, name, plan.cp), best.starts[name])
        parts.append(own(name, runs, place))
        words.append(f"{name} {plan.stages}")
        place += 0 if choice.ranks == "colocated" else plan.stages
    place += encoders[0][1].stages if choice.ranks == "colocated" else 0
    runs = _cut(model.pieces(LANGUAGE), best.starts[LANGUAGE])
    many = named(runs, last.stages)
    if choice.has_encoders_inside:
        runs = ((encoders_inside(model), *runs[0]), *runs[1:])
        text = f"inside the first of {many}"
    else:
        text = f"{f'together {encoders[0][1].stages}' if choice.ranks == 'colocated' else ' + '.join(words)} → {many}"
    return Plan(
        text, (*parts, language(runs, place, last.stages, choice.has_encoders_inside)), choice.replica, choice.schedule
    )


def _cut(layers: Sequence[Cost], starts: Sequence[int]) -> Runs:
    return tuple(tuple(layers[a:b]) for a, b in pairwise([*starts, len(layers)]))


def _spread(model: Model, name: str, cp: int) -> list[Cost]:
    """Return the layers of an encoder on the devices of a stage; cp distributes the tiles."""
    tiles = model.encoders[name].tiles
    share = -(-tiles // cp) / tiles
    return [(share * a, share * b, share * c) for a, b, c in model.pieces(name)]


def encoders_inside(model: Model) -> Cost:
    """Return the cost of all encoders on the devices of a language model stage."""
    layers = [one for name in model.encoders for one in _spread(model, name, LANGUAGE_DEVICES // ENCODER_DEVICES)]
    forward, inputs, weights = (sum(one) for one in zip(*layers, strict=True))
    return forward, inputs, weights


def own(module: str, runs: Runs, place: int) -> Part:
    """Return an encoder with a trained projector at its end, on its own places."""
    stages = len(runs)
    return Part(
        module, runs, tuple(index == stages - 1 for index in range(stages)), tuple(range(place, place + stages))
    )


def language(runs: Runs, place: int, count: int, inside: bool = False) -> Part:
    """Return a frozen language model on a number of places, with several chunks per place if there are more.

    inside: Whether its first stage includes the projectors.
    """
    trains = tuple(inside and index == 0 for index in range(len(runs)))
    return Part(LANGUAGE, runs, trains, tuple(place + index % count for index in range(len(runs))))


def named(runs: Runs, count: int) -> str:
    """Describe the number of places of a language model and of its chunks per place."""
    return str(count) if len(runs) == count else f"{count} × {len(runs) // count}"


# ---------------------------------------------------------------------------------------------------- the others


def sizes() -> Iterator[tuple[int, int]]:
    """Yield stage counts of the language model and of encoders that use all devices."""
    for count in range(1, DEVICES // LANGUAGE_DEVICES):
        yield count, (DEVICES - count * LANGUAGE_DEVICES) // ENCODER_DEVICES


def even_starts(layers: int, stages: int) -> tuple[int, ...]:
    """Return the first layers of even stages; the first stages get one layer more."""
    each, more = divmod(layers, stages)
    return tuple(each * index + min(index, more) for index in range(stages))


def even(layers: Sequence[Cost], stages: int) -> Runs:
    """Return layers in even runs; modules after the layers belong to the last run."""
    return _cut(layers, even_starts(len(layers), stages))


def colocated(model: Model, size: int, count: int, frozen_aware: bool = True) -> Plan:
    """Return a chain of stages: all encoders, one after the other, then the language model, each divided evenly.

    frozen_aware: Whether costs account for frozen parts, or assume that everything is trained.
    """
    pieces = [even(model.pieces(name, frozen_aware), size) for name in model.encoders]
    encoders = tuple(tuple(layer for run in runs for layer in run) for runs in zip(*pieces, strict=True))
    shared = own("encoders", encoders, 0)
    last = language(even(model.pieces(LANGUAGE, frozen_aware), count), size, count)
    if not frozen_aware:
        shared, last = (replace(part, trains=(True,) * len(part.runs)) for part in (shared, last))
    return Plan(f"{size} → {count}", (shared, last), size * ENCODER_DEVICES + count * LANGUAGE_DEVICES)


def blind(model: Model) -> Plan:
    """Return the chain that would be fastest if everything were trained."""
    count, size = min(sizes(), key=lambda two: colocated(model, two[1], two[0], frozen_aware=False).simulated)
    return colocated(model, size, count)


def published(model: Model) -> Plan:
    """Return the chain with the published number of language model stages."""
    count = PUBLISHED[model.name]
    return colocated(model, (DEVICES - count * LANGUAGE_DEVICES) // ENCODER_DEVICES, count)


def replicated(model: Model, whole: bool = False) -> Plan:
    """Return a plan with all encoders in every stage of an evenly divided language model.

    whole: Every device runs each encoder completely, as in the published evaluation, instead of dividing the work.
    """
    count = DEVICES // LANGUAGE_DEVICES
    if whole:
        pieces = [one for name in model.encoders for one in model.pieces(name, devices=1)]
        forward, inputs, weights = (sum(one) for one in zip(*pieces, strict=True))
    else:
        forward, inputs, weights = encoders_inside(model)
    # Later stages compute the same encoder tokens, and train nothing there.
    encoders = [(forward, inputs, weights), *[(forward, 0.0, 0.0)] * (count - 1)]
    runs = even(model.pieces(LANGUAGE), count)
    with_encoders = tuple((first, *run) for first, run in zip(encoders, runs, strict=True))
    return Plan(f"in each of {count}", (language(with_encoders, 0, count, inside=True),), DEVICES)


def ideal(model: Model) -> float:
    """Return the step time if all devices were always busy and nothing were computed twice."""
    work = LANGUAGE_DEVICES * sum(map(sum, model.pieces(LANGUAGE)))
    work += sum(ENCODER_DEVICES * sum(map(sum, model.pieces(name))) for name in model.encoders)
    return MICROBATCHES * work / DEVICES
