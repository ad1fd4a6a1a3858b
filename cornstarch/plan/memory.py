"""Memory per rank: parameters, gradients, optimizer states; arithmetic only, no torch.

The figures are those of the data parallelism as this package runs it (`cornstarch.parallel`), padding of shards
included. `textbook` has the well-known formulas, which are the same where everything divides evenly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from cornstarch.errors import ConfigError
from cornstarch.plan.data_options import UNSYNCHRONIZED, choose_sharded_dtypes, keeps_gathered
from cornstarch.plan.plan import DataKind, DataPlan

if TYPE_CHECKING:
    from cornstarch.plan.cost import LayerCost

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_ALIGNMENT = 16  # bytes to which FSDP 1 aligns each parameter in the flat parameter of a unit
GATHERED = ("zero2", "zero3", "fsdp1", "fsdp2", "hsdp")
"""Kinds that gather parameters for every forward pass; all but zero2 for every backward pass, too."""
PREDICTED = ("ddp", "zero1", *GATHERED)
"""Kinds whose steps can be predicted."""


def textbook(parameters: int, ranks: int, weight: int = 2, gradient: int = 2, states: int = 12) -> dict[str, float]:
    """Return the bytes per rank of each ZeRO stage, if all parameters are trained and everything divides evenly.

    `states` (K): bytes of the optimizer per parameter: 12 for Adam beside half-precision weights (a float32 copy and 2
    moments), 8 for Adam on float32 weights; `weight`, `gradient`: bytes of a parameter and of its gradient.
    """
    shard = parameters / ranks
    return {
        "ddp": (weight + gradient + states) * parameters,
        "zero1": (weight + gradient) * parameters + states * shard,
        "zero2": weight * parameters + (gradient + states) * shard,
        "zero3": (weight + gradient + states) * shard,
    }


@dataclass(frozen=True)
class ParameterSize:
    """The size of a parameter."""

    shape: tuple[int, ...]
    itemsize: int
    """Bytes of one of its numbers, as stored."""
    trained: bool
    unit: int | None = None
    """The number of the unit that it is gathered with; None: the root unit."""
    gradient_itemsize: int | None = None
    """Bytes of a number of its gradient; None: as the parameter."""

    @property
    def gradient_bytes(self) -> int:
        return self.numel * (self.itemsize if self.gradient_itemsize is None else self.gradient_itemsize)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class StateSize:
    """The optimizer state of one parameter, in bytes."""

    per_element: int = 0
    """Per element: 8 for Adam on float32, 4 for SGD with momentum, 0 without."""
    per_row: int = 0
    """Per element of the shape without its last dimension: factored states (Adafactor)."""
    per_column: int = 0
    """Per element of the shape without its second-to-last dimension."""
    constant: int = 0
    """Step counters."""

    def of(self, shape: Sequence[int]) -> int:
        rows, columns = prod(shape[:-1]), prod((*shape[:-2], *shape[-1:]))
        return self.per_element * prod(shape) + self.per_row * rows + self.per_column * columns + self.constant


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model and its optimizer."""

    parameters: tuple[ParameterSize, ...]
    buffers: int = 0
    """Bytes; replicated on every rank."""
    states: Mapping[tuple[int, bool], StateSize] = field(default_factory=dict)
    """By the item size of a parameter, and whether it has several dimensions."""
    averaged: bool = False
    """Whether a moving average of the trained weights is kept, in float32."""

    @property
    def trained(self) -> tuple[ParameterSize, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.trained)

    def state(self, parameter: ParameterSize, shape: Sequence[int]) -> int:
        """Return the bytes of the optimizer for a shard of a parameter with this shape."""
        return self.states[parameter.itemsize, len(parameter.shape) > 1].of(shape)

    def average(self, numbers: int) -> int:
        """Return the bytes of the moving average of this many numbers."""
        return 4 * numbers if self.averaged else 0


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank after a backward pass, before the optimizer's step."""

    parameters: int
    gradients: int
    optimizer: int
    averages: int = 0
    buffers: int = 0
    buckets: int = 0
    """DDP's buckets, if gradients are copied there instead of being views of them."""
    exchanged: int = 0
    """State of the low-bandwidth kinds: compression errors, last synchronized weights, outer momentum."""
    gathered: int = 0
    """The peak of what sharded kinds gather: whole parameters, and gradients that are not reduced yet."""
    unit: int = 0
    """The part of `gathered` that belongs to the unit at work; several parts of a rank have it once."""
    gradients_stay: bool = False
    """Whether the memory of gradients is never freed: DDP's buckets."""
    offloaded: bool = False
    """Whether everything but buffers and gathered parameters is in CPU memory."""

    @property
    def persistent(self) -> int:
        """Parameters, gradients, optimizer states, averages and buffers."""
        return self.parameters + self.gradients + self.optimizer + self.averages + self.buffers

    def peak(self, activations: int = 0, accumulated: bool = False, last: int = 0) -> int:
        """Return the peak bytes of a step on the device.

        In a backward pass gradients appear as activations are freed, so they do not add up, unless gradients exist
        before: in persistent buckets, or of an earlier microbatch (`accumulated`). `last`: activations of the layer
        whose backward pass is last.
        """
        gradients = 0 if self.offloaded else self.gradients
        resting = self.buffers if self.offloaded else self.persistent - gradients + self.buckets + self.exchanged
        together = self.gradients_stay or accumulated
        passing = gradients + activations if together else max(gradients + last, activations)
        return resting + self.gathered + passing


