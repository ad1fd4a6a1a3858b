"""The places of the rows of a JSON list: found by one scan of the bytes, and kept on the disk for later starts.

The rows of a list stand between separators: its opening bracket, the commas at depth 1, its closing bracket. Nothing is
parsed: NumPy finds quotes, backslashes, brackets and commas, and drops those that stand in strings. No torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cornstarch.errors import ConfigError
from cornstarch.files import replace_file

_VERSION = 1  # of the stored index
_CHUNK = 1 << 23  # bytes that are scanned at once
_STORED_FROM = 1 << 25  # bytes of a file: smaller ones are scanned in a moment
_LISTED = 40  # characters of a file in a message

_QUOTE, _ESCAPE, _OPEN, _CLOSE, _COMMA = 1, 2, 3, 4, 5
_KINDS = np.zeros(256, np.uint8)
for _characters, _kind in ((b'"', _QUOTE), (b"\\", _ESCAPE), (b"[{", _OPEN), (b"]}", _CLOSE), (b",", _COMMA)):
    _KINDS[list(_characters)] = _kind


def read_separators(path: Path) -> np.ndarray:
    """Return the byte offsets of the separators of a JSON list, one more than it has rows.

    The index of a large file is stored in the user's cache folder, by path, size and time of the file. Of several
    processes on a node one scans the file; the others wait for it and then map the same index into memory.
    """
    try:
        status = os.stat(path)
        if status.st_size < _STORED_FROM:
            return scan_separators(path)
        store = _IndexFile.of(path, status)
        if (found := store.load()) is not None:
            return found
        with store.lock() as may_store:
            found = store.load()  # by another process, while this one waited
            if found is None:
                found = scan_separators(path)
                if may_store:
                    store.save(found)
            return found
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


@dataclass(frozen=True)
class _IndexFile:
    """The stored index of one file: separators, and a checksum as the last number."""

    folder: Path
    owner: str  # a digest of the path
    name: str
    size: int  # of the indexed file

    @classmethod
    def of(cls, path: Path, status: os.stat_result) -> _IndexFile:
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        owner = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:24]
        state = f"{_VERSION} {status.st_size} {status.st_mtime_ns}"
        state = hashlib.sha256(state.encode()).hexdigest()[:16]
        return cls(Path(root) / "cornstarch" / "json_index", owner, f"{owner}-{state}.npy", status.st_size)

    def load(self) -> np.ndarray | None:
        """Return the stored separators; None if there are none, or damaged ones."""
        try:
            stored = np.load(self.folder / self.name, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        if stored.ndim != 1 or stored.dtype != np.int64 or len(stored) < 3:
            return None
        separators = stored[:-1]
        is_whole = stored[-1] == zlib.crc32(separators.tobytes()) and separators[0] >= 0 and separators[-1] < self.size
        return separators if is_whole else None

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Let one process at a time scan; yields whether the index can be stored."""
        with ExitStack() as held:
            may_store = True
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                fcntl.flock(held.enter_context((self.folder / f"{self.owner}.lock").open("ab")), fcntl.LOCK_EX)
            except OSError:  # a folder that cannot be written, or has no locks: each process scans for itself
                may_store = False
            yield may_store

    def save(self, separators: np.ndarray) -> None:
        """Store separators in place of those of earlier states of the file. A full disk is no reason to stop."""
        stored = np.append(separators, zlib.crc32(separators.tobytes())).astype(np.int64)
        content = io.BytesIO()
        np.save(content, stored, allow_pickle=False)
        try:
            replace_file(self.folder / self.name, content.getvalue())
            for old in self.folder.glob(f"{self.owner}-*.npy"):
                if old.name != self.name:
                    old.unlink(missing_ok=True)
        except OSError:
            return


def scan_separators(path: Path) -> np.ndarray:
    """Return the byte offsets of the separators of a JSON list; ConfigError, with a line, if it is not closed."""
    scan = _Scan(path)
    with open(path, "rb") as file:
        rest = b""
        while chunk := file.read(_CHUNK):
            # An escape and the character that it belongs to stay together.
            chunk = rest + chunk
            kept = len(chunk.rstrip(b"\\"))
            chunk, rest = chunk[:kept], chunk[kept:]
            scan.add(np.frombuffer(chunk, np.uint8))
        scan.add(np.frombuffer(rest, np.uint8))
    return scan.finish()


