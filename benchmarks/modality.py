"""Measure the gain of modality-parallel, frozen-aware pipelines: nine multimodal models on 24 virtual devices.

The real runtime executes real schedules of 24 microbatches, in processes in which the computation of a layer is a sleep
of its cost (virtual_devices.py, nine_models.py). The fastest of several steps counts, because other load on the machine
is not part of the plan. The devices of a stage, tp 2 for encoders and tp 2 × cp 2 for language models, are one process:
they all do and wait for the same. Encoders and language models are frozen, projectors are trained, layers are
recomputed in the backward pass. No plan uses more than 24 devices. Memory limits are ignored. Six plans of each model
(modality_plans.py):

apart       modality-parallel: each encoder has its own stages. The product's search (`cornstarch.plan.search`) chooses
            the number of stages, the layers of each stage by their real costs, the number of model chunks of the
            language model, and the schedule
searched    the result of the search if encoders may also share stages, or run in the first stage of the language model:
            our plan

colocated   a chain: all encoders, one after the other, on the same stages, then the language model. Layers are divided
            evenly; the number of stages is the one that would be fastest if everything were trained
published   the same, with the numbers of stages of the published evaluation
replicated  the language model in six even stages, each of which runs all encoders, divided over its devices
whole       the same, but every device runs each encoder completely, as in the published evaluation

These four use 1F1B, as published. Our plans with 1F1B, and a step in which no device ever waits, are simulated for
comparison.

There are two workloads. `published` is that of the published evaluation's script: the language model gets few tokens
from images that are split into tiles, and the models of 70 and 72 billion parameters have 40 of their 80 layers. With
`patches`, it gets a token for each patch, as in practice, and has all of its layers: encoders are then a smaller part
of the work.

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

BEST, MEAN, DEVIATION = 1.57, 1.2, 0.05  # targets: largest ratio, mean ratio, deviation from the simulation
COST = (0.01, 0.01, 0.0)  # cost of a stage when the runtime itself is measured
OURS, OTHERS = ("apart", "searched"), ("colocated", "published", "replicated", "whole")


class Runtime(NamedTuple):
    """Seconds outside of computation."""

    action: float = 0.0
    """Per action."""
    transfer: float = 0.0
    """From the end of an action to the start of a dependent one on another place."""

    @classmethod
    def measured(cls) -> Runtime:
        """Measure one stage alone, and two with one microbatch at a time, so that nothing overlaps."""
        alone, two = (
            Job(StageGraph.chain(stages, costs=COST), ((COST,),) * stages, MICROBATCHES, "naive", 5)
            for stages in (1, 2)
        )
        # Late sleeps shorten the next ones, so a busy machine may appear to take negative time.
        action = max(0.0, (min(run(alone)) - alone.compute) / (2 * MICROBATCHES))
        there_and_back = (min(run(two)) - two.compute) / MICROBATCHES - 4 * action
        return cls(action, max(0.0, there_and_back / 2))

    def step(self, schedule: Schedule) -> float:
        """Return the simulated step time."""
        nodes = (
            replace(one, forward=one.forward + self.action, backward_input=one.backward_input + self.action)
            for one in schedule.graph.nodes
        )
        slower = replace(schedule, graph=replace(schedule.graph, nodes=tuple(nodes)))
        return simulate(slower, self.transfer).step


@dataclass
class Case:
    """A model, its plans, and their step times."""

    model: Model
    plans: dict[str, Plan]
    usual: dict[str, float]
    """Simulated step times of our plans with 1F1B."""
    scale: float
    """Seconds per 10^12 operations."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """By plan: the seconds of each measured step."""
    runtime: Runtime = Runtime()
    """The overhead of the runtime."""

    @classmethod
    def of(cls, model: Model, seconds: float) -> Case:
        """Search the plans of a model; `seconds` is the step time of our own plan."""
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
        """The simulated seconds of a step of a plan."""
        job = self.plans[name].job(self.scale, 1)
        return self.runtime.step(make_schedule(job.graph, job.microbatches, job.policy))

    def took(self, name: str) -> float:
        """The seconds of the fastest measured step of a plan, or of the simulated one."""
        return min(self.seconds[name]) if self.seconds else self.simulated(name)

    def ratio(self, own: str, other: str) -> float:
        """The step time of another plan relative to our own."""
        return self.took(other) / self.took(own)

    def deviation(self, name: str) -> float:
        """The relative deviation of the measured from the simulated time."""
        return self.took(name) / self.simulated(name) - 1


def measure(cases: Sequence[Case], steps: int, together: int) -> None:
    """Run the plans of all models, several at a time; plans with the same stages run once."""
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
    """Return the relative step times of the others."""
    head = ["", "tokens", *(f"{other} / {own}" for own, other in product(OURS, OTHERS))]
    rows = [
        [case.model.name, f"{case.model.tokens:,}", *(f"{case.ratio(*two):.2f}" for two in product(OURS, OTHERS))]
        for case in cases
    ]
    for word, of in (("mean", statistics.mean), ("best", max), ("least", min)):
        rows.append([word, "", *(f"{of([c.ratio(*two) for c in cases]):.2f}" for two in product(OURS, OTHERS))])
    return table(head, rows)


def times(cases: Sequence[Case]) -> list[str]:
    """Return every plan, its step time, and its deviation from the simulation."""
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
    """Return simulated ratios of colocated encoders to our plans, with and without 1F1B, and to the ideal."""
    rows = []
    for case in cases:
        other = case.plans["colocated"].simulated
        found = [*(other / case.usual[own] for own in OURS), other / case.plans["searched"].simulated]
        rows.append([case.model.name, *(f"{one:.2f}" for one in (*found, other / ideal(case.model)))])
    means = [statistics.mean(float(row[column]) for row in rows) for column in range(1, 5)]
    rows.append(["mean", *(f"{mean:.2f}" for mean in means)])
    return table(["colocated against", "apart in 1f1b", "searched in 1f1b", "searched", "no device ever waits"], rows)


def verdict(cases: Sequence[Case]) -> list[str]:
    """Compare the ratios with the targets."""
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
            f"{held} {100 * DEVIATION:.0f} %. In the simulation, an action takes {action:.2f} ms beyond computation, "
            f"and a transfer {transfer:.2f} ms, as measured with one stage and with two"
        )
    return lines


def page(found: Mapping[str, Sequence[Case]], about: str) -> str:
    """Return the page."""
    lines = ["# The gain of modality-parallel, frozen-aware pipelines", "", about]
    for workload, cases in found.items():
        lines += ["", f"## Workload: {workload}", "", "Step times relative to our plans:", ""]
        lines += [*ratios(cases), "", *verdict(cases), "", "Simulated contributions:", ""]
        lines += [*shares(cases), "", "All plans, in seconds per step:", "", *times(cases)]
    return "\n".join(lines) + "\n"


def load() -> str:
    """Return the load of the machine."""
    return f"{os.getloadavg()[0]:.1f}"


def main() -> None:
    names = [model.name for model in WORKLOADS["published"]]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=4.0, help="step time of `searched`; the others follow from it")
    parser.add_argument("--steps", type=int, default=2, help="steps per plan; the fastest counts")
    parser.add_argument("--together", type=int, default=4, help="plans that run at the same time; they only sleep")
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
        f"{given.together} plans at a time. Searching took {searched:.0f} s, everything {spent:.0f} s. The plans are "
        "described at the top of the script."
    )
    text = page(found, about)
    print(text)
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
