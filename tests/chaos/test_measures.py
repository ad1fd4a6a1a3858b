"""What the harness makes of hangs, long runs and other numbers of ranks, without any process."""

from __future__ import annotations

import json

import pytest

from tests.chaos import phases
from tests.chaos.elastic import check_samples, compare_losses
from tests.chaos.endurance import Outcome, Usage, describe_goodput, describe_soak
from tests.chaos.hangs import Found, describe, find_named, read_found
from tests.chaos.kills import Outcome as Killed
from tests.chaos.kills import Verdict
from tests.chaos.page import write
from tests.chaos.processes import Line

STOPPED = "step 5/6\nRankError: Rank 1 (node, process 77) was stopped by a signal 4 s ago, in step 6.\n"
HOST = "RankError: Rank 0 (node, process 6), which hosts the store of the run, has not answered for 4 s.\n"


def test_the_rank_that_is_named_is_found() -> None:
    assert find_named([STOPPED, HOST, "rank 1 of 2 failed with exit code 1", "Rank 3 waits"]) == (1, 0)
    assert find_named(["Rank 2 has not moved for 5 s\nRank 1 has ended without a word"]) == (2,)


def found(rank: int, named: tuple[int, ...], seconds: float | None) -> Found:
    return Found(f"0-ddp-{rank}", "ddp", rank, named, seconds, 9.0)


def test_only_the_stopped_rank_is_right() -> None:
    right, late, wrong, nobody = found(1, (1, 1), 4.2), found(1, (1,), 6.5), found(0, (1,), 4.0), found(0, (), None)
    assert [one.is_right for one in (right, late, wrong, nobody)] == [True, True, False, False]
    assert [one.is_late for one in (right, late, wrong, nobody)] == [False, True, False, True]
    said = describe([right, late, wrong, nobody])
    assert "2 named rightly, 2 within the limit (5 s, or 5 median steps), 2 more than 1 s behind it" in said
    assert read_found(json.loads(json.dumps({"command": "stops", "machine": {}, **vars(right)}))) == right


def report_samples(time: float, step: int, epoch: int, replica: int, *names: str) -> Line:
    return Line(time, 10 + replica, replica, phases.SAMPLES, "+", step, json.dumps([epoch, replica, names]))


def test_each_sample_counts_once_per_epoch() -> None:
    claims = [Line(time, 10, 0, phases.CLAIMED, "+", 0) for time in (0.0, 5.0)]
    first = [report_samples(1.0, 1, 0, 0, "a"), report_samples(1.1, 1, 0, 1, "b"), report_samples(2.0, 2, 0, 0, "c")]
    again = [report_samples(6.0, 2, 0, 0, "c", "d"), report_samples(7.0, 3, 1, 0, "a")]
    assert check_samples([*claims, *first, *again]) == (4, [])
    more = report_samples(8.0, 4, 1, 0, "b"), report_samples(9.0, 5, 2, 0, "a")
    count, (problem,) = check_samples([*claims, *first, *again, *more])
    assert count == 6 and "epoch 1" in problem and "'c': 0" in problem and "'d': 0" in problem
    twice = report_samples(6.5, 2, 0, 1, "a")
    assert "'a': 2" in check_samples([*claims, *first, *again, twice])[1][0]
    assert check_samples(claims)[1] == ["no epoch was completed"]


def test_losses_are_compared_by_step() -> None:
    fixed = {("train", 1): {"loss": 2.0}, ("train", 2): {"loss": 1.0}, ("evaluation", 2): {"loss": 1.0}}
    assert compare_losses(fixed, {("train", 1): {"loss": 2.0 + 2e-5}}) == {1: pytest.approx(1e-5, rel=1e-3)}


def usage(seconds: float, memory: float, files: int) -> Usage:
    return Usage(seconds, 3, 40.0, memory, files, 30, 1)


def test_growth_is_seen() -> None:
    still = [usage(one, 300.0 + one % 3, 12) for one in range(40)]
    assert describe_soak(Outcome(40.0, 100, 4, usage=still))["flat"]
    stuck = describe_soak(Outcome(40.0, -9, 4, usage=still))
    assert not stuck["flat"] and stuck["line"].startswith("NO PROGRESS")
    growing = [usage(one, 300.0 + 3 * one, 12) for one in range(40)]
    assert not describe_soak(Outcome(40.0, 100, 4, usage=growing))["flat"]
    leaking = describe_soak(Outcome(40.0, 100, 4, usage=[usage(one, 300.0, 12 + one // 4) for one in range(40)]))
    assert not leaking["flat"] and leaking["line"].startswith("GROWS over 40 s with 4 faults")


def test_goodput_is_relative_to_the_same_run_without_faults() -> None:
    parts = [Outcome(60.0, 600), Outcome(600.0, 5400, 10, backs=[2.0, 4.0, 3.0]), Outcome(60.0, 660)]
    said = describe_goodput(parts)
    assert said["goodput"] == round(9.0 / 10.5, 4)
    assert "10 faults" in said["line"] and "3.0 s (at most 4.0)" in said["line"]


def test_the_page_says_what_the_results_say() -> None:
    killed = Killed(phases.SAVE, ("launcher",), 1.0, done=9, lost=3, ended=0.4, back=2.5)
    cases = [({"name": "0-0", "layout": "ddp", "restarts": 5}, Verdict(kills=[killed], attempts=2, compared=30))]
    machine = {"date": "2026-01-02", "cores": 2, "load": 1.5}
    lines = [{"command": "stops", "machine": machine, **vars(found(1, (1,), 4.5))},
             {"command": "busy", "machine": machine, "line": "0 false alarms in 3.0 minutes"}]  # fmt: skip
    page = write(lines, cases)
    words = " ".join(page.split())  # paragraphs are wrapped
    assert "1 kills in 1 runs; 0 runs failed; 0 with orphans; 0 with two writers; 30 values bit-equal" in words
    assert "| save | 1 | 3 | 0.40 (0.40) | 2.5 (2.5) |" in page and "| ddp | 1 | 1 | 4.5 (4.5) |" in page
    assert "- 0 false alarms in 3.0 minutes" in page and "2026-01-02, Python" in page and "Soak" not in page
    assert "tests.chaos kills --count 200" in page and "cuts --count" not in page
