"""Which rank is named, from heartbeats alone."""

from __future__ import annotations

from typing import Any

import pytest

from cornstarch.health.hang_detector import Hang, HangDetector, find_limit
from cornstarch.health.heartbeat import Heartbeat, RankProcess, find_state
from cornstarch.parallel.activity import Activity

PROCESSES = {rank: RankProcess("node", 100 + rank, "m") for rank in range(4)}
INTERVAL = 0.5


class Run:
    """Heartbeats of ranks over time."""

    def __init__(self, ranks: int = 2, limit: float | None = None) -> None:
        self.detector = HangDetector({rank: PROCESSES[rank] for rank in range(ranks)}, limit)
        self.ranks, self.now, self.number = ranks, 0.0, 0

    def beat(self, seconds: float = 0.0, silent: tuple[int, ...] = (), **by_rank: dict[str, Any]) -> Hang | None:
        """Let time pass; every rank that is not silent posts. `rank_1={...}` says what rank 1 posts."""
        steps = max(1, round(seconds / INTERVAL))
        hang = None
        for _ in range(steps):
            self.now, self.number = self.now + INTERVAL, self.number + 1
            beats = []
            for rank in range(self.ranks):
                if rank in silent:
                    continue
                values: dict[str, Any] = {"phase": "step", "step": 7, "steps": 7, "seconds": 0.1}
                values |= by_rank.get(f"rank_{rank}", {})
                beats.append(Heartbeat(rank, self.number, **values))
            hang = self.detector.find_hang(beats, self.now, INTERVAL)
            if hang is not None:
                break
        return hang


WAITS = {"idle": 4.5, "state": "waits", "waits": "all_reduce [433]"}


def test_the_limit_is_five_steps_and_at_least_five_seconds() -> None:
    assert [find_limit(step) for step in (0.0, 0.1, 1.0, 3.0)] == [5.0, 5.0, 5.0, 15.0]


def test_a_rank_without_heartbeats_is_named_and_not_the_one_that_waits_for_it() -> None:
    run = Run()
    assert run.beat(2.0) is None
    stopped = {**WAITS, "neighbour": (1, "T")}
    hang = run.beat(5.0, silent=(1,), rank_0=stopped)
    assert hang is not None and hang.ranks == (1,)
    assert hang.text.startswith("Rank 1 (node, process 101) was stopped by a signal 4 s ago")
    assert "last heard of in step 7;" in hang.text
    assert "rank 0 waits for it in step 7" in hang.text and run.now <= 7.0


def test_a_rank_that_hears_from_nobody_is_cut_off_itself() -> None:
    run = Run(3)
    assert run.beat(2.0) is None
    hang = run.beat(5.0, silent=(1, 2), rank_0={**WAITS, "neighbour": (1, "R")})
    assert hang is not None and hang.ranks == (0,) and run.now <= 7.0
    assert hang.text.startswith("Rank 0 (node, process 100) has not heard from any other machine for 4 s, in step 7")
    run = Run(3)  # a process of this machine that was stopped is seen
    run.beat(2.0)
    hang = run.beat(5.0, silent=(1, 2), rank_0={**WAITS, "neighbour": (1, "T")})
    assert hang is not None and hang.ranks[0] == 1


@pytest.mark.parametrize(("hosts", "named"), [("aabbcc", 1), ("aabbbb", 2)])
def test_with_two_machines_nobody_knows_which_one_is_cut_off(hosts: str, named: int) -> None:
    detector = HangDetector({rank: RankProcess(host, rank, host) for rank, host in enumerate(hosts)}, None, own=1)
    beats = [Heartbeat(rank, 1, phase="step", step=7, steps=7) for rank in range(6)]
    assert detector.find_hang(beats, 1.0, INTERVAL) is None
    for number in range(2, 20):
        posts = [Heartbeat(rank, number, phase="step", step=7, steps=7) for rank in (0, 1)]
        if (hang := detector.find_hang(posts, number * INTERVAL, INTERVAL)) is not None:
            break
    assert hang is not None and hang.ranks[0] == named


def test_the_limit_follows_the_steps() -> None:
    run = Run()
    run.beat(2.0, rank_0={"seconds": 4.0}, rank_1={"seconds": 4.0})
    slow = {"seconds": 4.0, "idle": 10.0, "state": "waits", "waits": "x", "neighbour": (1, "T")}
    assert run.beat(10.0, silent=(1,), rank_0=slow) is None
    assert run.beat(10.0, silent=(1,), rank_0=slow) is not None


@pytest.mark.parametrize(
    ("state", "seconds", "said"),
    [("ended", 5.0, "has ended without a word"), ("S", 5.0, "has not answered for"), ("R", 45.0, "has not answered")],
)
def test_a_silent_rank_that_runs_is_given_more_time(state: str, seconds: float, said: str) -> None:
    run = Run()
    run.beat(1.0)
    near = {**WAITS, "idle": 0.0, "state": "moves", "neighbour": (1, state)}
    if state == "R":
        assert run.beat(20.0, silent=(1,), rank_0=near) is None
        assert "runs, slowly" in run.detector.notes[0].text
    hang = run.beat(seconds, silent=(1,), rank_0=near)
    assert hang is not None and said in hang.text and hang.ranks == (1,)


