"""The local launcher: output, variables and signals of workers, and the report when one fails."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import textwrap
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from cornstarch.errors import ConfigError
from cornstarch.launch import local_launcher
from cornstarch.launch.launcher import launch
from cornstarch.launch.local_launcher import build_environments, process_count
from cornstarch.launch.worker_group import WorkerExit
from tests.launch.launched_script import PATIENCE, ROOT, is_gone, start, wait_until


def test_rank_0_prints_and_the_others_write_logs(tmp_path: Path) -> None:
    script = """
        print("out", rank)
        print("err", rank, file=sys.stderr)
    """
    launched = start(tmp_path, script, 3)
    assert launched.wait() == (0, "out 0\n", "err 0\n")
    assert launched.log(0) == "err 0\n"
    assert [launched.log(rank).split("\n") for rank in (1, 2)] == [["out 1", "err 1", ""], ["out 2", "err 2", ""]]


def test_a_second_launch_continues_the_logs(tmp_path: Path) -> None:
    for _ in range(2):
        launched = start(tmp_path, 'print("again")', 2)
        assert launched.wait()[0] == 0
    lines = (launched.logs / "rank_1.log").read_text().splitlines()
    assert [line for line in lines if not line.startswith("---")] == ["again", "again"]


def test_workers_get_the_variables_of_torchrun(tmp_path: Path) -> None:
    script = """
        from cornstarch.launch import current_world
        names = ["GROUP_RANK", "OMP_NUM_THREADS", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "MINE"]
        publish(f"world_{rank}", f"{current_world()} {[os.environ[name] for name in names]}")
    """
    environment = {"MINE": "yes", "OMP_NUM_THREADS": "7", "PYTHONPATH": str(ROOT)}
    assert start(tmp_path, script, 2, environment=environment).wait()[0] == 0
    for rank in (0, 1):
        world = f"World(rank={rank}, local_rank={rank}, size=2, local_size=2)"
        assert (tmp_path / f"world_{rank}").read_text() == f"{world} ['0', '7', '127.0.0.1', 'lo', 'yes']"


def test_omp_threads_divide_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    for size in (1, 2, 1000):
        environment = build_environments({}, size, 1, 3)[-1]
        assert environment["OMP_NUM_THREADS"] == str(max(1, cores // size))


def test_more_processes_than_cores_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_launcher, "core_count", lambda: 1)
    console = _console()
    assert launch(["true"], 2, tmp_path, console=console) == 0
    assert "2 processes share 1 core: this works, but is slow." in console.export_text()


def test_only_rank_0_has_the_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    launched = start(tmp_path, "publish(f'terminal_{rank}', str(sys.stdout.isatty()))", 2, stdout=theirs)
    os.close(theirs)
    assert launched.wait()[0] == 0
    os.close(ours)
    assert [(tmp_path / f"terminal_{rank}").read_text() for rank in (0, 1)] == ["True", "False"]


# ---------------------------------------------------------------------------------------------------- failures


def test_the_first_failure_is_shown_without_its_consequences(tmp_path: Path) -> None:
    script = """
        if rank == 2:
            publish("pid", str(os.getpid()))
            raise ValueError("the cause")
        pid = int(await_file("pid"))
        until(lambda: is_gone(pid))
        raise ConnectionError("a victim's noise")
    """
    code, stdout, stderr = (launched := start(tmp_path, script, 4)).wait()
    assert (code, stdout) == (1, "")
    assert stderr.startswith("rank 2 of 4 failed with exit code 1; the others were stopped.\n  Traceback (most recent")
    assert "  ValueError: the cause\n" in stderr
    assert str(launched.logs / "rank_2.log") in stderr
    assert "noise" not in stderr
    assert all("a victim's noise" in launched.log(rank) for rank in (0, 1, 3))


def test_the_first_failure_may_be_the_last_exit(tmp_path: Path) -> None:
    """Ending a process group makes the others fail, and takes time: what counts is when the error was raised."""
    script = """
        from cornstarch.launch.failure_report import record_failure
        if rank != 1:
            publish(f"pid_{rank}", str(os.getpid()))
            await_file("failed")
            raise ConnectionError("noise")
        pids = [int(await_file(f"pid_{other}")) for other in (0, 2)]
        try:
            raise ValueError("the cause")
        except ValueError as error:
            record_failure(error)
            publish("failed")
            until(lambda: all(map(is_gone, pids)))
            raise
    """
    code, _, stderr = start(tmp_path, script, 3, environment={"PYTHONPATH": str(ROOT)}).wait()
    assert code == 1
    assert stderr.startswith("rank 1 of 3 failed")
    assert "the cause" in stderr
    assert "noise" not in stderr


def test_a_failure_of_rank_0_is_shown_as_printed(tmp_path: Path) -> None:
    script = """
        if rank == 0:
            publish("pid", str(os.getpid()))
            raise ValueError("the cause")
        pid = int(await_file("pid"))
        until(lambda: is_gone(pid))
        sys.exit(5)
    """
    code, _, stderr = start(tmp_path, script, 2).wait()
    assert code == 1
    assert stderr.startswith("Traceback")
    assert stderr.count("the cause") == 2  # the line of the code, and the message
    assert "rank 0 of 2 failed with exit code 1; the others were stopped." in stderr


@pytest.mark.parametrize("ending", ["print(f'ConfigError: {error}', file=sys.stderr); sys.exit(2)", "raise"])
def test_a_mistake_on_all_ranks_is_shown_once(tmp_path: Path, ending: str) -> None:
    script = f"""
        from cornstarch.errors import ConfigError
        try:
            raise ConfigError("run.yaml:14  tp = 3\\n  Use 1, 2 or 4.")
        except ConfigError as error:
            {ending}
    """
    code, _, stderr = start(tmp_path, script, 4, environment={"PYTHONPATH": str(ROOT)}).wait()
    message = "ConfigError: run.yaml:14  tp = 3\n  Use 1, 2 or 4.\n"
    if ending == "raise":
        assert code == 1
        assert stderr.count("tp = 3") == 2  # in the traceback that Python prints of rank 0, too
        assert stderr.endswith(message)
    else:
        assert (code, stderr) == (2, message)


def test_a_crash_on_all_ranks_is_shown_once(tmp_path: Path) -> None:
    code, _, stderr = start(tmp_path, "import no_such_module", 4).wait()
    assert code == 1
    assert stderr.count("ModuleNotFoundError") == 1
    assert "\nrank 0 of 4 failed with exit code 1; the others were stopped.\n" in stderr


def test_a_mistake_on_one_rank_is_shown_without_traceback(tmp_path: Path) -> None:
    script = """
        from cornstarch.errors import ConfigError
        print("some output")
        if rank == 1:
            raise ConfigError("no GPU here.\\n  Start fewer.")
        signal.pause()
    """
    launched = start(tmp_path, script, 2, grace=0.1, environment={"PYTHONPATH": str(ROOT)})
    code, _, stderr = launched.wait()
    assert code == 1
    assert stderr.splitlines() == [
        "rank 1 of 2 failed with exit code 1; the others were stopped.",
        "  ConfigError: no GPU here.",
        "    Start fewer.",
        f"Output: {launched.logs / 'rank_1.log'}",
    ]


def test_a_killed_process_is_named_with_the_usual_cause(tmp_path: Path) -> None:
    script = """
        print("its last line")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()
    """
    code, _, stderr = start(tmp_path, script, 3, grace=0.1).wait()
    assert code == 128 + signal.SIGKILL
    assert stderr.startswith("rank 1 of 3 was killed by SIGKILL; the others were stopped.\n  its last line\n")
    assert "ran out of memory" in stderr


def test_failures_are_reported_without_pidfd_open(tmp_path: Path) -> None:
    script = """
        if rank == 1:
            sys.exit(3)
        signal.pause()
    """
    code, _, stderr = start(tmp_path, script, 3, grace=0.1, before="del os.pidfd_open").wait()
    assert code == 3
    assert stderr.startswith("rank 1 of 3 failed with exit code 3")


CAUSES = [
    ("the earlier of two recorded errors", [WorkerExit(0, 1, 2.0, True), WorkerExit(1, 1, 1.0, True)], 1),
    ("the earlier of two exits", [WorkerExit(0, 1, 1.0), WorkerExit(1, 1, 2.0)], 0),
    ("a killed one, though seen later", [WorkerExit(0, 1, 1.0, True), WorkerExit(1, -signal.SIGKILL, 1.5)], 1),
    ("not one that NCCL aborted", [WorkerExit(0, -signal.SIGABRT, 1.5), WorkerExit(1, 1, 1.0, True)], 1),
    ("not a crash after an error", [WorkerExit(0, -signal.SIGSEGV, 1.5, True), WorkerExit(1, 1, 1.0, True)], 1),
]


@pytest.mark.parametrize(("ends", "cause"), [case[1:] for case in CAUSES], ids=[case[0] for case in CAUSES])
def test_the_cause_comes_first(ends: list[WorkerExit], cause: int) -> None:
    assert min(ends, key=lambda end: end.order).rank == cause


def test_the_children_of_a_killed_worker_end_too(tmp_path: Path) -> None:
    script = """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        publish(f"child_{rank}", str(child.pid))
        await_file("child_0"), await_file("child_1")
        if rank == 1:
            sys.exit(3)
        signal.pause()
    """
    assert start(tmp_path, script, 2, grace=0.1).wait()[0] == 3
    children = [int((tmp_path / f"child_{rank}").read_text()) for rank in (0, 1)]
    wait_until(lambda: all(map(is_gone, children)))


def test_a_missing_command_exits_with_127(tmp_path: Path) -> None:
    code = f"""
        from pathlib import Path
        from cornstarch.launch import launch
        raise SystemExit(launch(["/no/such/program"], 2, Path({str(tmp_path / "logs")!r})))
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 127
    assert "Cannot start /no/such/program: No such file or directory" in ran.stderr


