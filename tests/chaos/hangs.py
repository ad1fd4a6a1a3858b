"""Ranks that are stopped, links that are cut, and machines that are only busy: who is named, and how soon."""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.namespaces import Network, Unable, network
from tests import forked
from tests.chaos import phases
from tests.chaos.endurance import LongRun
from tests.chaos.kills import PATIENCE, FoundError
from tests.chaos.layouts import LAYOUTS, write_run
from tests.chaos.processes import ROOT, append_result, is_alive, prepare_trainer, wait_until
from tests.cli import started

LIMIT = 5.0
"""Seconds in which a rank must be named (`launch.hang_timeout: auto`), or 5 median steps if they take longer."""
_NAMED = re.compile(
    r"^.{0,40}\bRank (\d+)\b(?: \([^)]*\))?(?:, which [^,]*,)? (?:was stopped|has not|has ended|has left)", re.MULTILINE
)
SLACK = 1.0
"""Seconds more before a rank counts as named too late: until the message is in a log, on a busy machine."""
_OFTEN = ("loop.evaluate_every=40", "logging.every=5")
_RANKS_OF_CUTS = 3
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <sched.h>


@dataclass(frozen=True)
class Found:
    """What was said about one rank that was stopped or cut off."""

    name: str
    layout: str
    rank: int
    named: tuple[int, ...]
    """The ranks that the first message names on each rank that could print one."""
    seconds: float | None
    """Until the first message; None: there was none."""
    back: float | None
    """Seconds until the run trained again, or until all of its processes were gone."""
    problem: str = ""
    limit: float = LIMIT
    """Seconds within which it had to be named."""

    @property
    def is_right(self) -> bool:
        return not self.problem and set(self.named) == {self.rank}

    @property
    def is_late(self) -> bool:
        return self.seconds is None or self.seconds > self.limit + SLACK


def find_named(texts: Iterable[str]) -> tuple[int, ...]:
    """Return which rank the first message of each text names; texts without one are left out."""
    found = [_NAMED.search(text) for text in texts]
    return tuple(int(one.group(1)) for one in found if one is not None)


def describe(found: Sequence[Found]) -> str:
    """Return one line about all."""
    right = sum(one.is_right for one in found)
    times = sorted(one.seconds for one in found if one.seconds is not None) or [0.0]
    within = sum(one.seconds is not None and one.seconds <= one.limit for one in found)
    late = sum(one.is_late for one in found)
    return (
        f"{len(found)} ranks stopped or cut off: {right} named rightly, {within} within the limit (5 s, or 5 median "
        f"steps), {late} more than {SLACK:g} s behind it (median {statistics.median(times):.1f}, at most "
        f"{times[-1]:.1f}), {sum(bool(one.problem) for one in found)} with another problem"
    )


def add_commands(commands: Any) -> None:
    """Add the commands and their options."""
    stops = commands.add_parser("stops", help="SIGSTOP of ranks")
    stops.add_argument("--count", type=int, default=50)
    stops.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    stops.set_defaults(run=run_stops)
    cuts = commands.add_parser("cuts", help="links between network namespaces that go down; needs root")
    cuts.add_argument("--count", type=int, default=20)
    cuts.set_defaults(run=run_cuts)
    busy = commands.add_parser("busy", help="false alarms where the machine has other things to do")
    busy.add_argument("--minutes", type=float, default=60.0)
    busy.add_argument("--hogs", type=int, default=3 * (os.cpu_count() or 1), help="processes that compute beside it")
    busy.add_argument("--layout", choices=list(LAYOUTS), default="fsdp2")
    busy.set_defaults(run=run_busy)
    for reader in (stops, cuts, busy):
        reader.add_argument("--seed", type=int, default=0)
        reader.add_argument("--into", type=Path, help="a file of JSON lines; what it has is not repeated")


# ------------------------------------------------------------------------------------------------ stopped ranks


