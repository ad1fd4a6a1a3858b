"""What modality-parallel, frozen-aware pipelines save: nine multimodal models on 24 virtual devices.

The real runtime carries out real schedules of 24 microbatches, in processes in which the compute of a layer is a sleep
of its cost (virtual_devices.py, nine_models.py). Of several steps the fastest counts: what other jobs on the machine
take away is not the plan's. The devices of a stage, tp 2 for encoders and tp 2 × cp 2 for language models, are one
process: what they do is the same, and they wait for the same. Encoders and language models are frozen, projectors are
trained, layers are recomputed in the backward pass. No plan uses more than 24 devices. Whether a stage fits into memory
is not looked at. Six plans of each model (modality_plans.py):

apart       modality-parallel: each encoder on stages of its own. How many, where layers are cut by what they really
            cost, in how many parts a language model stands on its places, and the schedule: what the product's search
            finds (`cornstarch.plan.search`)
searched    what it finds if encoders may stand on shared stages, too, or in the first stage of the language model: our
            plan

colocated   a chain: all encoders, one after the other, on the same stages, then the language model. Layers are cut
            evenly; how many stages there are is what would take least if everything were trained
published   the same, with the numbers of stages of the published evaluation
replicated  the language model cut evenly into six stages, each of which runs all encoders, whose work its devices share
whole       the same, but every device runs all of each encoder, as in the published evaluation

These four work in 1F1B, as published. Our plans in 1F1B, and a step in which no device ever waits, are simulated
beside them.

There are two workloads. `published` is that of the published evaluation's script: the language model gets few tokens of
images that are cut into tiles, and those of 70 and 72 billion parameters have 40 of their 80 layers. With `patches`, it
gets a token for each patch, as in use, and has all of its layers: encoders are then a smaller part of the work.

    python benchmarks/modality.py                              # prints a page; with --output FILE.md also writes it
    python benchmarks/modality.py --models VLM-M --steps 1     # one model
    python benchmarks/modality.py --simulate                   # without running anything
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date
from importlib.metadata import version
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

from modality_plans import APART, USUAL, Plan, blind, found, ideal, published, replicated
from nine_models import DEVICES, MICROBATCHES, WORKLOADS, Model
from virtual_devices import Job, run

from cornstarch.plan.simulate import simulate
from cornstarch.schedule.actions import Schedule
from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.policies import make_schedule

BEST, MEAN, DEVIATION = 1.57, 1.2, 0.05  # targets: the largest ratio, the mean of all, and of measured to simulated
COST = (0.01, 0.01, 0.0)  # of a stage, where the runtime itself is measured
OURS, OTHERS = ("apart", "searched"), ("colocated", "published", "replicated", "whole")


class Runtime(NamedTuple):
    """Seconds that are not compute."""

    action: float = 0.0
    """Around each action."""
    transfer: float = 0.0
    """From the end of an action to the start of one elsewhere that waits for it."""

    @classmethod
    def measured(cls) -> Runtime:
        """Measure one stage alone, and two that do one microbatch at a time: nothing is hidden behind compute."""
        alone, two = (
            Job(StageGraph.chain(stages, costs=COST), ((COST,),) * stages, MICROBATCHES, "naive", 5)
            for stages in (1, 2)
        )
        # Sleeps that end too late shorten the next ones, so that a busy machine may seem to take less than nothing.
        action = max(0.0, (min(run(alone)) - alone.compute) / (2 * MICROBATCHES))
        there_and_back = (min(run(two)) - two.compute) / MICROBATCHES - 4 * action
        return cls(action, max(0.0, there_and_back / 2))

    def step(self, schedule: Schedule) -> float:
        """Return what a step takes in simulation."""
        nodes = (
            replace(one, forward=one.forward + self.action, backward_input=one.backward_input + self.action)
            for one in schedule.graph.nodes
        )
        slower = replace(schedule, graph=replace(schedule.graph, nodes=tuple(nodes)))
        return simulate(slower, self.transfer).step


@dataclass
class Case:
    """A model, its plans, and what they take."""

    model: Model
    plans: dict[str, Plan]
    usual: dict[str, float]
    """What our plans take in simulation if they must work in 1F1B."""
    scale: float
    """Seconds of 10^12 operations."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """By plan; of each step that was measured."""
    runtime: Runtime = Runtime()
    """What its runtime takes."""

    @classmethod
    def of(cls, model: Model, seconds: float) -> Case:
        """Search the plans of a model; seconds: of a step of our own."""
        plans = {
            "apart": found(model, APART),
            "searched": found(model),
            "colocated": blind(model),
            "published": published(model),
            "replicated": replicated(model),
            "whole": replicated(model, whole=True),
        }
        assert all(plan.devices <= DEVICES for plan in plans.values())
        usual = {
            "apart": found(model, APART, (USUAL,)).simulated,
            "searched": found(model, schedules=(USUAL,)).simulated,
        }
        return cls(model, plans, usual, seconds / plans["searched"].simulated)

    def simulated(self, name: str) -> float:
        """The seconds of a step of a plan, in simulation."""
        job = self.plans[name].job(self.scale, 1)
        return self.runtime.step(make_schedule(job.graph, job.microbatches, job.policy))

    def took(self, name: str) -> float:
        """The seconds of the fastest step of a plan, or of a simulated one if nothing was measured."""
        return min(self.seconds[name]) if self.seconds else self.simulated(name)

    def ratio(self, own: str, other: str) -> float:
        """How many times as long another plan takes as our own."""
        return self.took(other) / self.took(own)

    def deviation(self, name: str) -> float:
        """How far what was measured is from what was simulated."""
        return self.took(name) / self.simulated(name) - 1


def measure(cases: Sequence[Case], steps: int, together: int) -> None:
    """Run the plans of all models, several at a time; plans of the same stages once."""
    runtime = Runtime.measured()
    wanted = {(case.scale, plan): plan.job(case.scale, steps) for case in cases for plan in case.plans.values()}
    longest_first = sorted(wanted, key=lambda key: -key[0] * key[1].simulated)
    jobs = [*dict.fromkeys(wanted[key] for key in longest_first)]
    with ThreadPoolExecutor(together) as pool:
        taken: dict[Job, list[float]] = dict(zip(jobs, pool.map(run, jobs), strict=True))
    for case in cases:
        case.runtime = runtime
        case.seconds = {name: taken[wanted[case.scale, plan]] for name, plan in case.plans.items()}


# ---------------------------------------------------------------------------------------------------- the page


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def ratios(cases: Sequence[Case]) -> list[str]:
    """Return how many times as long the others take."""
    head = ["", "tokens", *(f"{other} / {own}" for own, other in product(OURS, OTHERS))]
    rows = [
        [case.model.name, f"{case.model.tokens:,}", *(f"{case.ratio(*two):.2f}" for two in product(OURS, OTHERS))]
        for case in cases
    ]
    for word, of in (("mean", statistics.mean), ("best", max), ("least", min)):
        rows.append([word, "", *(f"{of([c.ratio(*two) for c in cases]):.2f}" for two in product(OURS, OTHERS))])
    return table(head, rows)


def times(cases: Sequence[Case]) -> list[str]:
    """Return every plan, what it takes, and how far that is from the simulation."""
    head = ["", "plan", "stages of encoders → language model", "schedule", "devices", "seconds", "simulated"]
    rows = []
    for case in cases:
        for name, plan in case.plans.items():
            cells = [case.model.name, name, plan.words, plan.policy, str(plan.devices)]
            if case.seconds:
                cells += [" ".join(f"{one:.3f}" for one in sorted(case.seconds[name])), f"{case.simulated(name):.3f}"]
                cells += [f"{100 * case.deviation(name):+.1f}"]
            else:
                cells += ["", f"{case.simulated(name):.3f}", ""]
            rows.append(cells)
    return table([*head, "measured to simulated, %"], rows)


def shares(cases: Sequence[Case]) -> list[str]:
    """Return, in simulation, what colocated encoders take against our plans, in 1F1B and not, and against the ideal."""
    rows = []
    for case in cases:
        other = case.plans["colocated"].simulated
        found = [*(other / case.usual[own] for own in OURS), other / case.plans["searched"].simulated]
        rows.append([case.model.name, *(f"{one:.2f}" for one in (*found, other / ideal(case.model)))])
    means = [statistics.mean(float(row[column]) for row in rows) for column in range(1, 5)]
    rows.append(["mean", *(f"{mean:.2f}" for mean in means)])
    return table(["colocated against", "apart in 1f1b", "searched in 1f1b", "searched", "no device ever waits"], rows)


def verdict(cases: Sequence[Case]) -> list[str]:
    """Return how the ratios stand to the targets."""
    lines = []
    for own, other in product(OURS, OTHERS):
        found = [case.ratio(own, other) for case in cases]
        mean, best = statistics.mean(found), max(found)
        lines.append(
            f"- {own} against {other}: mean {mean:.2f} ({'reaches' if mean >= MEAN else 'misses'} {MEAN}), best "
            f"{best:.2f} ({'reaches' if best >= BEST else 'misses'} {BEST}), least {min(found):.2f}"
        )
    if all(case.seconds for case in cases):
        off = [abs(case.deviation(name)) for case in cases for name in case.plans]
        held = "within" if max(off) <= DEVIATION else "not within"
        action, transfer = (1000 * one for one in cases[0].runtime)
        lines.append(
            f"- measured to simulated: {100 * max(off):.1f} % at most, {100 * statistics.mean(off):.1f} % on average; "
            f"{held} {100 * DEVIATION:.0f} %. In the simulation an action takes {action:.2f} ms beside its compute, "
            f"and a transfer {transfer:.2f} ms, as measured with one stage and with two"
        )
    return lines


def page(found: Mapping[str, Sequence[Case]], about: str) -> str:
    """Return all that was found."""
    lines = ["# What modality-parallel, frozen-aware pipelines save", "", about]
    for workload, cases in found.items():
        lines += ["", f"## Workload: {workload}", "", "How many times as long others take as our plans:", ""]
        lines += [*ratios(cases), "", *verdict(cases), "", "In simulation, and what is due to what:", ""]
        lines += [*shares(cases), "", "Every plan, and its seconds per step:", "", *times(cases)]
    return "\n".join(lines) + "\n"


def load() -> str:
    """Return how busy the machine is."""
    return f"{os.getloadavg()[0]:.1f}"


def main() -> None:
    names = [model.name for model in WORKLOADS["published"]]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="of a step of `searched`; others take what they take"
    )
    parser.add_argument("--steps", type=int, default=2, help="of each plan; the fastest counts")
    parser.add_argument("--together", type=int, default=4, help="plans that run at the same time: they only sleep")
    parser.add_argument("--simulate", action="store_true", help="run nothing")
    parser.add_argument("--output", type=Path, help="a Markdown file")
    given = parser.parse_args()
    before, began = load(), time.perf_counter()
    models = {name: [model for model in WORKLOADS[name] if model.name in given.models] for name in given.workloads}
    cases = {model: Case.of(model, given.seconds) for model in dict.fromkeys(chain(*models.values()))}
    found = {workload: [cases[model] for model in its] for workload, its in models.items()}
    searched = time.perf_counter() - began
    if not given.simulate:
        measure([*cases.values()], given.steps, given.together)
    spent = time.perf_counter() - began
    about = (
        f"Command: `python benchmarks/modality.py {' '.join(sys.argv[1:])}`. {date.today().isoformat()}, Python "
        f"{platform.python_version()}, torch {version('torch')}, {os.cpu_count()} CPU cores, load {before} before and "
        f"{load()} at the end. {MICROBATCHES} microbatches, {given.steps} measured steps of each plan, "
        f"{given.together} plans at a time. Searching took {searched:.0f} s, everything {spent:.0f} s. What the plans "
        "are is said at the top of the script."
    )
    text = page(found, about)
    print(text)
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
