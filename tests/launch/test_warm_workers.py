"""Workers of further attempts that are forked with imports done. Real processes and signals, no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.launch.launched_script import PRELUDE, ROOT, Launched, is_gone, wait_until
from tests.launch.test_supervisor import STEPS, lines

_SUPERVISOR = """
import sys
from pathlib import Path
from cornstarch.launch import local_launcher, warm_workers
from cornstarch.launch.run_director import Size, SizeRange
from cornstarch.launch.supervisor import Job, supervise

local_launcher.core_count = lambda: 64  # no warning about cores
warm_workers._PATIENCE = {patience}
command = (sys.executable, "-m", "worker", "--one", "two words")
sys.exit(supervise(Job(command, Path("run"), SizeRange.of(Size(1, 2)), {restarts})))
"""
# A package that is imported ahead, in the place of a heavy one. It says who imports it, and with which priority.
_PACKAGE = """
import os, threading
from pathlib import Path

nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
here = Path(__file__).parent / f"imported_{os.getpid()}"
here.with_suffix(".part").write_text(f"{nice} {'RANK' in os.environ}")
here.with_suffix(".part").rename(here)
"""
# Every attempt waits until the server of the next one has imported the package, and is ready.
_FIRST_STEPS = """
import peft

for step in (1, 2, 3):
    steps.write(step)
me = f"{attempt}_{rank}"
publish(f"imports_{me}", str((here / f"imported_{os.getpid()}").exists()))

def servers():
    # The processes that have imported the package to fork workers; workers are forked after that.
    found = []
    for one in [int(path.name.split("_")[1]) for path in here.glob("imported_*") if path.suffix != ".part"]:
        try:
            if b"cornstarch.launch.fork_server" in Path(f"/proc/{one}/cmdline").read_bytes():
                found.append(one)
        except OSError:
            pass
    return found

def await_server():
    # It reads requests in its only thread when it is ready.
    until(lambda: any(len(os.listdir(f"/proc/{one}/task")) == 1 for one in servers()))
