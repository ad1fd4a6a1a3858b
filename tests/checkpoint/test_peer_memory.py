"""Copies of a run's state in memory: kill -9 of every process, and a second start that goes on from there."""

from __future__ import annotations

import io
import os
import shutil
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from cornstarch.checkpoint import peer_memory
from cornstarch.checkpoint.peer_memory import PeerMemory, locate_copies, open_peer_memory
from cornstarch.errors import ConfigError
from cornstarch.train import RunConfig, Trainer
from cornstarch.trainer.callbacks import Callback
from tests import forked
from tests.checkpoint import numbered
from tests.parity.pool import pool
from tests.trainer.tiny import losses, tiny_config, trainer_of

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "fsdp2": (2, {"data": {"kind": "fsdp2"}}),
    "zero1": (2, {"data": {"kind": "zero1"}}),
    "tp": (2, {"modules": {"vision": {"tp": 2}, "language_model": {"tp": 2}}}),
    "stages": (2, {"modules": {"vision": {}, "language_model": {}}}),
}


class KillAfter(Callback):
    """Kills this process when it has done a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_batch_begin(self, trainer: Any) -> None:
        if trainer.position.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(locate_copies(tmp_path / "run"), ignore_errors=True)


def describe(folder: Path, layout: str | None = None, **checkpoint: Any) -> RunConfig:
    parallel = LAYOUTS[layout][1] if layout else {}
    return tiny_config(
        folder, "loop.steps=7", "threads=1", checkpoint=checkpoint, parallel={**parallel, "verify": "never"},
    )  # fmt: skip


def train_rank(
    rank: int, size: int, meeting: Path, config: RunConfig, die_at: int | None, said: Path, nodes: int
) -> None:
    """Train in one of several processes, up to a kill or to the end. Each node has a memory of its own."""
    torch.set_num_threads(1)
    local = size // nodes
    os.environ.update({"LOCAL_WORLD_SIZE": str(local), "LOCAL_RANK": str(rank % local), "RANK": str(rank)})
    if nodes > 1:
        peer_memory.SHARED_MEMORY = said.parent / f"node-{rank // local}"
        peer_memory.SHARED_MEMORY.mkdir(exist_ok=True)
    store = dist.FileStore(str(meeting), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=200))
    text = io.StringIO()
    callbacks = [] if die_at is None else [KillAfter(die_at)]
    Trainer(config, console=Console(file=text, width=200), callbacks=callbacks).fit()
    if rank == 0:
        said.write_text(text.getvalue())
    os._exit(0)


def run_ranks(folder: Path, config: RunConfig, size: int, die_at: int | None = None, nodes: int = 1) -> str:
    """Train in processes; return what rank 0 has said if they came to the end."""
    number = len(list(folder.glob("meeting-*")))
    said, meeting = folder / f"said-{number}", folder / f"meeting-{number}"
    meeting.touch()
    ranks = [forked.process(train_rank, rank, size, meeting, config, die_at, said, nodes) for rank in range(size)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(250)
    codes = [one.exitcode for one in ranks]
    for one in ranks:
        one.kill()
    assert codes == [0 if die_at is None else -signal.SIGKILL] * size
    return said.read_text() if die_at is None else ""


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_run_goes_on_from_memory_as_if_nothing_had_happened(layout: str, folder: Path) -> None:
    size = LAYOUTS[layout][0]
    whole = folder / "whole"
    run_ranks(folder, describe(whole, layout), size)
    config = describe(folder, layout, peer=2)
    run_ranks(folder, config, size, die_at=5)
    assert not list((folder / "run" / "checkpoints").glob("step_*"))
    assert sorted(path.name for path in copies_of(folder)) == ["step_00000002", "step_00000004"]
    assert "Going on from the copy in memory of step 4; the newest checkpoint on disk: none." in run_ranks(
        folder, config, size
    )
    assert losses(folder / "run") == losses(whole / "run")
    assert set(losses(folder / "run")) == set(range(1, 8))
    assert not locate_copies(folder / "run").exists()  # released at the end


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "lost"), [("ddp", 0), ("fsdp2", 1)])
def test_one_of_two_nodes_may_be_lost(layout: str, lost: int, folder: Path) -> None:
    whole = folder / "whole"
    run_ranks(folder, describe(whole, layout), 2)
    config = describe(folder, layout, peer=2)
    run_ranks(folder, config, 2, die_at=5, nodes=2)
    nodes = [list((folder / f"node-{node}").glob("*/*/step_00000004")) for node in (0, 1)]
    assert [sorted(path.name for path in one.iterdir()) for [one] in nodes[:1]] == [
        sorted(path.name for path in one.iterdir()) for [one] in nodes[1:]
    ]  # two nodes: each has all files
    shutil.rmtree(folder / f"node-{lost}")
    said = run_ranks(folder, config, 2, nodes=2)
    assert "Going on from the copy in memory of step 4" in said
    assert losses(folder / "run") == losses(whole / "run")
    assert not list(folder.glob("node-*/*"))  # released at the end


def copies_of(folder: Path) -> list[Path]:
    return list(locate_copies(folder / "run").glob("*/step_*"))


def stop_at(folder: Path, step: int, **checkpoint: Any) -> None:
    """Train up to a failure after a step."""

    class Fail(Callback):
        def on_batch_begin(self, trainer: Any) -> None:
            if trainer.position.step == step:
                raise ConfigError("stop here")

    with pytest.raises(ConfigError, match="stop here"):
        trainer_of(describe(folder, **checkpoint), callbacks=[Fail()]).fit()


def resume(folder: Path, **checkpoint: Any) -> str:
    text = io.StringIO()
    Trainer(describe(folder, **checkpoint), console=Console(file=text, width=200)).fit()
    return text.getvalue()


def test_a_damaged_copy_is_passed_over(folder: Path) -> None:
    trainer_of(describe(folder / "whole")).fit()
    stop_at(folder, 5, peer=2)
    [newest] = [path for path in copies_of(folder) if path.name == "step_00000004"]
    [file] = newest.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    said = resume(folder, peer=2)
    assert "A damaged copy in memory is passed over" in said and "the copy in memory of step 2" in said
    assert losses(folder / "run") == losses(folder / "whole" / "run")


def test_only_damaged_copies_leave_the_checkpoint_on_disk(folder: Path) -> None:
    stop_at(folder, 5, every=3, peer=2)
    [copy] = copies_of(folder)  # those of older steps than the checkpoint were released
    assert copy.name == "step_00000004"
    (copy / "checkpoint.json").write_text("{}")
    said = resume(folder, every=3, peer=2)
    assert "A damaged copy in memory is passed over" in said and "copy in memory of" not in said
    assert set(losses(folder / "run")) == set(range(1, 8))
    assert not locate_copies(folder / "run").exists()


def test_a_newer_checkpoint_on_disk_wins(folder: Path) -> None:
    stop_at(folder, 5, every=4, peer=3)
    assert copies_of(folder) == []
    assert "copy in memory of" not in resume(folder, every=4, peer=3)


def test_copies_are_private_and_those_of_a_run_that_was_moved_aside_are_removed(folder: Path) -> None:
    stop_at(folder, 3, peer=2)
    base = locate_copies(folder / "run")
    assert base.stat().st_mode & 0o777 == 0o700 and len(copies_of(folder)) == 1
    shutil.move(folder / "run", folder / "run.old-1")  # as --restart does
    stop_at(folder, 1, peer=2)
    assert copies_of(folder) == []
    stop_at(folder, 3, peer=2)
    assert len(copies_of(folder)) == 1
    stop_at(folder, 1)  # without the key nothing is kept
    assert not base.exists()


def test_a_state_that_does_not_fit_is_refused_in_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/dev/shm")
    monkeypatch.setattr(peer_memory.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ConfigError, match=r"has [\d,]+ bytes, and its copies need [\d,]+ more .* but 1,000 bytes"):
        trainer_of(describe(folder, peer=2)).fit()
    assert copies_of(folder) == []


def test_a_folder_of_somebody_else_is_refused(folder: Path) -> None:
    base = locate_copies(folder / "run")
    base.mkdir(mode=0o777)
    base.chmod(0o777)
    with pytest.raises(ConfigError, match="is not a folder that only this user can read"):
        trainer_of(describe(folder, peer=2)).fit()
    base.rmdir()
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (folder / "run" / "x").touch()
    base.symlink_to(elsewhere)
    open_peer_memory(folder / "run", is_used=True)  # a link is no copy: it is removed, and not followed
    assert not base.is_symlink() and elsewhere.is_dir()


def copy_on_three_nodes(folder: Path) -> list[list[str]]:
    """Be one of three nodes; return the files of each copy here, after some were damaged and lost."""
    memory_of_node = folder / f"node-{dist.get_rank()}"
    memory_of_node.mkdir()
    # The process goes on with other tests.
    with (
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1"}),
        mock.patch.object(peer_memory, "SHARED_MEMORY", memory_of_node),
    ):
        return copy_on_a_node(folder)


def copy_on_a_node(folder: Path) -> list[list[str]]:
    rank = dist.get_rank()
    memory = open_peer_memory(folder / "run", is_used=True)
    assert memory is not None and memory.place.nodes == 3
    for step in (1, 2, 3):
        memory.copy(step, numbered.numbered(step), {"step": step}, wait=True)
    here = sorted(path.name for path in (memory.folder / "step_00000003").iterdir())
    dist.barrier()
    if rank == 0:  # the newest copy of rank 1's shards, on the nodes 1 and 2
        for node in (1, 2):
            [file] = folder.glob(f"node-{node}/*/*/step_00000003/rank-0001-*")
            file.write_bytes(file.read_bytes()[:-1] + b"x")
        [file] = folder.glob("node-1/*/*/step_00000002/rank-0001-*")
        file.write_bytes(b"")
        shutil.rmtree(folder / "node-0")
        (folder / "node-0").mkdir()
    dist.barrier()
    found = memory.newest()
    assert found is not None and found.step == 2
    with found.all_tensors() as tensors:
        assert {float(n) for name in tensors for n in tensors[name].unique()} == {2.0}
    names = sorted(path.name for path in found.folder.iterdir())
    problems = memory.problems
    memory.drop(until=9)
    peer_memory.SHARED_MEMORY = Path("/dev/shm")
    return [here, names, problems]


def test_what_nodes_have_is_judged_together(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    found = pool().run(3, copy_on_three_nodes, tmp_path)
    pool().renew()  # its workers believe in nodes now
    everything = ["checkpoint.json", "data.json", *(f"rank-{rank:04d}-tensors-00001.safetensors" for rank in range(3))]
    for rank, (here, names, problems) in enumerate(found):
        before = (rank - 1) % 3
        assert here == [name for name in everything if "rank" not in name or int(name[5:9]) in (rank, before)]
        assert names == everything
        assert len(problems) == 1 and "step_00000003" in problems[0]


def test_a_run_that_was_set_back_drops_the_copies_that_it_gave_up(folder: Path) -> None:
    (folder / "run").mkdir()
    memory = open_peer_memory(folder / "run", is_used=True)
    assert isinstance(memory, PeerMemory)
    for step in (2, 4):
        memory.copy(step, {"w": torch.ones(3)}, {}, wait=True)
    memory.drop(after=3)
    assert [one.step for one in memory.list()] == [2]
    memory.drop(until=2)
    assert not memory.base.exists() and memory.newest() is None
