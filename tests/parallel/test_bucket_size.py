"""Buckets of gradients that suit the link: measured, the same in all processes, and no matter for the result."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cornstarch.errors import ConfigError
from cornstarch.parallel import apply_data_parallel, data_mesh
from cornstarch.parallel.ddp_fsdp import MeasuredBucket, get_measured_bucket, measure_link
from cornstarch.plan import DataPlan
from cornstarch.plan.communication import Link
from cornstarch.plan.low_bandwidth_cost import SMALLEST_BUCKET, choose_bucket_bytes
from cornstarch.train import Trainer
from tests.parallel.test_data import assert_same
from tests.parallel.work import alone, step
from tests.parity.pool import Pool
from tests.trainer.tiny import tiny_config

BUCKET = "parallel.data.bucket_mb"


def wrap_with(bucket: float | str | None) -> tuple[MeasuredBucket | None, int]:
    """Return what was measured, and the size that DDP was given."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    plan = DataPlan(bucket_mb=bucket)  # type: ignore[arg-type]
    wrapped = apply_data_parallel(model, data_mesh("cpu"), plan)
    assert isinstance(wrapped, DistributedDataParallel)
    return get_measured_bucket(wrapped), wrapped.bucket_bytes_cap


def measured() -> Link:
    """Return the link between all processes."""
    assert dist.group.WORLD is not None
    return measure_link(dist.group.WORLD, torch.device("cpu"))


def test_all_ranks_measure_the_same_bucket_size(workers: Pool) -> None:
    links = workers.run(3, measured)
    assert len(set(links)) == 1
    assert links[0].bandwidth > 1e6 and links[0].latency >= 0


def test_ddp_uses_the_bucket_size_measured_for_the_link(workers: Pool) -> None:
    told = workers.run(2, wrap_with, "auto")
    assert told[0] == told[1]
    chosen, size = told[0]
    bytes_of_all = 4 * 2 * (512 * 512 + 512)
    assert chosen.size == size == choose_bucket_bytes(chosen.link, 2, bytes_of_all)
    assert SMALLEST_BUCKET <= size <= bytes_of_all // 4
    assert f"{size / 2**20:.3g} MiB" in chosen.line and "measured" in chosen.line


def test_bucket_size_is_not_measured_by_default(workers: Pool) -> None:
    (found, size), _ = workers.run(2, wrap_with, 3.0)
    assert found is None and size == 3 * 2**20
    assert workers.run(2, wrap_with, None)[0][0] is None


def test_gradients_equal_those_of_one_process(workers: Pool) -> None:
    expected = alone(most=0.1)
    for one in workers.run(2, step, {"kind": "ddp", "bucket_mb": "auto"}, 0.1, 2):
        assert_same(one.gradients, expected.gradients)


def run_told(folder: str) -> str:
    """Train a step; return what was said."""
    said = io.StringIO()
    config = tiny_config(Path(folder), f"output={folder}/run", f"{BUCKET}=auto", "loop.steps=1", "loop.batch_size=2")
    Trainer(config, console=Console(file=said, width=200)).fit()
    return said.getvalue()


def test_run_logs_and_reports_its_measured_bucket_size(workers: Pool, tmp_path: Path) -> None:
    tiny_config(tmp_path)  # writes the data
    told, _ = workers.run(2, run_told, str(tmp_path))
    line = json.loads((tmp_path / "run" / "run.json").read_text())["buckets"]
    assert line.startswith("buckets of ") and f"gradients travel in {line}." in told
    assert f"gradients in {line}" in (tmp_path / "run" / "report.html").read_text()


def test_compression_with_auto_buckets_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bucket_mb = auto\n(.|\n)*would measure another size"):
        DataPlan(bucket_mb="auto", compression={"kind": "topk"})  # type: ignore[arg-type]
