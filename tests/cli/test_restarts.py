"""`cornstarch train --restarts`: ranks that die, and what the run says about it; signals before and between steps."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from cornstarch.launch.stop_guard import IN_SETUP, WITHOUT_SAVING
from tests import warm
from tests.chaos.processes import ROOT, find_processes
from tests.cli.small_runs import record, summary, write_config
from tests.cli.started import Started, free_port, start, together
from tests.cli.test_train import send
from tests.trainer.tiny import losses, tiny_config

TRAIN = ("train", "run.yaml")
OPTIONS = ("checkpoint.every=2", "data.workers=0", "logging.progress=lines")


def write_dying_run(folder: Path, rows: str = "rows") -> None:
    """Write a run of 9 steps whose ranks die where there is a file that says so."""
    tiny_config(folder)
    arguments = {"path": str(folder / "train.json"), "folder": str(folder)}
    source = {"path": f"tests.cli.dying_rows:{rows}", "arguments": arguments, "media": str(folder)}
    write_config(folder, *OPTIONS, "loop.steps=9", data={"train": [source]})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    """The losses of runs that nothing interrupts, in one process and in two."""
    folder = tmp_path_factory.mktemp("whole")
    write_dying_run(folder)
    found = {}
    for count in ("1", "2"):
        code, said = start(
            *TRAIN, f"output=run{count}", "--nproc", count, folder=folder, python=warm.interpreter()
        ).ended()  # fmt: skip
        assert code == 0, said
        found[count] = losses(folder / f"run{count}")
    return found


def order_death(folder: Path, *places: tuple[int, int]) -> None:
    for rank, attempt in places:
        (folder / f"die_{rank}_{attempt}").write_text(str(4 + attempt))


def restarts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "restarts.jsonl").read_text().splitlines()]


def test_a_run_whose_ranks_are_killed_ends_bit_equal(tmp_path: Path, whole: dict[str, dict[int, float]]) -> None:
    write_dying_run(tmp_path)
    order_death(tmp_path, (1, 0), (0, 1))
    command = (*TRAIN, "--nproc", "2", "--restarts", "2")
    code, said = start(*command, folder=tmp_path, python=warm.interpreter()).ended()
    assert code == 0, said
    assert losses(tmp_path / "run") == whole["2"]
    assert "rank 1 of 2 was killed by SIGKILL in step" in said and "rank 0 of 2 was killed by SIGKILL" in said
    told = restarts(tmp_path / "run")
    assert [line["kind"] for line in told] == ["failure", "restart"] * 2
    assert all(line["step"] in (2, 4, 6, 8) for line in told[1::2])
    assert all(line["lost_seconds"] > 0 and line["lost_steps"] <= 2 for line in told[1::2])
    events = [line for line in record(tmp_path / "run", "event") if line["event"] == "restarted"]
    assert [line["attempt"] for line in events] == [1, 2]
    assert events[0]["text"].startswith("restart 1: rank 1 of 2 was killed by SIGKILL; goes on after step ")
    page = (tmp_path / "run/report.html").read_text()
    assert 'id="restarts"' in page and "2 failures, 2 restarts" in page
    assert summary(tmp_path / "run")["status"] == "finished"


def test_further_attempts_are_forked_and_bit_equal(tmp_path: Path, whole: dict[str, dict[int, float]]) -> None:
    """With the interpreter that a user has: ranks import torch once, and then are forked from one that has done so."""
    write_dying_run(tmp_path, "die_when_ready")
    options = ("--nproc", "2", "--restarts", "1", "launch.hang_timeout=60")
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # by its one thread a server shows that it is ready
    code, said = start(*TRAIN, *options, folder=tmp_path, environment=variables).ended()
    assert code == 0, said
    assert losses(tmp_path / "run") == whole["2"]
    commands = {path.name: path.read_text() for path in tmp_path.glob("command_*")}
    is_forked = {name: "cornstarch.launch.fork_server" in command for name, command in commands.items()}
    assert is_forked == {"command_0_0": False, "command_1_0": False, "command_0_1": True, "command_1_1": True}
    assert find_processes(tmp_path) == []


def test_a_single_process_is_restarted(tmp_path: Path, whole: dict[str, dict[int, float]]) -> None:
    write_dying_run(tmp_path)
    order_death(tmp_path, (0, 0))
    code, said = start(*TRAIN, "launch.restarts=1", folder=tmp_path, python=warm.interpreter()).ended()
    assert code == 0, said
    assert "rank 0 of 1 was killed by SIGKILL" in said and "restart 1 of 1" in said
    assert losses(tmp_path / "run") == whole["1"]


def test_a_run_whose_first_rank_is_killed_has_failed(tmp_path: Path) -> None:
    write_dying_run(tmp_path)
    order_death(tmp_path, (0, 0))
    code, said = start(*TRAIN, "--nproc", "2", folder=tmp_path, python=warm.interpreter()).ended()
    assert code == 137, said
    told = summary(tmp_path / "run")
    assert told["status"] == "failed" and told["cause"].startswith("rank 0 of 2 was killed by SIGKILL in step ")
    assert record(tmp_path / "run", "event")[-1]["event"] == "failed"
    assert "failed</span>" in (tmp_path / "run/report.html").read_text()


def test_two_machines_restart_together(tmp_path: Path, whole: dict[str, dict[int, float]]) -> None:
    """Two supervisors on one machine: the rank of the second dies."""
    write_dying_run(tmp_path)
    order_death(tmp_path, (1, 0))
    with free_port() as port:
        nodes = ("--nnodes", "2", "--master", f"127.0.0.1:{port}", "--restarts", "2")
        runs = [
            start(*TRAIN, *nodes, "--node-rank", node, folder=tmp_path, python=warm.interpreter()) for node in "01"
        ]
        ended = [run.ended() for run in runs]
    assert [code for code, _ in ended] == [0, 0], ended
    assert "rank 1 of 2 was killed by SIGKILL: restart 1 of 2" in ended[0][1]
    assert losses(tmp_path / "run") == whole["2"]
    assert [line["kind"] for line in restarts(tmp_path / "run")] == ["failure", "restart"]


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    write_dying_run(tmp_path)
    broken = ("model.encoders.vision.processor_config.class_name=NoSuchProcessor", "--nproc", "2", "--restarts", "3")
    code, said = start(*TRAIN, *broken, folder=tmp_path, python=warm.interpreter()).ended()
    assert code == 2 and said.count("ConfigError: ") == 1 and "restart 1" not in said, said


def test_torchrun_restarts_by_itself(tmp_path: Path) -> None:
    write_dying_run(tmp_path)
    ended = together(*TRAIN, "--restarts", "2", folder=tmp_path)
    assert [code for code, _ in ended] == [2, 2]
    assert "--restarts 2: this process is rank 0 of 2" in ended[0][1] and "--max-restarts" in ended[0][1]


# ------------------------------------------------------------------------------------------------ signals


def stop_in_setup(folder: Path, *options: str) -> Started:
    tiny_config(folder)
    arguments = {"path": str(folder / "train.json"), "gate": str(folder / "gate")}
    source = {"path": "tests.cli.dying_rows:wait_at", "arguments": arguments, "media": str(folder)}
    write_config(folder, *OPTIONS, data={"train": [source]})
    (folder / "gate").touch()
    run = start(*TRAIN, *options, folder=folder, python=warm.interpreter())
    run.until((folder / "gate.reached").exists)
    run.send(signal.SIGTERM)
    return run


@pytest.mark.parametrize("options", [(), ("--nproc", "2", "--restarts", "2")])
def test_sigterm_during_setup_says_so_in_one_line(tmp_path: Path, options: tuple[str, ...]) -> None:
    code, said = stop_in_setup(tmp_path, *options).ended()
    assert (code, said.splitlines()[-1]) == (143, IN_SETUP)
    assert said.count("SIGTERM") == 1 and "Traceback" not in said and "restart" not in said


@pytest.mark.parametrize("options", [(), ("--nproc", "1", "--restarts", "2")])
def test_a_second_sigterm_ends_at_once(tmp_path: Path, options: tuple[str, ...]) -> None:
    tiny_config(tmp_path)
    arguments = {"path": str(tmp_path / "train.json"), "gate": str(tmp_path / "gate"), "free": 10}
    source = {"path": "tests.cli.gated_rows:rows", "arguments": arguments, "media": str(tmp_path)}
    write_config(tmp_path, *OPTIONS, data={"train": [source]})
    gate = tmp_path / "gate"
    gate.touch()
    run = start(*TRAIN, *options, folder=tmp_path, python=warm.interpreter())
    run.until(lambda: gate.stat().st_size > 0)
    send(run, signal.SIGTERM, gate)
    run.send(signal.SIGTERM)  # and the gate stays closed
    code, said = run.ended()
    assert code == 143 and WITHOUT_SAVING in said and "Traceback" not in said, said
    assert summary(tmp_path / "run")["status"] == "failed"
