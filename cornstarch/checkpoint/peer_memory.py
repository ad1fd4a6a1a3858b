"""Copies of a run's state in memory, which outlive its processes: `checkpoint.peer`.

A copy is a checkpoint in a folder of shared memory (`/dev/shm`), written and verified by the same code: every rank's
shards with checksums, complete or not there at all. The kernel holds it, so that any process of the run may be killed,
and all of them. On several nodes, files are on two of them, so that one may be lost (`peer_nodes.py`). A restart of
all machines loses the copies, and the run goes on from its newest checkpoint on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from cornstarch.checkpoint.coordinator import Coordinator
from cornstarch.checkpoint.peer_nodes import NodePlace, NodeWriter, find_newest_together
from cornstarch.checkpoint.reader import Checkpoint
from cornstarch.checkpoint.shards import LEFTOVER_NAME, Tensorlike, list_shards
from cornstarch.checkpoint.storage import LocalStorage
from cornstarch.checkpoint.store import CheckpointStore
from cornstarch.errors import ConfigError
from cornstarch.files import replace_file
from cornstarch.parallel import distributed

SHARED_MEMORY = Path("/dev/shm")
IDENTITY = "peer.json"
"""The file of a run's folder that names its copies: a run that starts over finds none of an earlier one."""
KEPT = 2
_AT_ONCE = KEPT + 1  # a new copy is complete before the oldest one is removed


class SharedMemory(LocalStorage):
    """Folders in shared memory, below one that only its owner can read."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def make_folder(self, folder: Path) -> None:
        with suppress(FileExistsError):
            self.base.mkdir(mode=0o700)
        found = os.lstat(self.base)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(f"{self.base} is not a folder that only this user can read. Remove it.")
        super().make_folder(folder)


class PeerMemory(CheckpointStore):
    """The copies of a run's state in shared memory."""

    def __init__(self, run_folder: Path, name: str) -> None:
        self.base = locate_copies(run_folder)
        super().__init__(self.base / name, KEPT)
        self.storage = SharedMemory(self.base)
        self.place = NodePlace.current()

    def copy(self, step: int, tensors: Mapping[str, Tensorlike], data: Mapping[str, Any], *, wait: bool) -> None:
        """Copy the state of a step into shared memory; all ranks must call it."""
        self.wait()
        shards = [shard for name, tensor in tensors.items() for shard in list_shards(name, tensor)]
        own = {
            "sizes": {f"{shard.name}{shard.box}": shard.nbytes for shard in shards},
            "copies": len(self.list()),
            "free": min(shutil.disk_usage(SHARED_MEMORY).free, psutil.virtual_memory().available),
        }
        coordinator = Coordinator.default()
        coordinator.reduce(lambda: own, _check_memory)
        if self.place.nodes == 1:
            self.save(step, tensors, data, wait=wait)
            return

        def prepare(resources: ExitStack, step: int) -> tuple[Path, int]:
            return self.folder / f"step_{step:08d}.tmp.{secrets.token_hex(4)}", step + 1

        coordinator.run_on_all(lambda: self._make_room(step))
        writer = NodeWriter(self.storage, self.folder, coordinator, step, tensors, data)
        writer.plan(None, "sharded", prepare)
        writer.temporary = self.folder / writer.temporary.name  # each node's own path
        writer.finish(lambda target: self._prune(self.list()))

    def _make_room(self, step: int) -> None:
        """On each node: remove what a killed copy has left, and a copy of the same step that was not complete."""
        if self.place.is_first and self.folder.is_dir():
            for name in os.listdir(self.folder):
                if LEFTOVER_NAME.fullmatch(name) or name == f"step_{step:08d}":
                    self.storage.remove(self.folder / name)

    def newest(self) -> Checkpoint | None:
        """Return the newest copy that is intact; unlike `latest`, damaged ones alone are no error."""
        if self.place.nodes > 1:
            self.problems = []
            return find_newest_together(self.folder, self.storage, self.problems)
        try:
            return self.latest()
        except ConfigError:
            return None

    def drop(self, *, until: int | None = None, after: int | None = None) -> None:
        """Remove the copies of steps up to `until`, or after `after`; the folder goes with the last one."""
        self.wait()
        if not self.place.is_first or not self.base.exists():
            return
        for one in self.list():
            if (until is not None and one.step <= until) or (after is not None and one.step > after):
                with suppress(OSError):
                    self.storage.remove(one.folder)
        if not self.list():
            release_copies(self.base)


def open_peer_memory(run_folder: Path, is_used: bool) -> PeerMemory | None:
    """Return the copies of a run, or None if it keeps none; those that nobody will read are removed. Collective."""
    if not is_used:
        if distributed.rank() % max(1, distributed.ranks_per_node()) == 0:
            release_copies(locate_copies(run_folder))
        return None
    coordinator = Coordinator.default()
    coordinator.run_on_all(_check_support)
    name = coordinator.run_on_first(lambda: _name_run(run_folder))
    memory = PeerMemory(run_folder, name)
    coordinator.run_on_all(lambda: _remove_others(memory))
    return memory


def _check_support() -> None:
    NodePlace.current()
    if not SHARED_MEMORY.is_dir():
        raise ConfigError(f"checkpoint.peer: there is no {SHARED_MEMORY} to keep copies in. Leave the key out.")


def locate_copies(run_folder: Path) -> Path:
    """Return the folder in shared memory for the run in a folder."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(run_folder))).hexdigest()[:16]
    return SHARED_MEMORY / f"cornstarch-{os.geteuid()}-{name}"


def release_copies(base: Path) -> None:
    """Remove all copies of a run."""
    if base.is_symlink():
        base.unlink()
    elif base.exists():
        shutil.rmtree(base, ignore_errors=True)


def _name_run(run_folder: Path) -> str:
    """Return the name of the run in a folder, which has none of its own before its first start."""
    path = run_folder / IDENTITY
    if not path.exists():
        replace_file(path, json.dumps({"id": secrets.token_hex(8)}).encode() + b"\n")
    return _identify_run(run_folder)


def _remove_others(memory: PeerMemory) -> None:
    """On each node: remove the copies of another run that was in the run's folder."""
    base = memory.base
    stale = base.is_symlink() or (base.exists() and any(name != memory.folder.name for name in os.listdir(base)))
    if memory.place.is_first and stale:
        release_copies(base)


def _identify_run(run_folder: Path) -> str:
    path = run_folder / IDENTITY
    try:
        name = json.loads(path.read_bytes())["id"]
        int(name, 16)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: it does not name a run. Remove it.") from error
    return str(name)


def _check_memory(found: list[dict[str, Any]]) -> None:
    """Refuse copies that would not fit beside those that are there; replicated shards are kept once on a node."""
    size = sum({shard: size for one in found for shard, size in one["sizes"].items()}.values())
    needed = (_AT_ONCE - found[0]["copies"]) * size
    free = min(one["free"] for one in found)
    if needed > free:
        raise ConfigError(
            f"checkpoint.peer: the state has {size:,} bytes, and its copies need {needed:,} more while they are "
            f"renewed, but {free:,} bytes of memory are free in {SHARED_MEMORY}. Leave the key out; "
            "checkpoint.background saves to disk while the run goes on."
        )
