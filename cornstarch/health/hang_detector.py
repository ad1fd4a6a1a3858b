"""Decides from heartbeats which rank does not go on: the one that is behind, not those that wait for it.

Pure: heartbeats and the time go in, and at most one hang comes out. A rank that sends no heartbeat is stopped, has
ended, or cannot be reached. A rank that sends them and does not move is behind unless it waits for others. If all wait,
the one that began fewer collectives than the others of a process group is behind.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from cornstarch.health.heartbeat import Heartbeat, RankProcess

LEAST = 5.0
"""Seconds that a rank may always take (`launch.hang_timeout: auto`)."""
_STEPS = 5  # median steps that it may take
_FIRST_STEPS = 3  # that allocate, connect and compile
EARLY = 0.8  # of the limit, so that all ranks know at the limit
_PATIENCE = 600.0  # seconds for a rank that is idle in one of its first steps
_LONG_PATIENCE = 3600.0  # for what has no usual time: set-up, data, compilation, an evaluation, a save
_PATIENCE_FACTOR = 20.0
_ALIVE_FACTOR = 10.0  # for a rank without a heartbeat whose process runs
_SILENT_FACTOR = 4.0  # while a rank is set up: imports hold the interpreter for seconds
_SURELY = 0.75  # of the time after which one rank is silent: others are, too
_SHOWN = 4  # ranks in a message

_STATES = {
    "data": "waits for data",
    "compiles": "compiles",
    "saves": "saves or loads a checkpoint",
    "computes": "computes",
    "stands": "stands still",
}


def find_limit(step: float) -> float:
    """Return the seconds in which a rank must move where a step takes so long (`launch.hang_timeout: auto`)."""
    return max(LEAST, _STEPS * step)


@dataclass(frozen=True)
class Hang:
    """Which ranks do not go on, and the message with which the run ends."""

    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Note:
    """Something that ends nothing: a rank that is slow."""

    step: int
    text: str


class HangDetector:
    """Finds the rank that does not go on, from the heartbeats of all ranks.

    Args:
        processes: Where the ranks run.
        limit: Seconds in which a rank must move; None: 5 median steps, at least 5 s.
        own: The rank that looks.
    """

    def __init__(self, processes: Mapping[int, RankProcess], limit: float | None, own: int = 0) -> None:
        self._processes, self._limit, self._own = dict(processes), limit, own
        self._beats: dict[int, Heartbeat] = {}
        self._heard: dict[int, float] = {}
        self._last = 0.0
        self._noted: set[tuple[int, int, str]] = set()
        self.notes: list[Note] = []
        """Not read yet."""

    @property
    def limit(self) -> float:
        """Seconds in which a rank must move."""
        if self._limit is not None:
            return self._limit
        steps = [beat.seconds for beat in self._beats.values() if beat.seconds]
        return find_limit(statistics.median(steps) if steps else 0.0)

    @property
    def patience(self) -> float:
        """Seconds for a rank in its first steps."""
        if self._limit is not None:
            return _PATIENCE_FACTOR * self._limit
        return max(_PATIENCE, _PATIENCE_FACTOR * self.limit)

    def _find_patience(self, beat: Heartbeat) -> float:
        if self._limit is not None or (beat.state == "stands" and beat.phase == "step"):
            return self.patience
        return max(_LONG_PATIENCE, self.patience)

    def find_hang(self, beats: Iterable[Heartbeat], now: float, interval: float) -> Hang | None:
        """Take the newest heartbeats, as every `interval` seconds; return a hang if there is one."""
        late = now - self._last - 2 * interval if self._last else 0.0
        if late > 0:  # this process was stopped itself: what it has not heard meanwhile counts against nobody
            self._heard = {rank: heard + late for rank, heard in self._heard.items()}
        self._last = now
        for beat in beats:
            known = self._beats.get(beat.rank)
            if known is None or known.number != beat.number:
                self._beats[beat.rank], self._heard[beat.rank] = beat, now
        watched = {rank: beat for rank, beat in self._beats.items() if not beat.has_left}
        return self._find_silent(watched, now) or self._find_standing(watched, now)

    # ------------------------------------------------------------------ ranks without a heartbeat

    def _find_silent(self, watched: Mapping[int, Heartbeat], now: float) -> Hang | None:
        found: dict[int, tuple[float, str]] = {}
        for rank, beat in watched.items():
            silence = now - self._heard[rank]
            if silence < EARLY * self.limit:
                continue
            state = self._ask_neighbours(rank, watched, now)
            if state in ("R", "D"):
                limit = _ALIVE_FACTOR * self.limit
            elif state in ("T", "ended") or beat.phase not in ("setup", "end"):
                limit = self.limit
            else:
                limit = _SILENT_FACTOR * self.limit
            if silence >= EARLY * limit:
                found[rank] = silence, state
            else:
                self._note(beat, "silent", f"{self._name(rank)} has not answered for {silence:.0f} s; it runs, slowly.")
        if not found:
            return None
        rank = min(found)
        silence, state = found[rank]
        if state not in ("T", "ended") and self._is_cut_off(watched, now):
            return self._end_cut_off(watched[self._own], silence)
        who, where = self._name(rank), _describe_last(watched[rank], watched, found)
        more = [one for one in sorted(found) if one != rank]
        others = f" Neither do {_list_ranks(more)}." if more else ""
        pid = self._processes[rank].pid
        if state == "T":
            text = (
                f"{who} was stopped by a signal {silence:.0f} s ago, {where}.{others}\n"
                f"  Find out who stops processes there: a debugger, a terminal, a job scheduler. `kill -CONT {pid}` "
                "lets one go on; launch.hang_timeout=off waits for it."
            )
        elif state == "ended":
            text = f"{who} has ended without a word, {where}.{others}\n  Look at its log, and at the kernel's (dmesg)."
        else:
            text = (
                f"{who} has not answered for {silence:.0f} s, {where}.{others}\n"
                "  Its machine, or the network to it, is down, or the process is frozen. launch.hang_timeout sets how "
                "long the others wait."
            )
        return Hang(tuple(sorted(found)), text)

    def _is_cut_off(self, watched: Mapping[int, Heartbeat], now: float) -> bool:
        """Return whether it is rather the machine of this rank that cannot be reached: nobody elsewhere answers."""
        enough = _SURELY * EARLY * self.limit  # the last heartbeats of others came a little later
        silent = {rank for rank in watched if now - self._heard[rank] >= enough}
        answering = watched.keys() - silent
        if self._own not in answering or len(silent) < 2:
            return False
        home = self._processes[self._own].host
        elsewhere = {self._processes[rank].host for rank in silent} - {home}
        is_local = all(self._processes[rank].host == home for rank in answering)
        return answering == {self._own} or (is_local and len(elsewhere) > 1)

    def _end_cut_off(self, beat: Heartbeat, silence: float) -> Hang:
        text = (
            f"{self._name(beat.rank)} has not heard from any other machine for {silence:.0f} s, {find_place(beat)}: it "
            "is cut off from the network, or all of the others are.\n  Look at the network of this machine first. "
            "launch.hang_timeout sets how long ranks wait."
        )
        return Hang((beat.rank,), text)

    def _ask_neighbours(self, rank: int, watched: Mapping[int, Heartbeat], now: float) -> str:
        """Return the state of a rank's process as another rank of its machine sees it; "" if none does."""
        for other, beat in watched.items():
            near = beat.neighbour
            if near is not None and near[0] == rank and now - self._heard[other] < EARLY * self.limit:
                return near[1]
        return ""

    # ------------------------------------------------------------------ ranks that answer and do not move

    def _find_standing(self, watched: Mapping[int, Heartbeat], now: float) -> Hang | None:
        early = EARLY * self.limit
        if any(now - self._heard[rank] > early / 2 for rank in watched):
            return None  # a rank is silent: if it stays so, it is the cause
        standing = {rank: beat for rank, beat in watched.items() if beat.idle >= early}
        behind = {rank: beat for rank, beat in standing.items() if beat.state != "waits"}
        for rank, beat in sorted(behind.items(), key=lambda one: -one[1].idle):
            is_usual = beat.phase == "step" and beat.steps >= _FIRST_STEPS
            if beat.state == "stands" and is_usual:
                return self._end_standing(beat)
            if beat.idle >= self._find_patience(beat):
                return self._end_standing(beat)
            if is_usual or beat.state == "data":
                text = f"{self._name(rank)} {_STATES[beat.state]} for {beat.idle:.0f} s, {find_place(beat)}."
                self._note(beat, beat.state, f"{text}{_describe_stack(beat)}")
        if behind or len(standing) < len(watched) or not standing:
            return None
        is_early = any(beat.steps < _FIRST_STEPS or beat.phase in ("setup", "end") for beat in standing.values())
        if len(standing) == 1 or min(beat.idle for beat in standing.values()) < (self.patience if is_early else early):
            return None
        return self._end_deadlock(standing)

    def _end_standing(self, beat: Heartbeat) -> Hang:
        text = (
            f"{self._name(beat.rank)} has not moved for {beat.idle:.0f} s, {find_place(beat)}: it {_STATES[beat.state]}"
            f", and the others wait for it.{_describe_stack(beat)}\n  The stacks of all ranks are in the run's folder, "
            "`health`. launch.hang_timeout sets how long the others wait."
        )
        return Hang((beat.rank,), text)

    def _end_deadlock(self, standing: Mapping[int, Heartbeat]) -> Hang:
        """Return the hang on ranks that all wait."""
        behind = find_behind(standing)
        hint = "\n  The last collectives and the stacks of all ranks are in the run's folder, `health`."
        if not behind:
            beat = standing[min(standing)]
            numbers = {tuple(sorted(beat.sequences.items())) for beat in standing.values()}
            if len(numbers) > 1 and all(beat.sequences for beat in standing.values()):
                return self._end_crossed(standing, hint)
            text = (
                f"All ranks have waited for one another for {beat.idle:.0f} s, {find_place(beat)}: rank {beat.rank} "
                f"{_describe_wait(beat)}. No rank is behind: the network between them carries nothing, or ranks take "
                f"part with different shapes. They run on {self._list_hosts()}.{hint}"
            )
            return Hang(tuple(sorted(standing)), text)
        first = standing[min(behind)]
        own, most = behind[first.rank]
        ahead = next(beat for rank, beat in standing.items() if rank not in behind)
        rest = [rank for rank in sorted(behind) if rank != first.rank]
        others = f" So have {_list_ranks(rest)}." if rest else ""
        text = (
            f"{self._name(first.rank)} has left out a collective, or waits in another one, {find_place(first)}: it "
            f"has begun {own} in a process group where rank {ahead.rank} has begun {most}, and {_describe_wait(first)} "
            f"while rank {ahead.rank} {_describe_wait(ahead)}.{others}{_describe_stack(first)}{hint}"
        )
        return Hang(tuple(sorted(behind)), text)

    def _end_crossed(self, standing: Mapping[int, Heartbeat], hint: str) -> Hang:
        """Return the hang on ranks of which each has begun a collective that another one has not."""
        one = standing[min(standing)]
        other = next(beat for beat in standing.values() if beat.sequences != one.sequences)
        text = (
            f"Ranks {one.rank} and {other.rank} have waited in different collectives for {one.idle:.0f} s, "
            f"{find_place(one)}: one of them left one out, or began one that the other did not. {self._name(one.rank)} "
            f"{_describe_wait(one)}.{_describe_stack(one)}\n  {self._name(other.rank)} {_describe_wait(other)}."
            f"{_describe_stack(other)}{hint}"
        )
        return Hang((one.rank, other.rank), text)

    # ------------------------------------------------------------------ words

    def _note(self, beat: Heartbeat, kind: str, text: str) -> None:
        """Remember a note, once for each rank, step and kind."""
        if (key := (beat.rank, beat.step, kind)) not in self._noted:
            self._noted.add(key)
            self.notes.append(Note(beat.step, text))

    def _name(self, rank: int) -> str:
        process = self._processes.get(rank)
        return f"Rank {rank}" if process is None else f"Rank {rank} ({process.host}, process {process.pid})"

    def _list_hosts(self) -> str:
        hosts = sorted({process.host for process in self._processes.values()})
        return ", ".join(hosts[:_SHOWN]) + (", …" if len(hosts) > _SHOWN else "")


