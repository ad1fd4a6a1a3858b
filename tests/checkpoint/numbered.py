"""Checkpoints whose every number is their step, saved by worker processes in fair and foul weather."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cornstarch.checkpoint import Checkpoint, CheckpointStore, LocalStorage, Sharded
from cornstarch.checkpoint.coordinator import Coordinator
from cornstarch.checkpoint.shards import Tensorlike
from cornstarch.checkpoint.storage import Chunks
from cornstarch.errors import ConfigError
from tests.checkpoint.layouts import refusal


def numbered(step: int, size: int = 500) -> dict[str, Tensorlike]:
    """Return tensors whose every number is the step: one cut, one that all have, one of each process."""
    ranks = Coordinator.default()
    begin, end = (size * 3 * number // ranks.size for number in (ranks.rank, ranks.rank + 1))
    return {
        "cut": Sharded(torch.Size([size, 3]), torch.full((end - begin,), float(step)), begin),
        "same": torch.full((7,), step),
        f"own/{ranks.rank}": torch.full((size,), float(step)),
    }


def save_numbered(store: CheckpointStore, step: int, size: int = 500, **options: Any) -> Path:
    return store.save(step, numbered(step, size), {"step": step}, **options)


def step_told_by(folder: Path, size: int = 2) -> int | None:
    """Return the newest step, if every number of it says so."""
    store = CheckpointStore(folder, keep=2)
    found = store.latest()
    assert store.problems == []
    if found is None:
        return None
    with found.all_tensors() as tensors:
        assert set(tensors) == {"cut", "same", *(f"own/{rank}" for rank in range(size))}
        assert {float(n) for name in tensors for n in tensors[name].unique()} == {float(found.step)}
    assert found.data()["step"] == found.step
    return found.step


def save_steps(folder: Path, numbers: list[int], **options: Any) -> None:
    """Save some steps."""
    store = CheckpointStore(folder, keep=9)
    for step in numbers:
        save_numbered(store, step, **options)


def save_on_a_full_disk(folder: Path, full: int, form: str, wait: bool) -> str:
    """Save a large step that one rank cannot write; return what is raised, and that the next save works."""
    store = CheckpointStore(folder, keep=9)
    save_numbered(store, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if Coordinator.default().rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        message = refusal(lambda: (save_numbered(store, 2, 9_000, form=form, wait=wait), store.wait()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()  # rank 0 tells the others, then removes what was written
    left = sorted(path.name for path in folder.iterdir() if path.name != ".lock")
    assert left == ["step_00000001"], left
    dist.barrier()
    save_numbered(store, 3)
    return message


def save_in_background(folder: Path, form: str) -> tuple[bool, bool, int | None]:
    """Save, change the tensors at once, and return whether it went on beside, whether it waited, and what was saved."""
    go_on = threading.Event()

    class SlowStorage(LocalStorage):
        def write(self, path: Path, chunks: Chunks) -> dict[str, Any]:
            assert go_on.wait(250)
            return super().write(path, chunks)

    store = CheckpointStore(folder, keep=9)
    store.storage = SlowStorage()
    tensors = numbered(5)
    path = store.save(5, tensors, {"step": 5}, form=form, wait=False)
    for tensor in tensors.values():
        (tensor.local if isinstance(tensor, Sharded) else tensor).fill_(-1)
    beside = store.is_saving and not path.exists()
    other = torch.ones(1)
    dist.all_reduce(other)  # the run's own traffic
    store.check()
    go_on.set()
    save_numbered(store, 6, wait=False)  # waits for the one before
    waited = path.exists()
    store.wait()
    return beside, waited, step_told_by(folder)


def fail_in_background(folder: Path, failing: int) -> str:
    """Save on a disk that fails on one rank, go on training, and return what `check` raises, soon."""
    store = CheckpointStore(folder, keep=9)
    save_numbered(store, 1, wait=False)
    store.wait()

    class FullStorage(LocalStorage):
        def write(self, path: Path, chunks: Chunks) -> dict[str, Any]:
            raise OSError(28, "No space left on device")

    if Coordinator.default().rank == failing:
        store.storage = FullStorage()
    save_numbered(store, 2, wait=False)

    def check_until_it_raises() -> None:
        while True:
            time.sleep(0.01)
            store.check()

    message = refusal(check_until_it_raises)
    store.check()  # raised once
    assert step_told_by(folder) == 1
    return message


def disagree(folder: Path, what: str) -> str:
    """Save something that is another on rank 1."""
    rank = Coordinator.default().rank
    store = CheckpointStore(folder, keep=9)
    step, data, tensors = 1, {"a": {"b": 1}}, numbered(1)
    options: dict[str, Any] = {}
    if what == "data":
        data["a"]["b"] = rank
    elif what == "step":
        step = rank
    elif what == "form":
        options["form"] = ["full", "sharded"][rank]
    elif what == "shape":
        tensors["same"] = torch.ones(3 + rank)
    elif what == "kind":
        data["a"]["b"] = object() if rank == 1 else 1  # type: ignore[assignment]
    elif what == "parts" and rank == 1:
        del tensors["cut"]
    message = refusal(lambda: store.save(step, tensors, data, **options))
    assert not list(folder.glob("step_*"))
    return message


def find_steps(folder: Path, damage_on: int | None = None) -> tuple[int | None, list[str]]:
    """Return the newest step that is whole, and what was passed over; one rank may see damage that others do not."""
    store = CheckpointStore(folder, keep=9)
    check = Checkpoint.check_sizes

    def fail(checkpoint: Any) -> None:
        if checkpoint.step == 2:
            raise ConfigError(f"{checkpoint.folder} is missing or cannot be read")
        check(checkpoint)

    if damage_on == Coordinator.default().rank:
        Checkpoint.check_sizes = fail  # type: ignore[method-assign]
    try:
        found = store.latest()
    finally:
        Checkpoint.check_sizes = check  # type: ignore[method-assign]
    return None if found is None else found.step, store.problems
