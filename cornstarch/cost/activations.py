"""Activation memory: what autograd saves for the backward pass, in total and by layer.

Each saved storage counts once, with all its bytes; parameters do not count. The peak adds two tensors of the size of
the largest one: the gradients on both sides of the operation that saved it (for a language model, the loss over the
vocabulary). It is an estimate: kernels have workspaces, and allocators leave gaps.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from cornstarch.compat.compiler import set_activation_budget
from cornstarch.kernels.compile import compile_layers
from cornstarch.parallel.device import DevicePlacement
from cornstarch.trees import map_tensors, tensors_in

_GRADIENTS = 2  # beside the largest saved tensor
OUTSIDE = -1
"""The number that stands for everything outside layers."""

LayerCall = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Activations:
    """Bytes that the forward pass leaves for the backward pass."""

    saved: int = 0
    """All of them."""
    largest: int = 0
    """The largest tensor."""
    outside: int = 0
    """Saved outside layers."""
    inputs: int = 0
    """Inputs of layers."""
    layer: int = 0
    """Saved by the largest layer."""
    copies: int = 0
    """Copies of weights that autocast keeps until the forward pass ends."""

    def __add__(self, other: Activations) -> Activations:
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        sums |= {"largest": max(self.largest, other.largest), "layer": max(self.layer, other.layer)}
        return Activations(**sums)

    def peak(self, recomputed: bool, budget: int | None = None) -> int:
        """Return the peak in bytes: all layers are `recomputed`, or as many as a `budget` needs."""
        least = min(self.saved, self.outside + self.inputs + max(self.layer, self.copies))
        kept = least if recomputed else self.saved if budget is None else max(least, min(self.saved, budget))
        return kept + _GRADIENTS * self.largest


@dataclass(frozen=True)
class StoredTensor:
    """A storage that is kept for the backward pass, and the layers that need it, by number."""

    size: int
    savers: frozenset[int]
    """Layers that save it unless they are recomputed; `OUTSIDE`: code outside layers saves it, too."""
    readers: frozenset[int]
    """Layers that have it as an input: they keep it if they are recomputed."""


@dataclass(frozen=True)
class LayerActivations:
    """What each layer of a model saves, in the order of the forward pass."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    """Layers of the same kind are alike."""
    work: tuple[float, ...]
    """FLOPs of the forward pass of each layer."""
    stored: tuple[StoredTensor, ...]

    def __add__(self, other: LayerActivations) -> LayerActivations:
        first = len(self.names)

        def shift(layers: frozenset[int]) -> frozenset[int]:
            return frozenset(OUTSIDE if layer == OUTSIDE else layer + first for layer in layers)

        later = (StoredTensor(one.size, shift(one.savers), shift(one.readers)) for one in other.stored)
        return LayerActivations(
            self.names + other.names, self.kinds + other.kinds, self.work + other.work, (*self.stored, *later)
        )

    def scale(self, fractions: Mapping[int, float]) -> LayerActivations:
        """Return the same with a fraction of what each layer alone saves; 1 if a layer is missing."""

        def rescale(one: StoredTensor) -> StoredTensor:
            owner = next(iter(one.savers)) if len(one.savers) == 1 and not one.readers else OUTSIDE
            return replace(one, size=round(one.size * fractions.get(owner, 1.0)))

        return replace(self, stored=tuple(map(rescale, self.stored)))

    def own_bytes(self, layer: int) -> int:
        return sum(one.size for one in self.stored if one.savers == {layer} and not one.readers)

    def bytes_after_forward(self, recomputed: frozenset[int] = frozenset()) -> int:
        """Return the bytes that are kept when the forward pass ends."""
        return sum(one.size for one in self.stored if one.savers - recomputed or one.readers & recomputed)

    def peak(self, recomputed: frozenset[int] = frozenset()) -> int:
        """Return the peak in bytes: while a layer is recomputed, all of its own activations are there."""

        def count_during(layer: int) -> int:
            # The backward pass has freed the layers behind it by then.
            return sum(
                one.size
                for one in self.stored
                if layer in one.savers
                or any(saver < layer for saver in one.savers - recomputed)
                or any(reader <= layer for reader in one.readers & recomputed)
            )

        return max([self.bytes_after_forward(recomputed), *map(count_during, recomputed)])

    def recomputable_layers(self) -> list[int]:
        """Return the layers that keep more than their inputs."""
        return [layer for layer in range(len(self.names)) if self.gain(layer) > 0]

    def gain(self, layer: int) -> int:
        """Return the bytes that recomputing this layer alone frees."""
        alone = frozenset([layer])
        return sum(
            one.size * (bool(one.savers) - bool(one.savers - alone or one.readers & alone))
            for one in self.stored
            if layer in one.savers or layer in one.readers
        )


class SavedTensors:
    """Records the storages that autograd saves, and the layer that saved each; those of the model do not count."""

    # with saved_tensors_hooks(saved.add, lambda tensor: tensor): model(**batch)
    def __init__(self, model: nn.Module | None = None) -> None:
        own = [] if model is None else [*model.parameters(), *model.buffers()]
        self._own = {storage_of(tensor) for tensor in own}
        self.sizes: dict[StorageWeakRef, int] = {}
        """Bytes by storage, in the order in which they were saved."""
        self._savers: dict[StorageWeakRef, dict[nn.Module | None, None]] = {}  # in their order
        self._inputs: dict[StorageWeakRef, int] = {}
        self._readers: dict[StorageWeakRef, set[nn.Module]] = {}
        self._layers: dict[nn.Module, float] = {}  # FLOPs, in the order of the forward pass
        self.calls: list[LayerCall] = []
        """The first call of each layer, in the order of the forward pass."""
        self._alive: list[Tensor] = []  # a freed storage could be reused and mistaken for the recorded one
        self._layer: nn.Module | None = None
        self._copies = 0

    def add(self, tensor: Tensor) -> Tensor:
        """Record a saved tensor; the pack hook of `saved_tensors_hooks`."""
        storage = storage_of(tensor)
        if storage not in self._own:
            self._savers.setdefault(storage, {})[self._layer] = None
            if storage not in self.sizes:
                self.sizes[storage] = tensor.untyped_storage().nbytes()
                self._alive.append(tensor.detach())
        return tensor

    def add_copy(self, weight: Tensor) -> None:
        self._copies += weight.nbytes

    def add_flops(self, flops: float) -> None:
        if self._layer is not None:
            self._layers[self._layer] += flops

    def leave_out(self, tensor: Tensor) -> None:
        """Treat a tensor as one of the model's own."""
        self._own.add(storage_of(tensor))
        self._alive.append(tensor.detach())

    @contextmanager
    def record_layer(self, layer: nn.Module) -> Iterator[None]:
        """Record, inside the block, the inputs of a layer and what it saves."""

        def begin(module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            self._layer = module
            if module not in self._layers:
                self._layers[module] = 0.0
                self.calls.append((module, arguments, dict(named)))
            tensors = tensors_in([arguments, named])
            if any(tensor.requires_grad for tensor in (*tensors, *module.parameters())):
                for tensor in tensors:
                    self._inputs[storage_of(tensor)] = tensor.untyped_storage().nbytes()
                    self._readers.setdefault(storage_of(tensor), set()).add(module)
                self._alive += [tensor.detach() for tensor in tensors]

        def end(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            self._layer = None

        with layer.register_forward_pre_hook(begin, with_kwargs=True), layer.register_forward_hook(end):
            yield

    def activations(self) -> Activations:
        """Return the totals; a storage that several layers saved counts for the first."""
        sizes: Counter[nn.Module | None] = Counter()
        first = {storage: next(iter(savers)) for storage, savers in self._savers.items()}
        for storage, size in self.sizes.items():
            sizes[first[storage]] += size
        outside = sizes.pop(None, 0)
        inputs = sum(size for storage, size in self._inputs.items() if first.get(storage, storage) is not None)
        saved, most = outside + sum(sizes.values()), max(sizes.values(), default=0)
        return Activations(saved, max(self.sizes.values(), default=0), outside, inputs, most, self._copies)

    def by_layer(self, names: Mapping[nn.Module, str]) -> LayerActivations:
        """Return what each layer saves, given the names of the layers."""
        order: dict[nn.Module | None, int] = {None: OUTSIDE, **{layer: n for n, layer in enumerate(self._layers)}}
        stored = [
            StoredTensor(
                self.sizes.get(storage, size),
                frozenset(order[layer] for layer in self._savers.get(storage, ())),
                frozenset(order[layer] for layer in self._readers.get(storage, ())),
            )
            for storage, size in {**self.sizes, **self._inputs}.items()
        ]
        sizes = [sum(one.size for one in stored if number in one.savers) for number in range(len(self._layers))]
        kinds = [
            f"{names[layer].rpartition('.')[0]} {type(layer).__name__} {size} {work:.0f}"
            for (layer, work), size in zip(self._layers.items(), sizes, strict=True)
        ]
        return LayerActivations(
            tuple(names[layer] for layer in self._layers), tuple(kinds), tuple(self._layers.values()), tuple(stored)
        )


def storage_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def measure_compiled_bytes(call: LayerCall, placement: DevicePlacement, **options: Any) -> int:
    """Return the bytes that a layer, given on the meta device, saves beside its inputs if it is compiled."""
    # Only the compiler knows what it saves, so the layer is compiled and run on the run's device with random numbers.
    bare, arguments, named = call
    set_activation_budget(1.0)
    gpus = [placement.device] if placement.device.type == "cuda" else []
    with torch.random.fork_rng(gpus), torch.enable_grad():
        layer = materialize(bare, placement.device)

        def build(tensor: Tensor) -> Tensor:
            real = torch.empty_like(tensor, device=placement.device)
            _fill(real)
            return real.requires_grad_(tensor.requires_grad)

        arguments, named = map_tensors(build, (list(arguments), dict(named)))
        compile_layers([layer], lambda reason: None, **options)
        saved = SavedTensors(layer)
        for tensor in tensors_in([arguments, named]):
            saved.leave_out(tensor)
        with placement.forward_context(), saved_tensors_hooks(saved.add, lambda tensor: tensor):
            layer(*arguments, **named)
    return saved.activations().saved


def materialize(module: nn.Module, device: torch.device) -> Any:
    real = copy.deepcopy(module).to_empty(device=device)
    for tensor in (*real.parameters(), *real.buffers()):
        _fill(tensor)
    return real


@torch.no_grad()
def _fill(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.normal_(std=0.02)
    else:
        tensor.zero_()
