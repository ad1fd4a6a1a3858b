"""Plan twenty runs, and predict the published recipe nearest to each on the same cluster with the same rules.

Everything here is predicted, nothing is measured.

    python benchmarks/twenty_plans.py                     # prints a line for each
    python benchmarks/twenty_plans.py --only 405B         # cases whose names contain a text
    python benchmarks/twenty_plans.py --output FILE.md
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twenty_cases import CASES, LANGUAGE, OUTLOOK, Case

from cornstarch.errors import ConfigError
from cornstarch.plan.cluster import Cluster
from cornstarch.plan.predict import Prediction
from cornstarch.planner.search_run import cost_of, plan_run, predict_own_plan
from cornstarch.report.number_format import format_count, format_step_time
from cornstarch.train import load_config

PARTS = ("compute", "recompute", "tensor", "context", "gather", "exchange", "data", "optimizer", "wait", "slowest")


@dataclass(frozen=True)
class Outcome:
    """The plan of a case, and the prediction of the recipe."""

    case: Case
    cluster: Cluster
    best: Prediction | None
    recipe: Prediction | None
    trouble: str
    search: float
    """CPU seconds."""
    trace: float
    """CPU seconds."""


def build_config(case: Case) -> dict[str, Any]:
    """Return the sections of a case's config."""
    model: dict[str, Any] = {"language_model": {"train": "full", "config": LANGUAGE[case.language]}}
    if case.encoders:
        model["encoders"] = {
            name: {"token": f"<{name}>", "train": "full", "config": one} for name, one in case.encoders.items()
        }
    else:
        model["language_model"]["tokenizer"] = "none/none"
    data = {"train": "none.json", "max_length": case.tokens}
    return {"name": "run", "model": model, "data": data, "loop": {"batch_size": case.batch, "steps": 1}}


