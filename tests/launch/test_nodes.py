"""Supervisors of several machines, here of one: they start, end and restart together. Without torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from cornstarch.errors import ConfigError
from cornstarch.launch.node_messages import LineSocket, check_token, is_signature, make_nonce, parse_address, sign
from cornstarch.launch.nodes import NodeServer
from cornstarch.launch.run_director import Size, SizeRange
from cornstarch.launch.supervisor import Job
from tests.launch.launched_script import PRELUDE, ROOT, Launched
from tests.launch.test_supervisor import STEPS, lines, ready

_SUPERVISOR = """
import os, sys
from pathlib import Path
from cornstarch.launch import local_launcher, nodes
from cornstarch.launch.run_director import SizeRange
from cornstarch.launch.supervisor import Job, supervise

local_launcher.core_count = lambda: 64
nodes.JOIN_SECONDS = {join}
nodes.SETTLE_SECONDS = 0.2
size = SizeRange(({least}, 2), (1, 1))
job = Job((sys.executable, {script!r}), Path({run!r}), size, 3)
sys.exit(supervise(job, nodes.connect_nodes(job, {node}, "127.0.0.1", {port}, {token!r})))
"""


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody else is given; with SO_REUSEADDR it can be opened."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def start(folder: Path, script: str, node: int, port: int, join: float = 100.0, least: int = 2) -> Launched:
    """Start the supervisor of one of two machines, with one process."""
    (folder / "worker.py").write_text(PRELUDE + STEPS + textwrap.dedent(script))
    paths = {"script": str(folder / "worker.py"), "run": str(folder / "run")}
    code = _SUPERVISOR.format(**paths, node=node, port=port, token="", join=join, least=least)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    return Launched(process, folder / "run")


def test_a_failure_on_one_machine_restarts_all(tmp_path: Path, port: int) -> None:
    script = """
        steps.write(4)
        if attempt == 0:
            signal.pause()
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
        publish(f"variables_{rank}", " ".join(os.environ[name] for name in names))
    """
    runs = [start(tmp_path, script, node, port) for node in (1, 0)]  # the second is first, and waits
    for run in runs:
        run.until(lambda: ready(tmp_path, 0, 0, 1))
    os.kill(int((tmp_path / "pid_0_1").read_text()), signal.SIGKILL)
    ended = [run.wait() for run in runs]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert "rank 1 of 2 was killed by SIGKILL in step 4" in ended[0][2]
    assert all("rank 1 of 2 was killed by SIGKILL: restart 1 of 3" in error for _, _, error in ended)
    (failure,) = lines(tmp_path)
    assert (failure["rank"], failure["step"], failure["ranks"]) == (1, 4, 2)
    found = [(tmp_path / f"variables_{rank}").read_text().split() for rank in (0, 1)]
    assert [one[:5] for one in found] == [["0", "0", "2", "1", "0"], ["1", "0", "2", "1", "1"]]
    assert found[0][5:] == found[1][5:] and found[0][5] == "127.0.0.1"


def test_a_machine_that_is_lost_and_comes_back(tmp_path: Path, port: int) -> None:
    script = "publish('done') if attempt else signal.pause()"
    first, second = (start(tmp_path, script, node, port) for node in (0, 1))
    for run in (first, second):
        run.until(lambda: ready(tmp_path, 0, 0, 1))
    second.process.kill()
    second.wait()
    again = start(tmp_path, script, 1, port)
    assert again.wait()[0] == 0
    code, _, error = first.wait()
    assert code == 0 and "machine 1 is gone (the connection was closed): restart 1 of 3" in error


def test_machines_leave_and_join_an_elastic_run(tmp_path: Path, port: int) -> None:
    script = """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # it saves, and ends
        publish(f"size_{attempt}", str(size))
        until(lambda: size == 2 and attempt > 1)
    """
    first = start(tmp_path, script, 0, port, least=1)
    second = start(tmp_path, script, 1, port, least=1)
    first.until(lambda: any(ready(tmp_path, attempt, 0, 1) for attempt in (0, 1)))  # the second may arrive later
    began = 0 if ready(tmp_path, 0, 1) else 1
    second.process.kill()
    second.wait()
    first.until(lambda: ready(tmp_path, began + 1, 0))
    assert (tmp_path / f"size_{began + 1}").read_text() == "1"
    again = start(tmp_path, script, 1, port, least=1)
    assert again.wait()[0] == 0
    code, _, error = first.wait()
    assert code == 0, error
    assert "from the newest checkpoint with 1 instead of 2 processes" in error
    assert "goes on with 2 instead of 1 processes" in error


def test_the_first_machine_cannot_be_lost(tmp_path: Path, port: int) -> None:
    first, second = (start(tmp_path, "signal.pause()", node, port) for node in (0, 1))
    for run in (first, second):
        run.until(lambda: ready(tmp_path, 0, 0, 1))
    first.process.kill()
    code, _, error = second.wait()
    assert code == 1 and "The supervisor of the first machine is gone" in error and "Traceback" not in error
    first.wait()


def test_a_signal_to_one_machine_ends_all(tmp_path: Path, port: int) -> None:
    runs = [start(tmp_path, "signal.pause()", node, port) for node in (0, 1)]
    for run in runs:
        run.until(lambda: ready(tmp_path, 0, 0, 1))
    runs[1].process.send_signal(signal.SIGTERM)
    assert [run.wait()[0] for run in runs] == [143, 143]
    assert not ready(tmp_path, 1, 0)


def test_a_machine_that_does_not_arrive_is_named(tmp_path: Path, port: int) -> None:
    code, _, error = start(tmp_path, "", 0, port, join=0.5).wait()
    assert (code, error) == (1, "Machine 1 of 2 did not arrive within 0.5 s.\n")
    code, _, error = start(tmp_path, "", 1, port, join=0.5).wait()
    assert code == 1 and "could not be reached at 127.0.0.1" in error and "connection refused" in error


@pytest.fixture
def server(tmp_path: Path, port: int) -> Iterator[NodeServer]:
    job = Job(("true",), tmp_path, SizeRange.of(Size(2, 1)))
    found = NodeServer(job, "127.0.0.1", port, "secret")
    found.start()
    yield found
    found.close()


def greet(port: int, node: object, token: str) -> dict[str, object]:
    line = LineSocket(socket.create_connection(("127.0.0.1", port)))
    theirs = str(line.receive_one()["nonce"])
    line.send(node=node, nonce="mine", proof=sign(token, theirs, str(node)))
    answer = line.receive_one()
    line.close()
    return answer


@pytest.mark.parametrize(
    ("node", "token", "answer"),
    [(1, "wrong", "the token differs"), ("1", "secret", "the token differs"), (7, "secret", "machines 0 to 1")],
)
def test_strangers_are_refused(server: NodeServer, port: int, node: object, token: str, answer: str) -> None:
    assert answer in str(greet(port, node, token)["refused"])
    assert is_signature("secret", greet(port, 1, "secret")["welcome"], "mine", "server")  # and the server still serves


OTHERS = [b"GET / HTTP/1.0\r\n\r\n", b"[1]\n", b'{"node": 1}\n', b"\xff\n", b"[" * 99999 + b"\n"]


@pytest.mark.parametrize("sent", OTHERS)
def test_other_programs_do_no_harm(server: NodeServer, port: int, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(sent)
        assert b"welcome" not in connection.recv(1000) + connection.recv(1000)
    assert "welcome" in greet(port, 1, "secret")


def test_a_port_in_use_is_refused(server: NodeServer, tmp_path: Path, port: int) -> None:
    with pytest.raises(ConfigError, match="the port is in use"):
        NodeServer(Job(("true",), tmp_path, SizeRange.of(Size(2, 1))), "127.0.0.1", port, "")


def test_a_network_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="CORNSTARCH_TOKEN"):
        check_token("node-0", "")
    check_token("node-0", "secret")
    check_token("127.0.0.1", "")
    assert make_nonce() != make_nonce()


@pytest.mark.parametrize("master", ["node-0", "node-0:", ":29500", "node-0:x", "node-0:70000"])
def test_addresses(master: str) -> None:
    assert parse_address("node-0:29500") == ("node-0", 29500) and parse_address("[::1]:1") == ("::1", 1)
    with pytest.raises(ConfigError, match="--master"):
        parse_address(master)


def test_messages_survive_being_cut() -> None:
    ours, theirs = map(LineSocket, _connected())
    ours.connection.sendall(b'{"a": 1}\n{"b"')
    assert theirs.receive() == [{"a": 1}]
    ours.connection.sendall(b": 2}\n")
    assert theirs.receive() == [json.loads('{"b": 2}')]
    ours.close()
    with pytest.raises(ConnectionResetError):
        theirs.receive()
    theirs.close()


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        return ours, listening.accept()[0]
