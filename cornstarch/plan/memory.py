"""How many bytes each rank holds: parameters, gradients, states of the optimizer; arithmetic only, no torch.

    held = memory_of(size, DataPlan("zero3"), ranks=8)
    held.held, held.peak(activations)

The figures are those of the kinds of data parallelism as they are run here (`cornstarch.parallel`), padding of shards
included. `textbook` has the well-known formulas, which they come down to when everything divides evenly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from cornstarch.errors import ConfigError
from cornstarch.plan.dealing import deal_out
from cornstarch.plan.options import APART
from cornstarch.plan.plan import DataPlan

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_ALIGNED = 16  # bytes to which FSDP 1 aligns each parameter in the string that it makes of a unit's


def textbook(parameters: int, ranks: int, weight: int = 2, gradient: int = 2, states: int = 12) -> dict[str, float]:
    """Return the bytes per rank of each stage of ZeRO, all parameters being trained and everything dividing evenly.

    Args:
        parameters: Ψ.
        ranks: N.
        weight: Bytes of a parameter.
        gradient: Bytes of its gradient.
        states: K, what the optimizer has for it: 12 for Adam beside half-precision weights (a copy in float32, and two
            averages), 8 for Adam on float32 weights.
    """
    share = parameters / ranks
    return {
        "ddp": (weight + gradient + states) * parameters,
        "zero1": (weight + gradient) * parameters + states * share,
        "zero2": weight * parameters + (gradient + states) * share,
        "zero3": (weight + gradient + states) * share,
    }


# ------------------------------------------------------------------------------------------------ what there is


@dataclass(frozen=True)
class ParameterSize:
    """A parameter as far as memory is concerned."""

    shape: tuple[int, ...]
    itemsize: int
    """Bytes of one of its numbers, as they are kept."""
    trained: bool
    unit: int | None = None
    """The number of the unit that it is gathered with; None: with the model itself."""

    @property
    def numel(self) -> int:
        """Its numbers."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Its bytes, whole."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class StateSize:
    """What an optimizer has for one parameter, in bytes."""

    per_element: int = 0
    """For each number: 8 for Adam on float32, 4 for SGD with momentum, 0 without."""
    per_row: int = 0
    """For each number of what is left without the last dimension: factored states (Adafactor)."""
    per_column: int = 0
    """For each number of what is left without the last dimension but one."""
    constant: int = 0
    """Counters of steps."""

    def of(self, shape: Sequence[int]) -> int:
        """Return the bytes for a tensor of this shape."""
        rows, columns = prod(shape[:-1]), prod((*shape[:-2], *shape[-1:]))
        return self.per_element * prod(shape) + self.per_row * rows + self.per_column * columns + self.constant


@dataclass(frozen=True)
class ModelSize:
    """A model and its optimizer as far as memory is concerned."""

    parameters: tuple[ParameterSize, ...]
    buffers: int = 0
    """Bytes; every rank has them whole."""
    states: Mapping[tuple[int, bool], StateSize] = field(default_factory=dict)
    """By the bytes of a parameter's number, and whether it has several dimensions."""
    averaged: bool = False
    """Whether an average of the trained weights is kept, in float32."""

    @property
    def trained(self) -> tuple[ParameterSize, ...]:
        """The parameters that change."""
        return tuple(parameter for parameter in self.parameters if parameter.trained)

    def state(self, parameter: ParameterSize, shape: Sequence[int]) -> int:
        """Return the bytes of the optimizer for a part of a parameter, which has this shape."""
        return self.states[parameter.itemsize, len(parameter.shape) > 1].of(shape)

    def average(self, numbers: int) -> int:
        """Return the bytes of the average of so many numbers."""
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
    """What DDP copies gradients to, if they do not lie there already."""
    exchanged: int = 0
    """What exchanges over slow links keep: what was not sent yet, weights that all had last, an outer momentum."""
    gathered: int = 0
    """The most that sharded kinds have whole for a moment: parameters, and gradients that are not summed yet."""
    gradients_stay: bool = False
    """Whether the memory of gradients is never given back: DDP's buckets."""
    offloaded: bool = False
    """Whether all but the buffers and what is gathered is in the CPU's memory."""

    @property
    def held(self) -> int:
        """What tensors hold that last: parameters, gradients, optimizer, averages and buffers."""
        return self.parameters + self.gradients + self.optimizer + self.averages + self.buffers

    def peak(self, activations: int = 0, accumulated: bool = False, last: int = 0) -> int:
        """Return the most bytes of a step on the device that computes.

        In backward gradients come as activations go, so that they are not all there together, unless gradients are
        there before: in buckets that stay, or those of an earlier portion of the step (`accumulated`).

        Args:
            activations: The most that there are.
            accumulated: Whether a step has several portions.
            last: Activations that are there until all gradients are: those of the layer whose backward pass is last.
        """
        gradients = 0 if self.offloaded else self.gradients
        resting = self.buffers if self.offloaded else self.held - gradients + self.buckets + self.exchanged
        together = self.gradients_stay or accumulated
        passing = gradients + activations if together else max(gradients + last, activations)
        return resting + self.gathered + passing


