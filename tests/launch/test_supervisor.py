"""The supervisor: attempts, what follows a failure, signals, and what is left in the run's folder. Without torch."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

from cornstarch.launch.attempt_record import FailureLine, append_failure, append_line
from cornstarch.launch.failure_report import find_error
from cornstarch.launch.local_launcher import open_records
from cornstarch.launch.run_director import Fault, Finish, Outcome, RunDirector, Size, SizeRange
from cornstarch.report.restarts import build_restarts_view, read_restarts
from tests.launch.launched_script import PRELUDE, ROOT, Launched, is_gone, wait_until

# Workers say which step they are in, as the training loop does.
STEPS = """
from cornstarch.launch.attempt_record import open_step_file

attempt = int(os.environ["CORNSTARCH_ATTEMPT"])
steps = open_step_file()
publish(f"pid_{attempt}_{rank}", str(os.getpid()))
"""

_SUPERVISOR = """
import sys
from pathlib import Path
from cornstarch.launch import local_launcher
from cornstarch.launch.run_director import Size, SizeRange
from cornstarch.launch.supervisor import Job, supervise

local_launcher.core_count = lambda: 64  # no warning about cores
sys.exit(supervise(Job((sys.executable, {script!r}), Path({run!r}), SizeRange.of(Size(1, {nproc})), {restarts})))
"""


def start(folder: Path, script: str, nproc: int, restarts: int) -> Launched:
    """Start a supervisor of a script, in a process of its own."""
    (folder / "worker.py").write_text(PRELUDE + STEPS + textwrap.dedent(script))
    code = _SUPERVISOR.format(script=str(folder / "worker.py"), run=str(folder / "run"), nproc=nproc, restarts=restarts)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return Launched(process, folder / "run")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run/restarts.jsonl").read_text().splitlines()]


def ready(folder: Path, attempt: int, *ranks: int) -> bool:
    return all((folder / f"pid_{attempt}_{rank}").exists() for rank in ranks)


@pytest.mark.parametrize("killed", [(1,), (0,), (0, 1)])
def test_killed_ranks_are_started_again(tmp_path: Path, killed: tuple[int, ...]) -> None:
    script = """
        steps.write(7)
        if attempt == 0:
            signal.pause()
        print("port", os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_RESTART_COUNT"])
    """
    run = start(tmp_path, script, 2, 1)
    run.until(lambda: ready(tmp_path, 0, 0, 1))
    pids = [int((tmp_path / f"pid_0_{rank}").read_text()) for rank in (0, 1)]
    for rank in killed:
        os.kill(pids[rank], signal.SIGKILL)
    code, said, error = run.wait()
    assert code == 0, error
    assert all(map(is_gone, pids))
    assert said.startswith("port ") and said.split()[2] == "1"  # a store prefix of its own
    assert "was killed by SIGKILL in step 7; the others were stopped." in error
    assert "restart 1 of 1, from the newest checkpoint" in error
    (failure,) = lines(tmp_path)
    assert failure["rank"] in killed and failure["step"] == 7 and failure["cause"].endswith("was killed by SIGKILL")


def test_survivors_end_before_the_next_attempt_begins(tmp_path: Path) -> None:
    """A rank that ignores SIGTERM and waits for ever is killed; when the next attempt runs, it is gone."""
    script = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if attempt == 0 and rank == 1:
            await_file("pid_0_0")
            sys.exit(3)
        if attempt == 0:
            signal.pause()
        publish(f"gone_{rank}", str(is_gone(int((here / "pid_0_0").read_text()))))
    """
    code, _, error = start(tmp_path, script, 2, 1).wait()
    assert code == 0, error
    assert [(tmp_path / f"gone_{rank}").read_text() for rank in (0, 1)] == ["True", "True"]
    assert lines(tmp_path)[0]["ending_seconds"] < 30  # 0.75 s and a little on a quiet machine


def test_the_same_fault_three_times_ends_the_run(tmp_path: Path) -> None:
    script = """
        steps.write(5)
        if rank == 1:
            raise ValueError(f"no such photo, tried at {id(steps):#x} {time.time()}")
        signal.pause()
    """
    code, _, error = start(tmp_path, script, 2, 10).wait()
    assert code == 1
    assert error.count("rank 1 of 2 failed with exit code 1 in step 5") == 3
    assert error.endswith("The same fault has occurred 3 times in step 5: another restart would not help.\n")
    assert [line["kind"] for line in lines(tmp_path)] == ["failure"] * 3 + ["end"]


def test_restarts_are_used_up(tmp_path: Path) -> None:
    script = """
        steps.write(5 + attempt)
        sys.exit(3)
    """
    code, _, error = start(tmp_path, script, 1, 2).wait()
    assert code == 3
    assert error.count("failed with exit code 3") == 3
    assert error.endswith("All 2 restarts are used up (launch.restarts).\n")


def test_a_users_mistake_is_not_tried_again(tmp_path: Path) -> None:
    script = """
        print("ConfigError: tp = 3\\n  Use 1, 2 or 4.", file=sys.stderr)
        sys.exit(2)
    """
    code, _, error = start(tmp_path, script, 2, 5).wait()
    assert (code, error) == (2, "ConfigError: tp = 3\n  Use 1, 2 or 4.\n")
    assert not ready(tmp_path, 1, 0) and not (tmp_path / "run/restarts.jsonl").exists()


MESSAGES = {
    "RendezvousError: Rank 1 of 2 could not reach rank 0.": True,
    "RankError: Rank 1 (host, process 7) does not go on; last heard of in step 3.": True,
    "RankError: Ranks 0 and 1 should hold the same weights after step 3 and do not.": True,
    "TrainingError: The loss is nan in step 3 on rank 1.": False,
    "TrainingError: Memory ran out in the forward pass.": False,
}


@pytest.mark.parametrize(("message", "is_tried"), MESSAGES.items())
def test_which_messages_are_faults_of_processes(message: str, is_tried: bool) -> None:
    assert find_error(f"noise\n{message}\n  more\n").is_fault == is_tried


def test_a_rank_that_is_named_by_another_is_the_cause(tmp_path: Path) -> None:
    script = """
        steps.write(3)
        if attempt == 0 and rank == 0:
            print("RankError: Rank 1 (host, process 7) does not go on.\\n  It is in data.", file=sys.stderr)
            sys.exit(2)
        if attempt == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
    """
    code, _, error = start(tmp_path, script, 2, 1).wait()
    assert code == 0 and "restart 1 of 1" in error
    assert [line["cause"] for line in lines(tmp_path)] == ["Rank 1 (host, process 7) does not go on"]


def test_a_signal_ends_the_run_without_a_restart(tmp_path: Path) -> None:
    script = """
        steps.write(3)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        publish(f"ready_{rank}")
        signal.pause()
    """
    run = start(tmp_path, script, 2, 5)
    run.until(lambda: all((tmp_path / f"ready_{rank}").exists() for rank in (0, 1)))
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == (0, "", "")
    assert not ready(tmp_path, 1, 0)


def test_an_error_of_a_rank_that_takes_long_to_end_is_shown(tmp_path: Path) -> None:
    """Its victims end before it does, and it is killed before it has printed anything."""
    script = """
        from cornstarch.launch.failure_report import record_failure
        if rank == 0:
            await_file("failed")
            raise ConnectionError("noise")
        try:
            raise KeyError("photo 17")
        except KeyError as error:
            record_failure(error)
        publish("failed")
        signal.pause()
    """
    code, _, error = start(tmp_path, script, 2, 0).wait()
    assert code == 1
    assert error.startswith("rank 1 of 2 failed with exit code 1; the others were stopped.\n  Traceback")
    assert "KeyError: 'photo 17'" in error and "noise" not in error


# ---------------------------------------------------------------------------------------------------- decisions


TWO = SizeRange.of(Size(1, 2))


def fault(**changes: Any) -> Fault:
    return Fault(**{"rank": 1, "code": 1, "cause": "rank 1 of 2 failed", "message": "E: x", "step": 4, **changes})


def test_the_cause_is_a_crash_of_any_machine(tmp_path: Path) -> None:
    director = RunDirector(tmp_path, TWO, 3)
    director.begin(Size(2, 1))
    echo = Outcome(1, fault(rank=0, cause="rank 0 of 2 failed", message="closed"))
    assert director.decide([echo, Outcome(137, fault(code=137, cause="killed", is_crash=True))]) is None
    assert read_restarts(tmp_path)[-1].cause == "killed"


FAULTS = [
    ("another step", [fault(), fault(step=5), fault()], True),
    ("another message", [fault(), fault(message="E: y"), fault()], True),
    ("the same, but for an address", [fault(message=f"E: at 0x{n}af") for n in range(3)], False),
    ("the same line of code", [fault(message=f'  File "a.py", line 3, in f\nE: {n:06d}') for n in range(3)], False),
    ("other lines of code", [fault(message=f'  File "a.py", line {n}, in f\nE: x') for n in range(3)], True),
    ("kills of other ranks", [fault(cause=f"rank {n} killed", is_crash=True) for n in range(3)], True),
    ("during set-up", [fault(step=None)] * 3, False),
]


@pytest.mark.parametrize(("faults", "goes_on"), [case[1:] for case in FAULTS], ids=[case[0] for case in FAULTS])
def test_when_a_fault_is_the_same(tmp_path: Path, faults: list[Fault], goes_on: bool) -> None:
    director = RunDirector(tmp_path, TWO, 9)
    for one in faults:
        director.begin(Size(1, 2))
        decision = director.decide([Outcome(one.code, one)])
    assert (decision is None) == goes_on


def test_a_worker_that_cannot_be_killed_ends_the_run(tmp_path: Path) -> None:
    director = RunDirector(tmp_path, TWO, 9)
    director.begin(Size(1, 2))
    decision = director.decide([Outcome(1, fault(), unkillable=[0])])
    assert isinstance(decision, Finish) and "Rank 0 cannot be killed" in decision.reason


# ---------------------------------------------------------------------------------------------------- what is left


def test_the_report_shows_failures_and_restarts(tmp_path: Path) -> None:
    assert build_restarts_view(tmp_path) is None
    append_failure(tmp_path, FailureLine(0, 1e9, 2, 1, 7, "rank 1 was killed by <b>SIGKILL"))
    append_line(tmp_path, {"kind": "restart", "attempt": 1, "step": 5, "ranks": 2, "lost_steps": 1, "lost_seconds": 80})
    (tmp_path / "restarts.jsonl").open("a").write('[1]\n{"kind": 3, "step": "x"}\n{torn')
    view = build_restarts_view(tmp_path)
    assert view is not None and view["lead"] == "1 failure, 1 restart; 1 step and 1 min 20 s were lost."
    assert [row[2].text for row in view["table"].rows][:2] == [
        "rank 1 was killed by <b>SIGKILL", "goes on with 2 processes",
    ]  # fmt: skip


def test_folders_of_killed_launchers_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = {name: tmp_path / f"cornstarch-launch-{name}" for name in ("old", "used", "new")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "lock").touch()
    for name in ("old", "used"):
        os.utime(folders[name], (1e9, 1e9))
    with open(folders["used"] / "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with open_records() as own:
            assert own.parent == tmp_path
            assert {path for path in tmp_path.iterdir()} == {own, folders["used"], folders["new"]}
    assert not own.exists()


def test_a_killed_supervisor_leaves_no_worker(tmp_path: Path) -> None:
    run = start(tmp_path, "signal.pause()", 2, 5)
    run.until(lambda: ready(tmp_path, 0, 0, 1))
    run.process.kill()
    wait_until(lambda: all(is_gone(int((tmp_path / f"pid_0_{rank}").read_text())) for rank in (0, 1)))
    run.wait()
    assert not ready(tmp_path, 1, 0)