def find_behind(standing: Mapping[int, Heartbeat]) -> dict[int, tuple[int, int]]:
    """Return the ranks that began fewer collectives in a group than others: how many, and how many the others began.

    A rank that is behind in one group only because it waits in another, where it is ahead, is not the cause.
    """
    most: dict[str, int] = {}
    for beat in standing.values():
        for name, count in beat.sequences.items():
            most[name] = max(most.get(name, 0), count)
    behind: dict[int, tuple[int, int]] = {}
    ahead: set[int] = set()
    for name, top in most.items():
        counts = {rank: beat.sequences[name] for rank, beat in standing.items() if name in beat.sequences}
        if len(set(counts.values())) < 2:
            continue
        ahead |= {rank for rank, count in counts.items() if count == top}
        behind |= {rank: (count, top) for rank, count in counts.items() if count < top}
    return {rank: pair for rank, pair in behind.items() if rank not in ahead}


def find_place(beat: Heartbeat) -> str:
    """Return where a rank is in the run, in words."""
    if beat.phase == "setup":
        return "while the run is set up"
    if beat.phase == "end":
        return "at the end of the run"
    if beat.phase == "pause":
        return f"in an evaluation or a save after step {beat.step}"
    if beat.phase == "between":
        return f"after step {beat.step}"
    if beat.phase == "data":
        return f"before step {beat.step + 1}, where it reads data"
    details = [beat.operation] if beat.operation else []
    if beat.stage is not None:
        details.append(f"stage {beat.stage}, microbatch {beat.microbatch}")
    inside = f" ({', '.join(details)})" if details else ""
    return f"in step {beat.step}{inside}"


def _describe_last(beat: Heartbeat, watched: Mapping[int, Heartbeat], silent: Collection[int]) -> str:
    """Return where a silent rank was, and where another rank waits for it."""
    waiting = [one for rank, one in watched.items() if rank not in silent]
    if not waiting:
        return f"last heard of {find_place(beat)}"
    furthest = max(waiting, key=lambda one: one.idle)
    return f"last heard of {find_place(beat)}; rank {furthest.rank} waits for it {find_place(furthest)}"


def _describe_wait(beat: Heartbeat) -> str:
    peer = "" if beat.peer is None or not beat.waits else f" of rank {beat.peer}"
    what = beat.waits or ", ".join(beat.pending[:2]) or "an operation of several ranks"
    return f"waits in {what}{peer}"


def _describe_stack(beat: Heartbeat) -> str:
    return f"\n  It is in {', called from '.join(beat.stack)}." if beat.stack else ""


def _list_ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_SHOWN]))}{more}"