def build_recipe(case: Case, cluster: Cluster) -> dict[str, Any]:
    """Return the sections of a case's config with the recipe's plan."""
    own, config = case.recipe, build_config(case)
    replicas = cluster.devices // (own.tp * own.cp * own.stages)
    module: dict[str, Any] = {
        "tp": own.tp, "cp": own.cp, "stages": own.stages, "virtual_stages": own.virtual,
        "activation_checkpointing": own.checkpointing, "tp_sequence": own.tp > 1, "tp_vocabulary": own.tp > 1,
    }  # fmt: skip
    module |= {"layers": own.layers} if own.layers is not None else {}
    module |= {"ep": own.ep, "tp_sequence": False} if own.ep > 1 else {}
    encoder = {"tp": own.tp, "cp": own.cp, "activation_checkpointing": own.checkpointing}
    names = [*case.encoders, "language_model"] if case.encoders else ["model"]
    modules = {name: module if name == names[-1] else encoder for name in names}
    parallel: dict[str, Any] = {"modules": modules, "data": {"kind": own.kind}}
    if case.encoders:
        parallel["ranks"] = "first_stage" if own.stages > 1 else "shared"
    if own.stages > 1:
        parallel["schedule"] = "interleaved" if own.virtual > 1 else "1f1b"
    config["loop"]["gradient_accumulation_steps"] = max(1, case.batch // (replicas * own.rows))
    return {**config, "parallel": parallel}


def read_cluster(text: str) -> Cluster:
    """Return the cluster of a name, or of a file's content."""
    if "\n" not in text:
        return Cluster.parse(text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(text)
        return Cluster.parse(str(path))


def plan_case(case: Case) -> Outcome:
    """Plan a case and predict its recipe."""
    cluster, start = read_cluster(case.cluster), time.process_time()
    config = load_config(None, base=build_config(case))
    cost = cost_of(config, cluster)
    traced = time.process_time()
    found = plan_run(config, cluster, cost)
    ended = time.process_time()
    try:
        own = predict_own_plan(load_config(None, base=build_recipe(case, cluster)), cluster, cost)
        recipe, trouble = own.prediction, own.trouble
    except ConfigError as error:
        recipe, trouble = None, " ".join(str(error).split())
    return Outcome(case, cluster, found.best, recipe, trouble or "", ended - traced, traced - start)


def format_plan(one: Outcome) -> str:
    """Return a line of the table of plans."""
    case, best = one.case, one.best
    head = [case.name, one.cluster.name, f"{case.batch:,} × {case.tokens:,}"]
    if best is None:
        return f"| {' | '.join([*head, 'nothing fits', *[''] * 5])} |"
    memory = f"{best.peak / 2**30:.0f} of {best.limit / 2**30:.0f} GiB"
    mfu = "" if best.mfu is None else f"{best.mfu:.0%}"
    figures = [format_step_time(best.step), format_count(best.tokens_per_second), mfu, memory, f"{one.search:.1f}"]
    return f"| {' | '.join([*head, best.candidate.describe(), *figures])} |"


def compare_parts(best: Prediction, other: Prediction) -> str:
    """Return by which parts of a step a plan differs most from another, in per cent of the other's step."""
    here, there = vars(best.breakdown), vars(other.breakdown)
    parts = [(name, (here[name] - there[name]) / other.step) for name in PARTS if name in here]
    parts = sorted((one for one in parts if abs(one[1]) >= 0.005), key=lambda one: -abs(one[1]))
    return ", ".join(f"{name} {part:+.0%}" for name, part in parts[:4]) or "nothing"


def format_comparison(one: Outcome) -> str:
    """Return a line of the table of recipes."""
    recipe = one.case.recipe
    cells = [one.case.name, one.cluster.name, f"{recipe.describe()} ({recipe.where})"]
    if one.recipe is None or one.best is None:
        return f"| {' | '.join([*cells, one.trouble or 'no prediction', '', '', one.case.why])} |"
    fits = "" if one.recipe.fits else f", does not fit ({one.recipe.peak / 2**30:.0f} GiB)"
    faster = f"{one.recipe.step / one.best.step - 1:+.0%}"
    figures = [f"{format_step_time(one.recipe.step)}{fits}", faster, compare_parts(one.best, one.recipe)]
    return f"| {' | '.join([*cells, *figures, one.case.why])} |"


def build_page(outcomes: list[Outcome], left: list[Case]) -> str:
    """Return the page of results."""
    total = sum(one.search + one.trace for one in outcomes)
    lines = [
        "# Twenty plans",
        "",
        "`python benchmarks/twenty_plans.py --output benchmarks/results/twenty_plans.md`, 2026-11-19. **Everything",
        "here is predicted; nothing ran.** Plans are those of `cornstarch plan CONFIG --cluster NAME`: fully trained,",
        "in bf16, a batch of *rows × tokens*. Clusters are of the catalogue (docs/clusters.md). The search takes the",
        f"CPU seconds in the last column, after the trace of layers; all of it took {total:.0f} CPU-seconds.",
        "",
        "| run | cluster | batch | plan | step | tokens/s | MFU | memory | search |",
        "|---|---|---|---|---:|---:|---:|---|---:|",
        *map(format_plan, outcomes),
        "",
        "## Beside published recipes",
        "",
        "The recipe nearest to each, predicted on the same cluster by the same rules, with the encoders in the first",
        "stage or, without stages, on the same ranks. *recipe takes* is how much longer its step is than our plan's;",
        "*our plan against it* names the parts of a step that differ most, in per cent of the recipe's step. Recipes",
        "are for language models without encoders, unless they say otherwise.",
        "",
        "| run | cluster | recipe | predicted | recipe takes | our plan against it | why |",
        "|---|---|---|---:|---:|---|---|",
        *map(format_comparison, outcomes),
        "",
        OUTLOOK.strip(),
    ]
    if left:
        names = ", ".join(case.name for case in left)
        lines += ["", f"Left out, because the search took more than a CPU-minute (`--slow` runs it): {names}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--output", type=Path, help="a Markdown file")
    parser.add_argument("--slow", action="store_true", help="also cases whose search takes minutes")
    given = parser.parse_args()
    cases = [case for case in CASES if given.only in case.name]
    left = [case for case in cases if case.is_slow and not given.slow]
    outcomes = []
    for case in cases:
        if case not in left:
            outcomes.append(plan_case(case))
            print(format_plan(outcomes[-1]))
            print(format_comparison(outcomes[-1]), flush=True)
            if given.output is not None:
                given.output.write_text(build_page(outcomes, left))


if __name__ == "__main__":
    main()
