"""Samples dealt out by what they cost: weighed once, before the first step, and remembered in the run's folder.

Every process weighs some of the samples, by headers alone, and tells the others. From then on all know what a step's
samples cost, and each finds its own among them without asking: it reads no others.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import numpy as np

from cornstarch.errors import ConfigError
from cornstarch.parallel import processes
from cornstarch.plan.balancing import Costs, Dealt, balance, deal, loads, step_work
from cornstarch.plan.layout import Layout
from cornstarch.train.config import RunConfig
from cornstarch.train.data.collate import ChatCollator
from cornstarch.train.data.formats import SampleSource
from cornstarch.train.data.loader import Collator
from cornstarch.train.data.order import EpochOrder
from cornstarch.train.data.sample import SampleError
from cornstarch.train.data.sizes import SampleSizer, Step
from cornstarch.train.runs import RunFolder

COSTS = "sample_costs.npz"
_OF_NO_WEIGHT = {"evaluation", "workers", "prefetch", "balance", "packing", "split_images"}
_TOLD = 8  # steps that the gain is told of


@dataclass(frozen=True, eq=False)
class Balancer:
    """Deals out the samples of a step by cost."""

    costs: Costs
    """[phases, samples of the source]"""
    padded: bool
    """Whether rows are filled up to the longest of their portion."""

    def __call__(self, numbers: np.ndarray, ranks: int, portions: int) -> Dealt:
        """Return the places of a step's samples by replica and portion."""
        return balance(self.costs[:, numbers], ranks, portions, self.padded)

    def gain(self, steps: Sequence[np.ndarray], ranks: int, portions: int) -> tuple[float, float]:
        """Return the slowest replica's work over the mean, as samples come and balanced, over some steps."""
        mean = as_they_come = balanced = 0.0
        for numbers in steps:
            costs = self.costs[:, numbers]
            mean += float(costs.sum()) / ranks
            as_they_come += step_work(loads(costs, deal(len(numbers), ranks, portions), self.padded))
            balanced += step_work(loads(costs, self(numbers, ranks, portions), self.padded))
        return (as_they_come / mean, balanced / mean) if mean else (1.0, 1.0)


def balancer_of(
    config: RunConfig,
    collator: Collator,
    source: SampleSource,
    step: Step,
    layout: Layout,
    folder: RunFolder,
) -> Balancer | None:
    """Return what deals out a run's samples by cost; None if they come as they are. All processes must call it.

    Args:
        config: The run.
        collator: What makes its batches.
        source: Its training data.
        step: Counts what a batch multiplies.
        layout: Who holds which module.
        folder: Of the run; what samples cost is kept there, so that a run that goes on deals out as before.
    """
    if config.data.balance == "off" or layout.dp * config.loop.accumulation == 1:
        return None
    if not isinstance(collator, ChatCollator):
        raise ConfigError(
            "data.balance = cost: only conversations and documents are weighed, not the samples of this task.\n"
            "  Set it to off."
        )
    sizer = SampleSizer(collator, step)
    costs = _shared(lambda numbers: weighed(sizer, source, numbers), len(sizer.phases), len(source), config, folder)
    costs = costs / _ranks_of(sizer.phases, layout)[:, None]
    # Encoders that lend items are even however samples are dealt out: only the language model, the last, is left.
    lends = config.data.split_images and layout.dp > 1
    return Balancer(costs[-1:] if lends else costs, not config.data.packing)


def told_gain(balancer: Balancer, order: EpochOrder, config: RunConfig, ranks: int) -> str:
    """Return a line about what balancing gains in the first steps."""
    size = config.loop.batch_size
    numbers = order.order(0)
    steps = list(islice((numbers[n : n + size] for n in range(0, len(numbers), size)), _TOLD))
    before, after = balancer.gain(steps, ranks, config.loop.accumulation)
    return (
        f"Samples are dealt out by cost: the slowest replica has {after:.2f} × the mean work, not {before:.2f} × "
        f"(predicted, first {len(steps)} steps)."
    )


def weighed(sizer: SampleSizer, source: SampleSource, numbers: Sequence[int]) -> Costs:
    """Return what samples cost, [phases, samples]; nothing where one will be left out."""
    data = sizer.data
    found = np.zeros((len(sizer.phases), len(numbers)))
    for place, number in enumerate(numbers):
        with suppress(SampleError):
            size = sizer(source[number])
            if size.tokens <= data.max_length or data.too_long == "cut":
                found[:, place] = [size.work[phase] for phase in sizer.phases]
    return found


def _ranks_of(phases: Sequence[str], layout: Layout) -> np.ndarray:
    """Return over how many processes of a replica the work of each phase is spread."""
    modules = layout.plan.modules
    return np.array([layout.mesh(p).size / layout.dp if p in modules else 1.0 for p in phases])


# ------------------------------------------------------------------------------------------------ remembering


def _shared(
    weigh: Callable[[Sequence[int]], Costs], phases: int, count: int, config: RunConfig, folder: RunFolder
) -> Costs:
    """Return what all samples cost: as the folder says, or weighed by all processes together."""
    rank, size = processes.rank(), processes.size()
    key = _key(config)
    stored = _stored(folder, key, (phases, count)) if rank == 0 else None
    is_stored = processes.sum_over_ranks([stored is not None])[0] > 0
    costs = np.zeros((phases, count)) if stored is None else stored
    if not is_stored:
        costs[:, rank::size] = weigh(range(rank, count, size))
    # Each cost is one process's, and 0 in all others: the sum is exact.
    costs = np.array(processes.sum_over_ranks(costs.ravel().tolist())).reshape(phases, count)
    if rank == 0 and not is_stored:
        content = io.BytesIO()
        np.savez_compressed(content, costs=costs, key=np.array(key))
        folder.write(COSTS, content.getvalue())
    return costs


def _stored(folder: RunFolder, key: str, shape: tuple[int, int]) -> Costs | None:
    """Return what the folder says, if it is about the same model and data."""
    try:
        with np.load(folder / COSTS, allow_pickle=False) as file:
            costs, found = file["costs"], str(file["key"])
    except (OSError, ValueError, KeyError, EOFError):  # not there, or damaged: it is made again
        return None
    return costs if found == key and costs.shape == shape else None


def _key(config: RunConfig) -> str:
    """Return what stands for everything that decides what samples cost."""
    data = config.data.model_dump(mode="json", exclude=_OF_NO_WEIGHT)
    said = {"model": config.model.model_dump(mode="json"), "data": data, "recomputes": config.recomputes}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


__all__ = ["COSTS", "Balancer", "balancer_of", "told_gain", "weighed"]
