"""Runs whose processes are killed again and again: what was lost, what was left, and whether losses have changed.

One case is one run. Its ranks, or its launcher, are killed several times, each time in a phase that was drawn, and it
is started again until it is finished. Every logged loss and evaluation and the last checkpoint must equal, bit by bit,
those of a run that nothing disturbed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import phases
from tests.chaos.layouts import EVERY, LAYOUTS, STEPS, write_run
from tests.chaos.processes import Command, Line, describe_process, find_processes, is_alive, read_reports, wait_until

LAUNCHER = "launcher"
RANDOM = "random"
"""Not a phase: any moment since the processes have begun."""
MOMENTS = (phases.INIT, phases.LOAD, phases.STEP, phases.SAVE, phases.EVALUATION, RANDOM)
PATIENCE = 240.0
"""Seconds that anything may take on a busy machine; what takes longer is called a hang."""
ORPHANS_AFTER = 5.0
DOUBLE_WRITERS, ORPHANS = "two processes write to the folder", "processes are left"
_COMPARED = ("loss", "learning_rate", "grad_norm", "tokens", "accuracy")


@dataclass(frozen=True)
class Kill:
    """Who is killed, and when."""

    phase: str
    victims: tuple[int | str, ...]
    occurrence: int
    """Which entry into the phase since the processes have begun, counted from 1."""
    share: float
    """How far into the phase, by how long it takes undisturbed: from 0 to 1."""


@dataclass(frozen=True)
class Case:
    """A run, and how it is disturbed."""

    name: str
    layout: str
    kills: tuple[Kill, ...]
    restarts: int = 0
    """How often the run may restart itself; without, the command is given again."""
    cold: bool = False
    steps: int = STEPS


@dataclass
class Outcome:
    """What came of one kill."""

    phase: str
    victims: tuple[int | str, ...]
    time: float
    done: int = 0
    """Steps that were complete."""
    lost: int = 0
    """Steps that were computed once more."""
    ended: float = 0.0
    """Seconds until no rank of the attempt was left."""
    back: float | None = None
    """Seconds until processes trained again; None: the next kill came first."""
    named: bool | None = None
    """Whether the message names a victim; None if there was nobody to print it."""
    inside: bool = False
    """Whether the first victim was in the phase when it was killed."""
    by_itself: bool = False
    """Whether the run restarted itself."""


@dataclass
class Verdict:
    """What came of a case."""

    problems: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Temporary files outside of the run's folder that nobody removed."""
    kills: list[Outcome] = field(default_factory=list)
    attempts: int = 0
    gave_up: int = 0
    """How often a run that restarts itself ended nevertheless."""
    compared: int = 0
    """Losses, evaluations and tensors that were compared."""
    seconds: float = 0.0

    @property
    def is_failure(self) -> bool:
        return bool(self.problems)


class FoundError(Exception):
    """What a case should not do."""


def draw_case(seed: int, number: int, kills: int = 5, restarts: int = 0, cold: bool = False) -> Case:
    """Return a case: the same for the same numbers."""
    chance = random.Random(f"{seed} {number}")
    layout = list(LAYOUTS.values())[number % len(LAYOUTS)]
    drawn = []
    for _ in range(kills):
        phase = chance.choice(MOMENTS)
        most = {phases.STEP: 9, phases.SAVE: 2, phases.EVALUATION: 1, phases.LOAD: 2}.get(phase, 1)
        kind = chance.choices(("one", "several", "all", LAUNCHER), (50, 15, 10, 25))[0]
        ranks: list[int | str] = list(range(layout.ranks))
        chance.shuffle(ranks)
        count = {"one": 1, "several": chance.randint(2, layout.ranks), "all": layout.ranks}.get(kind, 0)
        victims = tuple(ranks[:count]) if count else (LAUNCHER,)
        drawn.append(Kill(phase, victims, chance.randint(1, most), round(chance.random(), 3)))
    return Case(f"{seed}-{number}", layout.name, tuple(drawn), restarts, cold)


