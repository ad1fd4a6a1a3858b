"""Compiled code of a rank, kept in a file for the next start: torch's portable cache artifacts.

torch compiles in a folder of the machine's own, which a new container does not have. After compilation the artifacts
are written to one file beside the run; the next start copies them into torch's folder before it compiles anything.
They are looked up there by what is compiled, for which device, and by which version, so a file that does not fit costs
time and nothing else. No failure here ends a run: it is reported once, and the run goes on without the cache.

Artifacts hold pickles and machine code, and a folder with runs may come from somebody else. So a file is signed with a
key of the user who wrote it, and read only by the same user, or from a folder that the user allows (`--allow-code`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from cornstarch.config.user_code import is_code_allowed, read_signing_key

LIMIT = 4 * 2**30
"""The most bytes that all files of a folder take; those that were not used for the longest time are deleted."""
_DIGEST = 32  # bytes of SHA-256 at the start of a file, and of the signature that follows
_SUFFIX, _UNFINISHED = ".artifacts", ".unfinished"
_SETTLED = 10  # steps without a compilation until the artifacts are written


class CompileCache:
    """The file with the compiled code of a rank.

    Args:
        folder: Where files are kept.
        key: What decides the code: ranks and runs with equal keys share a file.
        is_writer: Whether this rank writes the file; others with the same key only read it.
        log: Takes what is to be shown.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any], is_writer: bool, log: Callable[[str], None]) -> None:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
        self.file = folder / f"{digest[:20]}{_SUFFIX}"
        self._is_writer, self._log = is_writer, log
        self._stored: set[str] = set()  # the artifacts in the file
        self._saved, self._seen, self._seen_at = 0, 0, 0
        self._has_failed = False

    def load(self) -> int:
        """Give torch the artifacts of an earlier start; return how many there are."""
        try:
            content = self._read()
            if content is None:
                return 0
            info = torch.compiler.load_cache_artifacts(content)
            if info is None:
                raise ValueError("torch cannot read it")
            self._stored = {name for names in info.artifacts.values() for name in names}
            with suppress(OSError):  # when it was used
                os.utime(self.file)
        except Exception as error:  # a full disk, an odd file: torch raises whatever its caches raise
            self._report("read", error)
        else:
            self._log(f"compile cache: {len(self._stored)} artifacts of an earlier start from {self.file.parent}")
        return len(self._stored)

    def save_when_settled(self, compilations: int, step: int) -> None:
        """Write the artifacts when some steps have compiled nothing; `compilations` is their number so far."""
        if compilations != self._seen:
            self._seen, self._seen_at = compilations, step
        elif compilations != self._saved and step - self._seen_at >= _SETTLED:
            self.save(compilations)

    def save(self, compilations: int) -> None:
        """Write the artifacts of this process, if there are new ones since the last time."""
        if not self._is_writer or compilations == self._saved:
            return
        self._saved = compilations
        try:
            made = torch.compiler.save_cache_artifacts()
            if made is None:
                return
            content, info = made
            names = {name for names in info.artifacts.values() for name in names}
            if not names <= self._stored:
                self._write(content)
                self._stored = names
        except Exception as error:
            self._report("written", error)

    def _read(self) -> bytes | None:
        if not self.file.exists():
            return None
        written = self.file.read_bytes()
        digest, signature, content = written[:_DIGEST], written[_DIGEST : 2 * _DIGEST], written[2 * _DIGEST :]
        if hashlib.sha256(content).digest() != digest:
            raise ValueError("the file is damaged")
        folder = str(self.file.parent)
        if not (is_code_allowed(folder) or hmac.compare_digest(_sign(digest), signature)):
            raise PermissionError(f"another user or machine has written it; to run its code, add --allow-code {folder}")
        return content

    def _write(self, content: bytes) -> None:
        folder = self.file.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_room(2 * _DIGEST + len(content))
        # Two runs may write at the same time: each has a file of its own until it is complete.
        handle, name = tempfile.mkstemp(_UNFINISHED, self.file.stem, folder)
        try:
            with os.fdopen(handle, "wb") as file:
                digest = hashlib.sha256(content).digest()
                file.write(digest + _sign(digest) + content)
            os.replace(name, self.file)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise

    def _make_room(self, size: int) -> None:
        if size > LIMIT:
            raise ValueError(f"{size:,} bytes are more than all files together may take, {LIMIT:,}")
        found = []
        for path in self.file.parent.iterdir():
            if path.suffix in (_SUFFIX, _UNFINISHED) and path != self.file:
                with suppress(OSError):  # another run has deleted it
                    found.append((path.stat().st_mtime, path.stat().st_size, path))
        used = size + sum(one[1] for one in found)
        for _, length, path in sorted(found):
            if used <= LIMIT:
                break
            path.unlink(missing_ok=True)
            used -= length

    def _report(self, action: str, error: Exception) -> None:
        if not self._has_failed:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self._log(f"compile cache: {self.file} is not {action}: {reason}. Training goes on without it.")
        self._has_failed = True


def _sign(digest: bytes) -> bytes:
    """Return the user's signature of a digest; without a key, random bytes that no signature equals."""
    key = read_signing_key()
    return os.urandom(_DIGEST) if key is None else hmac.digest(key, digest, "sha256")
