"""Copies in memory on several nodes: every rank's shards on its own node and on the next one.

Rank r sends its files to the rank of the same place on the next node, which writes them there. So any one node may be
lost: its files are on the next node. When the run starts again, what the nodes have is judged together, and each node
gets the files that it lacks.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cornstarch.checkpoint import shards as files
from cornstarch.checkpoint.coordinator import Coordinator
from cornstarch.checkpoint.reader import Checkpoint, read_checkpoint
from cornstarch.checkpoint.save import CheckpointWriter
from cornstarch.checkpoint.storage import Storage
from cornstarch.errors import ConfigError
from cornstarch.files import Manifest, own_digest
from cornstarch.parallel import distributed


@dataclass(frozen=True)
class NodePlace:
    """Where this rank is among the nodes of a run."""

    rank: int
    per_node: int
    nodes: int

    @classmethod
    def current(cls) -> NodePlace:
        """Return the place of this rank; ConfigError if nodes have different numbers of ranks."""
        rank, size, per_node = distributed.rank(), distributed.world_size(), distributed.ranks_per_node()
        if per_node < 1 or size % per_node:
            raise ConfigError(
                f"checkpoint.peer: {size} ranks are on nodes of {per_node}; every node must have the same number of "
                "ranks. Leave the key out."
            )
        return cls(rank, per_node, size // per_node)

    @property
    def node(self) -> int:
        return self.rank // self.per_node

    @property
    def is_first(self) -> bool:
        """Whether this rank acts for its node."""
        return self.rank % self.per_node == 0

    def first_rank(self, node: int) -> int:
        return node * self.per_node


class NodeWriter(CheckpointWriter):
    """Writes a copy: the files of each rank on two nodes, and the manifest on all."""

    def finish(self, on_commit: Callable[[Path], object]) -> Path:
        place, world = NodePlace.current(), self.coordinator
        try:
            written: Manifest = world.run_on_all(self._write_here)
            world.run_on_all(lambda: self._swap_files(place, written))
            manifest, description, data = world.reduce(lambda: written, self._describe)
            world.run_on_all(lambda: self._commit_here(place, manifest, description, data))
            world.run_on_all(lambda: on_commit(self.target) if place.is_first else None)
        finally:
            self._resources.close()
        return self.target

    def _write_here(self) -> Manifest:
        self.storage.make_folder(self.temporary)
        return self._write()

    def _swap_files(self, place: NodePlace, written: Manifest) -> None:
        size = place.per_node * place.nodes
        to, source = (place.rank + place.per_node) % size, (place.rank - place.per_node) % size
        contents = [torch.from_numpy(np.fromfile(self.temporary / name, np.uint8)) for name in written]
        theirs, received = self.coordinator.swap(written, contents, to, source)
        with self.explain_errors():
            for name, content in zip(theirs, received, strict=True):
                stored = self.storage.write(self.temporary / name, [content.numpy().data])
                if stored != theirs[name]:
                    raise ConfigError(f"{name} was damaged on the way from rank {source} to rank {place.rank}.")

    def _describe(self, written: list[Manifest]) -> tuple[Manifest, dict[str, Any], str]:
        manifest = {name: entry for one in written for name, entry in one.items()}
        return manifest, self._description, self._content.decode()

    def _commit_here(self, place: NodePlace, manifest: Manifest, description: dict[str, Any], data: str) -> None:
        if not place.is_first:
            return
        with self.explain_errors():
            entry = self.storage.write(self.temporary / files.DATA, [data.encode()])
            files.write_manifest(self.storage, self.temporary, {**manifest, files.DATA: entry}, description)
            self.storage.commit(self.temporary, self.target)


def find_newest_together(folder: Path, storage: Storage, problems: list[str]) -> Checkpoint | None:
    """Return the newest copy of which the nodes together have all files, intact, after each node has got all of them.

    Problems are added on all ranks.
    """
    place, world = NodePlace.current(), Coordinator.default()
    candidates: list[str] = world.reduce(lambda: _list_copies(place, folder), _order_names)
    for name in candidates:
        view: dict[str, Any] = world.reduce(partial(_view_copy, place, folder / name), _join_views)
        if "problem" in view:
            problems.append(f"{folder / name}: {view['problem']}")
            continue
        world.run_on_all(partial(_complete_copy, place, world, folder / name, view, storage))
        return world.run_on_all(partial(_open_copy, folder / name, storage))
    return None


def _open_copy(path: Path, storage: Storage) -> Checkpoint:
    found = read_checkpoint(path, storage)
    found.check_sizes()
    return found


def _list_copies(place: NodePlace, folder: Path) -> list[str]:
    if not place.is_first or not folder.is_dir():
        return []
    return [name for name in os.listdir(folder) if files.FOLDER_NAME.fullmatch(name)]


def _order_names(found: Sequence[list[str]]) -> list[str]:
    return sorted({name for one in found for name in one}, reverse=True)


def _view_copy(place: NodePlace, path: Path) -> dict[str, Any]:
    """Return the manifest of a copy on this node and which of its files are here intact."""
    if not place.is_first or not path.is_dir():
        return {}
    try:
        found = read_checkpoint(path)
    except ConfigError as error:
        return {"problem": str(error)}
    intact = []
    problem = ""
    for name, entry in found.files.items():
        file = path / name
        if not file.is_file():
            continue
        if file.stat().st_size == entry["size"] and found.storage.digest(file) == entry["sha256"]:
            intact.append(name)
        else:
            problem = f"{file} is damaged"
    manifest = (path / files.MANIFEST).read_text()
    return {"manifest": manifest, "files": found.files, "node": place.node, "intact": intact, "problem": problem}


def _join_views(views: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest and the nodes that have each file; or why the copy cannot be used."""
    usable = [view for view in views if "manifest" in view]
    problems = [view["problem"] for view in views if view.get("problem")]
    if not usable:
        return {"problem": problems[0] if problems else "no node has its manifest"}
    first = usable[0]
    if len({own_digest(view["files"]) for view in usable}) > 1:
        return {"problem": "the nodes have different copies of this step"}
    holders = {name: [view["node"] for view in usable if name in view["intact"]] for name in first["files"]}
    lost = [name for name, nodes in holders.items() if not nodes]
    if lost:
        return {"problem": problems[0] if problems else f"{len(lost)} files are on no node, the first is {lost[0]}"}
    return {"manifest": first["manifest"], "holders": holders}


def _complete_copy(place: NodePlace, world: Coordinator, path: Path, view: dict[str, Any], storage: Storage) -> None:
    """Send files from nodes that have them to nodes that do not."""
    if not place.is_first:
        return
    holders: dict[str, list[int]] = view["holders"]
    fresh = path.with_name(f"{path.name}.tmp.{secrets.token_hex(4)}")
    lacks = any(place.node not in nodes for nodes in holders.values())
    if lacks:
        storage.make_folder(fresh)
        for name, nodes in holders.items():
            if place.node in nodes:
                os.link(path / name, fresh / name)
    for name, nodes in holders.items():  # in one order on all nodes
        for node in range(place.nodes):
            if node in nodes or place.node not in (node, nodes[0]):
                continue
            if place.node == nodes[0]:
                world.send_bytes(torch.from_numpy(np.fromfile(path / name, np.uint8)), place.first_rank(node))
            else:
                content = world.receive_bytes(place.first_rank(nodes[0]))
                storage.write(fresh / name, [content.numpy().data])
    if lacks:
        storage.write(fresh / files.MANIFEST, [view["manifest"].encode()])
        read_checkpoint(fresh, storage).verify()
        if path.exists():
            storage.remove(path)
        storage.commit(fresh, path)