# ---------------------------------------------------------------------------------------------------- signals

_READY = "publish(f'pid_{rank}', str(os.getpid()))"


def _ready(folder: Path, size: int) -> bool:
    return all((folder / f"pid_{rank}").exists() for rank in range(size))


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    script = f"""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        {_READY}
        signal.pause()
    """
    launched = start(tmp_path, script, 3)
    launched.until(lambda: _ready(tmp_path, 3))
    pids = [int((tmp_path / f"pid_{rank}").read_text()) for rank in range(3)]
    assert not any(map(is_gone, pids))
    launched.process.kill()
    wait_until(lambda: all(map(is_gone, pids)))
    assert launched.wait()[0] == -signal.SIGKILL


@pytest.mark.parametrize(
    ("number", "worker_code", "code"),
    [(signal.SIGTERM, 0, 0), (signal.SIGINT, 130, 130), (signal.SIGHUP, 143, 143), (signal.SIGTERM, 7, 7)],
)
def test_signals_are_forwarded_once(tmp_path: Path, number: signal.Signals, worker_code: int, code: int) -> None:
    script = f"""
        received = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: received.append(number))
        {_READY}
        until(lambda: received)
        publish(f"saved_{{rank}}", str(received))
        sys.exit({worker_code})
    """
    launched = start(tmp_path, script, 3)
    launched.until(lambda: _ready(tmp_path, 3))
    launched.process.send_signal(number)
    ended, _, stderr = launched.wait()
    assert ended == code
    assert (stderr == "") == (code != 7), stderr
    passed = signal.SIGTERM if number == signal.SIGHUP else number
    assert {(tmp_path / f"saved_{rank}").read_text() for rank in range(3)} == {str([int(passed)])}