def run_stops(asked: argparse.Namespace) -> int:
    """Stop ranks of runs that restart themselves; return 1 if one was not named rightly."""
    found = _read(asked.into, "stops")
    share = -(-asked.count // len(asked.layouts))
    for name in asked.layouts:
        todo = [number for number in range(share) if f"{asked.seed}-{name}-{number}" not in found]
        if not todo:
            continue
        with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as place:
            layout = LAYOUTS[name]
            run = LongRun(
                Path(place).resolve() / "long", layout, every=20, restarts=1_000_000, cold=False, overrides=_OFTEN
            )
            try:
                run.start()
                for number in todo:
                    one = stop_rank(run, f"{asked.seed}-{name}-{number}")
                    _note(asked, "stops", one)
                    found[one.name] = one
                    if one.problem:
                        print(f"    again: python -m tests.chaos stops --layouts {name} --seed {asked.seed}")
                        break
            except FoundError as error:
                print(f"{name}: {error}")
                return 1
            finally:
                run.stop()
    print(describe(list(found.values())))
    return int(any(one.is_late or not one.is_right for one in found.values()))


def stop_rank(run: LongRun, name: str) -> Found:
    """Stop a rank at a moment that the name decides, and wait until the run trains again."""
    chance = random.Random(name)
    time.sleep(chance.uniform(0.2, 1.5))  # the moment is random, in a step, a save or an evaluation
    ranks = run.ranks()
    rank = chance.choice(sorted(ranks))
    starts = {path: path.stat().st_size for path in _find_logs(run, rank)}
    limit = find_limit(run.folder / "run/metrics.jsonl")
    pids, began = {line.pid for line in ranks.values()}, time.monotonic()
    os.kill(ranks[rank].pid, signal.SIGSTOP)

    def read() -> tuple[int, ...]:
        return find_named(_read_from(path, start) for path, start in starts.items())

    seconds, problem = None, ""
    if wait_until(lambda: bool(read()), PATIENCE, every=0.02):
        seconds = round(time.monotonic() - began, 2)
    if not wait_until(lambda: not any(map(is_alive, pids)), PATIENCE):
        problem = "processes stay"
        os.kill(ranks[rank].pid, signal.SIGCONT)
    elif seconds is None:
        problem = "nobody is named"
    else:
        try:
            run.wait_for_steps()
        except FoundError as error:
            problem = str(error)
    back = round(time.monotonic() - began, 2)
    return Found(name, run.layout.name, rank, read(), seconds, back, problem, limit)


def find_limit(metrics: Path) -> float:
    """Return the seconds in which a rank must be named, from the latest steps of a run."""
    times = []
    for text in metrics.read_text().split("\n")[-40:-1]:
        if (line := json.loads(text))["kind"] == "train":
            times.append(float(line["step_time"]))
    return max(LIMIT, 5 * statistics.median(times)) if times else LIMIT


def _find_logs(run: LongRun, without: int) -> list[Path]:
    """Return the logs of the ranks that can print something."""
    return [run.folder / f"run/logs/rank_{rank}.log" for rank in range(run.layout.ranks) if rank != without]


def _read_from(path: Path, start: int) -> str:
    with path.open(errors="replace") as file:
        file.seek(start)
        return file.read()


# ------------------------------------------------------------------------------------------------ cut links


def _be_rank(name: str, folder: str, output: str, variables: Mapping[str, str]) -> None:
    """Train in a network namespace."""
    with open(f"/var/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):  # `os.setns` came with Python 3.12
            raise OSError(ctypes.get_errno(), f"namespace {name}")
    tempfile.tempdir = None
    prepare_trainer()
    os.environ.update(variables)
    phases.begin()
    started._run(["train", "run.yaml"], folder, output, None, variables, None)


def run_cuts(asked: argparse.Namespace) -> int:
    """Cut the link of one of three ranks, each in a namespace; return 1 if one was not named rightly."""
    found = _read(asked.into, "cuts")
    todo = [f"{asked.seed}-{number}" for number in range(asked.count) if f"{asked.seed}-{number}" not in found]
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as place, ExitStack() as stack:
        base = Path(place).resolve()
        try:
            ready = stack.enter_context(network(_RANKS_OF_CUTS, "1gbit"))
        except Unable as reason:
            print(f"skipped: {reason}")
            return 0
        overrides = ("loop.batch_size=12", "checkpoint.every=20", *_OFTEN)
        write_run(base / "data", base / "cut", LAYOUTS["ddp"], 1_000_000, *overrides)
        for name in todo:
            one = cut_link(ready, base / "cut", name)
            _note(asked, "cuts", one)
            found[one.name] = one
            if not one.is_right:
                print(f"    again: python -m tests.chaos cuts --seed {asked.seed} --count {asked.count}")
    print(describe(list(found.values())))
    return int(any(one.is_late or not one.is_right for one in found.values()))


def cut_link(ready: Network, folder: Path, name: str) -> Found:
    """Train in namespaces, cut a link at a moment that the name decides, and wait for the end of all."""
    chance = random.Random(name)
    (folder / "reports").mkdir(exist_ok=True)
    for file in (folder / "reports").iterdir():
        file.unlink()
    outputs = [folder / f"{name}-rank_{rank}.txt" for rank in range(_RANKS_OF_CUTS)]
    processes = []
    for rank, output in enumerate(outputs):
        output.touch()
        variables = {
            **ready.environment(rank), phases.FOLDER: str(folder / "reports"), phases.ONLY: phases.STEP,
            "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        one = forked.process(_be_rank, ready.names[rank], str(folder), str(output), variables)
        one.start()
        processes.append(one)
    rank, problem, seconds = chance.randrange(_RANKS_OF_CUTS), "", None
    others = [output for number, output in enumerate(outputs) if number != rank]
    try:
        wanted = chance.randint(12, 60)
        trained = lambda: _count_steps(folder) >= wanted  # noqa: E731
        wait_until(lambda: trained() or any(one.exitcode is not None for one in processes), PATIENCE)
        if not trained():
            return Found(name, "ddp", rank, (), None, None, f"it does not train: {outputs[0].read_text()[-500:]}")
        ready.set_link(rank, "down")
        began = time.monotonic()
        if wait_until(lambda: bool(find_named(map(_read_whole, others))), PATIENCE, every=0.02):
            seconds = round(time.monotonic() - began, 2)
        if not wait_until(lambda: all(one.exitcode is not None for one in processes), PATIENCE):
            problem = f"ranks stay: {[one.exitcode for one in processes]}"
        back = round(time.monotonic() - began, 2)
        found = Found(name, "ddp", rank, find_named(map(_read_whole, others)), seconds, back, problem)
        if not found.is_right:
            print("\n".join(f"--- {output.name}\n{_read_whole(output)[-1500:]}" for output in outputs))
        return found
    finally:
        ready.set_link(rank, "up")
        for one in processes:
            one.kill()
            one.join()


def _read_whole(path: Path) -> str:
    return path.read_text(errors="replace")


def _count_steps(folder: Path) -> int:
    """Return how many steps the slowest process has reported."""
    counts = [path.read_text().count(f" {phases.STEP} = ") for path in (folder / "reports").iterdir()]
    return min(counts) if len(counts) == _RANKS_OF_CUTS else 0


# ------------------------------------------------------------------------------------------------ a busy machine


def _compute_for_ever() -> None:
    values = list(range(1000))
    while True:
        values = [value * 3 % 1009 for value in values]


def run_busy(asked: argparse.Namespace) -> int:
    """Train beside processes that compute; return 1 if a rank was accused."""
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as place:
        layout = LAYOUTS[asked.layout]
        run = LongRun(Path(place).resolve() / "long", layout, every=100, restarts=0, cold=False, overrides=_OFTEN)
        hogs = [multiprocessing.get_context("fork").Process(target=_compute_for_ever) for _ in range(asked.hogs)]
        try:
            run.start()
            for one in hogs:
                one.start()
            first, began = run.step(), time.monotonic()
            wait_until(lambda: run.command.code is not None, 60.0 * asked.minutes, every=0.5)
            code, steps, took = run.command.code, run.step() - first, time.monotonic() - began
            logs = [_read_whole(path) for path in (run.folder / "run/logs").glob("rank_*.log")]
            accused = find_named([*logs, run.command.said()])
        finally:
            for one in hogs:
                with suppress(AttributeError):
                    one.kill()
            run.stop()
    alarms = len(accused) + (code is not None)
    line = (
        f"{alarms} false alarms in {took / 60:.1f} minutes and {steps:,} steps beside {asked.hogs} processes that "
        f"compute on {os.cpu_count()} cores"
    )
    print(line if code is None else f"{line}; it ended with {code}: {run.command.said()[-600:]}")
    result = {"name": f"{asked.seed}", "alarms": alarms, "minutes": took / 60, "steps": steps, "line": line}
    append_result(asked.into, {"command": "busy", **result})
    return int(alarms > 0)


# ------------------------------------------------------------------------------------------------ results


def _note(asked: argparse.Namespace, command: str, one: Found) -> None:
    word = "named rightly" if one.is_right else f"WRONG: {one.named or 'nobody'} {one.problem}"
    after = "" if one.seconds is None else f" after {one.seconds:.1f} s"
    back = "" if one.back is None else f", over after {one.back:.1f} s"
    print(f"{one.name:14} rank {one.rank} of {one.layout}: {word}{after}{back}", flush=True)
    append_result(asked.into, {"command": command, **asdict(one)})


def read_found(line: Mapping[str, Any]) -> Found:
    """Return what a line of a file says."""
    known = {name: line[name] for name in Found.__dataclass_fields__ if name in line}
    return Found(**{**known, "named": tuple(line["named"])})


def _read(path: Path | None, command: str) -> dict[str, Found]:
    """Return the results of a command in a file."""
    found = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else ():
        if (line := json.loads(text)).get("command") == command:
            found[line["name"]] = read_found(line)
    return found