# ------------------------------------------------------------------------------------------------ without a disturbance


@dataclass(frozen=True)
class Reference:
    """A run that nothing disturbed."""

    records: Mapping[tuple[str, int], Mapping[str, Any]]
    checkpoint: Mapping[str, str]
    lengths: Mapping[str, float]
    """How long each phase takes."""


def read_records(run: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return what a run has logged of each step: its numbers, without times. A torn last line is left out."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n") if path.exists() else [""]
    for text in lines[:-1]:
        line = json.loads(text)
        if line["kind"] in ("train", "evaluation"):
            key = (line["kind"], line["step"])
            assert key not in found, f"{key} is there twice"
            kept = {name: value for name, value in line.items() if name in _COMPARED}
            kept |= {name: value["loss"] for name, value in line.items() if isinstance(value, dict) and "loss" in value}
            found[key] = kept
    return found


def hash_last_checkpoint(run: Path) -> dict[str, str]:
    """Return a checksum of each file of tensors of the last checkpoint."""
    folders = sorted((run / "checkpoints").glob("step_*"))
    files = sorted(folders[-1].rglob("*.safetensors")) if folders else []
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def run_undisturbed(base: Path, case: Case) -> Reference:
    """Return the run of a case without kills; it is made once for each folder and layout."""
    folder = base / f"undisturbed-{case.layout}-{case.steps}"
    layout = LAYOUTS[case.layout]
    if not (folder / "done").exists():
        write_run(base / "data", folder, layout, case.steps)
        command = Command(folder, ["train", "run.yaml", "--nproc", str(layout.ranks)])
        command.start()
        code = command.wait(PATIENCE)
        if code != 0:
            command.kill_all()
            raise RuntimeError(f"an undisturbed run ended with {code}:\n{command.said()}")
        (folder / "done").touch()
    return Reference(read_records(folder / "run"), hash_last_checkpoint(folder / "run"), measure_phases(folder))


def measure_phases(folder: Path) -> dict[str, float]:
    """Return the mean seconds of each phase."""
    times: dict[str, list[float]] = {}
    begun: dict[tuple[int, str], float] = {}
    for line in read_reports(folder):
        if line.mark == "+":
            begun.setdefault((line.pid, line.phase), line.time)
        elif line.mark == "-":
            times.setdefault(line.phase, []).append(line.time - begun.pop((line.pid, line.phase)))
            begun.pop((line.pid, phases.INIT), None)
    lines = read_reports(folder)
    firsts = [line.time for line in lines if line.phase == phases.INIT]
    ready = min(line.time for line in lines if line.phase == phases.STEP)
    found = {phase: sum(values) / len(values) for phase, values in times.items()}
    return {**found, phases.INIT: ready - min(firsts), RANDOM: lines[-1].time - min(firsts)}


# ------------------------------------------------------------------------------------------------ disturbed


