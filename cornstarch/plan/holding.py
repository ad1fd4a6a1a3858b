"""What the layers of a stage hold on each of its ranks; what their gradients and their optimizer cost; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from cornstarch.errors import ConfigError
from cornstarch.plan.communication import all_gather, all_reduce, reduce_scatter
from cornstarch.plan.cost import LayerCost
from cornstarch.plan.memory import Memory, ModelSize, ParameterSize, StateSize, memory_of
from cornstarch.plan.plan import DataKind, DataPlan

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Device, Link

GATHERED = ("zero2", "zero3", "fsdp1", "fsdp2")
"""Kinds that gather parameters for every forward pass; all but zero2 for every backward pass, too."""


def held(layers: Sequence[LayerCost], kind: DataKind, ranks: int, states: int, whole: bool = False) -> Memory:
    """Return what each of `ranks` ranks that hold the same layers has of them.

    zero1 deals out whole parameters; of the many that a stage has, each rank is taken to get its share.

    Args:
        layers: Scaled to the rank; each is gathered by itself.
        kind: How they are spread.
        ranks: dp × cp.
        states: Bytes of the optimizer for a trained parameter.
        whole: Whether gradients are kept whole until the last microbatch: so do the stages of a pipeline.
    """
    if kind == "hsdp":
        raise ConfigError("data.kind = hsdp: its step cannot be predicted yet. Use zero3, or ddp.")
    parameters = []
    for unit, layer in enumerate(layers):
        itemsize = round(layer.parameter_bytes / layer.parameters) if layer.parameters else 1
        for numbers, trained in ((layer.changing, True), (layer.parameters - layer.changing, False)):
            if numbers:
                parameters.append(ParameterSize((numbers,), itemsize, trained, unit))
    sizes = {(parameter.itemsize, False): StateSize(per_element=states) for parameter in parameters}
    size = ModelSize(tuple(parameters), states=sizes)
    if kind == "zero1":
        every = memory_of(size, _data("ddp"), ranks)
        return replace(every, optimizer=-(-every.optimizer // ranks))
    spread = memory_of(size, _data(kind), ranks)
    return replace(spread, gradients=sum(one.bytes for one in size.trained)) if whole else spread


@lru_cache
def _data(kind: DataKind) -> DataPlan:
    return DataPlan(kind)


def together(parts: Iterable[Memory]) -> Memory:
    """Return what a rank holds that has several parts; they are gathered one after the other."""
    parts = tuple(parts)
    return Memory(
        parameters=sum(one.parameters for one in parts),
        gradients=sum(one.gradients for one in parts),
        optimizer=sum(one.optimizer for one in parts),
        gathered=max((one.gathered for one in parts), default=0),
        gradients_stay=any(one.gradients_stay for one in parts),
    )


@dataclass(frozen=True)
class StepEnd:
    """What one part adds to a step besides its passes, in seconds."""

    reduced: float = 0.0
    """Summing gradients over the replicas."""
    buckets: int = 0
    """Layers with gradients: portions in which they are summed."""
    optimizer: float = 0.0
    after: float = 0.0
    """zero1: gathering the new parameters."""

    def __add__(self, other: StepEnd) -> StepEnd:
        return StepEnd(*(getattr(self, name) + getattr(other, name) for name in vars(self)))

    def exposed(self, backward: float) -> float:
        """Return what of the sums is left when the last backward pass ends.

        The gradients of a layer are summed as soon as they are there, while those of the layer before are computed.
        The first portion can start after 1/n of the pass, the last one only when the pass is over.
        """
        if not self.buckets:
            return 0.0
        return max(self.reduced / self.buckets, self.reduced - backward * (1 - 1 / self.buckets))


def step_end(
    layers: Sequence[LayerCost], kind: DataKind, ranks: int, states: int, link: Link, device: Device
) -> StepEnd:
    """Return what the layers of a stage add to a step.

    The optimizer reads parameters, gradients and states once, and writes parameters and states, at the speed of the
    device's memory.
    """
    trained = [layer for layer in layers if layer.changing]
    gradients = sum(layer.parameter_bytes * layer.changing / layer.parameters for layer in trained)
    numbers = sum(layer.changing for layer in trained)
    bandwidth = getattr(device, "bandwidth", None)
    share = 1 if kind == "ddp" else ranks
    optimizer = (3 * gradients + 2 * states * numbers) / share / bandwidth if bandwidth else 0.0
    if ranks == 1:
        return StepEnd(0.0, len(trained), optimizer)
    reduced = all_reduce(gradients, ranks, link) if kind == "ddp" else reduce_scatter(gradients, ranks, link)
    after = all_gather(gradients, ranks, link) if kind == "zero1" and trained else 0.0
    return StepEnd(reduced if trained else 0.0, len(trained), optimizer, after)
