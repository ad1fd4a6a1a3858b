"""On a GPU: steps are timed without waiting for them, and a profile says where the GPU's time goes."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cornstarch.metrics.metrics import StepClock, read_metrics
from cornstarch.metrics.profiler import trace_name
from cornstarch.report.time_breakdown import PROFILE
from tests.trainer.test_hot_path_gpu import nothing_waited_for
from tests.trainer.tiny import tiny_config, trainer_of

pytestmark = pytest.mark.gpu


def work(times: int) -> None:
    one = torch.randn(4096, 4096, device="cuda")
    for _ in range(times):
        one = (one @ one).clamp(-1, 1)


def test_steps_are_timed_without_waiting() -> None:
    work(3)
    torch.cuda.synchronize()
    clock = StepClock.for_device(torch.device("cuda"))
    began = time.perf_counter()
    with nothing_waited_for():
        for _ in range(20):
            clock.start_step()
            work(20)
            clock.end_step(0.0)
    handed_over = time.perf_counter() - began
    torch.cuda.synchronize()
    whole = time.perf_counter() - began
    found = clock.read()
    assert found is not None and found.steps == 20
    assert found.seconds == pytest.approx(whole, rel=0.15)
    assert handed_over < 0.5 * whole  # or the process's clock would have done
    assert found.waited == 0.0


def test_data_wait_is_the_idle_time_of_the_gpu() -> None:
    work(3)
    torch.cuda.synchronize()
    clock = StepClock.for_device(torch.device("cuda"))
    for _ in range(5):
        time.sleep(0.2)  # the batch is late, and the GPU is done long before
        clock.start_step()
        work(2)
        clock.end_step(0.2)
    torch.cuda.synchronize()
    found = clock.read()
    assert found is not None and found.steps == 5
    assert found.waited == pytest.approx(1.0, rel=0.1)
    for _ in range(5):
        time.sleep(0.01)  # late, but the GPU has enough to do
        clock.start_step()
        work(100)
        clock.end_step(0.01)
    torch.cuda.synchronize()
    found = clock.read()
    assert found is not None and found.waited < 0.02


VARIANTS: dict[str, list[str]] = {
    "plain": ["compile=off"],
    "compiled": ["compile=layers"],
    "microbatches": ["loop.gradient_accumulation_steps=2", "compile=off"],
    "recomputed": ["loop.activation_checkpointing=true", "compile=off"],
    "adapters": ["model.language_model.train=lora", "model.encoders.vision.train=projector", "compile=off"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_gpu_profile_adds_up_to_the_step(tmp_path: Path, name: str) -> None:
    larger = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 8}
    sections: dict[str, Any] = {"model": {"language_model": {"config": {**larger, "num_key_value_heads": 8}}}}
    config = tiny_config(tmp_path, "device=cuda", "loop.steps=8", "logging.every=100", *VARIANTS[name], **sections)
    trainer_of(config, profile=True).fit()
    data = json.loads((tmp_path / "run" / PROFILE).read_text())
    (rank,) = data["ranks"]
    rows = {row["name"]: row for row in rank["rows"]}
    assert data["steps"] == [4, 5, 6]
    assert sum(row["seconds"] for row in rank["rows"]) == pytest.approx(rank["seconds"], rel=0.02)
    model = rows["language model"]
    assert model["forward"] > 0 and model["backward"] > 0
    assert model["backward"] > 0.5 * model["forward"]
    assert model["matrix products"]["forward"] > 0 and model["matrix products"]["backward"] > 0
    assert rows["vision encoder"]["forward"] > 0 and rows["optimizer"]["seconds"] > 0
    assert ("backward" in rows["vision encoder"]) == (name != "adapters")
    busy = rank["seconds"] - sum(rows.get(one, {}).get("seconds", 0.0) for one in ("GPU idle", "waiting for data"))
    assert rows.get("other", {"seconds": 0.0})["seconds"] < 0.1 * busy
    trace = json.loads(gzip.decompress((tmp_path / "run" / trace_name(0, 1)).read_bytes()))
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    assert busy <= sum(event["dur"] for event in kernels) / 1e6  # of three steps and the one before them
    lines = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if line["kind"] == "train"]
    assert all(0 <= line["data_wait"] <= line["step_time"] for line in lines)