class Disturbed:
    """One case, being run."""

    def __init__(self, case: Case, base: Path, folder: Path) -> None:
        self.case, self.folder, self.layout = case, folder, LAYOUTS[case.layout]
        self.reference = run_undisturbed(base, case)
        write_run(base / "data", folder, self.layout, case.steps)
        self.verdict = Verdict()
        self._seen: frozenset[int] = frozenset()
        arguments = ["train", "run.yaml", "--nproc", str(self.layout.ranks)]
        if case.restarts:
            arguments += ["--restarts", str(case.restarts)]
        self.command = Command(folder, arguments, case.cold)

    def run(self) -> Verdict:
        """Disturb the run until all kills are done, let it finish, and compare."""
        began = time.monotonic()
        try:
            self._start()
            for kill in self.case.kills:
                if not self._disturb(kill):
                    break
            self._finish()
            find_losses(read_reports(self.folder), self.verdict.kills)
            self._check_losses()
            self._check_end()
        except FoundError as error:
            self.verdict.problems.append(str(error))
        finally:
            self.command.kill_all()
        self.verdict.seconds = time.monotonic() - began
        return self.verdict

    def _start(self) -> None:
        self.verdict.attempts += 1
        self._started = time.monotonic()
        self.command.start()

    def _news(self) -> list[Line]:
        """Return what the processes of this attempt have reported."""
        return read_reports(self.folder, self._seen)

    def _disturb(self, kill: Kill) -> bool:
        """Kill once; return False if the run has ended before."""
        entered = self._wait_for(kill)
        if entered is None:
            return False
        pids = {line.rank: line.pid for line in self._news()}
        victims = [self.command.pid if one == LAUNCHER else pids[int(one)] for one in kill.victims]
        said, killed, hit = len(self.command.said()), time.monotonic(), 0
        for pid in victims:
            with suppress(ProcessLookupError):
                hit += is_alive(pid)
                os.kill(pid, signal.SIGKILL)
        if not hit:
            return False
        members = frozenset(pids.values())
        if not wait_until(lambda: not any(map(is_alive, {*victims, *members})), PATIENCE):
            raise FoundError(f"{kill}: ranks stay: {self._describe_left()}")
        outcome = Outcome(entered, kill.victims, killed, ended=round(time.monotonic() - killed, 3))
        self.verdict.kills.append(outcome)
        self._seen |= members | frozenset(line.pid for line in self._news() if not is_alive(line.pid))
        text = self._go_on(kill, outcome, said)
        if LAUNCHER not in kill.victims:
            outcome.named = any(f"rank {one} " in text for one in kill.victims)
        return True

    def _wait_for(self, kill: Kill) -> str | None:
        """Wait for the moment of a kill; return the phase that was waited for, or None if the run ends before."""
        who = 0 if LAUNCHER in kill.victims else int(kill.victims[0])
        ranks = {one for one in kill.victims if one != LAUNCHER}
        wanted = phases.INIT if kill.phase == RANDOM else kill.phase
        # What does not come (there is no checkpoint to load, or no second evaluation) is replaced by what does.
        instead = phases.STEP if kill.phase == phases.LOAD else phases.END

        def find() -> tuple[str, float] | None:
            """Return which phase was entered, and when."""
            if kill.phase == RANDOM and LAUNCHER in kill.victims:
                return RANDOM, self._started
            lines = self._news()
            if not ranks <= {line.rank for line in lines}:
                return None
            for phase, number in ((wanted, kill.occurrence), (instead, 1)):
                times = [line.time for line in lines if (line.phase, line.mark, line.rank) == (phase, "+", who)]
                if len(times) >= number:
                    return kill.phase if phase == wanted else phase, times[number - 1]
            return None

        if not wait_until(lambda: find() is not None or self.command.code is not None, PATIENCE, every=0.002):
            raise FoundError(f"{kill}: the run hangs before it: {self._describe_left()}")
        found = find()
        if found is None:
            return None
        due = found[1] + 0.9 * kill.share * self.reference.lengths.get(found[0], 0.05)
        while time.monotonic() < due and self.command.code is None:
            time.sleep(0.0005)
        return found[0] if self.command.code is None else None

    def _go_on(self, kill: Kill, outcome: Outcome, start: int) -> str:
        """Let the run restart itself, or give its command again; return what was printed in between."""
        if LAUNCHER not in kill.victims and self.case.restarts:
            wait_until(lambda: bool(self._news()) or self.command.code is not None, PATIENCE)
            outcome.by_itself = self.command.code is None
            if outcome.by_itself:
                self.verdict.attempts += 1
                return self.command.said()[start:]
        if self.command.wait(PATIENCE) is None:
            raise FoundError(f"{kill}: the launcher hangs: {self._describe_left()}")
        said = self.command.said()[start:]
        self.verdict.gave_up += bool(self.case.restarts and LAUNCHER not in kill.victims and self.command.code)
        self._check_orphans(f"{kill}")
        if "Traceback" in said and LAUNCHER in kill.victims:
            raise FoundError(f"{kill}: {said[-600:]}")
        self._start()
        return said

    def _check_orphans(self, when: str) -> None:
        """Refuse processes that outlive their launcher."""
        if not wait_until(lambda: not find_processes(self.folder), ORPHANS_AFTER, every=0.02):
            raise FoundError(f"{when}: {ORPHANS} after {ORPHANS_AFTER:g} s: {self._describe_left()}")

    def _describe_left(self) -> str:
        return "; ".join(f"{pid} {describe_process(pid)}" for pid in find_processes(self.folder)) or "nobody"

    def _finish(self) -> None:
        """Wait for the end of the run, which nothing disturbs any more."""
        if self.command.wait(PATIENCE) is None:
            raise FoundError(f"the run hangs after the last kill: {self._describe_left()}")
        if self.command.code != 0:
            raise FoundError(f"undisturbed, it ends with {self.command.code}: {self.command.said()[-1500:]}")
        self._check_orphans("the end")

    def _check_losses(self) -> None:
        """Compare what is logged with the undisturbed run; nobody may have written beside another one."""
        doubles = [line for line in read_reports(self.folder) if line.phase == phases.DOUBLE]
        if doubles:
            raise FoundError(f"{DOUBLE_WRITERS}: {doubles}")
        for outcome in self.verdict.kills:
            if outcome.lost > EVERY:
                raise FoundError(f"{outcome.lost} steps are lost, at most {EVERY} expected: {outcome}")
        try:
            records = read_records(self.folder / "run")
        except (AssertionError, ValueError) as error:
            raise FoundError(f"metrics.jsonl: {error}") from None
        if difference := find_difference(self.reference.records, records):
            raise FoundError(difference)
        self.verdict.compared += len(records)

    def _check_end(self) -> None:
        """Compare the last checkpoint, and look for what is left of killed processes."""
        files = hash_last_checkpoint(self.folder / "run")
        if files != self.reference.checkpoint or not files:
            raise FoundError(f"the last checkpoint has {sorted(files.items())}, not {self.reference.checkpoint}")
        self.verdict.compared += len(files)
        status = json.loads((self.folder / "run/run.json").read_text())["status"]
        if status != "finished":
            raise FoundError(f"run.json says {status}")
        if temporary := sorted(str(path) for path in (self.folder / "run").rglob("*.tmp*")):
            raise FoundError(f"temporary files are left: {temporary}")
        self.verdict.left = sorted(path.name for path in (self.folder / "tmp").iterdir())