def test_a_detector_that_was_stopped_itself_blames_nobody() -> None:
    run = Run()
    run.beat(1.0)
    run.now += 60.0
    assert run.beat(0.5, silent=(0, 1)) is None
    assert run.beat(1.0) is None


def test_a_rank_that_has_left_is_not_missed() -> None:
    run = Run()
    run.beat(1.0, rank_1={"has_left": True})
    assert run.beat(30.0, silent=(1,)) is None


def test_a_rank_that_stands_still_is_named_with_its_line() -> None:
    run = Run()
    run.beat(1.0)
    still = {"idle": 4.5, "state": "stands", "stack": ["read_row (rows.py:3)", "fit (run.py:9)"]}
    hang = run.beat(0.5, rank_0=WAITS, rank_1=still)
    assert hang is not None and hang.ranks == (1,)
    assert "has not moved for 4 s, in step 7: it stands still" in hang.text
    assert "It is in read_row (rows.py:3), called from fit (run.py:9)." in hang.text


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"state": "data", "phase": "data"}, "waits for data"),
        ({"state": "computes"}, "computes"),
        ({"state": "compiles"}, "compiles"),
        ({"state": "stands", "steps": 1}, None),
        ({"state": "saves", "phase": "pause"}, None),
    ],
)
def test_what_takes_its_time_is_noted_once_and_not_called_a_hang(values: dict[str, Any], said: str | None) -> None:
    run = Run()
    run.beat(1.0)
    assert run.beat(60.0, rank_0={**WAITS, "idle": 60.0}, rank_1={"idle": 60.0, **values}) is None
    notes = [note.text.partition(") ")[2] for note in run.detector.notes]
    assert len(notes) == (said is not None) and all(note.startswith(said or "") for note in notes)
    hang = run.beat(0.5, rank_0={**WAITS, "idle": 4000.0}, rank_1={"idle": 4000.0, **values})
    assert hang is not None and hang.ranks == (1,)


def test_of_ranks_that_all_wait_the_one_that_began_fewer_collectives_is_behind() -> None:
    run = Run(3)
    run.beat(1.0)
    waits = {f"rank_{rank}": {**WAITS, "sequences": {"all": 12}} for rank in (0, 2)}
    hang = run.beat(0.5, **waits, rank_1={**WAITS, "waits": "barrier", "sequences": {"all": 11}})
    assert hang is not None and hang.ranks == (1,)
    assert "has begun 11 in a process group where rank 0 has begun 12, and waits in barrier" in hang.text


def test_ranks_in_different_collectives_are_both_named() -> None:
    run = Run()
    run.beat(1.0)
    first = {**WAITS, "sequences": {"all": 12, "own": 4}}
    hang = run.beat(0.5, rank_0=first, rank_1={**WAITS, "waits": "barrier", "sequences": {"all": 11, "own": 5}})
    assert hang is not None and hang.ranks == (0, 1)
    assert "different collectives" in hang.text and "waits in barrier" in hang.text


def test_ranks_that_wait_in_the_same_collective_point_to_the_network() -> None:
    run = Run()
    run.beat(1.0)
    hang = run.beat(0.5, rank_0={**WAITS, "sequences": {"all": 3}}, rank_1={**WAITS, "sequences": {"all": 3}})
    assert hang is not None and "the network between them carries nothing" in hang.text


def test_ranks_that_wait_for_one_that_moves_are_left_alone() -> None:
    run = Run()
    assert run.beat(30.0, rank_0={**WAITS, "idle": 20.0}) is None


@pytest.mark.parametrize(
    ("set_up", "files", "ran", "pending", "state"),
    [
        ({"waits": "a message"}, [], 1.0, False, "waits"),
        ({"phase": "data"}, [], 1.0, False, "data"),
        ({}, ["/x/torch/_inductor/compile.py"], 0.0, True, "compiles"),
        ({}, ["/x/cornstarch/checkpoint/save.py"], 0.0, False, "saves"),
        ({}, ["x.py"], 0.5, True, "computes"),
        ({}, ["x.py"], 0.0, True, "waits"),
        ({}, ["x.py"], 0.0, False, "stands"),
    ],
)
def test_what_a_rank_does(set_up: dict[str, Any], files: list[str], ran: float, pending: bool, state: str) -> None:
    activity = Activity()
    activity.enter("step")
    for name, value in set_up.items():
        setattr(activity, name, value)
    assert find_state(activity, files, ran, pending) == state


def test_a_heartbeat_survives_its_way() -> None:
    beat = Heartbeat(3, 7, stack=["f (a.py:1)"], sequences={"a": 2}, neighbour=(4, "S"))
    assert Heartbeat.from_json(beat.to_json()) == beat