# ------------------------------------------------------------------------------------------------ who holds what


def memory_of(size: ModelSize, data: DataPlan, ranks: int, rank: int | None = None, copies: int = 1) -> Memory:
    """Return what a rank holds.

    Args:
        size: The model.
        data: The kind of data parallelism and its options.
        ranks: Ranks that hold the same parameters together: dp × cp. One: no data parallelism at all.
        rank: The rank's number among them. Default: the one that holds most.
        copies: hsdp: how often the model is there, each copy sharded over ranks / copies.
    """
    if ranks == 1:
        return _whole(size)
    if data.kind in APART:
        return replace(_whole(size), exchanged=_exchanged(size, data))
    if data.kind == "ddp":
        return _replicated(size, data)
    if data.kind == "zero1":
        return _owned(size, data, ranks, rank)
    shards = ranks // copies if data.kind == "hsdp" else ranks
    index = 0 if rank is None else rank % shards  # shards are cut so that the first is the largest
    sharded = _strung if data.kind == "fsdp1" else _sliced
    return replace(sharded(size, shards, index), gathered=_gathered(size, data), offloaded=data.offload)


def _whole(size: ModelSize) -> Memory:
    """One process: everything, once."""
    return Memory(
        parameters=sum(parameter.bytes for parameter in size.parameters),
        gradients=sum(parameter.bytes for parameter in size.trained),
        optimizer=sum(size.state(parameter, parameter.shape) for parameter in size.trained),
        averages=size.average(sum(parameter.numel for parameter in size.trained)),
        buffers=size.buffers,
    )


def _replicated(size: ModelSize, data: DataPlan) -> Memory:
    """DDP: everything on every rank; its buckets are never given back."""
    whole = _whole(size)
    views = data.gradient_as_bucket_view
    buckets = 0 if views else whole.gradients
    return replace(whole, buckets=buckets, gradients_stay=views, exchanged=_exchanged(size, data))


def _exchanged(size: ModelSize, data: DataPlan) -> int:
    """Return what exchanges keep beside the weights, in float32, as often as there are trained numbers."""
    remembers = data.compression.kind != "none" and data.compression.error_feedback
    copies = {"local_sgd": 1, "diloco": 2 + data.local.overlap, "async": 1}.get(data.kind, 0) + remembers
    return 4 * copies * sum(parameter.numel for parameter in size.trained)


def _owned(size: ModelSize, data: DataPlan, ranks: int, rank: int | None) -> Memory:
    """ZeRO-1: as DDP, but a rank has states only for the parameters that it owns."""
    trained = size.trained
    if len(trained) < ranks:
        raise ConfigError(
            f"zero1 deals out whole parameters, and there are {len(trained)} for {ranks} processes. "
            "Use fewer processes, or ddp."
        )
    states = [0] * ranks
    owners = deal_out([parameter.numel for parameter in trained], ranks)
    for parameter, owner in zip(trained, owners, strict=True):
        states[owner] += size.state(parameter, parameter.shape)
    return replace(_replicated(size, data), optimizer=max(states) if rank is None else states[rank])


