"""The rank of this process, and errors when the other ranks cannot be reached."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import distributed

from cornstarch.errors import ConfigError
from cornstarch.launch import World, current_world, launch, register_launcher, start_process_group
from cornstarch.launch import launcher as launchers
from cornstarch.launch.process_group import format_ranks
from tests.launch.launched_script import ROOT

SOON = 30.0  # seconds, on a machine with other things to do; without the limit of 0.5 s it would be minutes
FULL = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29500",
}


def test_the_rank_is_read_from_the_variables_of_torchrun() -> None:
    assert current_world(FULL) == World(rank=5, local_rank=1, size=8, local_size=4)


@pytest.mark.parametrize("variables", [{}, {"MASTER_ADDR": "first", "MASTER_PORT": "1"}, {"OMP_NUM_THREADS": "1"}])
def test_without_rank_variables_there_is_one_process(variables: dict[str, str]) -> None:
    assert current_world(variables) == World(rank=0, local_rank=0, size=1, local_size=1)


# As srun sets them for a task of a step; in a batch script outside of steps there is no SLURM_STEP_NUM_TASKS.
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (STEP, r"^srun has started 4 processes \(SLURM_STEP_NUM_TASKS=4, SLURM_PROCID=2\)"),
        (MPI, r"^Open MPI's mpirun has started 2 processes"),
    ],
)
def test_tasks_of_srun_and_mpirun_are_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        current_world(variables)
    assert current_world({**variables, **FULL}).size == 8  # torchrun inside of a task
    one = {
        name: "1" if name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE") else v for name, v in variables.items()
    }
    assert current_world(one) == World()
    assert current_world({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}) == World()  # in the batch script itself


BAD = [
    *[({name: None}, f"^{name} not set, but ") for name in FULL],
    ({"MASTER_ADDR": ""}, "^MASTER_ADDR not set, but RANK=5, LOCAL_RANK=1"),
    ({"RANK": "five"}, "RANK='five': expected a whole number"),
    ({"RANK": "8"}, "^RANK=8, LOCAL_RANK=1, WORLD_SIZE=8, LOCAL_WORLD_SIZE=4: rank 8 of 8"),
    ({"RANK": "-1"}, "rank -1 of 8"),
    ({"LOCAL_RANK": "4"}, "local rank 4 of 4"),
    ({"LOCAL_WORLD_SIZE": "9"}, "local rank 1 of 9: impossible"),
    ({"WORLD_SIZE": "0"}, "rank 5 of 0"),
    ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536: a port is"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_invalid_variables_are_refused(change: dict[str, str | None], message: str) -> None:
    variables = {name: text for name, text in {**FULL, **change}.items() if text is not None}
    with pytest.raises(ConfigError, match=message):
        current_world(variables)


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([5, 2, 0, 1], "ranks 0-2, 5"), ([0, 2], "ranks 0, 2")]
)
def test_ranks_are_formatted_as_spans(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


def test_importing_does_not_import_torch() -> None:
    code = "import sys, cornstarch.launch; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout == "False\n", ran.stderr


class ClusterLauncher:
    """A launcher for a scheduler with a variable of its own."""

    def is_active(self, environment: Mapping[str, str]) -> bool:
        return "MY_RANK" in environment

    def read_world(self, environment: Mapping[str, str]) -> World:
        return World(int(environment["MY_RANK"]), 0, 4, 1)

    def launch(
        self, command: Sequence[str], nproc: int | str, logs: Path, environment: Mapping[str, str], console: Console
    ) -> int:
        return len(command) * int(nproc)


def test_a_registered_launcher_is_used_where_it_is_active(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launchers, "LAUNCHERS", dict(launchers.LAUNCHERS))
    register_launcher("cluster", ClusterLauncher())
    assert current_world({"MY_RANK": "3", **FULL}) == World(3, 0, 4, 1)
    assert current_world(FULL).size == 8 and current_world({}) == World()
    assert launch(["a", "b"], 5, tmp_path, environment={"MY_RANK": "0"}) == 10


# ---------------------------------------------------------------------------------------------------- rendezvous


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Something that listens and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that is held, and that torch may open."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def meet(monkeypatch: pytest.MonkeyPatch, rank: int, host: str, port: int) -> tuple[str, float]:
    """Return what it says that two processes do not meet, and after how long."""
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    began = time.monotonic()
    with pytest.raises(ConfigError) as raised, start_process_group(World(rank, rank, 2, 2), rendezvous_timeout=0.5):
        raise AssertionError("they met")
    assert not distributed.is_initialized()
    return str(raised.value), time.monotonic() - began


def test_a_port_in_use_is_an_error(monkeypatch: pytest.MonkeyPatch, server: socket.socket) -> None:
    port = server.getsockname()[1]
    message, _ = meet(monkeypatch, 0, "127.0.0.1", port)
    assert message.startswith(f"Port {port} of {socket.gethostname()} is in use")
    assert "--master-port" in message


def test_an_unreachable_rank_0_is_an_error(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    message, seconds = meet(monkeypatch, 1, "127.0.0.1", free_port)
    assert f"could not reach rank 0 at 127.0.0.1:{free_port} within 0.5 s: connection refused." in message
    assert 0.5 <= seconds < SOON


def test_an_unknown_host_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    message, _ = meet(monkeypatch, 1, "no-such-host.invalid", 29500)
    assert "at no-such-host.invalid:29500 within 0.5 s:" in message
    assert "MASTER_ADDR must be its host name" in message


def test_another_program_at_the_port_is_an_error(monkeypatch: pytest.MonkeyPatch, server: socket.socket) -> None:
    message, seconds = meet(monkeypatch, 1, "127.0.0.1", server.getsockname()[1])
    assert "another program answers there, not the run's rank 0" in message
    assert seconds < SOON


def test_a_missing_rank_is_named(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    message, seconds = meet(monkeypatch, 0, "127.0.0.1", free_port)
    assert message.startswith("Rank 1 of 2 did not arrive within 0.5 s.")
    assert seconds < SOON


def test_a_missing_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    message, _ = meet(monkeypatch, 1, "", 29500)
    assert message == "2 processes need MASTER_ADDR and MASTER_PORT to find one another."


# ---------------------------------------------------------------------------------------------------- alone


def test_a_group_of_one_needs_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for _ in range(2):
        with start_process_group(World()) as device:
            assert device == torch.device("cpu")
            distributed.all_reduce(torch.ones(2))
            with pytest.raises(ConfigError, match="already in a process group"), start_process_group(World()):
                pass
        assert not distributed.is_initialized()


def test_an_error_is_recorded_for_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    began = int(time.time())
    with pytest.raises(ZeroDivisionError), start_process_group(World()):
        _ = 1 / 0
    assert not distributed.is_initialized()
    record = json.loads((tmp_path / "error.json").read_text())["message"]
    assert record["message"] == "ZeroDivisionError: division by zero"
    assert "1 / 0" in record["extraInfo"]["py_callstack"]
    assert began <= int(record["extraInfo"]["timestamp"]) <= time.time()


def test_a_missing_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(ConfigError, match="device type 'tpu': expected one of cpu, cuda"),
        start_process_group(World(), "tpu"),
    ):
        pass
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with (
        pytest.raises(ConfigError, match="Process 1 of 2 on .* needs a GPU, and there are 0 .* device=cpu"),
        start_process_group(World(1, 1, 2, 2), "cuda"),
    ):
        pass
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with (
        pytest.raises(ConfigError, match="Process 1 of 2 on .* and there are 1 .* Start at most 1"),
        start_process_group(World(1, 1, 2, 2), "cuda", backend="nccl"),
    ):
        pass


def test_gloo_for_gpus_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with start_process_group(World(), "cuda", backend="gloo") as device:
        assert device == torch.device("cuda", 0)
        assert distributed.get_backend_config() == "cpu:gloo,cuda:gloo"
    assert not distributed.is_initialized()