"""


def start(folder: Path, script: str, restarts: int, package: str = _PACKAGE, patience: float = 60.0) -> Launched:
    """Start a supervisor of two workers that are a module, in a process of its own."""
    (folder / "worker.py").write_text(PRELUDE + STEPS + _FIRST_STEPS + textwrap.dedent(script))
    (folder / "peft.py").write_text(package)
    process = subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR.format(restarts=restarts, patience=patience)], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return Launched(process, folder / "run")


def imports(folder: Path, attempt: int) -> list[bool]:
    """Return which workers of an attempt have imported the package by themselves."""
    return [(folder / f"imports_{attempt}_{rank}").read_text() == "True" for rank in (0, 1)]


def test_further_attempts_are_forked_with_imports_done(tmp_path: Path) -> None:
    script = """
        if attempt < 2:
            if rank == attempt:
                await_server()
                publish(f"server_{attempt}", str(servers()))
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        facts = [os.getppid(), os.getpgid(0) == os.getpid(), os.getpriority(os.PRIO_PROCESS, 0), sys.argv[1:], __name__]
        publish(f"facts_{rank}", str(facts))
        print("output of", rank, os.environ["MASTER_PORT"].isdigit())
        print("error of", rank, file=sys.stderr)
        sys.exit(0 if attempt == 3 else 7)
    """
    run = start(tmp_path, script, 3)
    code, said, error = run.wait()
    assert code == 0, error
    assert [imports(tmp_path, attempt) for attempt in range(4)] == [[True, True], *[[False, False]] * 3]
    assert (tmp_path / "server_0").read_text() == (tmp_path / "server_1").read_text()  # one for all attempts
    (server,) = eval((tmp_path / "server_0").read_text())
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert (tmp_path / f"imported_{server}").read_text() == f"{min(own + 10, 19)} False"
    assert is_gone(server)
    for rank in (0, 1):  # as if the supervisor had started them
        facts = eval((tmp_path / f"facts_{rank}").read_text())
        assert facts == [run.process.pid, True, own, ["--one", "two words"], "__main__"]
    assert said.endswith("output of 0 True\n") and error.endswith("error of 0\n")
    assert "output of 1 True\nerror of 1\n" in (run.logs / "rank_1.log").read_text()
    assert "failed with exit code 7 in step 3" in error
    assert [line["step"] for line in lines(tmp_path)] == [3, 3, 3]


def test_a_killed_supervisor_leaves_neither_server_nor_forked_worker(tmp_path: Path) -> None:
    script = """
        if attempt == 0 and rank == 0:
            await_server()
            sys.exit(3)
        if attempt == 1:
            publish(f"server_{rank}", str(servers()))
        signal.pause()
    """
    run = start(tmp_path, script, 2)
    run.until(lambda: all((tmp_path / f"server_{rank}").exists() for rank in (0, 1)))
    (server,) = eval((tmp_path / "server_0").read_text())
    pids = [server, *(int((tmp_path / f"pid_1_{rank}").read_text()) for rank in (0, 1))]
    run.process.kill()
    wait_until(lambda: all(map(is_gone, pids)))
    run.wait()


KILLED = "os.kill(servers()[0], signal.SIGKILL)"
STOPPED = "os.kill(servers()[0], signal.SIGSTOP)"


@pytest.mark.parametrize("harm", [KILLED, STOPPED], ids=["killed", "stopped"])
def test_without_the_server_workers_import_by_themselves(tmp_path: Path, harm: str) -> None:
    script = f"""
        if attempt == 0:
            if rank == 1:
                await_server()
                {harm}
                sys.exit(3)
            signal.pause()
    """
    code, _, error = start(tmp_path, script, 2, patience=0.5).wait()
    assert code == 0, error
    assert imports(tmp_path, 1) == [True, True]


def test_after_a_library_has_touched_cuda_an_interpreter_is_started(tmp_path: Path) -> None:
    package = _PACKAGE + textwrap.dedent("""
        import sys, types

        if "RANK" not in os.environ:
            sys.modules["torch"] = types.ModuleType("torch")
            sys.modules["cornstarch.compat"] = compat = types.ModuleType("cornstarch.compat")
            compat.is_forked_after_cuda = lambda: True
    """)
    script = """
        if attempt == 0:
            if rank == 1:
                await_server()
                sys.exit(3)
            signal.pause()
        publish(f"facts_{rank}", str([os.getppid(), sys.argv[1:], "torch" in sys.modules]))
        assert rank or os.fstat(int(os.environ["CORNSTARCH_STORE_SOCKET"]))
        print("output of", rank)
    """
    run = start(tmp_path, script, 1, package)
    code, said, error = run.wait()
    assert code == 0, error
    assert imports(tmp_path, 1) == [True, True]
    for rank in (0, 1):
        assert eval((tmp_path / f"facts_{rank}").read_text()) == [run.process.pid, ["--one", "two words"], False]
    assert said == "output of 0\n" and "output of 1\n" in (run.logs / "rank_1.log").read_text()


def test_what_starts_a_thread_when_it_is_imported_is_not_forked(tmp_path: Path) -> None:
    package = _PACKAGE + "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    script = """
        if attempt == 0 and rank == 1:
            until(lambda: sum(path.suffix != ".part" for path in here.glob("imported_*")) == 3)
            until(lambda: not servers())
            sys.exit(3)
        if attempt == 0:
            signal.pause()
    """
    code, _, error = start(tmp_path, script, 2, package).wait()
    assert code == 0, error
    assert imports(tmp_path, 1) == [True, True]


def test_a_run_without_restarts_has_no_server(tmp_path: Path) -> None:
    script = """
        publish(f"asked_{rank}", str("CORNSTARCH_MODULES_FILE" in os.environ))
    """
    code, _, error = start(tmp_path, script, 0).wait()
    assert code == 0, error
    assert [(tmp_path / f"asked_{rank}").read_text() for rank in (0, 1)] == ["False", "False"]