@dataclass
class _Scan:
    """A scan of a file, chunk by chunk."""

    path: Path
    position: int = 0  # bytes scanned
    depth: int = 0  # open brackets
    in_string: bool = False
    is_closed: bool = False
    found: list[np.ndarray] = field(default_factory=list)

    def add(self, chunk: np.ndarray) -> None:
        if not len(chunk):
            return
        if self.is_closed:
            self._refuse_rest(chunk, 0)
            self.position += len(chunk)
            return
        kinds = _KINDS[chunk]
        places = np.flatnonzero(kinds)
        kinds = kinds[places]
        # A character after an odd number of backslashes is escaped: none of those is a separator or ends a string.
        escapes = places[kinds == _ESCAPE]
        if len(escapes):
            is_last = np.append(np.diff(escapes) != 1, True)
            lasts = np.flatnonzero(is_last)
            lengths = np.diff(np.concatenate([[-1], lasts]))
            escaped = escapes[lasts[lengths % 2 == 1]] + 1
            own = ~np.isin(places, escaped, assume_unique=True) & (kinds != _ESCAPE)
            places, kinds = places[own], kinds[own]
        is_quote = kinds == _QUOTE
        inside = (np.cumsum(is_quote) + self.in_string) % 2 == 1
        if len(inside):
            self.in_string = bool(inside[-1])
        outside = ~inside & ~is_quote
        places, kinds = places[outside], kinds[outside]
        steps = (kinds == _OPEN).astype(np.int64) - (kinds == _CLOSE)
        depths = self.depth + np.cumsum(steps)
        if not self.found and len(places):
            self.found.append(places[:1] + self.position)  # the opening bracket of the list
        closing = np.flatnonzero((depths <= 0) & (kinds == _CLOSE))
        if len(closing):
            end = closing[0]
            self._refuse_rest(chunk, int(places[end]) + 1)
            places, kinds, depths = places[: end + 1], kinds[: end + 1], depths[: end + 1]
            self.is_closed = True
        is_separator = ((kinds == _COMMA) & (depths == 1)) | ((kinds == _CLOSE) & (depths == 0))
        if len(places):
            self.found.append(places[is_separator] + self.position)
            self.depth = int(depths[-1])
        self.position += len(chunk)

    def _refuse_rest(self, chunk: np.ndarray, start: int) -> None:
        rest = chunk[start:].tobytes()
        if rest.strip():
            at = self.position + start + len(rest) - len(rest.lstrip())
            shown = rest.lstrip()[:_LISTED].decode(errors="replace")
            raise ConfigError(
                f"{self.path}:{_line_of(self.path, at)} is no JSON: after the end of its list, at byte {at:,}, stands "
                f"{shown!r}. Expected one list."
            )

    def finish(self) -> np.ndarray:
        if not self.is_closed:
            where = "inside a text" if self.in_string else f"with {self.depth} open brackets"
            raise ConfigError(
                f"{self.path}:{_line_of(self.path, self.position)} is no JSON: the file ends at byte {self.position:,} "
                f"{where}; expected the ']' of its list. Is it cut off? Copy or download it again."
            )
        separators = np.concatenate(self.found)
        with open(self.path, "rb") as file:
            file.seek(int(separators[-2]) + 1)
            *last, closing = file.read(int(separators[-1] - separators[-2]))
        if closing != ord("]"):
            line = _line_of(self.path, int(separators[-1]))
            raise ConfigError(f"{self.path}:{line} is no JSON: {chr(closing)!r} ends its list; expected ']'.")
        if not bytes(last).strip():
            if len(separators) == 2:
                raise ConfigError(f"{self.path} is empty: it holds a list without rows.")
            line = _line_of(self.path, int(separators[-2]))
            raise ConfigError(f"{self.path}:{line} is no JSON: a comma stands before the end of its list. Remove it.")
        return separators


def _line_of(path: Path, position: int) -> int:
    """Return the number of the line of a byte, counted from 1."""
    lines = 1
    with open(path, "rb") as file:
        while position > 0 and (chunk := file.read(min(_CHUNK, position))):
            lines += chunk.count(b"\n")
            position -= len(chunk)
    return lines
