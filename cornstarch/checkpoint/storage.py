"""Storage backends: where the files of checkpoints are kept.

`CheckpointStore` and `Checkpoint` do all their input and output through a `Storage`, which is chosen by the scheme of
the folder: no scheme or `file://` is `LocalStorage`; s3, gs and other protocols of fsspec are `ObjectStorage`, unless
`register_storage` has added a backend for the scheme.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Protocol, TypeVar, runtime_checkable

from cornstarch.checkpoint.object_errors import redact
from cornstarch.errors import ConfigError
from cornstarch.files import sync

Chunks = Iterable[bytes | memoryview]
T = TypeVar("T")

MANIFEST = "checkpoint.json"
"""The file that makes a folder a checkpoint; it is written last."""

# `Path` makes s3:/bucket of s3://bucket; one letter is a drive, not a scheme.
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/+")


class Storage(Protocol):
    """The operations that checkpoints need; failures are `OSError`.

    A checkpoint is complete after `commit` and does not exist before: this is the only operation that has to be atomic.
    """

    def write(self, path: Path, chunks: Chunks) -> dict[str, Any]:
        """Write a new file durably; return its `size` and `sha256`, hashed on the way.

        The chunks may be iterated several times, and yield the same bytes each time.
        """

    def read(self, path: Path) -> bytes:
        """Return the content of a small file."""

    def open_local(self, path: Path) -> AbstractContextManager[Path]:
        """Return a local path, for as long as the block runs, through which safetensors can map the file."""

    def size(self, path: Path) -> int:
        """Return the size of a file in bytes."""

    def digest(self, path: Path) -> str:
        """Return the SHA-256 of the bytes that are stored now."""

    def confirm(self, path: Path) -> str:
        """Return the SHA-256 of a file that was just written here: read again, or vouched for by the storage."""

    def exists(self, path: Path) -> bool:
        """Return whether there is a file or a folder of that name."""

    def list_names(self, folder: Path) -> list[str]:
        """Return the names in a folder."""

    def make_folder(self, folder: Path) -> None:
        """Make a folder and its parents durably, unless it exists."""

    def flush(self, folder: Path) -> None:
        """Make the names in a folder durable."""

    def commit(self, source: Path, target: Path) -> None:
        """Give a folder its final name, atomically and durably."""

    def remove(self, folder: Path) -> None:
        """Remove a folder; it disappears as a whole, even if the process is killed."""

    def lock(self, folder: Path) -> AbstractContextManager[None]:
        """Keep other processes from saving in a folder until the block ends or this process dies."""

    def free_bytes(self, folder: Path) -> int:
        """Return the free space."""


@runtime_checkable
class RangeStorage(Protocol):
    """A storage that is far away, and of whose files single ranges can be read."""

    def read_range(self, path: Path, start: int, end: int) -> bytes:
        """Return some bytes of a file."""


class LocalStorage:
    """Folders of a local or shared POSIX file system."""

    def write(self, path: Path, chunks: Chunks) -> dict[str, Any]:
        digest, size = hashlib.sha256(), 0
        with open(path, "xb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        return {"size": size, "sha256": digest.hexdigest()}

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def open_local(self, path: Path) -> AbstractContextManager[Path]:
        return nullcontext(path)

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def digest(self, path: Path) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def confirm(self, path: Path) -> str:
        return self.digest(path)

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)

    def list_names(self, folder: Path) -> list[str]:
        return os.listdir(folder)

    def make_folder(self, folder: Path) -> None:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in missing:  # after a power failure the new names are still there
            sync(path.parent)

    def flush(self, folder: Path) -> None:
        sync(folder)

    def commit(self, source: Path, target: Path) -> None:
        os.rename(source, target)
        sync(target.parent)

    def remove(self, folder: Path) -> None:
        # Renamed first, so that nobody finds half a checkpoint. What a crash leaves is removed by the next save.
        doomed = folder.with_name(f"{folder.name.partition('.tmp.')[0]}.tmp.{secrets.token_hex(4)}")
        os.rename(folder, doomed)
        shutil.rmtree(doomed)

    @contextmanager
    def lock(self, folder: Path) -> Iterator[None]:
        with open(folder / ".lock", "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"Another process is saving checkpoints in {folder}. Give each run a folder of its own."
                ) from error
            except OSError:
                pass  # the file system has no locks: the user must not start two runs in one folder
            yield

    def free_bytes(self, folder: Path) -> int:
        return shutil.disk_usage(folder).free


_backends: dict[str, Callable[[], Storage]] = {"file": LocalStorage}
_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "memory")
"""Protocols that are known with one slash, too, as `Path` writes them."""
_NOT_STORES = ("local", "http", "https", "data", "reference", "simplecache", "blockcache", "filecache", "cached")
"""Protocols of fsspec that name no place to write objects to."""


def register_storage(scheme: str, backend: Callable[[], Storage]) -> None:
    """Use `backend()` for folders that begin with `scheme://`; it is given paths without the scheme."""
    if not _SCHEME.fullmatch(f"{scheme}://"):
        raise ConfigError(f"scheme = {scheme!r}; expected lower-case letters, such as s3.")
    _backends[scheme] = backend


def resolve_storage(folder: str | os.PathLike[str]) -> tuple[Storage, Path]:
    """Return the storage of a folder and the folder's path in it."""
    location = os.fspath(folder)
    found = _SCHEME.match(location)
    # A single slash without a known scheme is a local folder whose name has a colon.
    if found is None or ("://" not in location and found[1] not in (*_backends, *_OBJECT_STORES)):
        return LocalStorage(), Path(location)
    scheme, place = found[1], location[found.end() :]
    if scheme in _backends:
        return _backends[scheme](), Path("/" + place)
    from cornstarch.checkpoint.object_storage import ObjectStorage, list_protocols

    if scheme not in _OBJECT_STORES and (scheme in _NOT_STORES or scheme not in list_protocols()):
        known = sorted({*_backends, "gs", "memory", "s3"})
        raise ConfigError(
            f"{redact(location)}: no storage is registered for {scheme}://; there is {', '.join(known)}. "
            "Register one with cornstarch.checkpoint.register_storage."
        )
    if "@" in place.partition("/")[0] or "?" in place:
        raise ConfigError(
            f"{redact(location)}: a folder is `{scheme}://bucket/path`, without a user, a password or a query. "
            "Credentials are read from the environment."
        )
    if not place.strip("/"):
        raise ConfigError(f"{location}: expected a bucket, and a folder in it: {scheme}://bucket/path.")
    return ObjectStorage(scheme), Path(f"{scheme}:/{place}")  # messages name the store