def find_difference(
    expected: Mapping[tuple[str, int], Mapping[str, Any]], found: Mapping[tuple[str, int], Mapping[str, Any]]
) -> str | None:
    """Return the first record that is missing, too much, or not equal bit by bit."""
    for key in sorted({*expected, *found}, key=lambda key: (key[1], key[0])):
        if expected.get(key) != found.get(key):
            return f"{key[0]} of step {key[1]}: {found.get(key)}, undisturbed {expected.get(key)}"
    return None


def find_losses(lines: Sequence[Line], kills: Sequence[Outcome]) -> None:
    """Fill in what was done at each kill, what was lost by it, and when training went on."""
    steps = [line for line in lines if line.rank == 0 and line.phase == phases.STEP]
    resumed = {line.pid: line.number for line in lines if line.phase == phases.RESUMED and line.rank == 0}
    for number, kill in enumerate(kills):
        who = 0 if LAUNCHER in kill.victims else kill.victims[0]
        marks = [line.mark for line in lines if (line.phase, line.rank) == (kill.phase, who) and line.time < kill.time]
        kill.inside = bool(marks) and marks[-1] != "-"
        until = kills[number + 1].time if number + 1 < len(kills) else float("inf")
        before = [line for line in steps if line.time <= kill.time + kill.ended]
        last = [line for line in before if line.pid == before[-1].pid] if before else []
        kill.done = max([line.number for line in last] + [resumed.get(before[-1].pid, 0)]) if before else 0
        after = [line for line in steps if kill.time + kill.ended < line.time <= until]
        if after:
            kill.back = round(after[0].time - kill.time, 3)
            kill.lost = max(0, kill.done - resumed.get(after[0].pid, 0))
