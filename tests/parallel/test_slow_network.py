"""The network of benchmarks/slow_network.py: namespaces that see one another, and are gone afterwards."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def namespaces(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs Linux, root and iproute2")
    module = loaded("namespaces", monkeypatch)
    try:
        with module.network(1, "1gbit"):
            pass
    except module.Unable as error:
        pytest.skip(f"this machine makes no such networks: {error}")
    return module


def own_namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"cornstarch-{os.getpid()}-")]


SEND = """
import os, socket, sys
sys.path.insert(0, {benchmarks!r})
from namespaces import sent_bytes
rank, there = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(there) as server:
        open({ready!r}, "w").close()
        with server.accept()[0] as other:
            got = sum(iter(lambda: len(other.recv(65536)), 0))
    assert got == 1000000, got
else:
    while not os.path.exists({ready!r}):
        os.sched_yield()
    before = sent_bytes()
    with socket.create_connection(there) as other:
        other.sendall(bytes(1000000))
        other.shutdown(socket.SHUT_WR)
        other.recv(1)
    assert 1000000 < sent_bytes() - before < 1500000, sent_bytes() - before  # some packets may go twice
"""


def test_ranks_reach_one_another_and_count_what_they_send(namespaces: ModuleType, tmp_path: Path) -> None:
    code = SEND.format(benchmarks=str(BENCHMARKS), ready=str(tmp_path / "ready"))
    with namespaces.network(2, "1gbit") as joined:
        assert len(own_namespaces()) == 3
        joined.run([sys.executable, "-c", code], tmp_path / "logs", 250)
    assert own_namespaces() == []


def test_failure_leaves_no_namespaces(namespaces: ModuleType, tmp_path: Path) -> None:
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('lost')\ntime.sleep(600)"
    with pytest.raises(RuntimeError, match=r"rank 1 ended with 1:\nlost"), namespaces.network(2, "1gbit") as joined:
        joined.run([sys.executable, "-c", code], tmp_path / "logs", 250)
    assert own_namespaces() == []


def test_namespaces_of_a_killed_program_are_removed(namespaces: ModuleType) -> None:
    over = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    forgotten = f"cornstarch-{over.stdout.strip()}-0"
    subprocess.run(["ip", "netns", "add", forgotten], check=True)
    with namespaces.network(1, "1gbit"):
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert forgotten not in listed


def way(name: str, seconds: float, steps: int, rate: str = "100mbit") -> dict[str, Any]:
    """Return what a way with even steps would have seen."""
    moments = [seconds * step for step in range(1, steps + 1)]
    return {
        "way": name, "words": name, "rate": rate, "ranks": 2, "numbers": 7, "steps": steps, "held_out": 2.0 * seconds,
        "moments": [moments], "worked": [moments], "sent": [list(range(steps + 1))], "formula": 1.0,
    }  # fmt: skip


def test_partial_measurements_are_merged_into_one_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    network, picture = loaded("slow_network", monkeypatch), loaded("slow_picture", monkeypatch)
    first, second, page = tmp_path / "first.json", tmp_path / "second.json", tmp_path / "page.md"
    network.keep(first, "ways", way("ddp", 1.0, 48))
    network.keep(first, "ways", way("int8", 0.9, 48))
    network.keep(second, "ways", {**way("int8", 0.5, 48), "load": [0.2, 2.1]})  # measured again
    network.keep(second, "ways", way("gossip", 1.0, 32))
    monkeypatch.setattr(sys, "argv", ["slow_picture.py", str(first), str(second), "--page", str(page)])
    assert picture.main() == 0
    rows = {row[1].strip(): [cell.strip() for cell in row[2:-1]] for row in map(split, page.read_text().splitlines())}
    assert rows["int8"][0] == "48" and rows["int8"][4] == "2.0 ×" and rows["int8"][-2:] == ["-50.00 %", "0 – 2"]
    assert rows["gossip"][0] == "32" and rows["gossip"][-2:] == ["", ""]  # its loss is that of fewer steps


def split(line: str) -> list[str]:
    return line.split("|") if line.startswith("|") else ["", "", ""]


def test_page_without_ddp_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network, picture = loaded("slow_network", monkeypatch), loaded("slow_picture", monkeypatch)
    network.keep(tmp_path / "one.json", "ways", way("int8", 0.5, 48))
    monkeypatch.setattr(sys, "argv", ["slow_picture.py", str(tmp_path / "one.json")])
    with pytest.raises(SystemExit):
        picture.main()
    assert "100mbit: all is compared with ddp" in capsys.readouterr().err


def test_figures_come_from_the_quickest_block(monkeypatch: pytest.MonkeyPatch) -> None:
    module = loaded("slow_network", monkeypatch)
    block, steps = module.BLOCK, 3 * module.BLOCK + 1
    # The first block is slow, the second quick, the third disturbed in one rank; 10 bytes a step, but 1,000 at first.
    quick = [1.0] * block + [0.1] * block + [0.2] * (block + 1)
    slow = [1.0] * block + [0.1] * block + [0.4] * (block + 1)
    sent = [0, *(1000 * min(step, block) + 10 * max(0, step - block) for step in range(1, steps + 1))]

    def sums(values: list[float]) -> list[float]:
        return [sum(values[: end + 1]) for end in range(len(values))]

    seen: dict[str, Any] = {
        "steps": steps, "moments": [sums(quick), sums(slow)], "worked": [sums(quick)] * 2, "sent": [sent, sent],
        "formula": 9.5, "held_out": 2.0,
    }  # fmt: skip
    found = module.figures_of(seen)
    assert found["step_ms"] == pytest.approx(100) and found["cpu_ms"] == pytest.approx(100)
    assert found["median_ms"] == pytest.approx(250)  # of 100 and 400
    assert found["bytes"] == pytest.approx(10) and found["formula"] == 9.5
    assert found["mean_ms"] == pytest.approx(1000 * sum(slow) / steps)
