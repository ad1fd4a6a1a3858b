"""One save, by one process or by many.

    plan      every rank describes its shards; rank 0 assigns a writer to each and makes a folder `step_….tmp.…`
    write     every rank writes its files, syncs them and reads them back
    commit    rank 0 writes the manifest last and renames the folder, which makes it a checkpoint

All ranks take each phase together (`Coordinator.reduce`): a failure on one rank is raised on all, and the folder is
removed. A kill at any moment leaves at most a folder that is no checkpoint, which the next save removes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from cornstarch.checkpoint import shards as files
from cornstarch.checkpoint.coordinator import Coordinator
from cornstarch.checkpoint.object_errors import StorageError
from cornstarch.checkpoint.reader import Form, read_checkpoint
from cornstarch.checkpoint.shards import Box, Sharded, Tensorlike, TensorShard, is_partition, is_sharded, local_shards
from cornstarch.checkpoint.storage import Storage
from cornstarch.errors import ConfigError
from cornstarch.files import Manifest

PER_RANK = "per_rank"
"""The key of `data` under which each rank saves its own values."""

RankState = dict[str, Any]
"""What one rank wants to save, as JSON."""
SavePlan = dict[str, dict[str, Any]]
"""By name: `dtype` and `shape` of a tensor, and its `parts` as [rank that writes it, offsets, sizes]."""

FOLDER_TIMEOUT = 30.0  # seconds: network file systems may show new folders late


def describe_save(
    step: object, tensors: Mapping[str, Tensorlike], data: Mapping[str, Any], metric: float | None, form: object
) -> RankState:
    """Return what this rank wants to save; refuse what cannot be saved."""
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ConfigError(f"step = {step!r}; expected a whole number, 0 or more.")
    if form not in get_args(Form):
        raise ConfigError(f"form = {form!r}; expected one of {', '.join(get_args(Form))}.")
    _check_json(data, "data")
    return {
        "step": step,
        "form": form,
        "metric": None if metric is None or not math.isfinite(metric) else float(metric),
        "tensors": {name: _describe_tensor(name, tensor) for name, tensor in tensors.items()},
        "meshes": sorted({_describe_mesh(tensor) for tensor in tensors.values() if is_sharded(tensor)}),
        "data": data,
    }


def _describe_tensor(name: object, tensor: Tensorlike) -> dict[str, Any]:
    if not isinstance(name, str) or name == "__metadata__":
        raise ConfigError(f"A tensor cannot be saved under the name {name!r}.")
    if tensor.dtype not in files.DTYPES:
        raise ConfigError(f"{name} cannot be saved: safetensors has no {tensor.dtype}.")
    try:
        shards = local_shards(tensor)
    except (ValueError, RuntimeError) as error:  # partial sums that were not reduced yet
        raise ConfigError(f"{name} cannot be saved: {error}") from error
    for _, values in shards:
        if type(values) is not Tensor or values.layout is not torch.strided or values.is_meta:
            raise ConfigError(
                f"{name} cannot be saved: it is no plain dense tensor with values, but a {type(values).__name__} "
                f"({values.layout}, on {values.device})."
            )
    boxes = [[list(box.offsets), list(box.sizes)] for box, _ in shards]
    return {"dtype": files.DTYPES[tensor.dtype], "shape": list(tensor.shape), "boxes": boxes}


def _describe_mesh(tensor: Any) -> str:
    """Return the mesh of a sharded tensor for people: `replicate 2 x shard 4`."""
    if isinstance(tensor, Sharded) and (tensor.boxes is None or tensor.divided is not None):
        return "flat"
    distributed: Any = tensor.local if isinstance(tensor, Sharded) else tensor
    mesh = distributed.device_mesh
    names = mesh.mesh_dim_names or [f"axis {number}:" for number in range(mesh.ndim)]
    return " x ".join(f"{name} {size}" for name, size in zip(names, mesh.shape, strict=True))


def _check_json(value: object, at: str) -> None:
    """Refuse values that JSON cannot hold or would change."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{at} has the key {key!r}, a {type(key).__name__}; JSON has words as keys only.")
            _check_json(item, f"{at}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_json(item, f"{at}.{index}")
    elif value is not None and not isinstance(value, (str, int, float)):
        raise ConfigError(
            f"{at} is a {type(value).__name__}, which JSON cannot hold. Tensors belong in the tensors argument."
        )


def assign_writers(states: Sequence[RankState]) -> SavePlan:
    """Return which rank writes which shard: the lowest of those that have it."""
    # Plain tensors of one name are taken to be equal. If they are not (running means of a batch norm), those of the
    # lowest rank are saved.
    plan: SavePlan = {}
    assigned: dict[str, dict[tuple[Any, ...], list[Any]]] = {}
    for rank, state in enumerate(states):
        for name, entry in state["tensors"].items():
            known = plan.setdefault(name, {"dtype": entry["dtype"], "shape": entry["shape"], "parts": []})
            if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
                raise ConfigError(
                    f"{name} is {entry['dtype']} {entry['shape']} on rank {rank}, but {known['dtype']} "
                    f"{known['shape']} on a lower one."
                )
            for offsets, sizes in entry["boxes"]:
                assigned.setdefault(name, {}).setdefault((*offsets, *sizes), [rank, offsets, sizes])
    for name, entry in plan.items():
        entry["parts"] = list(assigned.get(name, {}).values())
        boxes = [_part_box(part) for part in entry["parts"]]
        if not is_partition(entry["shape"], boxes):
            raise ConfigError(
                f"{name} {entry['shape']} cannot be saved: the parts that the {len(states)} processes have do "
                f"not make a whole ({', '.join(map(str, boxes[:4]))})."
            )
    return plan


def _part_box(part: Sequence[Any]) -> Box:
    return Box(tuple(part[1]), tuple(part[2]))


def merge_data(states: Sequence[RankState]) -> dict[str, Any]:
    """Return the JSON data of all ranks as one: keys of any rank, with values that must agree."""
    data = [dict(state["data"]) for state in states]
    own = {str(rank): one.pop(PER_RANK) for rank, one in enumerate(data) if PER_RANK in one}
    merged: dict[str, Any] = _merge(list(enumerate(data)), "data")
    return {**merged, PER_RANK: own} if own else merged


def _merge(values: list[tuple[int, Any]], at: str) -> Any:
    (first_rank, first), *rest = values
    if not rest:
        return first
    if all(isinstance(value, Mapping) for _, value in values):
        keys = dict.fromkeys(key for _, value in values for key in value)
        return {
            key: _merge([(rank, value[key]) for rank, value in values if key in value], f"{at}.{key}") for key in keys
        }
    text = json.dumps(first)
    for rank, value in rest:
        if (other := json.dumps(value)) != text:
            shown, different = (one if len(one) <= 60 else f"{one[:60]}…" for one in (text, other))
            raise ConfigError(
                f"The processes do not save the same thing: {at} is {shown} on rank {first_rank}, "
                f"{different} on rank {rank}. What differs belongs under data[{PER_RANK!r}]."
            )
    return first


@dataclass(eq=False)
class CheckpointWriter:
    """Writes one checkpoint: `plan`, then `stage` if training goes on meanwhile, then `finish`."""

    storage: Storage
    folder: Path
    coordinator: Coordinator
    step: int
    tensors: Mapping[str, Tensorlike]
    data: Mapping[str, Any]
    temporary: Path = Path()
    form: Form = "sharded"

    def __post_init__(self) -> None:
        self._resources = ExitStack()  # on rank 0: the lock, released at the end
        self._description: dict[str, Any] = {}
        self._content = b""
        self._plan: SavePlan = {}
        self._shards: list[TensorShard] = []

    def plan(self, metric: float | None, form: Form, prepare: Callable[[ExitStack, int], tuple[Path, int]]) -> None:
        """Agree on what is saved; on rank 0, `prepare` locks and makes the folder, and returns it and its sequence."""

        def decide(states: list[RankState]) -> dict[str, Any]:
            keys = ("step", "form", "metric")
            agreed = {key: _merge([(rank, one[key]) for rank, one in enumerate(states)], key) for key in keys}
            step, chosen, size = agreed["step"], agreed["form"], self.coordinator.size
            self._description = {
                "step": step,
                "metric": agreed["metric"],
                "time": time.time(),
                "layout": {"processes": size, "form": chosen if size > 1 else "full", "meshes": states[0]["meshes"]},
            }
            # Encoded now: the caller may change the data before it is written.
            self._content = json.dumps(merge_data(states)).encode() + b"\n"
            plan = {} if chosen == "local" else assign_writers(states)
            with self.explain_errors():
                temporary, self._description["sequence"] = prepare(self._resources, step)
            return {"temporary": str(temporary), "plan": plan}

        arguments = self.step, self.tensors, self.data, metric, form
        try:
            decision = self.coordinator.reduce(lambda: describe_save(*arguments), decide)
        except BaseException:
            self._resources.close()
            raise
        self.temporary, self._plan, self.form = Path(decision["temporary"]), decision["plan"], form
        self._shards = self._list_own_shards()
        self.tensors = {}  # the shards have what is needed

    def _list_own_shards(self) -> list[TensorShard]:
        """Return the shards that this rank writes, or sends to rank 0, in the order of the plan."""
        if self.form == "local":
            return [shard for name, tensor in self.tensors.items() for shard in files.list_shards(name, tensor)]
        found: list[TensorShard] = []
        for name, entry in self._plan.items():
            boxes = [_part_box(part) for part in entry["parts"] if part[0] == self.coordinator.rank]
            own = {shard.box: shard for shard in files.list_shards(name, self.tensors[name])} if boxes else {}
            found += [own[box] for box in boxes]
        return found

    def stage(self, copy: Callable[[Sequence[TensorShard]], list[TensorShard]]) -> None:
        """Replace the tensors by copies, so that training may go on."""
        with self._clean_up():
            self._shards = self.coordinator.run_on_all(lambda: copy(self._shards))

    def finish(self, on_commit: Callable[[Path], object]) -> Path:
        """Write the files and commit the checkpoint; rank 0 then calls `on_commit`."""
        with self._resources, self._clean_up():
            return Path(self.coordinator.reduce(self._write, lambda entries: self._commit(entries, on_commit)))

    def _write(self) -> Manifest:
        rank, size = self.coordinator.rank, self.coordinator.size
        with self.explain_errors():
            end = time.monotonic() + FOLDER_TIMEOUT
            while not self.storage.exists(self.temporary):
                if rank == 0 or time.monotonic() > end:
                    raise ConfigError(
                        f"{self.temporary}, which rank 0 has made, is not there for rank {rank}. All processes need "
                        "one folder: use a file system that all machines share."
                    )
                time.sleep(0.05)
            if self.form == "full" and size > 1:
                written = self._write_on_first()
            else:
                prefix = files.file_prefix(rank, size)
                written = files.write_shards(self.storage, self.temporary, prefix, self._shards)
            files.check_written(self.storage, self.temporary, written)
            self.storage.flush(self.temporary)
            return written

    def _write_on_first(self) -> Manifest:
        """Write all tensors on rank 0, which gathers one at a time."""
        if self.coordinator.rank > 0:
            self.coordinator.serve([partial(shard.read, shard.box) for shard in self._shards])
            return {}
        try:
            tensors = _gather_tensors(self._plan, self._shards, self.coordinator)
            return files.write_shards(self.storage, self.temporary, "tensors", tensors, writers=1)
        finally:
            self.coordinator.stop_serving()

    def _commit(self, entries: list[Manifest], on_commit: Callable[[Path], object]) -> str:
        with self.explain_errors():
            manifest = {name: entry for one in entries for name, entry in one.items()}
            manifest[files.DATA] = self.storage.write(self.temporary / files.DATA, [self._content])
            files.write_manifest(self.storage, self.temporary, manifest, self._description)
            files.check_written(self.storage, self.temporary, {files.DATA: manifest[files.DATA]})
            read_checkpoint(self.temporary, self.storage).check_sizes()
            self.storage.flush(self.temporary)
            target = self.target
            self.storage.commit(self.temporary, target)  # durable before an old checkpoint is removed
            on_commit(target)
            return str(target)

    @property
    def target(self) -> Path:
        return self.temporary.with_name(self.temporary.name.partition(".tmp.")[0])

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Turn a storage failure into a message for the user."""
        try:
            yield
        except StorageError as error:  # says all that is known
            raise ConfigError(
                f"The checkpoint of step {self.step} could not be saved: {error} What was saved before is untouched."
            ) from error
        except OSError as error:
            size = sum(values.nbytes for tensor in self.tensors.values() for _, values in local_shards(tensor))
            size = size or sum(shard.nbytes for shard in self._shards)
            try:
                free = f"{self.storage.free_bytes(self.folder) / 1e9:.3f} GB are free there"
            except OSError:
                free = "the free space could not be determined"
            raise ConfigError(
                f"The checkpoint of step {self.step} could not be saved in {self.folder}: {error.strerror or error}. "
                f"It has {size / 1e9:.3f} GB of tensors; {free}. What was saved before is untouched. Free space, allow "
                "writing, or choose another folder."
            ) from error

    @contextmanager
    def _clean_up(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self.coordinator.rank == 0:
                with suppress(OSError):
                    self.storage.remove(self.temporary)
                self._resources.close()
            raise


def _gather_tensors(plan: SavePlan, own: Sequence[TensorShard], coordinator: Coordinator) -> Iterator[TensorShard]:
    """Yield whole tensors, each gathered on rank 0 when it is written."""
    mine = {(shard.name, shard.box): shard for shard in own}
    counts = [0] * coordinator.size
    for name, entry in plan.items():
        shape, dtype = tuple(entry["shape"]), files.TORCH_DTYPES[entry["dtype"]]
        sources: list[tuple[Box, Callable[[Box], Tensor]]] = []
        for part in entry["parts"]:
            rank, box = part[0], _part_box(part)
            read = mine[name, box].read if rank == 0 else partial(coordinator.fetch, rank, counts[rank], dtype)
            sources.append((box, read))
            counts[rank] += 1
        yield TensorShard(name, shape, dtype, Box.whole(shape), partial(files.assemble, sources, dtype))