def check_empty(folder: str) -> None:
    """Refuse to start a run over while a folder outside of the run's has checkpoints of it."""
    storage, path = resolve_storage(folder)
    if storage.exists(path) and any(name.startswith("step_") for name in storage.list_names(path)):
        raise ConfigError(
            f"--restart: {folder} (checkpoint.folder) has checkpoints of an earlier run, and only the run's own folder "
            "is moved aside. Remove them, or choose another folder."
        )


def run_in_threads(work: Callable[[str], T], names: Sequence[str], threads: int) -> dict[str, T]:
    """Return the results of `work` by name, computed in several threads; the first failure is raised."""
    # A ThreadPoolExecutor would not do: the interpreter shuts pools down before it waits for a background save.
    waiting: SimpleQueue[str] = SimpleQueue()
    for name in names:
        waiting.put(name)
    results: dict[str, T] = {}
    failures: list[BaseException] = []

    def run() -> None:
        while not failures:
            try:
                name = waiting.get_nowait()
            except Empty:
                return
            try:
                results[name] = work(name)
            except BaseException as error:
                failures.append(error)

    others = [Thread(target=run) for _ in range(min(threads, len(names)) - 1)]
    for thread in others:
        thread.start()
    run()
    for thread in others:
        thread.join()
    if failures:
        raise failures[0]
    return {name: results[name] for name in names}
