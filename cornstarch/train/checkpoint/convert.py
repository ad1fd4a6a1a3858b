"""A checkpoint written again in another form, by one process, without a model."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from cornstarch.errors import ConfigError
from cornstarch.files import Manifest, own_digest, sync
from cornstarch.train.checkpoint import files
from cornstarch.train.checkpoint.files import DATA, MANIFEST
from cornstarch.train.checkpoint.pieces import Box, Piece
from cornstarch.train.checkpoint.reading import Checkpoint, TensorReader, read_checkpoint, state_hash


def convert(
    source: Checkpoint, folder: Path, form: Literal["full", "sharded"] = "full", processes: int | None = None
) -> Checkpoint:
    """Write a checkpoint again into a new folder, with whole tensors or cut for so many processes, and compare them.

    Only the files change: any form is loaded by any number of processes. One tensor at a time is in memory.
    """
    count = _count(source, form, processes)
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} exists already. Give a new folder.")
    source.verify()
    name = source.folder.name.partition(".")[0]
    fresh = folder.with_name(f"{folder.name}.tmp.{secrets.token_hex(4)}")
    try:
        (fresh / name).mkdir(parents=True)
        with source.all_tensors() as tensors:
            _write(source, tensors, fresh / name, form, count)
            expected = state_hash(tensors, leave_out=())
        written = read_checkpoint(fresh / name)
        with written.tensors() as tensors:
            if state_hash(tensors, leave_out=()) != expected:
                raise ConfigError(f"{fresh} holds other tensors than {source.folder}. Check the disk.")
        os.rename(fresh, folder)
        sync(folder.parent)
    except OSError as error:
        raise ConfigError(
            f"{source.folder} could not be converted to {folder}: {error.strerror or error}. Nothing is left there."
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return read_checkpoint(folder / name)


def _count(source: Checkpoint, form: str, processes: int | None) -> int:
    if form == "full":
        if processes not in (None, 1):
            raise ConfigError(f"A full checkpoint is not cut, but {processes} processes were given.")
        return 1
    if form != "sharded":
        raise ConfigError(f"form = {form!r}; expected full or sharded. A local one can only be saved by a run.")
    count: int = source.layout["processes"] if processes is None else processes
    if count < 1:
        raise ConfigError(f"{count} processes; expected 1 or more.")
    return count


def _write(source: Checkpoint, tensors: TensorReader, folder: Path, form: str, count: int) -> None:
    written: Manifest = {}
    for rank in range(count):
        written.update(files.write_pieces(folder, files.prefix_of(rank, count), _pieces(tensors, rank, count)))
    written[DATA] = files.write_file(folder / DATA, [(source.folder / DATA).read_bytes()])
    files.check_written(folder, written)
    content: dict[str, Any] = json.loads((source.folder / MANIFEST).read_bytes())
    content["files"] = written
    content["layout"] = {"processes": count, "form": form, "meshes": [], "converted": source.layout}
    content["sha256"] = own_digest(content)
    files.write_file(folder / MANIFEST, [files.serialized(content)])
    sync(folder)
    sync(folder.parent)


def _pieces(tensors: TensorReader, rank: int, count: int) -> Iterator[Piece]:
    """Yield the part of each tensor that one of `count` processes would have, cut along the first dim."""
    for name in tensors:
        shape = tuple(tensors.shape(name))
        if not shape or shape[0] == 0:
            boxes = [Box.whole(shape)] if rank == 0 else []
        else:
            begin, end = (shape[0] * number // count for number in (rank, rank + 1))
            boxes = [Box((begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]))] if end > begin else []
        for box in boxes:
            if box.numel or not tensors.shape(name).numel():
                yield Piece(name, shape, tensors.dtype(name), box, partial(tensors.read, name, box))
