"""What the layers of a stage hold on each of its ranks; what their gradients and their optimizer cost; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from cornstarch.errors import ConfigError
from cornstarch.plan.communication import all_gather, all_reduce, reduce_scatter
from cornstarch.plan.cost import LayerCost
from cornstarch.plan.memory import Memory, ModelSize, ParameterSize, StateSize, memory_of
from cornstarch.plan.plan import DataKind, DataPlan
from cornstarch.plan.simulate import StepEnd

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Device
    from cornstarch.plan.passes import Links

GATHERED = ("zero2", "zero3", "fsdp1", "fsdp2", "hsdp")
"""Kinds that gather parameters for every forward pass; all but zero2 for every backward pass, too."""
_REACHED = 0.8  # of a memory's speed: AdamW and the norm of 1.7 billion gradients in bf16 take 8 ms on an H200
PREDICTED = ("ddp", "zero1", *GATHERED)
"""Kinds whose steps can be predicted."""


def held(
    layers: Sequence[LayerCost], kind: DataKind, ranks: int, states: int, whole: bool = False, copies: int = 1
) -> Memory:
    """Return what each of `ranks` ranks that hold the same layers has of them.

    zero1 deals out whole parameters; of the many that a stage has, each rank is taken to get its share.

    Args:
        layers: Scaled to the rank; each is gathered by itself.
        kind: How they are spread.
        ranks: dp × cp.
        states: Bytes of the optimizer for a trained parameter.
        whole: Whether gradients are kept whole until the last microbatch: so do the stages of a pipeline.
        copies: hsdp: how often the model is there, each copy sharded over ranks / copies.
    """
    if kind not in PREDICTED:
        raise ConfigError(
            f"data.kind = {kind}: what its steps take cannot be predicted. Use one of {', '.join(PREDICTED)}."
        )
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
    spread = memory_of(size, _data(kind), ranks, copies=copies)
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


def step_end(
    layers: Sequence[LayerCost], kind: DataKind, ranks: int, states: int, links: Links, device: Device, copies: int = 1
) -> StepEnd:
    """Return what the layers of a stage add to a step.

    Gradients are read twice, for their norm and by the optimizer, which reads parameters and states, too, and writes
    both; at most of the speed that the maker promises for the device's memory. hsdp sums gradients within each copy
    first, and then each rank its part over the copies. The cores of one machine sum gradients after they have computed
    them, as they do both.
    """
    link, shards = links.data, ranks // copies
    trained = [layer for layer in layers if layer.changing]
    gradients = sum(layer.parameter_bytes * layer.changing / layer.parameters for layer in trained)
    numbers = sum(layer.changing for layer in trained)
    bandwidth = getattr(device, "bandwidth", None)
    share = 1 if kind == "ddp" else shards
    touched = (4 * gradients + 2 * states * numbers) / share
    optimizer = touched / (_REACHED * bandwidth) if bandwidth else 0.0
    if ranks == 1:
        return StepEnd(0.0, len(trained), optimizer)
    reduced = all_reduce(gradients, ranks, link) if kind == "ddp" else reduce_scatter(gradients, shards, link)
    if copies > 1 and links.copies is not None:
        reduced += all_reduce(gradients / shards, copies, links.copies)
    after = all_gather(gradients, ranks, link) if kind == "zero1" and trained else 0.0
    return StepEnd(reduced if trained else 0.0, len(trained), optimizer, after, beside=links.beside)
