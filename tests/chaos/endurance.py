"""Long runs with a fault now and then: how much of the speed is left, and whether memory and open files stay flat."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cornstarch.report.restarts import read_restarts
from tests.chaos import phases
from tests.chaos.kills import LAUNCHER, PATIENCE, FoundError
from tests.chaos.layouts import LAYOUTS, Layout, write_run
from tests.chaos.processes import Command, Line, append_result, find_processes, is_alive, read_reports, wait_until

_ENDLESS = 100_000_000
_SAMPLED = 5.0  # seconds between two looks at memory and files
_MIB = 2**20


@dataclass(frozen=True)
class Usage:
    """What the processes of a run use at a moment."""

    seconds: float
    processes: int
    launcher_mib: float
    total_mib: float
    launcher_files: int
    total_files: int
    temporary: int
    """Files and folders where temporary ones are."""


@dataclass
class Outcome:
    """What came of a long run."""

    seconds: float = 0.0
    steps: int = 0
    """Trained, counting each once."""
    faults: int = 0
    restarted: int = 0
    """By the run itself."""
    commands: int = 1
    backs: list[float] = field(default_factory=list)
    """Seconds from each fault until training went on."""
    lost: list[float] = field(default_factory=list)
    """Seconds that each restart has cost, as the run itself records them: from its checkpoint until it goes on."""
    usage: list[Usage] = field(default_factory=list)


class LongRun:
    """A run without an end, in a folder of its own."""

    def __init__(
        self, folder: Path, layout: Layout, *, every: int, restarts: int, cold: bool, overrides: Sequence[str] = ()
    ) -> None:
        quiet = (f"checkpoint.every={every}", "loop.evaluate_every=null", "logging.every=10", *overrides)
        write_run(folder / "data", folder, layout, _ENDLESS, *quiet)
        arguments = ["train", "run.yaml", "--nproc", str(layout.ranks)]
        if restarts:
            arguments += ["--restarts", str(restarts)]
        environment = {phases.ONLY: ",".join((*phases.RARE, phases.LOAD))}
        self.command = Command(folder, arguments, cold, environment)
        self.folder, self.layout, self.restarts = folder, layout, restarts
        self.outcome = Outcome()
        self._metrics = folder / "run/metrics.jsonl"
        self._old: frozenset[int] = frozenset()

    def start(self) -> None:
        """Start it, and wait until it trains."""
        self.command.start()
        self.wait_for_steps()

    def stop(self) -> None:
        """End all of its processes."""
        with suppress(OSError):
            os.kill(self.command.pid, signal.SIGKILL)
        wait_until(lambda: self.command.code is not None, 10.0)
        self.command.kill_all()

    def step(self) -> int:
        """Return the last step that was logged."""
        with suppress(OSError, ValueError), self._metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4096))
            for text in reversed(file.read().split(b"\n")[1:-1]):
                if (line := json.loads(text))["kind"] == "train":
                    return int(line["step"])
        return 0

    def ranks(self) -> dict[int, Line]:
        """Return the ranks that are there, and what they reported first."""
        lines = [line for line in read_reports(self.folder, self._old) if line.phase == phases.INIT]
        found = {line.rank: line for line in lines if is_alive(line.pid)}
        self._old |= {line.pid for line in lines if line.pid not in {one.pid for one in found.values()}}
        return found

    def disturb(self, kind: str, chance: random.Random) -> None:
        """Do something to the run, and wait until it trains again."""
        ranks = self.ranks()
        before, began = {line.pid for line in ranks.values()}, time.monotonic()
        self.outcome.faults += 1
        if kind == LAUNCHER:
            os.kill(self.command.pid, signal.SIGKILL)
        elif kind == "stop":
            os.kill(chance.choice(list(ranks.values())).pid, signal.SIGSTOP)
        else:
            os.kill(chance.choice(list(ranks.values())).pid, signal.SIGKILL)
        if not wait_until(lambda: not any(map(is_alive, before)), PATIENCE):
            raise FoundError(f"{kind}: ranks stay")
        if kind == LAUNCHER or not self.restarts:
            self._start_again()
        self.wait_for_steps()
        self.outcome.restarted += kind != LAUNCHER and bool(self.restarts)
        self.outcome.backs.append(round(time.monotonic() - began, 3))

    def _start_again(self) -> None:
        if self.command.wait(PATIENCE) is None:
            raise FoundError("the launcher hangs")
        if not wait_until(lambda: not find_processes(self.folder), 5.0):
            raise FoundError("processes outlive their launcher")
        self.outcome.commands += 1
        self.command.start()

    def wait_for_steps(self) -> None:
        """Wait until all ranks are there and rank 0 has logged a step."""
        end = time.monotonic() + PATIENCE
        while len(ranks := self.ranks()) < self.layout.ranks or not self._has_logged_since(ranks[0].time):
            if self.command.code is not None:
                self._start_again()
            if time.monotonic() > end:
                raise FoundError(f"it does not train again: {self.command.said()[-900:]}")
            time.sleep(0.02)

    def _has_logged_since(self, moment: float) -> bool:
        with suppress(OSError, ValueError):
            ago = time.time() - self._metrics.stat().st_mtime
            return self.step() > 0 and time.monotonic() - ago > moment
        return False

    def measure(self, began: float) -> Usage:
        """Return what its processes use now."""
        pids = find_processes(self.folder)
        memory, files = {pid: _read_memory(pid) for pid in pids}, {pid: _count_files(pid) for pid in pids}
        own = self.command.pid
        return Usage(
            round(time.monotonic() - began, 1), len(pids), memory.get(own, 0.0), round(sum(memory.values()), 1),
            files.get(own, 0), sum(files.values()), sum(1 for _ in (self.folder / "tmp").rglob("*")),
        )  # fmt: skip


def _read_memory(pid: int) -> float:
    """Return the memory of a process in MiB, a page that several share counted in parts."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return round(int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024, 1)
    return 0.0


