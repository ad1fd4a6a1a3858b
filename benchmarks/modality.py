"""What modality-parallel, frozen-aware pipelines save: nine multimodal models on 24 virtual devices.

The real runtime carries out 1F1B with 24 microbatches, in processes in which the compute of a layer is a sleep of its
cost (virtual_devices.py, nine_models.py). The devices of a stage, tp 2 for encoders and tp 2 × cp 2 for language
models, are one process: what they do is the same, and they wait for the same. Encoders and language models are frozen,
projectors are trained, layers are recomputed in the backward pass. No plan uses more than 24 devices. Whether a stage
fits into memory is not looked at. Five plans of each model:

apart       modality-parallel: each encoder on stages of its own, as many as take least in simulation; layers are cut by
            what they really cost
searched    the one that takes least in simulation of `apart`, of all encoders on shared stages, and of all encoders in
            the first stage of the language model; mostly the last, which is not modality-parallel
colocated   all encoders on the same stages; how many, and where layers are cut, is what would take least if everything
            were trained
published   the same, with the numbers of stages of the published evaluation
replicated  the language model cut evenly into six stages, each of which runs all encoders

The targets are for `apart`.

There are two workloads. `published` is that of the published evaluation's script: the language model gets one token for
each tile of an image, and those of 70 and 72 billion parameters have 40 of their 80 layers. With `patches`, it gets a
token for each patch, as in use, and has all of its layers: encoders are then a smaller part of the work.

    python benchmarks/modality.py                              # prints tables; with --output FILE.json also writes them
    python benchmarks/modality.py --models VLM-M --steps 1     # one model
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from nine_models import DEVICES, ENCODER_DEVICES, LANGUAGE_DEVICES, WORKLOADS, Model
from virtual_devices import Cost, Job, run

from cornstarch.pipeline.balance import best_starts
from cornstarch.plan.simulate import simulate
from cornstarch.schedule.graph import StageGraph, StageNode
from cornstarch.schedule.policies import make_schedule

MICROBATCHES, POLICY = 24, "1f1b"
LANGUAGE = "language_model"
BEST, MEAN, DEVIATION = 1.57, 1.2, 0.05  # targets: the largest ratio, the mean of all, and of simulated to measured
OURS, OTHERS = ("apart", "searched"), ("colocated", "published", "replicated")
# Stages of the language model in the published evaluation, without regard to what is frozen.
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

Layers = Sequence[Cost]


@dataclass(frozen=True)
class Plan:
    """The stages of a model."""

    words: str
    stages: tuple[tuple[str, int, bool, tuple[Cost, ...]], ...]
    """Module, place, whether something is trained, layers."""
    devices: int

    def graph(self, scale: float = 1.0) -> StageGraph:
        """Return the stages; scale: seconds of 10^12 operations."""
        nodes: list[StageNode] = []
        edges: list[tuple[int, int]] = []
        ends: list[int] = []
        for number, (module, place, trains, layers) in enumerate(self.stages):
            index = sum(node.module == module for node in nodes)
            forward, inputs, weights = (scale * sum(one) for one in zip(*layers, strict=True))
            nodes.append(StageNode(module, index, place, trains, forward, inputs, weights))
            if index:
                edges.append((number - 1, number))
            elif module == LANGUAGE:
                edges += [(end, number) for end in ends]
            if number + 1 < len(self.stages) and self.stages[number + 1][0] != module:
                ends.append(number)
        return StageGraph(tuple(nodes), tuple(edges))

    def job(self, scale: float, steps: int) -> Job:
        """Return what virtual devices do."""
        layers = tuple(
            tuple((scale * a, scale * b, scale * c) for a, b, c in layers) for _, _, _, layers in self.stages
        )
        return Job(self.graph(scale), layers, MICROBATCHES, POLICY, steps)

    @property
    def simulated(self) -> float:
        """What a step takes, in 10^12 operations of a device."""
        return simulate(make_schedule(self.graph(), MICROBATCHES, POLICY)).step


# ---------------------------------------------------------------------------------------------------- plans


@cache
def cut(model: Model, module: str, stages: int, aware: bool, weighed: bool) -> tuple[tuple[Cost, ...], ...]:
    """Return the layers of each stage of a module.

    Args:
        model: The model.
        module: Of it.
        stages: How many.
        aware: Whether costs are what they are, or what they would be if everything were trained.
        weighed: Whether layers are cut by what they are, or by what they would be.
    """
    return _runs(model.pieces(module, aware), model.pieces(module, weighed), stages)


def _runs(layers: Layers, weights: Layers, stages: int) -> tuple[tuple[Cost, ...], ...]:
    """Return layers in runs that weigh the same."""
    starts = best_starts([sum(one) for one in weights], range(1, len(layers)), stages, "The model")
    return tuple(tuple(layers[a:b]) for a, b in zip(starts, [*starts[1:], len(layers)], strict=True))


def apart(model: Model, sizes: Mapping[str, int], language: int, aware: bool = True, weighed: bool = True) -> Plan:
    """Return a plan with encoders on stages of their own: so many of each."""
    stages, place = [], 0
    for name, size in sizes.items():
        for index, layers in enumerate(cut(model, name, size, aware, weighed)):
            stages.append((name, place + index, not aware or index == size - 1, layers))
        place += size
    words = " + ".join(f"{name} {size}" for name, size in sizes.items())
    used = sum(sizes.values()) * ENCODER_DEVICES
    return _with_language(f"{words} → {language}", stages, place, used, model, language, aware, weighed)


def colocated(model: Model, size: int, language: int, aware: bool = True, weighed: bool = True) -> Plan:
    """Return a plan with all encoders on the same stages."""
    stages = [
        (name, index, not aware or index == size - 1, layers)
        for name in model.encoders
        for index, layers in enumerate(cut(model, name, size, aware, weighed))
    ]
    words = f"together {size} → {language}"
    return _with_language(words, stages, size, size * ENCODER_DEVICES, model, language, aware, weighed)


def _with_language(
    words: str, stages: list[Any], place: int, used: int, model: Model, language: int, aware: bool, weighed: bool
) -> Plan:
    runs = cut(model, LANGUAGE, language, aware, weighed)
    own = [(LANGUAGE, place + index, not aware, layers) for index, layers in enumerate(runs)]
    return Plan(words, (*stages, *own), used + language * LANGUAGE_DEVICES)


def inside(model: Model) -> Plan:
    """Return a plan with the encoders in the language model's first stage, which has the fewer layers."""
    layers = [_encoders_inside(model), *model.pieces(LANGUAGE)]
    count = DEVICES // LANGUAGE_DEVICES
    stages = [(LANGUAGE, index, index == 0, run) for index, run in enumerate(_runs(layers, layers, count))]
    return Plan(f"inside the first of {count}", tuple(stages), DEVICES)


