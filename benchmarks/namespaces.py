"""Emulate a slow network on one machine: processes in their own network namespaces, connected by rate-limited links.

Every rank has a namespace with one interface, `wire`. Its other end is a port of a bridge in one more namespace. Both
ends send through a token bucket (`tc … tbf`): one limits what a rank sends, the other what it receives, as a cable
would. Counters and buckets see what the kernel hands to a network card: up to 64 KB with one header, which a card would
split into frames of 1,500 bytes with 4.6 % of headers. (Splitting here would take more CPU time than 1 Gbit/s allows.)

Requires Linux and root, with `ip` and `tc` (iproute2). Namespaces are removed when the block ends, also after an error.
The next program removes those of a program that was killed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

INTERFACE = "wire"
"""The one interface of a rank's namespace, besides its loopback."""
_PREFIX = "cornstarch"
_BURST = "128kb"  # burst size: two of the largest segments that the kernel sends
_QUEUE = "50ms"  # packets that wait longer are dropped, and TCP slows down
_PORT = 29500  # free: the namespaces are new


class Unable(Exception):
    """This machine does not support network namespaces; the message says why."""


class Network:
    """Namespaces of several ranks that reach only each other."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def environment(self, rank: int) -> Mapping[str, str]:
        """Return a rank's variables, as torchrun sets them."""
        return _environment(rank, len(self.names))

    def set_link(self, rank: int, state: str) -> None:
        """Cut a rank off (`down`), or connect it again (`up`)."""
        _call("ip", "-n", self.names[rank], "link", "set", INTERFACE, state)

    def run(self, command: Sequence[str], logs: Path, seconds: float) -> None:
        """Run a command in every namespace as torchrun does; one failure ends all and raises its last output."""
        logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            ranks = []
            for rank, name in enumerate(self.names):
                log = stack.enter_context((logs / f"rank_{rank}.log").open("wb"))
                ran = subprocess.Popen(
                    ["ip", "netns", "exec", name, *command],
                    env=_environment(rank, len(self.names)),
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stdout if rank == 0 else log,
                    stderr=log,
                )
                stack.callback(_end, ran)
                ranks.append(ran)
            failed = _wait(ranks, seconds)
        if failed is not None:
            words = (logs / f"rank_{failed}.log").read_text(errors="replace").splitlines()[-12:]
            raise RuntimeError(f"rank {failed} ended with {ranks[failed].returncode}:\n" + "\n".join(words))


def _environment(rank: int, size: int) -> Mapping[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": _address(0),
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
    }


def _wait(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> int | None:
    """Return the first rank that failed or timed out; None if all succeeded."""
    until = time.monotonic() + seconds
    while True:
        codes = [one.poll() for one in ranks]
        failed = next((number for number, code in enumerate(codes) if code), None)
        if failed is not None or None not in codes:
            return failed
        if time.monotonic() > until:
            return codes.index(None)
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


# ------------------------------------------------------------------------------------------------ making and removing


@contextmanager
def network(ranks: int, rate: str) -> Iterator[Network]:
    """Create a network for a block; `rate` applies to every link and direction, in `tc` format: 100mbit."""
    _check()
    _remove_forgotten()
    hub, *names = (f"{_PREFIX}-{os.getpid()}-{part}" for part in ("hub", *range(ranks)))
    with ExitStack() as stack, _signals_raise():
        for name in (hub, *names):
            _call("ip", "netns", "add", name)
            stack.callback(_call, "ip", "netns", "delete", name)
        _call("ip", "-n", hub, "link", "add", "bridge", "up", "type", "bridge")
        for rank, name in enumerate(names):
            _join(rank, name, hub, rate)
        yield Network(names)


def _join(rank: int, name: str, hub: str, rate: str) -> None:
    port = f"port{rank}"
    _call("ip", "-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", hub)
    for where, interface in ((name, INTERFACE), (hub, port)):
        limit = ("tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE)
        _call("tc", "-n", where, "qdisc", "add", "dev", interface, "root", *limit)
        _call("ip", "-n", where, "link", "set", interface, "up")
    _call("ip", "-n", hub, "link", "set", port, "master", "bridge")
    _call("ip", "-n", name, "address", "add", f"{_address(rank)}/24", "dev", INTERFACE)
    _call("ip", "-n", name, "link", "set", "lo", "up")


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def sent_bytes() -> int:
    """Return the bytes that this process's namespace has sent, including headers."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def _check() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Unable("network namespaces need Linux and root")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise Unable(f"{' and '.join(missing)} not found: install iproute2")


def _remove_forgotten() -> None:
    """Remove the namespaces of killed programs."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for name, owner in re.findall(rf"^({_PREFIX}-(\d+)-\w+)", listed, re.MULTILINE):
        if not Path(f"/proc/{owner}").exists():
            _call("ip", "netns", "delete", name)


def _call(*command: str) -> None:
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode != 0:
        raise Unable(f"`{' '.join(command)}` failed: {ran.stderr.strip()}")


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Raise an exception on SIGTERM, so that everything is removed."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