def _count_files(pid: int) -> int:
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def endure(run: LongRun, seconds: float, every: float | None, kinds: Sequence[str], seed: int) -> Outcome:
    """Let a run train for some time, with a fault now and then, and measure it.

    Args:
        run: It has been started.
        seconds: How long.
        every: Seconds between faults; None: without.
        kinds: What is done to it, drawn at random.
        seed: Of what is drawn.
    """
    chance, began, first = random.Random(seed), time.monotonic(), run.step()
    known = len(read_restarts(run.folder / "run"))
    due = began + (every * chance.uniform(0.3, 1.0) if every else float("inf"))
    faults, look = 0, began
    while (now := time.monotonic()) < began + seconds:
        if now >= look:
            run.outcome.usage.append(run.measure(began))
            look = now + _SAMPLED
        if every and now >= due:
            run.disturb(chance.choice(list(kinds)), chance)
            faults += 1
            due = began + every * (faults + chance.uniform(0.3, 1.0))
        time.sleep(0.05)
    run.outcome.seconds = round(time.monotonic() - began, 1)
    run.outcome.steps = run.step() - first
    lines = read_restarts(run.folder / "run")[known:]
    run.outcome.lost = [one.lost_seconds or 0.0 for one in lines if one.kind == "restart"]
    return run.outcome


# ------------------------------------------------------------------------------------------------ goodput


def add_commands(commands: Any) -> None:
    """Add the commands and their options."""
    goodput = commands.add_parser("goodput", help="steps per second with faults, against without")
    goodput.add_argument("--minutes", type=float, default=30.0, help="with faults")
    goodput.add_argument("--free", type=float, default=None, help="minutes without, before and after; default: a tenth")
    goodput.add_argument("--every", type=float, default=60.0, help="seconds between faults")
    goodput.add_argument("--save", type=int, default=100, help="steps between checkpoints")
    goodput.set_defaults(run=run_goodput, faults=["kill"])
    soak = commands.add_parser("soak", help="memory and open files over hours of faults")
    soak.add_argument("--hours", type=float, default=2.0)
    soak.add_argument("--every", type=float, default=30.0, help="seconds between faults")
    soak.add_argument("--save", type=int, default=100, help="steps between checkpoints")
    soak.add_argument("--faults", nargs="+", default=["kill"], choices=["kill", "stop", LAUNCHER])
    soak.set_defaults(run=run_soak)
    for reader in (goodput, soak):
        reader.add_argument("--layout", choices=list(LAYOUTS), default="fsdp2")
        reader.add_argument("--restarts", type=int, default=1_000_000, help="0: the command is given again instead")
        reader.add_argument("--warm", action="store_true", help="fork processes from one that has imported everything")
        reader.add_argument("--seed", type=int, default=0)
        reader.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the config")
        reader.add_argument("--into", type=Path, help="a file of JSON lines, to which the result is added")


