"""On a GPU: nothing is read in a step, batches come beside it, and numbers are waited for alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cornstarch.data.collate import CollatedBatch
from cornstarch.data.device_prefetcher import DevicePrefetcher
from cornstarch.data.loader import StepBatch
from cornstarch.models.multimodal_language_model.facts import BatchFacts
from cornstarch.parallel.device import DevicePlacement, Reading
from tests.trainer.tiny import losses, tiny_config, trainer_of

pytestmark = pytest.mark.gpu


@contextmanager
def nothing_waited_for() -> Iterator[None]:
    """Run a block in which nothing may wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("attention", ["causal", "item", "modality"])
def test_a_step_waits_for_nothing(tmp_path: Path, packing: bool, attention: str) -> None:
    sections = {"model": {"encoders": {"vision": {"attention": attention}}}, "data": {"packing": packing}}
    trainer = trainer_of(tiny_config(tmp_path, "device=cuda", "loop.gradient_accumulation_steps=2", **sections))
    trainer.setup()
    done = 0
    for batch in trainer.batches():
        if trainer.position.step < 2:  # kernels are loaded, memory is taken, what is held is looked at
            trainer.step(batch)
        else:
            with nothing_waited_for():
                trainer.step(batch)
        done += 1
    trainer.watch.check()
    assert done == 6


def test_workers_give_pinned_batches_and_the_same_losses(tmp_path: Path) -> None:
    for workers in (0, 2):
        options = ["device=cuda", "precision=fp32", f"data.workers={workers}", f"output={tmp_path / str(workers)}"]
        trainer = trainer_of(tiny_config(tmp_path, *options))
        if workers:
            trainer.setup()
            inputs = next(iter(trainer.build_loader())).microbatches[0].inputs
            assert all(one.is_pinned() for one in inputs.values() if isinstance(one, torch.Tensor))
            assert all(one.is_pinned() for one in inputs["facts"].places.values())
        trainer.fit()
    assert losses(tmp_path / "0") == pytest.approx(losses(tmp_path / "2"), rel=1e-5)


def batch_of(*values: float) -> StepBatch:
    microbatches = []
    for value in values:
        ids = torch.full((4, 4096), int(value))
        inputs: dict[str, Any] = {"input_ids": ids, "nested": {"x": torch.full((64, 1024, 1024), float(value))}}
        inputs["facts"] = BatchFacts.of(inputs, {"vision": int(value)})
        microbatches.append(CollatedBatch(inputs, ["a"], 1, 1, {}))
    return StepBatch(microbatches, 0, 0, [])


def test_what_was_copied_beside_is_what_was_given() -> None:
    """Copies of 256 MB under a stream of work that reads and frees the ones before."""
    feed, device = DevicePrefetcher(DevicePlacement(torch.device("cuda"), "fp32")), torch.device("cuda")
    work = torch.randn(4096, 4096, device=device)
    sums = []
    batches = [batch_of(n, n + 0.5) for n in range(1, 5)]
    feed.begin(batches[0])
    for index, batch in enumerate(batches):
        for number in range(2):
            inputs = feed.inputs(batch, number)
            if number == 1 and index + 1 < len(batches):
                feed.begin(batches[index + 1])
            for _ in range(20):
                work = (work @ work).clamp(-1, 1)
            sums.append(inputs["nested"]["x"].mean() + 0 * work[0, 0])
            assert inputs["facts"].places["vision"].is_cuda
            del inputs
    torch.cuda.synchronize()
    assert [one.item() for one in sums] == pytest.approx([n + half for n in range(1, 5) for half in (0, 0.5)])
    assert 0 <= feed.wait_seconds() < 60


def test_a_number_is_waited_for_alone() -> None:
    """What was begun after it may still run when it is read."""
    work = torch.randn(8192, 8192, device="cuda")
    for _ in range(3):
        work = (work @ work).clamp(-1, 1)
    torch.cuda.synchronize()
    reading = Reading(torch.tensor([1.5, 2.5], device="cuda"))
    after = torch.cuda.Event()
    for _ in range(200):
        work = (work @ work).clamp(-1, 1)
    after.record()
    assert reading.numbers() == [1.5, 2.5]
    assert not after.query()
    torch.cuda.synchronize()
