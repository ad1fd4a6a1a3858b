"""Locks in object stores: an object that says who writes, renewed while that process lives.

A process that is killed leaves its lock. On the same machine the next one sees that it has ended. From another machine
it waits until the lock was not renewed for `EXPIRY` seconds by its own clock: clocks of machines are never compared.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import psutil

from cornstarch.checkpoint.object_errors import redact
from cornstarch.errors import ConfigError

RENEWAL = 10.0
"""Seconds between two renewals of a lock."""
EXPIRY = 30.0
"""Seconds without a renewal after which the owner of a lock is taken to have ended."""
_POLL = 0.5

_held: dict[str, Path] = {}
"""The locks that this process holds, by token."""


class LockStore(Protocol):
    """What a lock needs of a store."""

    def put_new(self, path: Path, content: bytes) -> bool: ...

    def put(self, path: Path, content: bytes) -> None: ...

    def read(self, path: Path) -> bytes: ...

    def delete(self, path: Path) -> None: ...


@contextmanager
def hold_lock(store: LockStore, path: Path) -> Iterator[None]:
    """Hold a lock while the block runs; raise ConfigError if a living process has it."""
    token = secrets.token_hex(8)
    _held[token] = path
    ended = threading.Event()
    renewing = threading.Thread(target=_renew, args=(store, path, token, ended), daemon=True, name="cornstarch lock")
    try:
        _acquire(store, path, token)
        renewing.start()
        yield
    finally:
        ended.set()
        if renewing.ident is not None:
            renewing.join()
        _held.pop(token, None)
        with suppress(OSError):  # a lock that stays is seen to be nobody's
            if _read(store, path).get("token") == token:
                store.delete(path)


def _acquire(store: LockStore, path: Path, token: str) -> None:
    while not store.put_new(path, _encode(token, 0)):
        found = _read(store, path)
        if found and not _is_abandoned(found):
            _wait_for_silence(store, path, found)
        # Two may find the same lock abandoned: the one that deletes later would delete the other's new lock.
        if _read(store, path).get("token") == found.get("token"):
            store.delete(path)


def _wait_for_silence(store: LockStore, path: Path, found: dict[str, Any]) -> None:
    """Return when nothing has renewed a lock for long enough; raise ConfigError when something does."""
    is_here = found.get("machine") == _describe_machine()
    end = time.monotonic() + EXPIRY
    while not is_here and time.monotonic() < end:
        time.sleep(_POLL)
        now = _read(store, path)
        if not now:
            return
        if now != found:
            break
    else:
        if not is_here:
            return
    where = f"process {found.get('process')} on {found.get('host')}"
    raise ConfigError(
        f"Another process is saving checkpoints in {redact(str(path.parent))} ({where}). Give each run a folder of "
        "its own."
    )


def _renew(store: LockStore, path: Path, token: str, ended: threading.Event) -> None:
    count = 0
    while not ended.wait(RENEWAL):
        count += 1
        with suppress(OSError):  # the store is away for a moment; saving meets the same trouble
            if _read(store, path).get("token") != token:
                return  # given up by another process: it is that one's lock now
            store.put(path, _encode(token, count))


def check_held(store: LockStore, path: Path) -> None:
    """Refuse to go on if a lock of this process was taken over, because nothing had renewed it for too long."""
    if path not in _held.values():
        return
    found = _read(store, path)
    if found and found.get("token") not in _held:
        raise ConfigError(
            f"{redact(str(path.parent))} was taken over by process {found.get('process')} on {found.get('host')} while "
            "this one did not answer. Give each run a folder of its own."
        )


def _read(store: LockStore, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(store.read(path))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _encode(token: str, count: int) -> bytes:
    own = psutil.Process()
    return json.dumps(
        {
            "token": token,
            "renewals": count,
            "host": socket.gethostname(),
            "machine": _describe_machine(),
            "process": own.pid,
            "started": own.create_time(),
        }
    ).encode()


def _describe_machine() -> str:
    """Return a name of this machine's process numbers, which other machines and containers do not have."""
    parts = []
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts) or socket.gethostname()


def _is_abandoned(found: dict[str, Any]) -> bool:
    """Return whether the owner of a lock has ended on this machine."""
    if found.get("machine") != _describe_machine():
        return False
    process, started = found.get("process"), found.get("started")
    if process == os.getpid():
        return found.get("token") not in _held
    try:
        return not isinstance(process, int) or psutil.Process(process).create_time() != started
    except psutil.Error:
        return True
