"""Heartbeats over the store of the process group, and the ranks that look for hangs in them.

Two threads run beside the training thread, which may be blocked in gloo or NCCL. One looks at this process and makes
its heartbeats. The other one talks to the store: torch's store waits for ever for a host that is stopped, and the
first thread notices that.

Every rank posts one small value per interval, and three ranks read all of them: the first two, and the last one, which
is on another machine than the first. So the cost grows with the number of ranks, not with its square.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, replace

import torch.distributed as dist

from cornstarch.compat import clone_store, default_store
from cornstarch.health.hang_detector import EARLY, Hang, HangDetector, Note, find_limit
from cornstarch.health.heartbeat import TICK, Heartbeat, Pulse, RankProcess
from cornstarch.health.machine import read_process
from cornstarch.health.stragglers import Straggler, StragglerWatch
from cornstarch.parallel import distributed
from cornstarch.parallel.activity import Activity

_PREFIX = "cornstarch/health"
_POSTS_PER_SECOND = 8000  # of all ranks together
_ABSENT_FACTOR = 4.0  # of the limit, until a rank must have posted for the first time
_WINDOW_FACTOR = 4.0  # of the limit: how long ranks are compared for stragglers
_LEAVE_SECONDS = 5.0  # in which the store should take a rank's last word
_FIND_SECONDS = 0.05  # until it is asked again where the host of the store runs: it may be stopped in the first second
_READ_SECONDS = 1.0  # in which others should have read which rank does not go on; the store ends with rank 0


class HealthWatch:
    """Watches the ranks of a run, from `start` to `stop`. All ranks must start theirs at the same point.

    Args:
        activity: What the training thread says of itself.
        limit: Seconds in which a rank must move; None: 5 median steps, at least 5 s.
        end: Called from a thread with a message when the run must end, and whether the store can be asked.
    """

    def __init__(self, activity: Activity, limit: float | None, end: Callable[[str, bool], None]) -> None:
        self._activity, self._limit, self._end = activity, limit, end
        self._rank, self._world = distributed.rank(), distributed.world_size()
        self._store = default_store()
        number = self._store.add(f"{_PREFIX}/{self._rank}", 1)
        self._store = dist.PrefixStore(f"{_PREFIX}/{number}", self._store)
        self._reads_all = self._rank in (0, 1, self._world - 1)
        self._detector: HangDetector | None = None
        self._stragglers = StragglerWatch(_WINDOW_FACTOR * (limit or find_limit(0.0)))
        self._stopped, self._due = threading.Event(), threading.Event()
        self._beat = Heartbeat(self._rank)
        self._began = self._answered = time.monotonic()
        self._is_known = False  # whether the ranks that this one must know have said where they run
        self._host: RankProcess | None = None  # of the store
        self._neighbour: tuple[int, int] | None = None
        self._processes: dict[int, RankProcess] = {}
        self._has_ended = self._has_lost_store = False
        self._hanging: tuple[int, ...] = ()
        self._threads: list[threading.Thread] = []
        self.log: Callable[[str], None] | None = None
        """Prints what rank 0 notes, from a thread."""
        self._notes: list[Note] = []
        self._slow: list[Straggler] = []

    @property
    def limit(self) -> float:
        """Seconds in which this rank must move."""
        return find_limit(self._activity.seconds) if self._limit is None else self._limit

    @property
    def interval(self) -> float:
        """Seconds between heartbeats."""
        return min(max(self.limit / 10, TICK), 1.0) + self._world / _POSTS_PER_SECOND

    def start(self) -> None:
        """Begin to watch; call it in the training thread."""
        self._activity.thread = threading.get_ident()
        native = threading.get_native_id()
        for name, run in (("heartbeat", lambda: self._run_pulse(native)), ("heartbeat-store", self._exchange)):
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Tell the others that this rank needs no watching any more, if the store still answers."""
        self._stopped.set()
        self._due.set()
        for thread in self._threads:
            thread.join(0.0 if self._has_lost_store else _LEAVE_SECONDS)
        if self._rank == 0 and self._hanging and 0 not in self._hanging:
            self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        """Wait until the ranks that go on have left: they would take rank 0, which is gone, for the cause."""
        store, end = clone_store(self._store), time.monotonic() + _READ_SECONDS
        others = [f"beat/{rank}" for rank in range(1, self._world) if rank not in self._hanging]
        with suppress(RuntimeError):
            while others and time.monotonic() < end:
                if all(Heartbeat.from_json(one).has_left for one in store.multi_get(others)):
                    return
                time.sleep(TICK / 5)

    def read_notes(self) -> list[Note]:
        """Return what was noted since the last call; on rank 0."""
        notes, self._notes = self._notes, []
        return notes

    def read_stragglers(self) -> list[tuple[Straggler, str]]:
        """Return who was slow since the last call, with its host; on rank 0."""
        slow, self._slow = self._slow, []
        return [(one, self._processes[one.rank].host) for one in slow]

    # ------------------------------------------------------------------ this rank

    def _run_pulse(self, native: int) -> None:
        with closing(Pulse(self._activity, self._rank, native)) as pulse:
            self._beat_until_stopped(pulse)

    def _beat_until_stopped(self, pulse: Pulse) -> None:
        due = 0.0
        self._due.set()
        while not self._stopped.wait(TICK):
            self._answered += pulse.tick()  # while it was stopped itself, nobody could answer
            if self._neighbour is not None:
                pulse.watch_neighbour(*self._neighbour)
                self._neighbour = None
            if time.monotonic() >= due or not self._is_known:
                self._beat = pulse.beat(self.limit / 2)
                due = time.monotonic() + self.interval
                self._due.set()
            self._check_store()

    def _check_store(self) -> None:
        """End the run here if the store has not answered for too long: nobody can say so through it."""
        silence = time.monotonic() - self._answered - self.interval
        if self._has_ended or silence < EARLY * self.limit:
            return
        host, where = self._host, "The process that hosts the store of the run"
        state = ""
        if host is not None:
            is_near = host.machine == RankProcess.here().machine != ""
            state = (read_process(host.pid).letter or "ended") if is_near else ""
            where = f"Rank 0 ({host.host}, process {host.pid}), which hosts the store of the run,"
        if state in ("R", "D") and silence < 10 * self.limit:
            return
        happened = {"T": "was stopped by a signal", "ended": "has ended without a word"}.get(state)
        said = f"{happened} {silence:.0f} s ago" if happened else f"has not answered for {silence:.0f} s"
        self._conclude(
            f"{where} {said}, and the other ranks wait for it.\n  Find out who stops or ends processes there, or "
            "whether its machine, the network to it or that of this machine is down. launch.hang_timeout sets how long "
            "the others wait.",
            has_store=False,
        )

    def _conclude(self, text: str, has_store: bool = True) -> None:
        if not self._has_ended and not self._stopped.is_set():
            self._has_ended, self._has_lost_store = True, not has_store
            self._end(text, has_store)

    # ------------------------------------------------------------------ the store

    def _exchange(self) -> None:
        store = clone_store(self._store)  # a connection of its own: the training thread may wait in the other one
        while True:
            self._due.wait(None if self._is_known else _FIND_SECONDS)
            self._due.clear()
            is_last, beat = self._stopped.is_set(), self._beat
            if is_last:  # a new one, or the ranks that read all would take it for one that they know
                beat = replace(beat, has_left=True, number=beat.number + 1)
            try:
                if not self._is_known:
                    store.set(f"process/{self._rank}", json.dumps(asdict(RankProcess.here())))
                    self._is_known = self._find_processes(store)
                store.set(f"beat/{self._rank}", beat.to_json())
                if is_last:
                    return
                if self._reads_all:
                    self._look_for_hangs(store)
                else:
                    store.check(["answer"])
            except RuntimeError:  # no connection: the host has ended, or does not answer
                if is_last:
                    return
            else:
                self._answered = time.monotonic()

    def _find_processes(self, store: dist.Store) -> bool:
        """Read where others run: the host of the store, and the next rank of this machine. Return whether all said."""
        per_node = max(1, distributed.ranks_per_node())
        first = self._rank // per_node * per_node
        last = min(first + per_node, self._world) - 1
        near = self._rank + 1 if self._rank < last else first
        wanted = sorted({0, near} - {self._rank})
        if not store.check([f"process/{rank}" for rank in wanted]):
            return False
        for rank in wanted:
            process = RankProcess(**json.loads(store.get(f"process/{rank}")))
            if rank == near and process.machine == RankProcess.here().machine != "":
                self._neighbour = rank, process.pid
            if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
                self._host = process
        return True

    def _look_for_hangs(self, store: dist.Store) -> None:
        """Read all heartbeats, and end the run if a rank does not go on."""
        ranks = list(range(self._world))
        if self._detector is None:
            keys = [f"{kind}/{rank}" for rank in ranks for kind in ("process", "beat")]
            if not store.check(keys):
                self._find_absent(store)
                return
            found = store.multi_get([f"process/{rank}" for rank in ranks])
            self._processes = {rank: RankProcess(**json.loads(one)) for rank, one in zip(ranks, found, strict=True)}
            self._detector = HangDetector(self._processes, self._limit, self._rank)
        beats = [Heartbeat.from_json(one) for one in store.multi_get([f"beat/{rank}" for rank in ranks])]
        now = time.monotonic()
        hang: Hang | None = self._detector.find_hang(beats, now, self.interval)
        if self._rank == 0:
            self._keep_notes(beats, now)
        self._detector.notes.clear()
        if hang is not None:
            self._hanging = hang.ranks
            self._conclude(hang.text)

    def _find_absent(self, store: dist.Store) -> None:
        """End the run if ranks have never posted anything."""
        if time.monotonic() - self._began < _ABSENT_FACTOR * self.limit:
            return
        absent = [rank for rank in range(self._world) if not store.check([f"beat/{rank}"])]
        if absent:
            seconds = time.monotonic() - self._began
            self._conclude(f"Rank {absent[0]} has not answered in the first {seconds:.0f} s of the run's set-up.")

    def _keep_notes(self, beats: list[Heartbeat], now: float) -> None:
        assert self._detector is not None
        notes = self._detector.notes
        self._notes += notes
        self._slow += self._stragglers.add(beats, now)
        if self.log is not None:
            for note in notes:
                self.log(note.text)
