"""One save, step by step, by one process or by many.

    describe   every rank says what it has; rank 0 decides who writes what and makes a folder `step_….tmp.…`
    write      every rank writes its files, syncs them and reads them again
    commit     rank 0 writes the description last and renames the folder, which makes it a checkpoint

All ranks take each step together (`Ranks.reduced`): what fails on one fails on all, and the folder is removed. A kill
at any moment leaves at most a folder that is no checkpoint, which the next save removes.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cornstarch.errors import ConfigError
from cornstarch.files import Manifest, sync
from cornstarch.train.checkpoint import files
from cornstarch.train.checkpoint.files import DATA, DTYPES
from cornstarch.train.checkpoint.pieces import Box, Piece, Tensorlike, parts_of
from cornstarch.train.checkpoint.planning import Parts, common, describe, joined_data, writers
from cornstarch.train.checkpoint.ranks import Ranks
from cornstarch.train.checkpoint.reading import Form, read_checkpoint

_VISIBLE_AFTER = 30.0  # seconds, for file systems that show late what another machine has made

_TORCH_TYPES = {name: dtype for dtype, name in DTYPES.items()}


class Save:
    """A checkpoint that is being saved."""

    def __init__(
        self, folder: Path, ranks: Ranks, step: int, tensors: Mapping[str, Tensorlike], data: Mapping[str, Any]
    ) -> None:
        self.folder, self.ranks = folder, ranks
        self._step, self._tensors, self._data = step, tensors, data
        self._held = ExitStack()  # on rank 0: what is released when all is done
        self._description: dict[str, Any] = {}
        self._content = b""
        self._parts: Parts = {}
        self._own: list[Piece] = []
        self.fresh = Path()
        self.form: Form = "sharded"

    # ------------------------------------------------------------------ describe

    def begin(self, metric: float | None, form: Form, prepare: Callable[[ExitStack, int], tuple[Path, int]]) -> None:
        """Agree on what is saved; `prepare` gives rank 0, and keeps for it, a new folder and its place in the order."""

        def decide(descriptions: list[dict[str, Any]]) -> dict[str, Any]:
            step, chosen = common(descriptions, "step"), common(descriptions, "form")
            self._description = {
                "step": step,
                "metric": common(descriptions, "metric"),
                "time": time.time(),
                "layout": {
                    "processes": self.ranks.size,
                    "form": chosen if self.ranks.size > 1 else "full",
                    "meshes": descriptions[0]["meshes"],
                },
            }
            # As text, now: the caller may change it while it waits to be written.
            self._content = json.dumps(joined_data(descriptions)).encode() + b"\n"
            parts = {} if chosen == "local" else writers(descriptions)
            with self.explained():
                fresh, self._description["sequence"] = prepare(self._held, step)
            return {"fresh": str(fresh), "parts": parts}

        try:
            order = self.ranks.reduced(lambda: describe(self._step, self._tensors, self._data, metric, form), decide)
        except BaseException:
            self._held.close()
            raise
        self.fresh, self._parts, self.form = Path(order["fresh"]), order["parts"], form
        self._own = list(self._own_pieces())
        self._tensors = {}  # the pieces have what is needed

    def _own_pieces(self) -> Iterator[Piece]:
        """Yield what this rank writes, or gives to rank 0, in the order of the decision."""
        if self.form == "local":
            for name, tensor in self._tensors.items():
                # Of what it has nothing it says so, for a reader that asks whether all is there.
                nothing = (Box((0,) * len(tensor.shape), (0, *tensor.shape[1:])), torch.empty(0, dtype=tensor.dtype))
                for box, part in parts_of(tensor) or [nothing]:
                    yield _piece(name, tuple(tensor.shape), tensor.dtype, box, part)
            return
        for name, entry in self._parts.items():
            boxes = [_box(part) for part in entry["parts"] if part[0] == self.ranks.rank]
            if boxes:
                held = dict(parts_of(self._tensors[name]))
                for box in boxes:
                    yield _piece(name, tuple(entry["shape"]), _TORCH_TYPES[entry["dtype"]], box, held[box])

    def stage(self, copied: Callable[[Sequence[Piece]], list[Piece]]) -> None:
        """Replace the tensors by copies, so that training may go on."""

        def work() -> None:
            self._own = copied(self._own)

        with self._cleaned():
            self.ranks.agreed(work)

    # ------------------------------------------------------------------ write, commit

    def finish(self, committed: Callable[[Path], object]) -> Path:
        """Write, and make it a checkpoint; `committed` is what rank 0 does then."""
        with self._held, self._cleaned():
            return Path(self.ranks.reduced(self._written, lambda entries: self._committed(entries, committed)))

    def _written(self) -> Manifest:
        with self.explained():
            self._await_folder()
            ranks = self.ranks
            if self.form == "full" and ranks.size > 1:
                written = self._streamed()
            else:
                written = files.write_pieces(self.fresh, files.prefix_of(ranks.rank, ranks.size), self._own)
            files.check_written(self.fresh, written)
            sync(self.fresh)
            return written

    def _streamed(self) -> Manifest:
        """Have rank 0 write everything, of which it has one tensor at a time."""
        if self.ranks.rank > 0:
            self.ranks.serve([piece.load for piece in self._own])
            return {}
        try:
            return files.write_pieces(self.fresh, "tensors", _assembled(self._parts, self._own, self.ranks), writers=1)
        finally:
            self.ranks.dismiss()

    def _committed(self, entries: list[Manifest], committed: Callable[[Path], object]) -> str:
        with self.explained():
            manifest = {name: entry for one in entries for name, entry in one.items()}
            manifest[DATA] = files.write_file(self.fresh / DATA, [self._content])
            files.write_description(self.fresh, manifest, self._description)
            files.check_written(self.fresh, {DATA: manifest[DATA]})
            read_checkpoint(self.fresh).check_sizes()
            sync(self.fresh)
            target = self.target
            os.rename(self.fresh, target)
            sync(self.folder)  # the new one is there for good before an old one goes
            committed(target)
            return str(target)

    @property
    def target(self) -> Path:
        """Where the checkpoint will be."""
        return self.fresh.with_name(self.fresh.name.partition(".tmp.")[0])

    # ------------------------------------------------------------------ what goes wrong

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn a failure of the disk into a message."""
        try:
            yield
        except OSError as error:
            size = sum(part.nbytes for tensor in self._tensors.values() for _, part in parts_of(tensor))
            size = size or sum(piece.nbytes for piece in self._own)
            raise ConfigError(
                f"The checkpoint of step {self._step} could not be saved in {self.folder}: {error.strerror or error}. "
                f"It has {size / 1e9:.3f} GB of tensors; {_free_space(self.folder)}. What was saved before is "
                "untouched. Free space, allow writing, or choose another folder."
            ) from error

    @contextmanager
    def _cleaned(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self.ranks.rank == 0:
                shutil.rmtree(self.fresh, ignore_errors=True)
                self._held.close()
            raise

    def _await_folder(self) -> None:
        end = time.monotonic() + _VISIBLE_AFTER
        while not self.fresh.is_dir():
            if self.ranks.rank == 0 or time.monotonic() > end:
                raise ConfigError(
                    f"{self.fresh}, which rank 0 has made, is not there for rank {self.ranks.rank}. All processes need "
                    "one folder: use a file system that all machines share."
                )
            time.sleep(0.05)


def _piece(name: str, shape: tuple[int, ...], dtype: torch.dtype, box: Box, part: Tensor) -> Piece:
    return Piece(name, shape, dtype, box, lambda: part)


def _box(part: Sequence[Any]) -> Box:
    return Box(tuple(part[1]), tuple(part[2]))


def _assembled(parts: Parts, own: Sequence[Piece], ranks: Ranks) -> Iterator[Piece]:
    """Yield every tensor as a whole that is put together when it is written."""
    mine = {(piece.name, piece.box): piece for piece in own}
    asked = [0] * ranks.size
    for name, entry in parts.items():
        sources: list[tuple[Box, Callable[[Tensor], object]]] = []
        for part in entry["parts"]:
            rank, box = part[0], _box(part)
            if rank == 0:
                sources.append((box, partial(_copy, mine[name, box])))
            else:
                sources.append((box, partial(ranks.ask, rank, asked[rank])))
            asked[rank] += 1
        shape, dtype = tuple(entry["shape"]), _TORCH_TYPES[entry["dtype"]]
        yield Piece(name, shape, dtype, Box.whole(shape), partial(_assemble, Box.whole(shape), dtype, sources))


def _copy(piece: Piece, into: Tensor) -> None:
    into.copy_(piece.load())


def _assemble(whole: Box, dtype: torch.dtype, sources: Sequence[tuple[Box, Callable[[Tensor], object]]]) -> Tensor:
    result = torch.empty(whole.sizes, dtype=dtype)
    for box, fill in sources:
        part = torch.empty(box.sizes, dtype=dtype)
        fill(part)
        result[box.within(whole)].copy_(part)
    return result


def _free_space(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e9:.3f} GB are free there"
    except OSError:
        return "how much is free there could not be found out"
