"""Checkpoints in object stores, through fsspec: `s3://`, `gs://`, `memory://`, and other protocols that it knows.

An object store has no rename, no locks and no folders. What `Storage` promises is kept in another way:

    step_00000100/                      the files of a checkpoint, under their final names from the start
    step_00000100/checkpoint.json       the manifest, put last: without it nobody sees the other files
    step_00000100.tmp.1f3a/.begun       there while a save is unfinished; what it left is removed by the next save
    step_00000100.tmp.1f3a/checkpoint.json    the manifest until it is committed
    .lock                               who saves here, and since when (`object_lock.py`)

New objects are put on the condition that there is none of that name, where the store has such a condition, so that a
process that was given up cannot write into the checkpoint of another one.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import tempfile
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from cornstarch.checkpoint.object_errors import StorageError, explain_refusal, is_taken, is_transient, redact, refuse
from cornstarch.checkpoint.object_lock import check_held, hold_lock
from cornstarch.checkpoint.storage import MANIFEST, Chunks
from cornstarch.errors import ConfigError

T = TypeVar("T")

PART_BYTES = 2**25
"""Larger files are uploaded in parts of this size, and read in ranges of it."""
ATTEMPTS = 6
FIRST_DELAY = 0.5  # seconds; doubled for each attempt
MAX_DELAY = 30.0

_BEGUN, _LOCK = ".begun", ".lock"
_TEMPORARY = re.compile(r"(.+)\.tmp\.[0-9a-f]+")
_ORPHANED = ".tmp.0"
"""The end of the name under which files without a manifest are listed."""
_ATOMIC = ("s3", "s3a", "gs", "gcs", "az", "abfs")
"""Stores in which nobody sees an unfinished upload."""
_PACKAGES = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


def list_protocols() -> set[str]:
    """Return the protocols of fsspec, also those whose package is not installed."""
    import fsspec

    return {*fsspec.available_protocols(), *fsspec.registry}  # the second: those that were registered in Python


class ObjectStorage:
    """The objects under a URL of a protocol of fsspec; endpoints and credentials come from the environment."""

    def __init__(self, protocol: str) -> None:
        self.protocol = protocol
        self._proven: dict[str, str] = {}

    @cached_property
    def client(self) -> Any:
        """The file system of fsspec."""
        import fsspec

        try:
            # Other processes write, too: a listing is asked for each time.
            return fsspec.filesystem(self.protocol, use_listings_cache=False)
        except ImportError as error:
            extra = _PACKAGES.get(self.protocol)
            install = f"pip install 'cornstarch[{extra}]'" if extra else "install it"
            raise ConfigError(f"{self.protocol}:// needs another package ({error}): {install}.") from error

    # ------------------------------------------------------------------------------------------------ files

    def write(self, path: Path, chunks: Chunks) -> dict[str, Any]:
        key = self._key(path)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                written, etags = self._upload(key, chunks)
                break
            except Exception as error:
                if is_taken(error) and attempt > 1:
                    # An earlier attempt may have arrived although its answer was lost.
                    written, etags = _describe_content(chunks), set()
                    if self.digest(path) == written["sha256"]:
                        break
                self._wait_or_raise("put", path, error, attempt)
        found = self._retry("look at", path, lambda: self.client.info(key))
        if found["size"] != written["size"]:
            raise StorageError(
                f"{self._url(path)} has {found['size']} bytes, but {written['size']} were put. Check the store."
            )
        if path.name != MANIFEST and etags & _list_etags(found):  # a manifest is read back in any case
            self._proven[key] = written["sha256"]
        return written

    def _upload(self, key: str, chunks: Chunks) -> tuple[dict[str, Any], set[str]]:
        """Put an object, in parts if it is large; return what was written and the ETags that would prove it."""
        parts = _cut_into_parts(chunks)
        digest, size = hashlib.sha256(), 0
        first = next(parts, b"")
        following = next(parts, None)
        if following is None:
            content = bytes(first)
            self.client.pipe_file(key, content, mode="create")
            return _describe_content([content]), {hashlib.md5(content, usedforsecurity=False).hexdigest()}
        sums = b""
        whole = hashlib.md5(usedforsecurity=False)
        file: Any = None
        try:
            file = self.client.open(key, "xb", block_size=PART_BYTES, autocommit=False)
            part: bytes | bytearray | None = first
            while part is not None:
                file.write(part)
                digest.update(part)
                whole.update(part)
                sums += hashlib.md5(part, usedforsecurity=False).digest()
                size += len(part)
                part, following = following, next(parts, None)
            file.close()
            file.commit()
        except BaseException as error:
            with suppress(Exception):
                if file is not None:
                    file.discard()  # aborts the upload
                    file.closed = True  # closing would put what there is
                if self.protocol not in _ATOMIC and not is_taken(error):
                    self.client.rm_file(key)
            raise
        joined = hashlib.md5(sums, usedforsecurity=False).hexdigest()
        return {"size": size, "sha256": digest.hexdigest()}, {f"{joined}-{len(sums) // 16}", whole.hexdigest()}

    def read(self, path: Path) -> bytes:
        content: bytes = self._retry("read", path, lambda: self.client.cat_file(self._key(path)))
        return content

    def read_range(self, path: Path, start: int, end: int) -> bytes:
        """Return some bytes of a file."""
        content: bytes = self._retry("read", path, lambda: self.client.cat_file(self._key(path), start=start, end=end))
        return content

    def _read_ranges(self, path: Path) -> Iterator[bytes]:
        size = self.size(path)
        for start in range(0, size, PART_BYTES):
            end = min(size, start + PART_BYTES)
            content = self.read_range(path, start, end)
            if len(content) != end - start:
                raise StorageError(f"{self._url(path)}: {end - start} bytes were asked for, {len(content)} came.")
            yield content

    @contextmanager
    def open_local(self, path: Path) -> Iterator[Path]:
        size = self.size(path)
        with tempfile.TemporaryDirectory(prefix="cornstarch-download-") as folder:
            free = shutil.disk_usage(folder).free
            if size > free:
                raise StorageError(
                    f"{self._url(path)} has {size / 1e9:.3f} GB, and {free / 1e9:.3f} GB are free in "
                    f"{Path(folder).parent}, where it is copied to be read. Set TMPDIR to a larger folder."
                )  # fmt: skip
            local = Path(folder) / path.name
            with open(local, "xb") as file:
                for content in self._read_ranges(path):
                    file.write(content)
            yield local

    def size(self, path: Path) -> int:
        return int(self._retry("look at", path, lambda: self.client.info(self._key(path)))["size"])

    def digest(self, path: Path) -> str:
        digest = hashlib.sha256()
        for content in self._read_ranges(path):
            digest.update(content)
        return digest.hexdigest()

    def confirm(self, path: Path) -> str:
        # The store's own checksum of what has arrived proves as much as a download, which may be paid for.
        return self._proven.pop(self._key(path), None) or self.digest(path)

    # ------------------------------------------------------------------------------------------------ folders

    def exists(self, path: Path) -> bool:
        key = self._key(path / _BEGUN) if _TEMPORARY.fullmatch(path.name) else self._key(path)
        return self._find(path, key)

    def _find(self, path: Path, key: str) -> bool:
        def ask() -> bool:
            try:
                self.client.info(key)
            except FileNotFoundError:
                return False
            return True

        return self._retry("look at", path, ask)

    def list_names(self, folder: Path) -> list[str]:
        keys = self._list_keys(folder)
        if not keys:
            raise FileNotFoundError(f"{self._url(folder)} is empty.")
        names, committed, begun = set(), set(), set()
        for key in keys:
            name, _, rest = key.partition("/")
            if not rest:
                names.add(name)
            elif _TEMPORARY.fullmatch(name):
                names.add(name)
                begun.add(name.partition(".tmp.")[0])
            elif key.endswith(f"/{MANIFEST}"):
                committed.add(name)
        folders = {key.partition("/")[0] for key in keys if "/" in key} - names
        # What a killed save or removal has left is no checkpoint; it is listed as what the next save removes.
        orphans = {f"{name}{_ORPHANED}" for name in folders - committed - begun}
        return sorted(names | committed | orphans)

    def _list_keys(self, folder: Path) -> list[str]:
        """Return the names of all objects below a folder, relative to it."""
        prefix = "/".join(folder.parts[1:])

        def ask() -> list[str]:
            try:
                found = self.client.find(prefix)
            except FileNotFoundError:
                return []
            return [str(key).lstrip("/").removeprefix(prefix.lstrip("/") + "/") for key in found]

        return [key for key in self._retry("list", folder, ask) if key]

    def make_folder(self, folder: Path) -> None:
        for temporary in (one for one in (folder, *folder.parents) if _TEMPORARY.fullmatch(one.name)):
            self.put(temporary / _BEGUN, json.dumps({"begun": time.time()}).encode())

    def flush(self, folder: Path) -> None:
        pass

    def commit(self, source: Path, target: Path) -> None:
        check_held(self, target.parent / _LOCK)
        manifests = [key for key in self._list_keys(source) if key != _BEGUN]
        for name in manifests:
            content = self.read(source / name)
            self.write(target / name, [content])
            if self.read(target / name) != content:
                raise StorageError(f"{self._url(target / name)} has other bytes than were put. Check the store.")
        for name in (*manifests, _BEGUN):
            # The checkpoint is complete. What is left of the save is removed by the next one.
            with suppress(OSError):
                self._delete(source / name)

    def remove(self, folder: Path) -> None:
        match = _TEMPORARY.fullmatch(folder.name)
        if match is None:
            files = self._list_keys(folder)
            for name in sorted(files, key=lambda name: not name.endswith(MANIFEST)):  # without it nobody sees the rest
                self._delete(folder / name)
            return
        # The files of the save, unless they are a checkpoint by now, or another save has removed them and begun anew.
        final = folder.with_name(match[1])
        begun = self._list_keys(folder)
        files = self._list_keys(final)
        is_committed = any(name.endswith(MANIFEST) for name in files)
        if not is_committed and (_BEGUN in begun or folder.name.endswith(_ORPHANED)):
            self._abort_uploads(final)
            for name in files:
                self._delete(final / name)
        for name in sorted(begun, key=lambda name: name == _BEGUN):  # last: until then a killed removal is repeated
            self._delete(folder / name)

    def _delete(self, path: Path) -> None:
        def ask() -> None:
            with suppress(FileNotFoundError):
                self.client.rm_file(self._key(path))

        self._retry("delete", path, ask)

    def _abort_uploads(self, folder: Path) -> None:
        """Abort the unfinished uploads of a killed save, which cost money and cannot be seen."""
        if not hasattr(self.client, "call_s3"):
            return  # the others forget them by themselves
        bucket, _, prefix = self._key(folder).partition("/")

        def ask() -> None:
            found = self.client.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
            for upload in found.get("Uploads", ()):
                key, number = upload["Key"], upload["UploadId"]
                self.client.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=number)

        self._retry("abort uploads to", folder, ask)

    def lock(self, folder: Path) -> AbstractContextManager[None]:
        return hold_lock(self, folder / _LOCK)

    def free_bytes(self, folder: Path) -> int:
        raise OSError("an object store has no limit that can be asked for")

    # ------------------------------------------------------------------------------------------------ requests

    def put_new(self, path: Path, content: bytes) -> bool:
        """Put a small object unless there is one of that name; return whether it was put."""
        try:
            self._retry("put", path, lambda: self.client.pipe_file(self._key(path), content, mode="create"))
        except FileExistsError:
            return self.read(path) == content  # an answer was lost, and the request repeated
        return True

    def put(self, path: Path, content: bytes) -> None:
        """Put a small object, whether or not there is one of that name."""
        self._retry("put", path, lambda: self.client.pipe_file(self._key(path), content))

    def delete(self, path: Path) -> None:
        """Delete an object, if there is one."""
        self._delete(path)

    def _key(self, path: Path) -> str:
        """Return the key of a file; files of an unfinished save have their final one, except for its manifest."""
        names = list(path.parts[1:])
        if path.name not in (MANIFEST, _BEGUN):
            names = [match[1] if (match := _TEMPORARY.fullmatch(name)) else name for name in names]
        return "/".join(names)

    def _url(self, path: Path) -> str:
        return redact(f"{self.protocol}://{self._key(path)}")

    def _retry(self, what: str, path: Path, ask: Callable[[], T]) -> T:
        """Return the answer to a request, which is repeated while the store is busy or cannot be reached."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return ask()
            except Exception as error:
                self._wait_or_raise(what, path, error, attempt)
        raise AssertionError

    def _wait_or_raise(self, what: str, path: Path, error: Exception, attempt: int) -> None:
        if isinstance(error, (ConfigError, StorageError)):
            raise error
        if is_transient(error) and attempt < ATTEMPTS:
            # Jitter: all ranks were refused at once, and must not come back at once.
            time.sleep(min(MAX_DELAY, FIRST_DELAY * 2 ** (attempt - 1)) * random.uniform(0.5, 1.5))
            return
        tried = f" in {attempt} attempts" if attempt > 1 else ""
        message = f"could not {what} {self._url(path)}{tried}: {explain_refusal(error)}"
        raise refuse(error, message) from error


def _cut_into_parts(chunks: Chunks) -> Iterator[bytes | bytearray]:
    """Yield the same bytes in parts of `PART_BYTES`; the last one may be shorter."""
    waiting = bytearray()
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while len(view):
            taken = view[: PART_BYTES - len(waiting)]
            waiting += taken
            view = view[len(taken) :]
            if len(waiting) == PART_BYTES:
                yield waiting
                waiting = bytearray()
    if waiting:
        yield waiting


def _describe_content(chunks: Chunks) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    for chunk in chunks:
        digest.update(chunk)
        size += memoryview(chunk).nbytes
    return {"size": size, "sha256": digest.hexdigest()}


def _list_etags(found: dict[str, Any]) -> set[str]:
    """Return the checksums that a store states of an object, as hexadecimal numbers of MD5."""
    etags = {str(found.get(name, "")).strip('"') for name in ("ETag", "etag")}
    if isinstance(found.get("md5Hash"), str):  # Google's
        etags.add(b64decode(found["md5Hash"]).hex())
    return etags - {""}
