"""One checkpoint on disk: what its description says, and its tensors, whole or the part that is needed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from cornstarch.errors import ConfigError
from cornstarch.files import Manifest, check_manifest, file_digests, own_digest
from cornstarch.parallel.data import full_value
from cornstarch.train.checkpoint.files import (
    DATA,
    FOLDER_NAME,
    FORMAT,
    MANIFEST,
    StoredPiece,
    file_rank,
    open_pieces,
    serialized,
)
from cornstarch.train.checkpoint.pieces import Box, Tensorlike, parts_of, tile
from cornstarch.train.checkpoint.ranks import own_rank, world_size

__all__ = ["Checkpoint", "Form", "TensorReader", "read_checkpoint", "state_hash"]

Form: TypeAlias = Literal["sharded", "full", "local"]

_FIELDS = {"step": int, "sequence": int, "metric": float | None, "files": dict, "versions": dict, "layout": dict}


class TensorReader(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, each read from its files when it is asked for.

    A tensor may lie in memory that is mapped from a file: copy what is to stay.
    """

    def __init__(self, pieces: Mapping[str, list[StoredPiece]], is_local: bool = False) -> None:
        self._pieces = pieces
        self.is_local = is_local
        """Whether only what this process saved itself is there."""

    def __getitem__(self, name: str) -> Tensor:
        if self.is_local and self._pieces[name][0].box.sizes != self._pieces[name][0].shape:
            raise ConfigError(
                f"{name} is there in part only, as this process had it: the checkpoint is in the local form. Save in "
                'the form "sharded" or "full", or convert it.'
            )
        return self.read(name, Box.whole(self.shape(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a whole tensor; nothing is read."""
        return torch.Size(self._pieces[name][0].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor; nothing is read."""
        return self._pieces[name][0].dtype

    def read(self, name: str, box: Box) -> Tensor:
        """Return a part of a tensor, reading nothing else."""
        for piece in self._pieces[name]:
            if piece.box == box or piece.box.meet(box) == box:
                return piece.read(box)
        result = torch.empty(box.sizes, dtype=self.dtype(name))
        self._read_into(name, box, result)
        return result

    def copy_into(self, name: str, target: Tensorlike) -> None:
        """Fill a tensor, or this process's part of it if it is sharded, reading only what it needs."""
        shape = self.shape(name)
        if shape != target.shape:  # else a single number would fill the whole target
            raise ConfigError(f"{name} has the shape {list(shape)} in the checkpoint, {list(target.shape)} here.")
        with torch.no_grad():
            for box, destination in parts_of(target):
                if self.is_local and box not in [piece.box for piece in self._pieces[name]]:
                    had = ", ".join(str(piece.box) for piece in self._pieces[name])
                    raise ConfigError(
                        f"{name}: this process has the part {box}, but had {had} when the checkpoint was saved in the "
                        "local form, which can be loaded only as it was saved. Use the same parallelism, or convert it."
                    )
                self._read_into(name, box, destination)

    def _read_into(self, name: str, box: Box, destination: Tensor) -> None:
        missing = box.numel
        for piece in self._pieces[name]:
            common = box.meet(piece.box)
            if common is not None:
                destination[common.within(box)].copy_(piece.read(common))
                missing -= common.numel
        assert missing == 0, f"{name}: {missing} numbers of {box} are nowhere"  # `_checked`


def state_hash(tensors: Mapping[str, Any], leave_out: Collection[str] = ("rng/",)) -> str:
    """Return a hash of names, types, shapes and bytes of tensors: equal for every layout of the same state.

    Whole tensors are looked at one after the other. Tensors that are sharded are gathered, so that every process has to
    ask. Left out are names that begin with one of `leave_out`: random numbers belong to processes.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        if name.startswith(tuple(leave_out)):
            continue
        tensor = tensors[name]
        whole = full_value(tensor)
        digest.update(json.dumps([name, str(whole.dtype), list(whole.shape)]).encode())
        digest.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------- one checkpoint


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
    layout: dict[str, Any]
    """By how many `processes` and in which `form` it was saved, and over which `meshes` tensors were spread."""

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(entry["size"] for entry in self.files.values())

    @property
    def form(self) -> Form:
        """How it was written."""
        form: Form = self.layout.get("form", "full")
        return form

    def data(self) -> Any:
        """Return what was saved beside the tensors."""
        return _parsed(self.folder / DATA, _read_bytes(self.folder / DATA))

    @contextmanager
    def tensors(self) -> Iterator[TensorReader]:
        """Open the tensors; nothing is read before it is asked for. Any number of processes may, each for itself."""
        rank, size = own_rank(), world_size()
        if self.form == "local" and self.layout["processes"] != size:
            raise ConfigError(
                f"{self.folder} was saved in the local form by {self.layout['processes']} processes, and here are "
                f"{size}: each process would miss what others had. Start as many processes, or convert it: "
                f"cornstarch checkpoint convert {self.folder} NEW_FOLDER."
            )
        with self._opened(rank if self.form == "local" else None) as reader:
            yield reader

    @contextmanager
    def all_tensors(self) -> Iterator[TensorReader]:
        """Open the tensors of all processes together, also of a checkpoint in the local form."""
        with self._opened(None) as reader:
            yield reader

    @contextmanager
    def _opened(self, rank: int | None) -> Iterator[TensorReader]:
        with ExitStack() as stack:
            pieces: dict[str, list[StoredPiece]] = {}
            for file in sorted(self.files):
                if not file.endswith(".safetensors") or (rank is not None and file_rank(file) != rank):
                    continue
                for piece in open_pieces(self.folder / file, stack.enter_context):
                    had = pieces.setdefault(piece.name, [])
                    if self.form != "local" or rank is not None or _is_new(piece, had):
                        had.append(piece)
            for name, found in pieces.items():
                self._check(name, found, partly=rank is not None)
            yield TensorReader(pieces, is_local=rank is not None)

    def _check(self, name: str, pieces: list[StoredPiece], partly: bool) -> None:
        if len({piece.box for piece in pieces}) < len(pieces):
            raise ConfigError(f"{self.folder} holds the tensor {name!r} twice.")
        if len({(piece.shape, piece.dtype) for piece in pieces}) > 1:
            raise ConfigError(f"{self.folder} holds parts of different tensors under the name {name!r}.")
        if not partly and not _filled(pieces):
            raise ConfigError(f"{self.folder} does not hold all of the tensor {name!r}, or some of it twice.")

    def verify(self, names: Collection[str] | None = None) -> None:
        """Read every file, or some, and refuse the checkpoint if a byte is not as it was saved."""
        self.check_sizes()
        chosen = [name for name in self.files if names is None or name in names]
        for name, digest in file_digests(self.folder, chosen).items():
            if digest != self.files[name]["sha256"]:
                raise ConfigError(
                    f"{self.folder / name} is damaged: its SHA-256 is {digest[:16]}…, but "
                    f"{self.files[name]['sha256'][:16]}… was saved."
                )

    def check_sizes(self) -> None:
        """Refuse the checkpoint if a file is missing or has another size; their bytes are not read."""
        for name, entry in self.files.items():
            path = self.folder / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise ConfigError(f"{path} is missing or cannot be read ({error.strerror}).") from error
            if size != entry["size"]:
                raise ConfigError(f"{path} has {size} bytes, but {entry['size']} were saved.")


def _is_new(piece: StoredPiece, had: list[StoredPiece]) -> bool:
    """Say whether a process has something that no lower one had; in the local form all say all."""
    says_nothing = not piece.box.numel and piece.box.sizes != piece.shape
    return not says_nothing and all(other.box != piece.box for other in had)


def _filled(pieces: list[StoredPiece]) -> bool:
    inside = all(len(piece.box.sizes) == len(piece.shape) for piece in pieces)
    return inside and tile(pieces[0].shape, [piece.box for piece in pieces])


def read_checkpoint(folder: Path) -> Checkpoint:
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
    if content.get("sha256") != own_digest(content) or written != serialized(content):
        raise ConfigError(f"{path} is damaged or was edited: it does not have the checksum it states.")
    for field, kind in _FIELDS.items():
        if not isinstance(content.get(field), kind):
            raise ConfigError(f"{path} is damaged: {field} is {content.get(field)!r}.")
    check_manifest(path, content["files"])
    named = FOLDER_NAME.match(folder.name)
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
