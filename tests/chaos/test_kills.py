"""A few runs whose processes are killed, and what the harness makes of runs that went wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos import phases
from tests.chaos.kills import (
    LAUNCHER,
    RANDOM,
    Case,
    Disturbed,
    Kill,
    Outcome,
    draw_case,
    find_difference,
    find_losses,
    read_records,
)
from tests.chaos.layouts import EVERY, LAYOUTS
from tests.chaos.processes import Line
from tests.chaos.run_kills import describe, read_results, read_verdicts

CASES = [
    Case("ddp", "ddp", (Kill(phases.STEP, (1,), 6, 0.5), Kill(phases.SAVE, (LAUNCHER,), 1, 0.4)), steps=12),
    Case("fsdp2", "fsdp2", (Kill(phases.EVALUATION, (0,), 1, 0.4),), restarts=3, steps=12),
    Case("tp2xdp2", "tp2xdp2", (Kill(phases.INIT, (2, 3), 1, 0.6),), restarts=3, steps=12),
    Case("pipeline", "pipeline", (Kill(phases.SAVE, (1,), 1, 0.3), Kill(phases.LOAD, (0,), 2, 0.5)), 3, steps=12),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_killed_run_ends_as_if_nothing_had_happened(case: Case, tmp_path: Path) -> None:
    verdict = Disturbed(case, tmp_path, tmp_path / "disturbed").run()
    assert verdict.problems == []
    assert len(verdict.kills) == len(case.kills) and verdict.compared > case.steps
    assert all(kill.lost <= EVERY for kill in verdict.kills)
    assert all(kill.named for kill in verdict.kills if LAUNCHER not in kill.victims)
    assert [kill.by_itself for kill in verdict.kills] == [bool(case.restarts)] * len(case.kills)


# ------------------------------------------------------------------------------------------------ the harness itself


def test_cases_reach_everything() -> None:
    cases = [draw_case(0, number) for number in range(40)]
    assert cases[7] == draw_case(0, 7) and cases[7] != draw_case(1, 7)
    assert {case.layout for case in cases} == set(LAYOUTS)
    kills = [kill for case in cases for kill in case.kills]
    every = {phases.INIT, phases.LOAD, phases.STEP, phases.SAVE, phases.EVALUATION, RANDOM}
    assert {kill.phase for kill in kills} == every
    assert {LAUNCHER, 0, 1, 2, 3} == {victim for kill in kills for victim in kill.victims}
    assert {1, 2, 3, 4} == {len(kill.victims) for kill in kills}


def write_metrics(folder: Path, *lines: dict[str, object], end: str = "") -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    return folder


def test_a_difference_is_found(tmp_path: Path) -> None:
    first, second = ({"kind": "train", "step": step, "loss": 1.0 / step, "seconds": 9.0} for step in (1, 2))
    whole = read_records(write_metrics(tmp_path / "whole", first, second, end='{"kind": "tra'))
    assert whole == {("train", 1): {"loss": 1.0}, ("train", 2): {"loss": 0.5}}
    same = read_records(write_metrics(tmp_path / "same", {**first, "seconds": 1.0}, second))
    assert find_difference(whole, same) is None
    other = read_records(write_metrics(tmp_path / "bit", first, {**second, "loss": 0.5 + 2**-53}))
    assert "train of step 2" in str(find_difference(whole, other))
    assert "undisturbed None" in str(find_difference(read_records(write_metrics(tmp_path / "cut", first)), whole))
    with pytest.raises(AssertionError, match="twice"):
        read_records(write_metrics(tmp_path / "twice", first, first))


def test_what_is_lost_is_counted() -> None:
    def line(time: float, pid: int, phase: str, mark: str, number: int) -> Line:
        return Line(time, pid, 0, phase, mark, number)

    lines = [line(1.0 + step, 7, phases.STEP, "=", step) for step in range(1, 7)]
    lines += [line(10.0, 8, phases.RESUMED, "+", 4), line(11.0, 8, phases.STEP, "+", 0)]
    lines += [line(11.5, 8, phases.STEP, "=", 5)]
    kills = [Outcome(phases.STEP, (0,), 7.5, ended=0.5), Outcome(phases.STEP, (LAUNCHER,), 12.0)]
    find_losses(lines, kills)
    assert (kills[0].done, kills[0].lost, kills[0].back) == (6, 2, 3.5)
    assert (kills[1].done, kills[1].lost, kills[1].back) == (5, 0, None)


def test_results_are_read_again(tmp_path: Path) -> None:
    verdict = {"problems": ["it hangs"], "kills": [vars(Outcome(phases.SAVE, (1,), 0.0, lost=3, named=True))]}
    lines = [{"case": {"name": "0-0"}, "verdict": one} for one in ({"kills": []}, verdict)]
    (tmp_path / "kills.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [name for name, _ in read_results(tmp_path / "kills.jsonl")] == ["0-0"]
    said = describe(read_verdicts(tmp_path / "kills.jsonl"))
    assert "1 kills in 1 runs; 1 runs failed; 0 with orphans" in said
    assert "at most 3 steps lost; 1 of 1 victims named" in said
