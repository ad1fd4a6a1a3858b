"""How much each part of a model computes, counted on a real batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.flop_counter import FlopCounterMode

from cornstarch.attention.verify import evaluating
from cornstarch.train.data.collate import CollatedBatch
from cornstarch.train.parts import Part
from cornstarch.train.precision import Placement
from cornstarch.train.tasks.task import Task


def forward_flops(task: Task, parts: Sequence[Part], batch: CollatedBatch, placement: Placement) -> dict[str, float]:
    """Return the floating-point operations of a forward pass for one sample, by part; only what is counted is there.

    Matrix products, convolutions and attention are counted, as torch's counter does.
    """
    inputs = placement.moved(batch.inputs)
    counter = FlopCounterMode(display=False)
    with evaluating(task.model), placement.computing(), counter:
        task.loss(inputs)
    counts = {name: sum(operations.values()) for name, operations in counter.get_flop_counts().items()}
    root = type(task.model).__name__
    samples = max(len(batch.sample_ids), 1)
    found: dict[str, float] = {}
    for part in parts:
        # The counter calls a module by its path from the root, whose class name comes first.
        names = [f"{root}.{place}" if place else root for place in part.module_names]
        known = [counts[name] for name in names if name in counts]
        if known:
            found[part.name] = known[0] / samples
    return found
