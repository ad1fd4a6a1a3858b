"""The interpreter that does not wait for torch does what any other does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

SCRIPT = """
import os, signal, sys
assert __name__ == "__main__" and os.environ["SAID"] == "this"
print(os.getcwd(), *sys.argv[1:], "torch" in sys.modules, flush=True)
if sys.argv[1] == "wait":
    signal.pause()
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "raise":
    raise ValueError("the cause")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script in a folder of its own."""
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def start(*arguments: str | Path, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [warm.interpreter(), *map(str, arguments)], cwd=folder, env={**os.environ, "SAID": "this"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize(("said", "code"), [("0", 0), ("3", 3), ("raise", 1), ("kill", -signal.SIGKILL)])
def test_a_script_ends_as_it_says(script: Path, said: str, code: int) -> None:
    process = start(script, said, folder=script.parent)
    out, error = process.communicate(timeout=100)
    assert (process.returncode, out) == (code, f"{script.parent} {said} True\n")
    assert ("ValueError: the cause" in error) == (said == "raise")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_it(script: Path, number: signal.Signals) -> None:
    process = start(script, "wait", folder=script.parent)
    assert process.stdout is not None and process.stdout.readline()  # it runs
    process.send_signal(number)
    out, _ = process.communicate(timeout=100)  # returns when what wrote to the pipe has ended, too
    assert (process.returncode, out) == (-number, "")


def test_modules_and_everything_else(tmp_path: Path) -> None:
    version = start("-m", "cornstarch", "--version", folder=tmp_path)
    assert version.communicate(timeout=100)[0].startswith("cornstarch") and version.returncode == 0
    plain = start("-c", "import sys; print(sys.executable, 'torch' in sys.modules)", folder=tmp_path)
    assert plain.communicate(timeout=100)[0] == f"{sys.executable} False\n"
