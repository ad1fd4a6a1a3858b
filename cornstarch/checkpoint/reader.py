"""A stored checkpoint: its manifest, its tensors (whole, or only the shards that are needed), and its conversion."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from cornstarch.checkpoint import shards as files
from cornstarch.checkpoint.shards import Box, Tensorlike, TensorShard, is_partition, list_shards, local_shards
from cornstarch.checkpoint.storage import LocalStorage, Storage, resolve_storage, run_in_threads
from cornstarch.errors import ConfigError
from cornstarch.files import Manifest, check_manifest, own_digest, parse_json
from cornstarch.kernels.master_weights import MasterWeight
from cornstarch.parallel import distributed as world
from cornstarch.parallel.distributed import to_full_tensor

Form: TypeAlias = Literal["sharded", "full", "local"]

_FIELDS = {"step": int, "sequence": int, "metric": float | None, "files": dict, "versions": dict, "layout": dict}


class TensorReader(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, each read from its files on access.

    A tensor may be memory-mapped from a file: clone it to keep it.
    """

    def __init__(self, shards: Mapping[str, list[TensorShard]], is_local: bool = False) -> None:
        self._shards = shards
        self.is_local = is_local
        """Whether there are only the shards that this rank saved itself."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensorlike]) -> TensorReader:
        """Return tensors in memory, or their local shards, as if they were stored; a reader as it is."""
        if isinstance(tensors, cls):
            return tensors
        return cls({name: list_shards(name, tensor) for name, tensor in tensors.items()})

    def __getitem__(self, name: str) -> Tensor:
        if self.is_local and self._shards[name][0].box.sizes != self._shards[name][0].shape:
            raise ConfigError(
                f"{name} is there in part only, as this process had it: the checkpoint is in the local form. Save in "
                'the form "sharded" or "full", or convert it.'
            )
        return self.read(name, Box.whole(self.shape(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def __contains__(self, name: object) -> bool:
        return name in self._shards

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a whole tensor; nothing is read."""
        return torch.Size(self._shards[name][0].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor; nothing is read."""
        return self._shards[name][0].dtype

    def read(self, name: str, box: Box) -> Tensor:
        """Return a part of a tensor; nothing else is read."""
        parts = [(shard.box, shard.read) for shard in self._shards[name]]
        for part, read in parts:
            if part == box or part.intersect(box) == box:
                return read(box)
        return files.assemble(parts, self.dtype(name), box)

    def copy_into(self, name: str, target: Tensorlike) -> None:
        """Fill a tensor, or its local shards; only what is needed is read."""
        shape = self.shape(name)
        if shape != target.shape:  # else a single number would be broadcast
            raise ConfigError(f"{name} has the shape {list(shape)} in the checkpoint, {list(target.shape)} here.")
        parts = {shard.box: shard.read for shard in self._shards[name]}
        with torch.no_grad():
            if isinstance(target, MasterWeight):
                target.write(self.read(name, Box.whole(shape)))
                return
            for box, destination in local_shards(target):
                if self.is_local and box not in parts:
                    had = ", ".join(map(str, parts))
                    raise ConfigError(
                        f"{name}: this process has the part {box}, but had {had} when the checkpoint was saved in the "
                        "local form, which can be loaded only as it was saved. Use the same parallelism, or convert it."
                    )
                files.copy_intersections(box, destination, parts.items())


def state_hash(tensors: Mapping[str, Any], leave_out: Collection[str] = ("rng/",)) -> str:
    """Return a hash of names, dtypes, shapes and bytes of tensors: equal for every layout of the same state.

    Tensors are read one after the other. Sharded tensors are gathered, so that all ranks must call it. Names with a
    prefix of `leave_out` are skipped: random states belong to ranks.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        if not name.startswith(tuple(leave_out)):
            whole = to_full_tensor(tensors[name])
            digest.update(json.dumps([name, str(whole.dtype), list(whole.shape)]).encode())
            digest.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A stored checkpoint, as its `checkpoint.json` describes it."""

    folder: Path
    step: int
    sequence: int
    """The number of checkpoints saved before. Steps do not order them: a run may go back to an earlier step."""
    metric: float | None
    files: Manifest
    versions: dict[str, str]
    layout: dict[str, Any]
    """The number of `processes`, the `form`, and the `meshes` over which tensors were sharded."""
    storage: Storage = field(default_factory=LocalStorage, repr=False, compare=False)

    @property
    def size(self) -> int:
        return sum(entry["size"] for entry in self.files.values())

    @property
    def form(self) -> Form:
        form: Form = self.layout.get("form", "full")
        return form

    def data(self) -> Any:
        """Return the JSON data that was saved beside the tensors."""
        path = self.folder / files.DATA
        content = _read_json(self.storage, path)[1]
        if not isinstance(content, dict):
            raise ConfigError(f"{path} is damaged: it is no JSON object.")
        return content

    def tensors(self) -> AbstractContextManager[TensorReader]:
        """Open the tensors; nothing is read before it is accessed. The call is not collective."""
        size = world.world_size()
        if self.form == "local" and self.layout["processes"] != size:
            raise ConfigError(
                f"{self.folder} was saved in the local form by {self.layout['processes']} processes, and here are "
                f"{size}: each process would miss what others had. Start as many processes, or convert it: "
                f"cornstarch checkpoint convert {self.folder} NEW_FOLDER."
            )
        return self._open(world.rank() if self.form == "local" else None)

    def all_tensors(self) -> AbstractContextManager[TensorReader]:
        """Open the tensors of all ranks together, also of a checkpoint in the local form."""
        return self._open(None)

    @contextmanager
    def _open(self, rank: int | None) -> Iterator[TensorReader]:
        with ExitStack() as stack:
            shards: dict[str, list[TensorShard]] = {}
            for file in sorted(self.files):
                if not file.endswith(".safetensors") or (rank is not None and files.file_rank(file) != rank):
                    continue
                for shard in files.open_shards(self.storage, self.folder / file, stack, self.files[file]["sha256"]):
                    known = shards.setdefault(shard.name, [])
                    # In the local form every rank writes all that it has, or an empty placeholder.
                    is_placeholder = not shard.box.numel and shard.box.sizes != shard.shape
                    is_new = not is_placeholder and all(other.box != shard.box for other in known)
                    if self.form != "local" or rank is not None or is_new:
                        known.append(shard)
            for name, found in shards.items():
                boxes, shape = [shard.box for shard in found], found[0].shape
                if len(set(boxes)) < len(boxes):
                    raise ConfigError(f"{self.folder} holds the tensor {name!r} twice.")
                if len({(shard.shape, shard.dtype) for shard in found}) > 1:
                    raise ConfigError(f"{self.folder} holds parts of different tensors under the name {name!r}.")
                fit = all(len(box.sizes) == len(shape) for box in boxes)
                if rank is None and not (fit and is_partition(shape, boxes)):
                    raise ConfigError(f"{self.folder} does not hold all of the tensor {name!r}, or some of it twice.")
            yield TensorReader(shards, is_local=rank is not None)

    def verify(self, names: Collection[str] | None = None) -> None:
        """Read all files, or those in `names`, and refuse the checkpoint if a byte has changed."""
        self.check_sizes()

        def digest(name: str) -> str:
            try:
                return self.storage.digest(self.folder / name)
            except OSError as error:
                raise ConfigError(f"{self.folder / name} cannot be read ({error}).") from error

        chosen = [name for name in self.files if names is None or name in names]
        for name, found in run_in_threads(digest, chosen, files.WRITERS).items():
            if found != self.files[name]["sha256"]:
                raise ConfigError(
                    f"{self.folder / name} is damaged: its SHA-256 is {found[:16]}…, but "
                    f"{self.files[name]['sha256'][:16]}… was saved."
                )

    def check_sizes(self) -> None:
        """Refuse the checkpoint if a file is missing or has another size; the content is not read."""
        for name, entry in self.files.items():
            path = self.folder / name
            try:
                size = self.storage.size(path)
            except OSError as error:
                raise ConfigError(f"{path} is missing or cannot be read ({error.strerror or error}).") from error
            if size != entry["size"]:
                raise ConfigError(f"{path} has {size} bytes, but {entry['size']} were saved.")


def read_checkpoint(folder: str | os.PathLike[str], storage: Storage | None = None) -> Checkpoint:
    """Read and validate the manifest of a checkpoint; its other files are not looked at."""
    if storage is None:
        storage, folder = resolve_storage(folder)
    folder = Path(folder)
    path = folder / files.MANIFEST
    written, content = _read_json(storage, path)
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise ConfigError(f"{path} is damaged: it has no format number.")
    if content["format"] > files.FORMAT:
        raise ConfigError(
            f"{folder} was saved in format {content['format']} by a newer Cornstarch ({content.get('versions')}); "
            f"this one reads formats up to {files.FORMAT}. Update Cornstarch."
        )
    # Byte for byte: a changed blank would not change the content, but shows that the disk cannot be trusted.
    if content.get("sha256") != own_digest(content) or written != files.encode_manifest(content):
        raise ConfigError(f"{path} is damaged or was edited: it does not have the checksum it states.")
    for name, kind in _FIELDS.items():
        if name not in content or not isinstance(content[name], kind):
            raise ConfigError(f"{path} is damaged: {name} is {content.get(name)!r}.")
    if not isinstance(content["layout"].get("processes"), int):
        raise ConfigError(f"{path} is damaged: layout is {content['layout']!r}.")
    check_manifest(path, content["files"])
    match = files.FOLDER_NAME.match(folder.name)
    if match is None or int(match[1]) != content["step"]:
        raise ConfigError(f"{folder} holds step {content['step']}: it was renamed. Give it its old name back.")
    return Checkpoint(folder, **{name: content[name] for name in _FIELDS}, storage=storage)


def _read_json(storage: Storage, path: Path) -> tuple[bytes, Any]:
    """Return a small file as it is written, and its content."""
    try:
        written = storage.read(path)
    except OSError as error:
        raise ConfigError(f"{path} is missing or cannot be read ({error.strerror or error}).") from error
    return written, parse_json(path, written)


def convert_checkpoint(
    source: Checkpoint,
    folder: str | os.PathLike[str],
    form: Literal["full", "sharded"] = "full",
    processes: int | None = None,
) -> Checkpoint:
    """Write a checkpoint again into a new folder, with whole tensors or sharded for `processes`, and compare both.

    Only the files change: any form can be loaded by any number of processes. No model is needed, and one tensor at a
    time is in memory.
    """
    count = _count_processes(source, form, processes)
    storage, target = resolve_storage(folder)
    if storage.exists(target):
        raise ConfigError(f"{folder} exists already. Give a new folder.")
    source.verify()
    name = source.folder.name.partition(".")[0]
    fresh = target.with_name(f"{target.name}.tmp.{secrets.token_hex(4)}")
    try:
        storage.make_folder(fresh / name)
        with source.all_tensors() as tensors:
            written: Manifest = {}
            for rank in range(count):
                shards = _split_first_dim(tensors, rank, count)
                written |= files.write_shards(storage, fresh / name, files.file_prefix(rank, count), shards)
            data = source.storage.read(source.folder / files.DATA)
            written[files.DATA] = storage.write(fresh / name / files.DATA, [data])
            files.check_written(storage, fresh / name, written)
            description = json.loads(source.storage.read(source.folder / files.MANIFEST))
            description["layout"] = {"processes": count, "form": form, "meshes": [], "converted": source.layout}
            files.write_manifest(storage, fresh / name, written, description)
            storage.flush(fresh / name)
            storage.flush(fresh)
            expected = state_hash(tensors, leave_out=())
        with read_checkpoint(fresh / name, storage).tensors() as tensors:
            if state_hash(tensors, leave_out=()) != expected:
                raise ConfigError(f"{fresh} holds other tensors than {source.folder}. Check the disk.")
        storage.commit(fresh, target)
    except OSError as error:
        raise ConfigError(
            f"{source.folder} could not be converted to {folder}: {error.strerror or error}. Nothing is left there."
        ) from error
    finally:
        with suppress(OSError):  # committed, or never made
            storage.remove(fresh)
    return read_checkpoint(target / name, storage)


def _count_processes(source: Checkpoint, form: str, processes: int | None) -> int:
    if form not in ("full", "sharded"):
        raise ConfigError(f"form = {form!r}; expected full or sharded. A local one can only be saved by a run.")
    if form == "full" and processes not in (None, 1):
        raise ConfigError(f"A full checkpoint is not cut, but {processes} processes were given.")
    default = 1 if form == "full" else source.layout["processes"]
    count: int = default if processes is None else processes
    if count < 1:
        raise ConfigError(f"{count} processes; expected 1 or more.")
    return count


def _split_first_dim(tensors: TensorReader, rank: int, count: int) -> Iterator[TensorShard]:
    for name in tensors:
        shape = tuple(tensors.shape(name))
        if not shape or shape[0] == 0:
            box = Box.whole(shape) if rank == 0 else None
        else:
            begin, end = (shape[0] * number // count for number in (rank, rank + 1))
            box = Box((begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:])) if end > begin else None
        if box is not None and (box.numel or not tensors.shape(name).numel()):
            yield TensorShard(name, shape, tensors.dtype(name), box, partial(tensors.read, name))