def memory_of(size: ModelSize, data: DataPlan, ranks: int, rank: int | None = None, copies: int = 1) -> Memory:
    """Return the memory of a rank.

    Args:
        size: The model.
        data: The kind of data parallelism and its options.
        ranks: Ranks of the data group: dp × cp. 1: no data parallelism.
        rank: The rank's index in the group. Default: the one with the most memory.
        copies: hsdp: copies of the model, each sharded over ranks / copies.
    """
    if ranks == 1:
        return _build_whole(size)
    if data.kind in UNSYNCHRONIZED:
        return replace(_build_whole(size), exchanged=_low_bandwidth_bytes(size, data))
    if data.kind == "ddp":
        return _build_replicated(size, data)
    if data.kind == "zero1":  # flat buffers are divided evenly; gradients are whole until they are reduced
        is_compressed = data.compression.kind != "none"  # in DDP's buckets
        whole = _build_replicated(size, data) if is_compressed else _build_whole(size)
        return replace(whole, optimizer=-(-whole.optimizer // ranks))
    shards = ranks // copies if data.kind == "hsdp" else ranks
    index = 0 if rank is None else rank % shards  # the first shard is the largest
    build = _build_fsdp1 if data.kind == "fsdp1" else _build_fsdp2
    gathered, unit = _count_gathered_bytes(size, data)
    return replace(build(size, shards, index), gathered=gathered, unit=unit, offloaded=data.offload)


def _build_whole(size: ModelSize) -> Memory:
    return Memory(
        parameters=sum(parameter.bytes for parameter in size.parameters),
        gradients=sum(parameter.gradient_bytes for parameter in size.trained),
        optimizer=sum(size.state(parameter, parameter.shape) for parameter in size.trained),
        averages=size.average(sum(parameter.numel for parameter in size.trained)),
        buffers=size.buffers,
    )


def _build_replicated(size: ModelSize, data: DataPlan) -> Memory:
    """DDP: everything on every rank; its buckets are never freed."""
    whole = _build_whole(size)
    views = data.gradient_as_bucket_view
    buckets = 0 if views else whole.gradients
    return replace(whole, buckets=buckets, gradients_stay=views, exchanged=_low_bandwidth_bytes(size, data))


def count_exchange_copies(data: DataPlan) -> int:
    """Return the float32 copies of the trained numbers that the low-bandwidth kinds keep."""
    remembers = data.compression.kind != "none" and data.compression.error_feedback
    return {"local_sgd": 1, "diloco": 2 + data.local.overlap, "async": 1}.get(data.kind, 0) + remembers


def _low_bandwidth_bytes(size: ModelSize, data: DataPlan) -> int:
    return 4 * count_exchange_copies(data) * sum(parameter.numel for parameter in size.trained)


def _build_fsdp2(size: ModelSize, shards: int, index: int) -> Memory:
    """FSDP 2: each parameter is split along its first dimension; shards, but not their states, are padded."""
    padded = [(one, prod(_shard_shape(one.shape, shards, 0)) * one.itemsize) for one in size.parameters]
    own = [(parameter, _shard_shape(parameter.shape, shards, index)) for parameter in size.trained]
    return Memory(
        parameters=sum(bytes_ for _, bytes_ in padded),
        gradients=sum(bytes_ for one, bytes_ in padded if one.trained),
        optimizer=sum(size.state(parameter, shape) for parameter, shape in own),
        averages=size.average(sum(prod(shape) for _, shape in own)),
        buffers=size.buffers,
    )


def _shard_shape(shape: tuple[int, ...], shards: int, index: int) -> tuple[int, ...]:
    """Return the shape of a rank's shard, without padding."""
    rows = shape[0] if shape else 1
    most = -(-rows // shards)
    return (max(0, min(most, rows - index * most)), *shape[1:])


def _build_fsdp1(size: ModelSize, shards: int, index: int) -> Memory:
    """FSDP 1: a unit's parameters, each padded to 16 bytes, form one flat parameter that is split evenly."""
    parameters = gradients = optimizer = numbers = 0
    for unit in _group_by_unit(size.parameters).values():
        spans, end = [], 0  # each parameter with its start in the flat parameter
        for parameter in unit:
            spans.append((parameter, end))
            aligned = _ALIGNMENT // parameter.itemsize
            end += -(-parameter.numel // aligned) * aligned
        shard = -(-end // shards)
        parameters += shard * unit[0].itemsize
        if not any(parameter.trained for parameter in unit):
            continue  # a unit with any trained parameter has gradients for all of it
        gradients += shard * unit[0].itemsize
        for parameter, start in spans:
            own = min(start + parameter.numel, (index + 1) * shard) - max(start, index * shard)
            if parameter.trained and own > 0:
                optimizer += size.states[parameter.itemsize, False].of((own,))
                numbers += own
    return Memory(parameters, gradients, optimizer, size.average(numbers), size.buffers)


def _group_by_unit(parameters: Iterable[ParameterSize]) -> dict[int | None, list[ParameterSize]]:
    """Return the parameters of each unit; those of the root unit under None."""
    units: dict[int | None, list[ParameterSize]] = {}
    for parameter in parameters:
        units.setdefault(parameter.unit, []).append(parameter)
    return units


def _count_gathered_bytes(size: ModelSize, data: DataPlan) -> tuple[int, int]:
    """Return the peak of gathered parameters and unreduced gradients, and the part of it of the unit at work.

    The root unit stays gathered, and its gradients wait for the end. Other units are gathered one after the other: one
    computes while the next is gathered. zero2 frees none before backward. A unit's gradients exist twice while they are
    reduced: as computed, and in the communication buffer.
    """

    def count(unit: Iterable[ParameterSize], dtype: str | None) -> int:
        return sum(one.numel * _BYTES.get(dtype or "", one.itemsize) for one in unit)

    computed, reduced = data.param_dtype, data.reduce_dtype or data.param_dtype
    units = _group_by_unit(size.parameters)
    around = units.pop(None, [])
    whole = [count(unit, computed) for unit in units.values()]
    largest = max(whole, default=0)
    keeps = keeps_gathered(data.kind, data.reshard_after_forward, is_pipeline=False)
    layers = sum(whole) + largest if keeps else largest * (2 + data.prefetch)
    root, *trained = [[one for one in unit if one.trained] for unit in (around, *units.values())]
    summing = max((count(unit, computed) + count(unit, reduced) for unit in trained), default=0)
    peak = count(around, computed) + count(root, computed) + max(count(root, reduced), layers + summing)
    return peak, summing + (largest if keeps else largest * (2 + data.prefetch)) if whole else 0


def stage_memory(
    layers: Sequence[LayerCost],
    kind: DataKind,
    ranks: int,
    states: int,
    whole: bool = False,
    copies: int = 1,
    keeps: bool = False,
    gathered_itemsize: int | None = None,
    ep: int = 1,
) -> Memory:
    """Return the memory of each of `ranks` ranks with the same layers, which are scaled to the rank, one unit each.

    `states`: bytes of the optimizer per trained parameter. `whole`: gradients are kept whole until the last microbatch,
    as in the stages of a pipeline; `keeps`: parameters stay gathered, too. `gathered_itemsize`: as in a `RunCost`.
    `ep`: the ranks that experts are shared out over: ranks / ep have the same ones.
    """
    if kind not in PREDICTED:
        raise ConfigError(f"data.kind = {kind}: its steps cannot be predicted. Use one of {', '.join(PREDICTED)}.")
    parameters: list[ParameterSize] = []
    experts: list[ParameterSize] = []
    for unit, layer in enumerate(layers):
        total, trainable = layer.parameters, layer.num_trainable
        itemsize = round(layer.parameter_bytes / total) if total else 1
        if ep > 1 and (own := layer.experts) is not None:
            total, trainable = total - own.parameters, trainable - own.trained_parameters
            size = round(own.parameter_bytes / own.parameters)
            experts += _build_sizes(own.parameters, own.trained_parameters, size, unit)
            itemsize = round((layer.parameter_bytes - own.parameter_bytes) / total) if total else 1
        parameters += _build_sizes(total, trainable, itemsize, unit)
    data = _build_data_plan(kind, keeps and kind in ("fsdp2", "hsdp"), gathered_itemsize == 2)
    found = []
    for own_sizes, among in ((parameters, ranks), (experts, ranks // ep)):
        state = {(one.itemsize, False): StateSize(per_element=states) for one in own_sizes}
        model = ModelSize(tuple(own_sizes), states=state)
        sharded = memory_of(model, data, among, copies=copies)
        found.append(replace(sharded, gradients=sum(one.bytes for one in model.trained)) if whole else sharded)
    rest, own_experts = found
    # A layer and the experts inside it are gathered together.
    names = ("parameters", "gradients", "optimizer", "buckets", "gathered", "unit")
    return replace(rest, **{name: getattr(rest, name) + getattr(own_experts, name) for name in names})


def _build_sizes(parameters: int, trained: int, itemsize: int, unit: int) -> list[ParameterSize]:
    pairs = (trained, True), (parameters - trained, False)
    return [ParameterSize((numbers,), itemsize, is_trained, unit) for numbers, is_trained in pairs if numbers]


@lru_cache  # validation is slow, and a search asks thousands of times
def _build_data_plan(kind: DataKind, keeps: bool, in_half: bool) -> DataPlan:
    plan = DataPlan(kind, reshard_after_forward=False if keeps else None)
    return choose_sharded_dtypes(plan, "bf16", on_gpu=True) if in_half else plan


def combine_memory(parts: Iterable[Memory], keeps: bool = False) -> Memory:
    """Return the memory of a rank with several parts; `keeps`: all are gathered at once, else one after the other."""
    parts = tuple(parts)
    gathered, units = [one.gathered for one in parts], [one.unit for one in parts]
    return Memory(
        parameters=sum(one.parameters for one in parts),
        gradients=sum(one.gradients for one in parts),
        optimizer=sum(one.optimizer for one in parts),
        gathered=sum(gathered) - sum(units) + max(units, default=0) if keeps else max(gathered, default=0),
        unit=max(units, default=0),
        gradients_stay=any(one.gradients_stay for one in parts),
    )
