"""`python -m tests.chaos elastic`: a run whose number of ranks changes at kills.

Each sample must be trained on once per epoch, whatever the number of ranks, and the losses must be those of a run whose
number of ranks never changes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.chaos import told
from tests.chaos.kills import PATIENCE, FoundError, read_records
from tests.chaos.layouts import EVERY, LAYOUTS, Layout, write_run
from tests.chaos.processes import Command, Line, append_result, find_processes, read_told, wait_until

_TELL = ",".join((*told.RARE, told.STEP, told.SAMPLES))
_STILL = (  # each rank draws its own dropout, so the number of ranks must not matter
    "model.encoders.vision.config.attention_dropout=0.0",
    "model.language_model.config.attention_dropout=0.0",
    "loop.batch_size=12",
    "optimizer.learning_rate=1e-3",
)


def add_command(commands: Any) -> None:
    """Add the command and its options."""
    reader = commands.add_parser("elastic", help="another number of ranks after each kill")
    reader.add_argument("--sizes", type=int, nargs="+", default=[4, 2, 3, 4])
    reader.add_argument("--layouts", nargs="+", default=["ddp", "fsdp2"], choices=["ddp", "fsdp2"])
    reader.add_argument("--steps", type=int, default=24)
    reader.add_argument("--into", type=Path, help="a file of JSON lines, to which results are added")
    reader.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Return 1 if samples or losses differ."""
    failed = 0
    for name in asked.layouts:
        result = change_sizes(LAYOUTS[name], asked.sizes, asked.steps)
        print(result["line"], flush=True)
        for problem in result["problems"]:
            print(f"    {problem}\n    again: python -m tests.chaos elastic --layouts {name}")
        failed += bool(result["problems"])
        append_result(asked.into, {"command": "elastic", "layout": name, "result": result})
    return int(failed > 0)


def change_sizes(layout: Layout, sizes: Sequence[int], steps: int) -> dict[str, Any]:
    """Return what came of a run that is killed and goes on with other numbers of ranks."""
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as place:
        base = Path(place).resolve()
        problems: list[str] = []
        fixed, changed = base / "fixed", base / "changed"
        for folder in (fixed, changed):
            write_run(base / "data", folder, layout, steps, *_STILL)
        try:
            _run_to(fixed, sizes[0], None)
            for number, size in enumerate(sizes):
                is_last = number + 1 == len(sizes)
                _run_to(changed, size, None if is_last else (number + 1) * steps // len(sizes))
        except FoundError as error:
            problems.append(str(error))
        compared = compare_losses(read_records(fixed / "run"), read_records(changed / "run"))
        counts, more = check_samples(read_told(changed))
        largest = max(compared.values(), default=0.0)
        if len(compared) < steps or largest > 1e-5:
            problems.append(f"{len(compared)} losses compared, the largest deviation is {largest:.1e}")
        problems += more
        line = (
            f"{layout.name}: {' → '.join(map(str, sizes))} ranks with {len(sizes) - 1} kills; "
            f"{len(compared)} losses equal within {largest:.1e}; {counts} samples in whole epochs, each once; "
            f"{'FAILED' if problems else 'equal'}"
        )
        return {"line": line, "problems": problems, "largest": largest, "samples": counts}


def _run_to(folder: Path, ranks: int, until: int | None) -> None:
    """Train with a number of ranks: to the end, or until all are killed behind a step."""
    command = Command(folder, ["train", "run.yaml", "--nproc", str(ranks)], environment={told.ONLY: _TELL})
    command.start()
    try:
        if until is None:
            if command.wait(PATIENCE) != 0:
                raise FoundError(f"{ranks} ranks end with {command.code}: {command.said()[-900:]}")
            return
        due = until + EVERY // 2  # between two checkpoints, so that something is lost
        is_due = lambda: any(line.mark == "=" and line.number >= due for line in read_told(folder))  # noqa: E731
        if not wait_until(lambda: is_due() or command.code is not None, PATIENCE, every=0.002) or not is_due():
            raise FoundError(f"{ranks} ranks do not come to step {due}: {command.said()[-900:]}")
        for pid in find_processes(folder):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not wait_until(lambda: not find_processes(folder), 5.0):
            raise FoundError("processes stay")
        command.wait(PATIENCE)
    finally:
        command.kill_all()


def compare_losses(
    fixed: Mapping[tuple[str, int], Mapping[str, Any]], changed: Mapping[tuple[str, int], Mapping[str, Any]]
) -> dict[int, float]:
    """Return by how much the loss of each step deviates, relative to it."""
    found = {}
    for (kind, step), record in fixed.items():
        other = changed.get((kind, step))
        if kind == "train" and other is not None:
            found[step] = abs(other["loss"] - record["loss"]) / abs(record["loss"])
    return found


def check_samples(lines: Sequence[Line]) -> tuple[int, list[str]]:
    """Return how many samples were trained on in whole epochs, and what is wrong with them.

    Of steps that were trained several times, the last one counts: what the others did to the weights is gone.
    """
    claims = [line.time for line in lines if line.phase == told.CLAIMED]
    steps: dict[int, tuple[int, list[tuple[int, list[str]]]]] = {}
    for line in lines:
        if line.phase == told.SAMPLES:
            attempt = bisect(claims, line.time)
            epoch, _, names = json.loads(line.text)
            latest, known = steps.get(line.number, (attempt, []))
            steps[line.number] = (attempt, [*(known if latest == attempt else []), (epoch, names)])
    epochs: dict[int, Counter[str]] = {}
    for _, known in steps.values():
        for epoch, names in known:
            epochs.setdefault(epoch, Counter()).update(names)
    whole = sorted(epochs)[:-1]  # the last one may not be at its end
    everything = set().union(*(epochs[epoch] for epoch in whole)) if whole else set()
    problems = []
    for epoch in whole:
        if wrong := {name: epochs[epoch][name] for name in everything if epochs[epoch][name] != 1}:
            problems.append(f"epoch {epoch}: {wrong}, expected once each")
    if not whole:
        problems.append("no epoch was completed")
    return sum(epochs[epoch].total() for epoch in whole), problems
