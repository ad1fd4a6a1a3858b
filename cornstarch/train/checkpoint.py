"""Checkpoints on disk: whole, checked, in any number, and never half there.

A checkpoint is a folder `step_00000100` of safetensors and JSON; nothing in it is code. It is written under another
name, synced, read again and compared, and then renamed, so that a crash at any moment leaves the checkpoints that were
there. `checkpoint.json` is written last and lists every file with its size and SHA-256. A folder that exists is never
written into: the same step saved again is `step_00000100.1`.

Tensors have the names that the caller gives them and say nothing about processes, so that another number of processes
can read them: which file a tensor is in is found out from the files themselves.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cornstarch import __version__
from cornstarch.errors import ConfigError
from cornstarch.files import (
    Manifest,
    check_manifest,
    file_digests,
    own_digest,
    sync,
)

__all__ = ["Checkpoint", "CheckpointStore", "TensorReader"]

FORMAT = 1
MANIFEST = "checkpoint.json"
DATA = "data.json"

_FILE_BYTES = 2**30  # files are written and hashed beside each other
_WRITERS = min(8, os.cpu_count() or 1)
_FOLDER_NAME = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
_LEFTOVER_NAME = re.compile(r"step_\d{8,}(?:\.\d+)?\.tmp\.[0-9a-f]+")

_FIELDS = {"step": int, "sequence": int, "metric": float | None, "files": dict, "versions": dict}

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- one checkpoint


class TensorReader(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, each read from its file when it is asked for.

    A tensor may lie in memory that is mapped from the file: copy what is to stay.
    """

    def __init__(self, handles: Mapping[str, Any]) -> None:
        self._handles = handles

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._handles[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, as its `checkpoint.json` describes it."""

    folder: Path
    step: int
    sequence: int
    """How many checkpoints were saved before it; after going back to an earlier step, steps do not tell."""
    metric: float | None
    files: Manifest
    versions: dict[str, str]

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(entry["size"] for entry in self.files.values())

    def data(self) -> Any:
        """Return what was saved beside the tensors."""
        return _parsed(self.folder / DATA, _read_bytes(self.folder / DATA))

    @contextmanager
    def tensors(self) -> Iterator[TensorReader]:
        """Open the tensors; nothing is read before it is asked for."""
        with ExitStack() as stack:
            handles: dict[str, Any] = {}
            for file in (name for name in self.files if name.endswith(".safetensors")):
                try:
                    handle = stack.enter_context(safe_open(self.folder / file, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise ConfigError(f"{self.folder / file} cannot be read: {error}.") from error
                for name in handle.keys():  # noqa: SIM118  (a handle is no mapping)
                    if name in handles:
                        raise ConfigError(f"{self.folder} holds the tensor {name!r} twice.")
                    handles[name] = handle
            yield TensorReader(handles)

    def verify(self) -> None:
        """Read every file and refuse the checkpoint if a byte is not as it was saved."""
        for name, entry in self.files.items():
            path = self.folder / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise ConfigError(f"{path} is missing or cannot be read ({error.strerror}).") from error
            if size != entry["size"]:
                raise ConfigError(f"{path} has {size} bytes, but {entry['size']} were saved.")
        for name, digest in file_digests(self.folder, list(self.files)).items():
            if digest != self.files[name]["sha256"]:
                raise ConfigError(
                    f"{self.folder / name} is damaged: its SHA-256 is {digest[:16]}…, but "
                    f"{self.files[name]['sha256'][:16]}… was saved."
                )


Checkpoints = list[Checkpoint]
Problems = list[str]


def _read_checkpoint(folder: Path) -> Checkpoint:
    """Return what a checkpoint's description says, if that can be trusted; its other files are not looked at."""
    path = folder / MANIFEST
    written = _read_bytes(path)
    content = _parsed(path, written)
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise ConfigError(f"{path} is damaged: it has no format number.")
    if content["format"] > FORMAT:
        raise ConfigError(
            f"{folder} was saved in format {content['format']} by a newer Cornstarch ({content.get('versions')}); "
            f"this one reads formats up to {FORMAT}. Update Cornstarch."
        )
    # Byte for byte: a changed blank would not change the content, but says that the disk cannot be trusted.
    if content.get("sha256") != own_digest(content) or written != _serialized(content):
        raise ConfigError(f"{path} is damaged or was edited: it does not have the checksum it states.")
    for field, kind in _FIELDS.items():
        if not isinstance(content.get(field), kind):
            raise ConfigError(f"{path} is damaged: {field} is {content.get(field)!r}.")
    check_manifest(path, content["files"])
    named = _FOLDER_NAME.match(folder.name)
    if named is None or int(named[1]) != content["step"]:
        raise ConfigError(f"{folder} holds step {content['step']}: it was renamed. Give it its old name back.")
    return Checkpoint(folder, **{field: content[field] for field in _FIELDS})


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} is missing or cannot be read ({error.strerror}).") from error