def _sliced(size: ModelSize, shards: int, index: int) -> Memory:
    """FSDP 2: each parameter is cut along its first dimension, into slices of as many rows as the largest has.

    Parameters and gradients lie in memory of that size on every rank; the optimizer has what is really there.
    """

    def slots(parameter: ParameterSize) -> int:
        return prod(_slice(parameter.shape, shards, 0)) * parameter.itemsize

    own = [(parameter, _slice(parameter.shape, shards, index)) for parameter in size.trained]
    return Memory(
        parameters=sum(map(slots, size.parameters)),
        gradients=sum(map(slots, size.trained)),
        optimizer=sum(size.state(parameter, shape) for parameter, shape in own),
        averages=size.average(sum(prod(shape) for _, shape in own)),
        buffers=size.buffers,
    )


def _slice(shape: tuple[int, ...], shards: int, index: int) -> tuple[int, ...]:
    """Return the shape of a rank's part."""
    rows = shape[0] if shape else 1
    most = -(-rows // shards)
    return (max(0, min(most, rows - index * most)), *shape[1:])


def _strung(size: ModelSize, shards: int, index: int) -> Memory:
    """FSDP 1: a unit's parameters, each filled up to 16 bytes, are strung together and the string is cut evenly.

    A unit with anything trained in it has gradients for all of it.
    """
    parameters = gradients = optimizer = numbers = 0
    for unit in _units(size.parameters).values():
        spans = list(_spans(unit))
        share = -(-spans[-1][2] // shards)
        parameters += share * unit[0].itemsize
        if not any(parameter.trained for parameter in unit):
            continue
        gradients += share * unit[0].itemsize
        for parameter, start, _ in spans:
            own = min(start + parameter.numel, (index + 1) * share) - max(start, index * share)
            if parameter.trained and own > 0:
                optimizer += size.states[parameter.itemsize, False].of((own,))
                numbers += own
    return Memory(parameters, gradients, optimizer, size.average(numbers), size.buffers)


def _units(parameters: Iterable[ParameterSize]) -> dict[int | None, list[ParameterSize]]:
    """Return what is gathered together; what belongs to the model itself under None."""
    units: dict[int | None, list[ParameterSize]] = {}
    for parameter in parameters:
        units.setdefault(parameter.unit, []).append(parameter)
    return units


def _spans(unit: Sequence[ParameterSize]) -> Iterator[tuple[ParameterSize, int, int]]:
    """Yield each parameter of a string with its start and its end, filling included."""
    start = 0
    for parameter in unit:
        aligned = _ALIGNED // parameter.itemsize
        end = start + -(-parameter.numel // aligned) * aligned
        yield parameter, start, end
        start = end


def _gathered(size: ModelSize, data: DataPlan) -> int:
    """Return the most that is whole for a moment.

    The model itself, what is around its units, is gathered all the time, and its gradients wait for the end. Units are
    gathered one after the other: one computes while the next comes. zero2 frees none before backward. A unit's
    gradients are there twice while they are summed: as computed, and as what is sent.
    """

    def computed(parameter: ParameterSize) -> int:
        return parameter.numel * _BYTES.get(data.param_dtype or "", parameter.itemsize)

    def sent(parameter: ParameterSize) -> int:
        return parameter.numel * _BYTES.get(data.reduce_dtype or data.param_dtype or "", parameter.itemsize)

    units = _units(size.parameters)
    around = units.pop(None, [])
    whole = {number: sum(map(computed, unit)) for number, unit in units.items()}
    largest = max(whole.values(), default=0)
    keeps = data.kind == "zero2" if data.reshard_after_forward is None else data.reshard_after_forward is False
    layers = sum(whole.values()) + largest if keeps else largest * (2 + data.prefetch)
    trained = [[parameter for parameter in unit if parameter.trained] for unit in units.values()]
    summing = max((sum(map(computed, unit)) + sum(map(sent, unit)) for unit in trained), default=0)
    root = [parameter for parameter in around if parameter.trained]
    return sum(map(computed, around)) + sum(map(computed, root)) + max(sum(map(sent, root)), layers + summing)
