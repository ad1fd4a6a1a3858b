"""Runs in which a rank stops: the others name it within the limit, and end."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.health.faulty_runs import (
    Ended,
    FaultyTrainer,
    begin_collective,
    leave_out_collective,
    read_events,
    run_ranks,
    stand_still,
    stop_itself,
)

STAGES = {"parallel": {"modules": {"model": {"stages": 2}}, "verify": "never"},
          "loop": {"gradient_accumulation_steps": 4, "batch_size": 8}}  # fmt: skip
FSDP = {"parallel": {"data": {"kind": "fsdp2"}}}


def is_stopped(ranks: list[Ended], rank: int) -> str:
    """Return what the one other rank of two says."""
    (other,) = [one for number, one in enumerate(ranks) if number != rank]
    assert ranks[rank].code is None and other.code == 3, other.said
    assert other.error.startswith(f"RankError: Rank {rank} (") and "was stopped by a signal" in other.error
    return other.error


@pytest.mark.parametrize(
    ("name", "at", "sections", "place"),
    [
        ("ddp", ("step", 5), {}, "in step 5"),
        ("fsdp2", ("step", 5), FSDP, "in step 5"),
        ("stages", ("step", 5), STAGES, "in step 5 (backward, stage 0, microbatch 0)"),
        ("evaluation", ("pause", 5), {"loop": {"evaluate_every": 5}}, "in an evaluation or a save after step"),
    ],
)
def test_a_stopped_rank_is_named(
    name: str, at: tuple[str, int], sections: dict[str, Any], place: str, tmp_path: Path
) -> None:
    ranks = run_ranks(tmp_path, 2, {1: stop_itself}, at, **sections)
    said = is_stopped(ranks, 1)
    assert f"rank 0 waits for it {place}" in said
    written = {one.name for one in (tmp_path / "run/health").iterdir()}
    assert {"stacks_rank_0.txt", "collectives_rank_0.json"} <= written
    assert "the training thread" in (tmp_path / "run/health/stacks_rank_0.txt").read_text()


def test_rank_0_hosts_the_store_and_is_named_nevertheless(tmp_path: Path) -> None:
    assert ", which hosts the store of the run, was stopped" in is_stopped(
        run_ranks(tmp_path, 2, {0: stop_itself}), 0
    )


def test_all_ranks_say_the_same_of_one_that_stands_still(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path, 3, {1: stand_still}, loop={"batch_size": 12})
    assert [ranks[0].code, ranks[2].code] == [3, 3] and ranks[0].error == ranks[2].error
    assert "Rank 1 (" in ranks[0].error and "in step 5: it stands still" in ranks[0].error
    assert "It is in stand_still (faulty_runs.py:" in ranks[0].error
    assert "stand_still" in (tmp_path / "run/health/stacks_rank_1.txt").read_text()


def test_ranks_in_different_collectives_are_named(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path, 2, {0: begin_collective, 1: leave_out_collective})
    assert [one.code for one in ranks] == [3, 3], ranks
    assert "in different collectives" in ranks[0].error and "all_reduce [3]" in ranks[0].error
    assert ranks[0].error == ranks[1].error


def compute_for_long(faulty: FaultyTrainer) -> None:
    """Be busy where the next batch is asked for."""
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        pass


def test_a_slow_loader_is_no_hang(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path, 2, {1: compute_for_long}, ("batch", 5), launch={"hang_timeout": 1.0})
    assert [one.code for one in ranks] == [0, 0], ranks
    (note,) = [one for one in read_events(tmp_path) if one["event"] == "slow" and "waits for data" in one["text"]]
    assert note["text"].startswith("Rank 1 (") and "before step 5" in note["text"]


def test_a_rank_that_is_stopped_again_and_again_is_a_straggler(tmp_path: Path) -> None:
    def pulse(processes: list[ForkServerProcess]) -> None:
        pid, metrics = processes[1].pid, tmp_path / "run/metrics.jsonl"
        assert pid is not None
        end = time.monotonic() + 60
        while time.monotonic() < end and processes[1].exitcode is None:
            is_training = metrics.exists() and '"train"' in metrics.read_text()
            if is_training and "is slow" in metrics.read_text():
                break
            if is_training:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.4)
                os.kill(pid, signal.SIGCONT)
            time.sleep(0.1)
        for process in processes:
            process.kill()

    run_ranks(
        tmp_path, 2, steps=10**6, beside=pulse, loop={"steps": 10**6, "batch_size": 8}, logging={"every": 20},
        launch={"hang_timeout": 1.5},
    )  # fmt: skip
    slow = [one["text"] for one in read_events(tmp_path) if "is slow" in one["text"]]
    assert slow and slow[0].startswith("rank 1 (")


def test_nobody_is_named_where_it_is_switched_off(tmp_path: Path) -> None:
    def wait(processes: list[ForkServerProcess]) -> None:
        text = tmp_path / "rank_0.txt"
        end = time.monotonic() + 60
        while time.monotonic() < end and not (text.exists() and "STOPS" in text.read_text()):
            time.sleep(0.05)
        processes[0].join(2.0)
        assert processes[0].exitcode is None
        for process in processes:
            process.kill()

    run_ranks(tmp_path, 2, {1: stop_itself, 0: _say}, beside=wait, launch={"hang_timeout": "off"})
    assert not (tmp_path / "run/health").exists()


def _say(faulty: FaultyTrainer) -> None:
    print("STOPS", flush=True)


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_a_busy_machine_raises_no_alarm(tmp_path: Path) -> None:
    from tests import forked

    spinning = [forked.process(_spin, 4.0) for _ in range(3)]

    def begin(processes: list[ForkServerProcess]) -> None:
        for one in spinning:
            one.start()

    try:
        ranks = run_ranks(tmp_path, 2, beside=begin, loop={"steps": 120, "batch_size": 8}, launch={"hang_timeout": 1.0})
    finally:
        for one in spinning:
            one.kill()
            one.join()
    assert [one.code for one in ranks] == [0, 0], ranks


