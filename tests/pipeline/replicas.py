"""What the processes of `test_replicas.py` do."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cornstarch.compat import default_store
from cornstarch.pipeline.apply import Pipeline
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import ModulePlan, Plan
from tests import zoo

_caught: list[BaseException] = []


def fail(rank: int, microbatch: int) -> tuple[str, float]:
    """Raise in the loss of one replica; return what this process is told, and when."""
    plan = Plan(modules={"model": ModulePlan(stages=2)})
    layout = Layout.of(plan, dist.get_world_size(), dist.get_world_size())
    pipeline = Pipeline(zoo.LANGUAGE_MODELS["llama"].build(), layout, torch.device("cpu"), 2)
    ids = torch.arange(3, 15).view(2, 6)

    def finish(number: int, output: Any) -> Tensor:
        if (dist.get_rank(), number) == (rank, microbatch):
            raise ValueError("a bad number")
        loss: Tensor = output.loss
        return loss

    words = "nothing"
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    dist.barrier()  # how long it takes until all know is counted from when all are at work
    try:
        pipeline.train([batch, batch], finish)
    except RuntimeError as error:
        _caught[:], words = [error], str(error)
    ended = time.time()
    store = default_store()
    store.add("ended", 1)
    while store.add("ended", 0) < dist.get_world_size():  # nobody goes before all know
        time.sleep(0.02)
    return words, ended