def _parsed(path: Path, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: it is not JSON ({error}).") from error


def _serialized(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


# ---------------------------------------------------------------------------------------------------- the store


class CheckpointStore:
    """The checkpoints of a run: the newest so many, and the best one."""

    def __init__(self, folder: str | os.PathLike[str], keep: int, better: Literal["lower", "higher"] = "lower") -> None:
        if keep < 1:
            raise ConfigError(f"keep = {keep}; at least 1 checkpoint has to be kept.")
        self.folder = Path(folder)
        self.keep = keep
        self.better = better
        self.problems: Problems = []
        """Why the last `list`, `latest` or `best` passed over checkpoints."""

    def save(
        self, step: int, tensors: Mapping[str, Tensor], data: Mapping[str, Any], *, metric: float | None = None
    ) -> Path:
        """Save a checkpoint, then remove what need not be kept; the folders that were there are safe until then.

        `data` is what JSON can hold, with words as keys. The metric decides which checkpoint is the best one.
        """
        _check_step(step)
        _check_tensors(tensors)
        _check_plain(data, "data")
        size = sum(tensor.nbytes for tensor in tensors.values())
        with self._explaining(step, size), self._alone():
            self._remove_leftovers()
            earlier = self.list()
            fresh = self._new_name(step)
            description = {
                "step": step,
                "sequence": max((one.sequence for one in earlier), default=0) + 1,
                "metric": None if metric is None or not math.isfinite(metric) else float(metric),
            }
            try:
                fresh.mkdir()
                _write_checkpoint(fresh, tensors, data, description)
                _check_written(fresh)
                target = fresh.with_name(fresh.name.partition(".tmp.")[0])
                os.rename(fresh, target)
            except BaseException:
                shutil.rmtree(fresh, ignore_errors=True)
                raise
            sync(self.folder)  # the new one is there for good before an old one goes
            self._prune([*earlier, _read_checkpoint(target)])
        return target

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is whole; None if none was ever saved.

        Damaged ones are passed over and told in `problems`. If all are damaged this is an error: to start again from
        the first step is for the user to decide.
        """
        found = self._first_whole(reversed(self.list()))
        if found is None and self.problems:
            raise ConfigError(
                f"None of the checkpoints in {self.folder} can be used:\n  "
                + "\n  ".join(self.problems)
                + "\nRestore one from a copy, or move the folder away to start from the first step."
            )
        return found

    def best(self) -> Checkpoint | None:
        """Return the whole checkpoint with the best metric; None if there is none with a metric."""
        return self._first_whole(iter(self._by_metric(self.list())))

    def verify(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step if every byte of it is as it was saved."""
        found = [one for one in self.list() if one.step == step]
        if not found:
            damaged = [problem for problem in self.problems if f"step_{step:08d}" in problem]
            steps = ", ".join(str(one.step) for one in self.list()) or "none"
            raise ConfigError(damaged[0] if damaged else f"{self.folder} has no step {step}; it has {steps}.")
        found[-1].verify()
        return found[-1]

    def list(self) -> Checkpoints:
        """Return the checkpoints in the order in which they were saved; only their descriptions are checked."""
        self.problems = []
        found = []
        for folder in self._folders():
            try:
                found.append(_read_checkpoint(folder))
            except ConfigError as error:
                self.problems.append(str(error))
        return sorted(found, key=lambda one: one.sequence)

    def _folders(self) -> Sequence[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if _FOLDER_NAME.fullmatch(path.name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be read ({error.strerror}).") from error

    def _first_whole(self, candidates: Iterator[Checkpoint]) -> Checkpoint | None:
        for candidate in candidates:
            try:
                candidate.verify()
            except ConfigError as error:
                self.problems.append(str(error))
            else:
                return candidate
        return None

    def _by_metric(self, checkpoints: Checkpoints) -> Checkpoints:
        """Return those with a metric, the best first; of equal ones the earlier first."""
        sign = 1 if self.better == "lower" else -1
        measured = [(sign * one.metric, one.sequence, one) for one in checkpoints if one.metric is not None]
        return [one for *_, one in sorted(measured, key=lambda entry: entry[:2])]

    # ------------------------------------------------------------------------------------------------ writing

    @contextmanager
    def _explaining(self, step: int, size: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"The checkpoint of step {step} could not be saved in {self.folder}: {error.strerror or error}. It has "
                f"{size / 1e9:.3f} GB of tensors; {_free_space(self.folder)}. What was saved before is untouched. "
                "Free space, allow writing, or choose another folder."
            ) from error

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Make the folder, and keep other processes from saving in it until the block ends or this process dies."""
        _make_folder(self.folder)
        with open(self.folder / ".lock", "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"Another process is saving checkpoints in {self.folder}. Give each run a folder of its own."
                ) from error
            except OSError:
                pass  # a file system without locks: then it is the user who must not start two runs in one folder
            yield

    def _new_name(self, step: int) -> Path:
        """Return where to write; what is before `.tmp.` is the name that it gets in the end."""
        name, revision = f"step_{step:08d}", 0
        while os.path.lexists(self.folder / name):
            revision += 1
            name = f"step_{step:08d}.{revision}"
        return self.folder / f"{name}.tmp.{secrets.token_hex(4)}"

    def _remove_leftovers(self) -> None:
        """Remove what interrupted saves and removals left."""
        for path in self.folder.iterdir():
            if _LEFTOVER_NAME.fullmatch(path.name):
                _remove(path)

    def _prune(self, checkpoints: Checkpoints) -> None:
        newest = checkpoints[-1]
        # The same step once more takes the place of the first; it may be kept as the best only.
        others = [one for one in checkpoints[:-1] if one.step != newest.step]
        kept = {newest.folder, *(one.folder for one in others[max(0, len(others) - self.keep + 1) :])}
        kept |= {one.folder for one in self._by_metric(checkpoints)[:1]}
        for one in checkpoints:
            if one.folder not in kept:
                _remove(one.folder)


def _remove(folder: Path) -> None:
    try:
        # Renamed first, so that no one finds it half there; what a crash leaves goes with the next save.
        doomed = folder.with_name(f"{folder.name.partition('.tmp.')[0]}.tmp.{secrets.token_hex(4)}")
        os.rename(folder, doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        warnings.warn(f"{folder}, which is not needed any more, could not be removed: {error}", stacklevel=4)


def _make_folder(folder: Path) -> None:
    """Make a folder, and the folders above it, so that they are still there after a power failure."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def _free_space(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e9:.3f} GB are free there"
    except OSError:
        return "how much is free there could not be found out"


# ---------------------------------------------------------------------------------------------------- files


def _write_checkpoint(
    fresh: Path, tensors: Mapping[str, Tensor], data: Mapping[str, Any], description: dict[str, Any]
) -> None:
    portions = {f"tensors-{n:05d}.safetensors": portion for n, portion in enumerate(_portions(tensors), start=1)}
    with ThreadPoolExecutor(_WRITERS) as pool:
        entries = pool.map(lambda name: _write_file(fresh / name, _safetensors(portions[name])), portions)
        files: Manifest = dict(zip(portions, entries, strict=True))  # the first failure is raised here
    files[DATA] = _write_file(fresh / DATA, [json.dumps(data).encode() + b"\n"])
    content = {
        "format": FORMAT,
        **description,
        "layout": {"processes": 1},
        "time": time.time(),
        "versions": _versions(),
        "files": files,
    }
    content["sha256"] = own_digest(content)
    _write_file(fresh / MANIFEST, [_serialized(content)])
    sync(fresh)


def _check_written(fresh: Path) -> None:
    try:
        _read_checkpoint(fresh).verify()
    except ConfigError as error:
        raise ConfigError(
            f"A checkpoint was not saved, because other bytes are read than were written ({error}). What was saved "
            "before is untouched. Check the disk, or choose another one."
        ) from error


def _write_file(path: Path, pieces: Iterator[bytes | memoryview] | Sequence[bytes]) -> dict[str, Any]:
    """Write a file to the disk and return its entry in the manifest; it is hashed on its way."""
    digest, size = hashlib.sha256(), 0
    file: BinaryIO
    with open(path, "xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


def _portions(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Cut into files; wide numbers first, because readers need each tensor at a multiple of its own width."""
    portion: dict[str, Tensor] = {}
    size = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        if portion and size + tensors[name].nbytes > _FILE_BYTES:
            yield portion
            portion, size = {}, 0
        portion[name] = tensors[name]
        size += tensors[name].nbytes
    if portion:
        yield portion


def _safetensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file; of tensors on a GPU only one at a time is on the CPU."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _versions() -> dict[str, str]:
    return {"cornstarch": __version__, "torch": str(torch.__version__), "python": sys.version.split()[0]}


# ---------------------------------------------------------------------------------------------------- what is given


def _check_step(step: object) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ConfigError(f"step = {step!r}; expected a whole number, 0 or more.")


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == "__metadata__":
            raise ConfigError(f"A tensor cannot be saved under the name {name!r}.")
        if type(tensor.detach()) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta:
            raise ConfigError(f"{name} cannot be saved: it is no plain dense tensor with values, but {_kind(tensor)}.")
        if tensor.dtype not in _DTYPES:
            raise ConfigError(f"{name} cannot be saved: safetensors has no {tensor.dtype}.")


def _kind(tensor: Tensor) -> str:
    return f"a {type(tensor.detach()).__name__} ({tensor.layout}, on {tensor.device})"


def _check_plain(value: object, at: str) -> None:
    """Refuse what JSON would change on the way or cannot hold."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{at} has the key {key!r}, a {type(key).__name__}; JSON has words as keys only.")
            _check_plain(item, f"{at}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_plain(item, f"{at}.{index}")
    elif value is not None and not isinstance(value, (str, int, float)):
        raise ConfigError(f"{at} is a {type(value).__name__}, which JSON cannot hold; tensors are given apart.")
