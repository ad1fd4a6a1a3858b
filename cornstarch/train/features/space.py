"""A folder of many small files that together stay below a limit, whoever writes to it. No torch."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from cornstarch.errors import ConfigError

_LOCK, _USED = ".lock", ".used"
_UNFINISHED = ".tmp"
_ABANDONED = 3600.0  # seconds after which an unfinished file belongs to nobody
_EMPTIED_TO = 0.95  # of the limit: looking at every file takes a while, so it is not done for every new one


class Space:
    """The bytes that a folder's files may take.

    The sum of all files is in a file. One process at a time changes it, makes room, and gives a file its name; a file
    that is being written has its size from the beginning. A process that dies leaves the sum too large, never too
    small: it is counted anew whenever the folder is opened, or full.

    Files that were used least recently make room for others, but none that was used since the folder was opened: epochs
    go round in a circle, where what was used least recently is needed next.

    Args:
        folder: Made if it is not there.
        limit: Bytes.
        opened: When this run began to use the folder, in seconds since 1970. Default: now.
    """

    def __init__(self, folder: Path, limit: int, opened: float | None = None) -> None:
        self.folder, self.limit = folder, limit
        self._opened = time.time() if opened is None else opened
        self._is_full = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._alone():
                self._note(self._counted())
        except OSError as error:
            raise ConfigError(
                f"features.folder = {folder}\n  It cannot be written: {error.strerror}. Choose another folder."
            ) from error

    @property
    def used(self) -> int:
        """Bytes that are taken, or given to somebody who is writing."""
        try:
            return int((self.folder / _USED).read_text())
        except (OSError, ValueError):
            return self._counted()

    def write(self, path: Path, parts: Sequence[bytes | memoryview]) -> bool:
        """Write a file, at once or not at all; False: it was there already, or there is no room."""
        size = sum(len(part) for part in parts)
        if path.exists() or self._is_full or size > self.limit:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}{_UNFINISHED}")
        if not self._reserved(temporary, size):
            return False
        try:
            with open(temporary, "r+b") as file:
                for part in parts:
                    file.write(part)
            with self._alone():
                if not path.exists():  # no other process was faster
                    # Not synced: after a power cut a checksum tells that the file is damaged, and it is made again.
                    os.replace(temporary, path)
                    touch(path)
                    return True
        except OSError:
            self._give_back(temporary, size)
            raise
        self._give_back(temporary, size)
        return False

    # ------------------------------------------------------------------ room

    def _reserved(self, temporary: Path, size: int) -> bool:
        """Make an unfinished file of a size, so that whoever counts files counts it; older files are removed for it."""
        with self._alone():
            used = self.used
            if used + size > self.limit:
                used = self._emptied(size)
                self._is_full = used + size > self.limit
            if not self._is_full:
                with open(temporary, "xb") as file:
                    file.truncate(size)
                used += size
            self._note(used)
        return not self._is_full

    def _give_back(self, temporary: Path, size: int) -> None:
        with suppress(OSError), self._alone():
            temporary.unlink(missing_ok=True)
            self._note(max(self.used - size, 0))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with open(self.folder / _LOCK, "a+") as file:  # closing it unlocks it, and so does the end of the process
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _note(self, used: int) -> None:
        temporary = self.folder / f"{_USED}{_UNFINISHED}"
        temporary.write_text(str(used))
        os.replace(temporary, self.folder / _USED)

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield when each file was used last, its size, and where it is; remove what was left unfinished."""
        for parent, _, names in os.walk(self.folder):
            for name in names:
                path = Path(parent, name)
                if path.parent == self.folder:
                    continue
                try:
                    status = path.stat()
                    if name.endswith(_UNFINISHED) and time.time() - status.st_mtime > _ABANDONED:
                        path.unlink()
                        continue
                except OSError:  # somebody has removed it meanwhile
                    continue
                yield status.st_mtime, status.st_size, path

    def _counted(self) -> int:
        return sum(size for _, size, _ in self._files())

    def _emptied(self, size: int) -> int:
        """Remove what was used least recently until `size` fits with some to spare; return the bytes that are left."""
        files = sorted(self._files())
        used = sum(one for _, one, _ in files)
        for last, freed, path in files:
            if used + size <= self.limit * _EMPTIED_TO or last >= self._opened:
                break
            if path.name.endswith(_UNFINISHED):
                continue
            with suppress(OSError):  # who reads it just now goes on reading
                path.unlink(missing_ok=True)
                used -= freed
        return used


def touch(path: Path) -> None:
    """Note that a file is used now, by this machine's clock."""
    now = time.time()
    with suppress(OSError):
        os.utime(path, (now, now))
