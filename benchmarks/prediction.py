"""Compare predictions with measurements: the step time and the peak memory.

The planner (`cornstarch.plan.predict`) predicts each configuration twice: from costs that are estimated from shapes and
the device's data sheet (`run_cost`: *analytic*; for a CPU, its speed for products and copies is measured), and from
costs that were measured on this device, one layer of each kind (`cornstarch profile`: *measured layers*). Then the
steps are run. Errors are relative to the measurement, in percent. On a CPU, one process has one thread and its CPU time
counts; for two processes, wall time counts. The speed of the machine changes from minute to minute: half of the steps
run before the layers are measured, half after.

    python benchmarks/prediction.py --device cuda --output FILE.md      # one GPU, about 5 minutes
    python benchmarks/prediction.py --output FILE.md                    # this CPU: one process, two, virtual devices
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
import transformers

LIMITS = {"mean": 8.0, "worst": 15.0, "memory": 5.0}
SECONDS = {"cuda": 345.0, "cpu": 900.0}
HEADER = (
    "| configuration | measured ms | from measured layers | | analytic | | measured GiB | from measured layers | | "
    "analytic | |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


# ---------------------------------------------------------------------------------------------------- processes


def rows_of(device: str, chosen: Sequence[int], steps: int, limit: float) -> Iterator[dict[str, Any]]:
    """Yield the result of each case when it is done; the cases of one model share a process."""
    from prediction_steps import ON_CPU, ON_GPU

    cases = ON_GPU if device == "cuda" else ON_CPU
    ends = time.monotonic() + limit
    for _, group in groupby(chosen, key=lambda number: cases[number].model):
        left = list(group)
        while left:
            command = [sys.executable, __file__, "--device", device, "--steps", str(steps), "--limit", f"{ends}"]
            for found in _lines([*command, "--only", ",".join(map(str, left))]):
                yield found
                left.remove(found["number"])
            if left and time.monotonic() < ends:  # its process ended early
                yield {"number": left[0], "case": cases[left[0]].name, "error": "its process failed; see above"}
                left.pop(0)
            elif left:
                yield from ({"number": n, "case": cases[n].name, "error": "no time was left"} for n in left)
                left = []


def _lines(command: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the output of a process, line by line."""
    from prediction_steps import GIVEN_BACK

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **GIVEN_BACK}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)


def work(device: str, chosen: Sequence[int], steps: int, ends: float) -> None:
    """Run some cases in this process, and print each result on a line."""
    from prediction_steps import ON_CPU, ON_GPU, WARMING, measure

    torch.set_num_threads(1)
    known: dict[str, Any] = {}
    cases = ON_GPU if device == "cuda" else ON_CPU
    if device == "cpu":  # libraries load code at their first use, which is not part of a step
        measure(WARMING, torch.device(device), known, 1)
    for number in chosen:
        if time.monotonic() > ends:
            return
        try:
            found = measure(cases[number], torch.device(device), known, steps)
        except Exception as error:  # still print the other results
            traceback.print_exc()
            found = {"case": cases[number].name, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"}
        print(json.dumps({"number": number, **found}), flush=True)


# ---------------------------------------------------------------------------------------------------- the table


def off(predicted: float, found: float) -> float:
    """Return a relative error in percent."""
    return 100 * (predicted / found - 1)


def row(found: dict[str, Any]) -> str:
    """Return a row of the table."""
    if "error" in found:
        return f"| {found['case']} | {found['error']} |"
    cells = [found["case"], f"{1e3 * found['seconds']:.1f}"]
    for way in ("measured", "analytic"):
        cells += (
            [f"{1e3 * found[way][0]:.1f}", f"{off(found[way][0], found['seconds']):+.1f} %"]
            if way in found
            else [""] * 2
        )
    cells.append(f"{found['bytes'] / 2**30:.2f}" if "bytes" in found else "")
    for way in ("measured", "analytic"):
        has = "bytes" in found and way in found
        cells += [f"{found[way][1] / 2**30:.2f}", f"{off(found[way][1], found['bytes']):+.1f} %"] if has else [""] * 2
    return f"| {' | '.join(cells)} |"


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the mean and the worst errors."""
    good = [one for one in rows if "error" not in one]
    if not good:
        return ["Nothing was measured."]
    lines = []
    for way, words in (("measured", "from measured layers"), ("analytic", "analytic")):
        times = [abs(off(one[way][0], one["seconds"])) for one in good if way in one]
        sizes = [abs(off(one[way][1], one["bytes"])) for one in good if way in one and "bytes" in one]
        parts = [(what, errors) for what, errors in (("time", times), ("memory", sizes)) if errors]
        said = [
            f"{what} {sum(errors) / len(errors):.1f} % off on average, {max(errors):.1f} % at worst ({len(errors)})"
            for what, errors in parts
        ]
        lines += [f"- {words}: {'; '.join(said)}"] if said else []
    limits = f"mean {LIMITS['mean']:.0f} %, worst {LIMITS['worst']:.0f} %, memory {LIMITS['memory']:.0f} %"
    return [*lines, f"- targets: {limits}"]


def heading(device: str) -> list[str]:
    """Describe the machine."""
    where = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} cores of a CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return [f"## {where}", "", f"{versions}, {date.today().isoformat()}", "", HEADER]


def main() -> None:
    """Measure the requested configurations."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given.add_argument("--output", type=Path, help="a Markdown file")
    given.add_argument("--cases", help="indices of single-process configurations, from 0; default: all, and all others")
    given.add_argument("--several", action="store_true", help="only the configurations of several processes, on a CPU")
    given.add_argument("--steps", type=int, default=8)
    given.add_argument(
        "--seconds", type=float, help=f"start no single-process configuration after this time; default: {SECONDS}"
    )
    given.add_argument("--only", help=argparse.SUPPRESS)
    given.add_argument("--limit", type=float, default=float("inf"), help=argparse.SUPPRESS)
    asked = given.parse_args()
    if asked.only:
        work(asked.device, list(map(int, asked.only.split(","))), asked.steps, asked.limit)
        return
    from prediction_steps import ON_CPU, ON_GPU

    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        print(line, flush=True)
        if asked.output:
            asked.output.write_text("\n".join(["# Predictions", "", *lines, ""]), encoding="utf-8")

    cases = ON_GPU if asked.device == "cuda" else ON_CPU
    numbers = [str(number) for number in range(len(cases))]
    names = [] if asked.several else asked.cases.split(",") if asked.cases else numbers
    if not set(names) <= set(numbers):
        given.error(f"--cases {asked.cases}: expected some of {','.join(numbers)}")
    chosen = list(map(int, names))
    rows = rows_of(asked.device, chosen, asked.steps, asked.seconds or SECONDS[asked.device])
    if asked.device == "cpu" and not asked.cases:
        from prediction_ranks import on_two_ranks, on_virtual_devices

        rows = chain(rows, on_two_ranks(), on_virtual_devices())
    report_rows(asked.device, rows, tell)


def report_rows(device: str, rows: Iterator[dict[str, Any]], tell: Callable[[str], None]) -> None:
    """Print a table row by row, and the errors."""
    for line in heading(device):
        tell(line)
    found = []
    for one in rows:
        found.append(one)
        tell(row(one))
        if "took" in one:
            print(f"   ({one['took'][0]:.0f} s to predict, {one['took'][1]:.0f} s to run)", file=sys.stderr, flush=True)
    for line in ["", *summary(found)]:
        tell(line)


if __name__ == "__main__":
    main()