def _open_run(asked: argparse.Namespace, place: str) -> LongRun:
    layout = LAYOUTS[asked.layout]
    return LongRun(
        Path(place).resolve() / "long", layout, every=asked.save, restarts=asked.restarts, cold=not asked.warm,
        overrides=asked.set,
    )  # fmt: skip


def run_goodput(asked: argparse.Namespace) -> int:
    """Measure without faults, with faults, and without again; return 1 if less than 90 % of the speed is left."""
    free = 60.0 * (asked.minutes / 10 if asked.free is None else asked.free)
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as place:
        run = _open_run(asked, place)
        try:
            run.start()
            parts = []
            for seconds, every in ((free, None), (60.0 * asked.minutes, asked.every), (free, None)):
                run.outcome = Outcome()
                parts.append(endure(run, seconds, every, asked.faults, asked.seed))
        finally:
            run.stop()
    result = describe_goodput(parts)
    print(result["line"])
    _store(asked, "goodput", result, parts)
    return int(result["goodput"] < 0.9)


def describe_goodput(parts: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures, from the parts before, with and after the faults."""
    before, disturbed, after = (part.steps / part.seconds for part in parts)
    free, faults, backs = (before + after) / 2, parts[1].faults, sorted(parts[1].backs)
    goodput, not_lost = disturbed / free, 1 - sum(parts[1].lost) / parts[1].seconds
    line = (
        f"goodput {goodput:.1%}: {disturbed:.1f} steps/s with {faults} faults in {parts[1].seconds:.0f} s, {free:.1f} "
        f"without ({before:.1f} before, {after:.1f} after); training again after {statistics.median(backs or [0]):.1f} "
        f"s (at most {max(backs, default=0):.1f}); {not_lost:.1%} of the time was not lost to restarts"
    )
    figures = {"goodput": goodput, "not_lost": not_lost, "disturbed": disturbed, "free": free}
    return {**{name: round(value, 4) for name, value in figures.items()}, "line": line}


# ------------------------------------------------------------------------------------------------ soak


def run_soak(asked: argparse.Namespace) -> int:
    """Disturb a run for hours; return 1 if memory or files grow."""
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as place:
        run = _open_run(asked, place)
        try:
            run.start()
            outcome = endure(run, 3600.0 * asked.hours, asked.every, asked.faults, asked.seed)
        finally:
            run.stop()
    result = describe_soak(outcome)
    print(result["line"])
    _store(asked, "soak", result, [outcome])
    return int(not result["flat"])


def describe_soak(outcome: Outcome) -> dict[str, Any]:
    """Return the figures: the median of the second quarter against the last; the first one still fills caches."""
    quarter = max(1, len(outcome.usage) // 4)
    early, late = outcome.usage[quarter : 2 * quarter] or outcome.usage[:1], outcome.usage[-quarter:]
    found, is_flat = {}, True
    for name, slack in (("launcher_mib", 2.0), ("total_mib", 16.0), ("launcher_files", 1), ("total_files", 8),
                        ("temporary", 2)):  # fmt: skip
        first, last = (statistics.median(getattr(one, name) for one in part) for part in (early, late))
        found[name] = (first, last)
        is_flat &= last <= first * 1.03 + slack
    said = ", ".join(f"{name.replace('_', ' ')} {first:g} → {last:g}" for name, (first, last) in found.items())
    word = ("flat" if is_flat else "GROWS") if outcome.steps > 0 else "NO PROGRESS"
    line = (
        f"{word} over {outcome.seconds:.0f} s with {outcome.faults} faults and "
        f"{outcome.steps:,} steps: {said}"
    )
    return {"flat": is_flat and outcome.steps > 0, "figures": found, "line": line}


def _store(asked: argparse.Namespace, command: str, result: dict[str, Any], parts: Sequence[Outcome]) -> None:
    said = {name: str(value) for name, value in vars(asked).items() if name not in ("run", "into")}
    line = {"command": command, "asked": said, "result": result, "parts": [asdict(one) for one in parts]}
    append_result(asked.into, line)