def test_without_a_handler_a_signal_ends_all(tmp_path: Path) -> None:
    launched = start(tmp_path, f"{_READY}\nsignal.pause()", 2)
    launched.until(lambda: _ready(tmp_path, 2))
    launched.process.send_signal(signal.SIGTERM)
    assert launched.wait() == (143, "", "")


def test_the_third_signal_kills_all(tmp_path: Path) -> None:
    script = f"""
        signal.signal(signal.SIGINT, lambda *_: publish(f"got_{{rank}}_{{len(list(here.glob(f'got_{{rank}}_*')))}}"))
        {_READY}
        while True:
            signal.pause()
    """
    launched = start(tmp_path, script, 2)
    launched.until(lambda: _ready(tmp_path, 2))
    for count in range(3):
        launched.process.send_signal(signal.SIGINT)
        launched.until(
            lambda seen=count: (
                launched.process.poll() is not None
                or all((tmp_path / f"got_{rank}_{seen}").exists() for rank in (0, 1))
            )
        )
    assert launched.wait() == (130, "", "")


# ---------------------------------------------------------------------------------------------------- the port


def test_twenty_launches_at_once_never_share_a_port(tmp_path: Path) -> None:
    worker = """
        import os, socket, sys, time
        port = int(os.environ["MASTER_PORT"])
        if os.environ["RANK"] == "0":
            with socket.socket(fileno=int(os.environ["CORNSTARCH_STORE_SOCKET"])) as server:
                assert server.getsockname() == ("127.0.0.1", port)
                server.listen()
                with server.accept()[0] as connection:
                    connection.sendall(connection.recv(100))
            sys.exit()
        end = time.monotonic() + 120
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                assert time.monotonic() < end
                time.sleep(0.01)
        own = sys.argv[1].encode()
        connection.sendall(own)
        assert connection.recv(100) == own
    """
    (tmp_path / "worker.py").write_text(textwrap.dedent(worker))
    code = f"""
        import sys
        from concurrent.futures import ThreadPoolExecutor
        from pathlib import Path
        from cornstarch.launch import launch
        folder = Path({str(tmp_path)!r})
        command = [sys.executable, "-S", str(folder / "worker.py")]
        with ThreadPoolExecutor(20) as pool:
            print(list(pool.map(lambda k: launch([*command, str(k)], 2, folder / str(k)), range(20))))
    """
    started = [sys.executable, "-c", textwrap.dedent(code)]
    ran = subprocess.run(started, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert ran.stdout.strip() == str([0] * 20), ran.stderr


# ---------------------------------------------------------------------------------------------------- how many


def _console() -> Console:
    return Console(record=True, file=StringIO())


@pytest.mark.parametrize(
    ("nproc", "gpus", "expected", "said"),
    [
        (1, 0, 1, ""),
        ("2", 0, 2, ""),
        ("auto", 8, 8, ""),
        ("auto", 0, 1, "this machine has no GPU"),
    ],
)
def test_process_count(nproc: int | str, gpus: int, expected: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_launcher, "gpu_count", lambda: gpus)
    console = _console()
    assert process_count(nproc, console) == expected
    text = console.export_text()
    assert said in text if said else not text


@pytest.mark.parametrize("nproc", [0, -1, "many", "1.5", ""])
def test_an_invalid_number_of_processes_is_refused(nproc: int | str) -> None:
    with pytest.raises(ConfigError, match=f"nproc = {nproc}: expected"):
        process_count(nproc)


def test_launches_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="already rank 3 of 4, started.*Remove --nproc"):
        launch(["true"], 2, tmp_path / "logs", environment={"RANK": "3", "WORLD_SIZE": "4"})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file.logs: the folder for logs cannot be created: Not a directory"):
        launch(["true"], 2, tmp_path / "file" / "logs", console=_console())
    assert not (tmp_path / "logs").exists()
