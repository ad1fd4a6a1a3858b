"""`python -m tests.chaos elastic`: a run whose number of ranks changes at kills.

Each sample must be trained on once per epoch, whatever the number of ranks, and the losses must be those of a run whose
number of ranks never changes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cornstarch.launch.run_director import SCALE
from tests.chaos import phases
from tests.chaos.kills import PATIENCE, FoundError, read_records
from tests.chaos.layouts import EVERY, LAYOUTS, Layout, write_run
from tests.chaos.processes import Command, Line, append_result, find_processes, is_alive, read_reports, wait_until

_REPORTED = ",".join((*phases.RARE, phases.STEP, phases.SAMPLES))
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
    text = "itself: --nproc 2:4 --restarts; command: all are killed and another command is given"
    reader.add_argument("--by", choices=["itself", "command"], default="itself", help=text)
    reader.add_argument("--into", type=Path, help="a file of JSON lines, to which results are added")
    reader.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Return 1 if samples or losses differ."""
    failed = 0
    for name in asked.layouts:
        result = change_sizes(LAYOUTS[name], asked.sizes, asked.steps, asked.by == "itself")
        print(result["line"], flush=True)
        for problem in result["problems"]:
            print(f"    {problem}\n    again: python -m tests.chaos elastic --by {asked.by} --layouts {name}")
        failed += bool(result["problems"])
        append_result(asked.into, {"command": "elastic", "layout": name, "result": result})
    return int(failed > 0)


def change_sizes(layout: Layout, sizes: Sequence[int], steps: int, by_itself: bool) -> dict[str, Any]:
    """Return what came of a run that is killed and goes on with other numbers of ranks."""
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as place:
        base = Path(place).resolve()
        problems: list[str] = []
        fixed, changed = base / "fixed", base / "changed"
        for folder in (fixed, changed):
            write_run(base / "data", folder, layout, steps, *_STILL)
        try:
            _run_to(fixed, sizes[0], None)
            if by_itself:
                _run_elastic(changed, sizes, steps)
            else:
                for number, size in enumerate(sizes):
                    is_last = number + 1 == len(sizes)
                    _run_to(changed, size, None if is_last else _due(number, steps, len(sizes)))
        except FoundError as error:
            problems.append(str(error))
        compared = compare_losses(read_records(fixed / "run"), read_records(changed / "run"))
        lines = read_reports(changed)
        counts, more = check_samples(lines)
        if (used := list_sizes(lines)) != list(sizes):
            problems.append(f"trained with {used} ranks")
        largest = max(compared.values(), default=0.0)
        if len(compared) < steps or largest > 1e-5:
            problems.append(f"{len(compared)} losses compared, the largest deviation is {largest:.1e}")
        problems += more
        line = (
            f"{layout.name}, {'one command' if by_itself else 'a command each'}: {' → '.join(map(str, sizes))} ranks "
            f"with {len(sizes) - 1} kills; "
            f"{len(compared)} losses equal within {largest:.1e}; {counts} samples in whole epochs, each once; "
            f"{'FAILED' if problems else 'equal'}"
        )
        return {"line": line, "problems": problems, "largest": largest, "samples": counts}


def _run_to(folder: Path, ranks: int, until: int | None) -> None:
    """Train with a number of ranks: to the end, or until all are killed behind a step."""
    command = Command(folder, ["train", "run.yaml", "--nproc", str(ranks)], environment={phases.ONLY: _REPORTED})
    command.start()
    try:
        if until is None:
            if command.wait(PATIENCE) != 0:
                raise FoundError(f"{ranks} ranks end with {command.code}: {command.said()[-900:]}")
            return
        _wait_for_step(command, until)
        for pid in find_processes(folder):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not wait_until(lambda: not find_processes(folder), 5.0):
            raise FoundError("processes stay")
        command.wait(PATIENCE)
    finally:
        command.kill_all()


def _run_elastic(folder: Path, sizes: Sequence[int], steps: int) -> None:
    """Train with one command that changes the number of ranks itself; a rank is killed before each change."""
    chance = random.Random(0)
    numbers = ["--nproc", f"{min(sizes)}:{max(sizes)}", "--restarts", "50"]
    command = Command(folder, ["train", "run.yaml", *numbers], environment={phases.ONLY: _REPORTED})
    (folder / "run").mkdir()
    try:
        for number, size in enumerate(sizes):
            (folder / "run" / SCALE).write_text(str(size))
            if number == 0:
                command.start()
            else:
                pids = [line.pid for line in read_reports(folder) if line.phase == phases.INIT and is_alive(line.pid)]
                os.kill(chance.choice(pids), signal.SIGKILL)
            if number + 1 < len(sizes):
                _wait_for_step(command, _due(number, steps, len(sizes)))
        if command.wait(PATIENCE) != 0:
            raise FoundError(f"it ends with {command.code}: {command.said()[-900:]}")
    finally:
        command.kill_all()


def _due(number: int, steps: int, sizes: int) -> int:
    """Return the step after which the number of ranks changes: between two checkpoints, so that something is lost."""
    return (number + 1) * steps // sizes + EVERY // 2


def _wait_for_step(command: Command, step: int) -> None:
    def is_due() -> bool:
        return any(line.mark == "=" and line.number >= step for line in read_reports(command.folder))

    wait_until(lambda: is_due() or command.code is not None, PATIENCE, every=0.002)
    if not is_due():
        raise FoundError(f"it does not come to step {step}: {command.said()[-900:]}")


def list_sizes(lines: Sequence[Line]) -> list[int]:
    """Return how many replicas trained, one number for each change."""
    claims = [line.time for line in lines if line.phase == phases.CLAIMED]
    found: dict[int, int] = {}
    for line in lines:
        if line.phase == phases.SAMPLES:
            attempt = bisect(claims, line.time)
            found[attempt] = max(found.get(attempt, 0), json.loads(line.text)[1] + 1)
    sizes = [found[attempt] for attempt in sorted(found)]
    return [size for number, size in enumerate(sizes) if number == 0 or size != sizes[number - 1]]


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
    claims = [line.time for line in lines if line.phase == phases.CLAIMED]
    steps: dict[int, tuple[int, list[tuple[int, list[str]]]]] = {}
    for line in lines:
        if line.phase == phases.SAMPLES:
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
