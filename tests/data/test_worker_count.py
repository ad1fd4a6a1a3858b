"""`data.workers: auto`: how many processes prepare data, on machines of many sizes."""

from __future__ import annotations

import io
import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console

from cornstarch.config import DataConfig
from cornstarch.data import worker_count
from cornstarch.data.formats import open_sources
from cornstarch.data.loader import open_data
from cornstarch.data.run_workers import choose_workers
from cornstarch.data.sample import Media, Sample
from cornstarch.data.worker_count import NodeResources, choose_worker_count, classify_work
from cornstarch.parallel.mesh import Replica
from cornstarch.train import Trainer
from tests.trainer import tiny

PLENTY = 100 * 10**9


@pytest.mark.parametrize(
    ("work", "on_gpu", "cores", "ranks", "count"),
    [
        ("decode", True, 16, 1, 8),
        ("decode", True, 16, 4, 3),
        ("decode", True, 4, 1, 3),
        ("decode", True, 1, 1, 0),
        ("decode", True, 8, 8, 0),
        ("decode", True, 256, 8, 8),
        ("decode", False, 2, 1, 0),
        ("decode", False, 4, 1, 0),
        ("decode", False, 16, 1, 4),
        ("decode", False, 16, 4, 0),
        ("tokenize", True, 16, 1, 2),
        ("tokenize", False, 64, 1, 0),
        ("none", True, 64, 1, 0),
    ],
)
def test_the_count_follows_cores_and_work(work: Any, on_gpu: bool, cores: int, ranks: int, count: int) -> None:
    chosen = choose_worker_count(work, on_gpu, ranks, NodeResources(cores, PLENTY), lambda: 10**8)
    assert chosen.count == count
    assert str(chosen).startswith(f"data.workers: {count} (")


def test_batches_ahead_fit_into_memory() -> None:
    node = NodeResources(cores=32, memory=10 * 10**9)
    assert choose_worker_count("decode", True, 2, node, lambda: 10**9).count == 5  # 5 GB per rank
    assert choose_worker_count("decode", True, 2, node, lambda: 6 * 10**9).count == 0
    assert "6.0 GB" in choose_worker_count("decode", True, 2, node, lambda: 6 * 10**9).reason


def test_nothing_is_measured_without_workers() -> None:
    def measure() -> int:
        raise AssertionError("prepared samples for nothing")

    assert choose_worker_count("none", True, 1, NodeResources(64, PLENTY), measure).count == 0
    assert choose_worker_count("decode", False, 1, NodeResources(2, PLENTY), measure).count == 0


def test_work_is_read_from_rows_all_over_a_file(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "what"}, {"from": "gpt", "value": "that"}]
    texts = [{"conversations": talk} for _ in range(40)]
    seen = [{"image": "1.png", "conversations": [{"from": "human", "value": "<image> what"}, talk[1]]}] * 40
    rows = {"texts": texts, "images": [*texts, *seen], "numbers": [{"x": [1.0], "y": 2}] * 4}
    found = {}
    for name, some in rows.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(some))
        source = {"path": str(tmp_path / f"{name}.json"), "format": "rows" if name == "numbers" else "auto"}
        found[name] = classify_work(open_sources(DataConfig(train=[source]).train).sources)
    assert found == {"texts": "tokenize", "images": "decode", "numbers": "none"}


def test_decoded_images_need_no_workers() -> None:
    picture = Image.new("RGB", (4, 4))
    assert classify_work([[Sample("1", fields={"image": Media("image", picture)})]]) == "none"  # type: ignore[list-item]
    assert classify_work([[Sample("1", fields={"image": Media("image", b"JPEG")})]]) == "decode"  # type: ignore[list-item]


def test_limits_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_count, "_CGROUPS", tmp_path)
    monkeypatch.setattr(worker_count.os, "sched_getaffinity", lambda _: set(range(64)))
    group = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"), "/")
    inner = tmp_path / group.strip("/")
    inner.mkdir(parents=True, exist_ok=True)
    assert worker_count.count_cores() == 64
    (inner / "cpu.max").write_text("max 100000\n")
    assert worker_count.count_cores() == 64
    (inner / "cpu.max").write_text("650000 100000\n")
    assert worker_count.count_cores() == 6
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert worker_count.count_cores() == 1

    free = worker_count.free_memory()
    (inner / "memory.max").write_text("max")
    (inner / "memory.current").write_text("1000")
    assert worker_count.free_memory() > 4000
    (inner / "memory.max").write_text("9000")
    assert worker_count.free_memory() == 2000 < free


def test_limits_of_older_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_count, "_CGROUPS", tmp_path)
    monkeypatch.setattr(worker_count.os, "sched_getaffinity", lambda _: set(range(64)))
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert worker_count.count_cores() == 64
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    assert worker_count.count_cores() == 3


def test_the_limit_of_open_files_is_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        worker_count.allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_run_says_what_it_chose_and_trains_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for name, cores in (("few", 2), ("many", 16)):
        monkeypatch.setattr(NodeResources, "here", lambda cores=cores: NodeResources(cores, PLENTY))
        config = tiny.tiny_config(tmp_path, f"output={tmp_path / name}", "loop.steps=2", "checkpoint.every=null")
        printed = io.StringIO()
        trainer = Trainer(config, console=Console(file=printed, width=200))
        trainer.fit()
        losses.append(tiny.losses(tmp_path / name))
        chosen = {"few": "data.workers: 0 (2 cores, which", "many": "data.workers: 4 (16 cores, samples to decode)"}
        assert chosen[name] in printed.getvalue()
        assert trainer.build_loader().workers == {"few": 0, "many": 4}[name]
    assert losses[0] == losses[1]


def test_data_given_in_python_stays_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeResources, "here", lambda: NodeResources(16, PLENTY))
    read: list[int] = []

    class Rows(torch.utils.data.Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, Any]:
            read.append(index)
            return {"image": b"...", "label": 1}

    config = tiny.tiny_config(tmp_path, data={"train": [{"path": "mine", "format": "given"}]})
    data, lines = open_data(config, Rows()), list[str]()
    read.clear()
    count = choose_workers(data, None, Replica.here(), torch.device("cpu"), lines.append)  # type: ignore[arg-type]
    assert (count, read) == (0, [])
    assert lines == ["data.workers: 0 (samples need no decoding)"]
