"""The passes of a module's layers on one of its ranks: computing, what is exchanged inside it, what is kept; no torch.

What costs time inside a layer, beside computing:

- tp: each forward pass sums `sums` tensors as large as the output over the tensor-parallel ranks, and so does the
  pass of the gradients of inputs. Nothing is computed meanwhile.
- cp: keys and values go round once in a forward pass, and twice in a backward pass, with their gradients.
- checkpointing: a backward pass does the forward pass again, what it exchanges included.
- zero3: parameters are gathered before each pass, while the layer before computes: it takes the longer of both. zero2
  keeps them from forward to backward, and gathers them for the next microbatch's forward. The cores of one machine,
  which carry parameters and compute, take as long as both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cornstarch.plan.communication import all_gather, all_reduce
from cornstarch.plan.cost import LayerCost, RunCost, scaled
from cornstarch.plan.partition import best_parts
from cornstarch.plan.plan import ModulePlan

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Device, Link

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Links:
    """The slowest links of a module's groups."""

    tp: Link
    cp: Link
    data: Link
    """Of those that hold the same parameters together; with hsdp, of one copy."""
    copies: Link | None = None
    """hsdp: of the ranks that hold the same part of each copy."""
    beside: bool = True
    """Whether gradients and parameters travel over `data` while ranks compute; else one comes after the other."""


@dataclass(frozen=True)
class Way:
    """How the layers of a module are computed: what their passes depend on."""

    module: str
    tp: int
    cp: int
    samples: float
    """Those of a microbatch, in microbatches that the costs are of."""
    links: Links
    checkpointing: bool = False
    sequence: bool = False
    vocabulary: bool = False
    gathered_over: int = 1
    """zero2, zero3: ranks that parameters are gathered from."""
    gathered_again: bool = True
    """zero3: for the backward pass, too."""

    @classmethod
    def of(cls, name: str, plan: ModulePlan, samples: float, links: Links, over: int, again_too: bool) -> Way:
        """Return the way of a module of a plan; `over`, `again_too`: how its parameters are gathered."""
        again, sequence, vocabulary = plan.activation_checkpointing, plan.tp_sequence, plan.tp_vocabulary
        return cls(name, plan.tp, plan.cp, samples, links, again, sequence, vocabulary, over, again_too)


@dataclass(frozen=True, eq=False)
class Passes:
    """By layer, for one microbatch on one rank. Times include what the layer exchanges."""

    layers: tuple[LayerCost, ...]
    """Scaled to the rank."""
    forward: Numbers
    inputs: Numbers
    """Of the gradients of inputs, and of computing again."""
    weights: Numbers
    tensor: Numbers
    """What of all these is tp's, forward and backward."""
    context: Numbers
    """cp's."""
    gather: Numbers
    """Gathering parameters: what computing does not hide."""
    again: Numbers
    """Computing again, without what it exchanges."""
    kept: Numbers
    """Bytes kept until the backward pass; none where there is none."""
    working: Numbers
    """Bytes that are there while one layer computes, beyond what is kept."""
    gradients: Numbers
    """Bytes of the gradients of its weights."""
    shared: Numbers
    """Bytes of gradients that it makes of weights that an earlier layer has."""

    @cached_property
    def total(self) -> Numbers:
        """All that a microbatch takes."""
        return self.forward + self.inputs + self.weights

    @cached_property
    def sums(self) -> tuple[float, float, float]:
        """Forward, gradients of inputs and of weights, of all layers."""
        return float(self.forward.sum()), float(self.inputs.sum()), float(self.weights.sum())

    @cached_property
    def _cuts(self) -> dict[tuple[int, int, float], tuple[int, ...]]:
        return {}

    def cut(self, stages: int, virtual: int = 1, before: float = 0.0) -> tuple[int, ...]:
        """Return the first layer of each part of each stage, found once."""
        key = (stages, virtual, before)
        if key not in self._cuts:
            self._cuts[key] = best_parts(self.total, *key)
        return self._cuts[key]


def passes(cost: RunCost, way: Way, device: Device) -> Passes:
    """Return what the layers of a module take."""
    module = cost.module(way.module)
    upstream = cost.trained_before(way.module)
    rows: list[tuple[float, ...]] = []
    layers: list[LayerCost] = []
    known: dict[tuple[object, ...], tuple[LayerCost, tuple[float, ...]]] = {}
    for layer in module.layers:  # those of a stack are mostly alike, but for their names
        key = (upstream, *[value for name, value in vars(layer).items() if name != "name"])
        if key not in known:
            one = scaled(layer, way.tp, way.cp, way.samples, device, way.sequence, way.vocabulary)
            known[key] = one, _row(one, way, upstream)
        one, row = known[key]
        layers.append(one)
        rows.append(row)
        upstream = upstream or layer.trained
    columns = np.array(rows, dtype=np.float64).T
    return Passes(tuple(layers), *columns)


def _row(one: LayerCost, way: Way, upstream: bool) -> tuple[float, ...]:
    """Return the numbers of a layer, in the order of `Passes`."""
    has_backward = upstream or one.trained
    tensor = one.sums * all_reduce(one.output_bytes, way.tp, way.links.tp) if way.tp > 1 else 0.0
    context = all_gather(one.kv_bytes, way.cp, way.links.cp) if way.cp > 1 else 0.0
    # What is kept whole anyway, as in a head, is not computed again.
    recomputed = way.checkpointing and has_backward and one.activation_bytes_recomputed < one.activation_bytes
    again = (one.forward if one.again is None else one.again) if recomputed else 0.0
    exchanged = tensor + context
    forward = one.forward + exchanged
    inputs = again + (exchanged if recomputed else 0.0)
    inputs += one.input_gradient + tensor if upstream else 0.0
    inputs += 2 * context if has_backward else 0.0
    weights = one.weight_gradient if one.trained else 0.0
    gather = 0.0
    if way.gathered_over > 1:
        whole = all_gather(one.parameter_bytes, way.gathered_over, way.links.data)
        hidden = (forward, inputs + weights) if way.links.beside else (0.0, 0.0)
        late = max(0.0, whole - hidden[0])
        later = max(0.0, whole - hidden[1]) if has_backward and way.gathered_again else 0.0
        forward, inputs, gather = forward + late, inputs + later, late + later
    times = 1 + recomputed
    tensor *= times + upstream
    context *= times + 2 * has_backward
    kept = one.activation_bytes_recomputed if way.checkpointing else one.activation_bytes
    kept = kept if has_backward else 0
    return (
        forward,
        inputs,
        weights,
        tensor,
        context,
        gather,
        again,
        kept,
        one.activation_bytes - kept + one.working_bytes,
        one.parameter_bytes * one.changing / one.parameters if one.parameters else 0,
        one.shared_bytes,
    )


class PassTable:
    """Passes of the ways that have been asked for."""

    def __init__(self, cost: RunCost, device: Device) -> None:
        self.cost, self.device = cost, device
        self.find = lru_cache(maxsize=None)(self._find)

    def _find(self, way: Way) -> Passes:
        return passes(self.cost, way, self.device)