def replicated(model: Model) -> Plan:
    """Return a plan with all encoders in every stage of a language model that is cut evenly."""
    layers, count = model.pieces(LANGUAGE), DEVICES // LANGUAGE_DEVICES
    forward, inputs, weights = _encoders_inside(model)
    ends = [len(layers) * (index + 1) // count for index in range(count)]
    stages = []
    for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        # What the later stages make of the encoders' tokens is the same, and nothing is trained there.
        encoders = (forward, inputs, weights) if index == 0 else (forward, 0.0, 0.0)
        stages.append((LANGUAGE, index, index == 0, (encoders, *layers[start:end])))
    return Plan(f"in each of {count}", tuple(stages), DEVICES)


def _encoders_inside(model: Model) -> Cost:
    """Return what all encoders cost on the devices of a stage of the language model, whose cp shares the tiles."""
    total = [0.0, 0.0, 0.0]
    for name, encoder in model.encoders.items():
        cp = LANGUAGE_DEVICES // ENCODER_DEVICES
        share = -(-encoder.tiles // cp) / encoder.tiles
        total = [a + share * sum(b) for a, b in zip(total, zip(*model.pieces(name), strict=True), strict=True)]
    return total[0], total[1], total[2]


def apart_plans(model: Model) -> list[Plan]:
    """Return the plans that have every encoder on stages of its own."""
    return [
        apart(model, dict(zip(model.encoders, sizes, strict=True)), language)
        for language, size in _sizes()
        for sizes in product(range(1, size + 1), repeat=len(model.encoders))
        if sum(sizes) == size
    ]


def fastest(plans: Sequence[Plan]) -> Plan:
    """Return the fastest plan in simulation."""
    return min(plans, key=lambda plan: plan.simulated)


def plans_of(model: Model) -> dict[str, Plan]:
    """Return all plans that are compared."""
    own = apart_plans(model)
    shared = [colocated(model, size, language) for language, size in _sizes()] if len(model.encoders) > 1 else []
    return {
        "apart": fastest(own),
        "searched": fastest([*own, *shared, inside(model)]),
        "colocated": blind(model),
        "published": published(model),
        "replicated": replicated(model),
    }


def blind(model: Model) -> Plan:
    """Return the plan with encoders on the same stages that would be the fastest if everything were trained."""
    language, size = min(
        _sizes(), key=lambda sizes: colocated(model, sizes[1], sizes[0], aware=False, weighed=False).simulated
    )
    return colocated(model, size, language, weighed=False)


def published(model: Model) -> Plan:
    """Return the plan with encoders on the same stages, as many as in the published evaluation."""
    language = PUBLISHED[model.name]
    return colocated(model, (DEVICES - language * LANGUAGE_DEVICES) // ENCODER_DEVICES, language, weighed=False)


def _sizes() -> Iterator[tuple[int, int]]:
    """Yield stages of the language model and of encoders that use all devices."""
    for language in range(1, DEVICES // LANGUAGE_DEVICES):
        yield language, (DEVICES - language * LANGUAGE_DEVICES) // ENCODER_DEVICES


# ---------------------------------------------------------------------------------------------------- measuring


def measure(model: Model, seconds: float, steps: int) -> dict[str, Any]:
    """Run all plans of a model and return their numbers."""
    plans = plans_of(model)
    assert all(plan.devices <= DEVICES for plan in plans.values())
    scale = seconds / plans["apart"].simulated
    taken: dict[tuple[Any, ...], list[float]] = {}  # plans of the same stages are the same
    for plan in plans.values():
        if plan.stages not in taken:
            taken[plan.stages] = run(plan.job(scale, steps))
    found = {}
    for name, plan in plans.items():
        seconds_of, simulated = taken[plan.stages], scale * plan.simulated
        found[name] = {
            "plan": plan.words,
            "devices": plan.devices,
            "processes": plan.graph().places,
            "seconds": statistics.median(seconds_of),
            "range": [min(seconds_of), max(seconds_of)],
            "simulated": simulated,
            "deviation": statistics.median(seconds_of) / simulated - 1,
        }
    ratios = {own: {other: found[other]["seconds"] / found[own]["seconds"] for other in OTHERS} for own in OURS}
    return {"model": model.name, "tokens": model.tokens, "plans": found, "ratios": ratios}


def row(found: Mapping[str, Any]) -> str:
    """Return a line of the table."""
    plans, ratios = found["plans"], found["ratios"]
    cells = [found["model"], f"{found['tokens']:,}"]
    cells += [f"{plans[own]['seconds']:.3f} ({plans[own]['plan']})" for own in OURS]
    cells += [
        " / ".join(f"{ratios[own][other]:.2f}" for own in OURS) + f" ({plans[other]['plan']})" for other in OTHERS
    ]
    cells += [" / ".join(f"{100 * one['deviation']:+.1f}" for one in plans.values())]
    return f"| {' | '.join(cells)} |"


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how the ratios stand to the targets."""
    lines = []
    for own, other in product(OURS, OTHERS):
        ratios = [one["ratios"][own][other] for one in rows]
        mean, best = statistics.mean(ratios), max(ratios)
        lines.append(
            f"{own} against {other}: mean {mean:.2f} ({'reaches' if mean >= MEAN else 'misses'} {MEAN}), best "
            f"{best:.2f} ({'reaches' if best >= BEST else 'misses'} {BEST}), least {min(ratios):.2f}"
        )
    worst = max(abs(plan["deviation"]) for one in rows for plan in one["plans"].values())
    held = "within" if worst <= DEVIATION else "not within"
    return [*lines, f"measured to simulated: {100 * worst:.1f} % apart at most, {held} {100 * DEVIATION:.0f} %"]


def measure_all(workload: str, given: argparse.Namespace) -> dict[str, Any]:
    """Measure a workload, print its table, and return its numbers."""
    print(f"\nworkload {workload}: seconds of a step, and how many times as long the others take as apart / searched;")
    print("in brackets stages of encoders → language model")
    print("| | tokens | apart | searched | colocated | published | replicated | measured to simulated, % |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for model in WORKLOADS[workload]:
        if model.name in given.models:
            rows.append(measure(model, given.seconds, given.steps))
            print(row(rows[-1]), flush=True)
    print("\n".join(verdict(rows)), flush=True)
    return {"workload": workload, "models": rows}


def main() -> None:
    names = [model.name for model in WORKLOADS["published"]]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a step of `apart`; others take what they take")
    parser.add_argument("--steps", type=int, default=2, help="of each plan; the median counts")
    parser.add_argument("--output", type=Path, help="a JSON file")
    given = parser.parse_args()
    found = {"python": platform.python_version(), "torch": version("torch")}
    machine = f"{platform.machine()} CPU, {os.cpu_count()} cores"
    print(", ".join(f"{name} {text}" for name, text in found.items()))
    print(f"{machine}, {given.steps} steps of {MICROBATCHES} microbatches; a step of `apart` is {given.seconds} s")
    began = time.perf_counter()
    workloads = [measure_all(workload, given) for workload in given.workloads]
    print(f"took {time.perf_counter() - began:.0f} s")
    if given.output is not None:
        result = {
            "command": f"python benchmarks/modality.py {' '.join(sys.argv[1:])}".rstrip(),
            "date": date.today().isoformat(),
            "versions": found,
            "machine": machine,
            "workloads": workloads,
        }
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
