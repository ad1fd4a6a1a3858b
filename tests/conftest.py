"""What holds for every test: no network, one thread, the same random numbers."""

from __future__ import annotations

import gc
import os

# Before anything imports transformers: it reads these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Functions that configs of tests may name, also in worker processes; a test adds its own with `allow_code`.
os.environ["CORNSTARCH_ALLOW_CODE"] = '["tests", "examples"]'

import ipaddress
import signal
import socket
from contextlib import suppress
from typing import Any

import pytest
import torch

with suppress(ImportError):  # a GPU machine may have what the GPU tests need and no more
    import hypothesis

    # How long an example takes depends on what else the machine does, and tests do not measure time.
    hypothesis.settings.register_profile("any machine", deadline=None)
    hypothesis.settings.load_profile("any machine")


def _is_local(address: Any) -> bool:
    """Say whether a socket address stays on this machine."""
    if not isinstance(address, tuple):  # a Unix socket's path
        return True
    host = str(address[0])
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("", "localhost", socket.gethostname())


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches for the network fails at once, on every machine alike."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if not _is_local(address):
            raise OSError(f"a test tried to reach {address!r}; tests run without a network")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(autouse=True)
def restore_allowed_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test allows (`allow_code`) is not allowed in the next."""
    monkeypatch.setenv("CORNSTARCH_ALLOW_CODE", os.environ["CORNSTARCH_ALLOW_CODE"])


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test starts from the same random numbers, in whatever order the tests run."""
    torch.manual_seed(0)


def pytest_configure() -> None:
    """One thread per worker: the tests run on several workers already. And signals as a terminal leaves them.

    `nohup` and jobs in the background ignore signals, and so would the commands that tests start and interrupt.
    """
    torch.set_num_threads(1)
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Set aside what has been imported: collecting garbage would look at all of it again and again."""
    gc.collect()
    gc.freeze()
