"""What a call of a module computes and moves, operation by operation, found by running it on the meta device.

Two kinds of operations cost time by what they multiply: products of matrices (and convolutions) and attention. All
others cost time by what they read and write. Where layers are compiled, those that follow one another without a product
between them become one kernel: what passes between them is neither written nor read, and what their backward pass needs
is computed again from what goes into them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from cornstarch.compat import TorchDispatchMode
from cornstarch.train.activations import counted
from cornstarch.train.costing.segments import Called
from cornstarch.trees import tensors_in

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution)
_GROUPED = ("grouped_mm", "_grouped_mm")
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Piece:
    """A tensor that an operation reads or writes."""

    storage: StorageWeakRef
    bytes: int


@dataclass(frozen=True)
class Operation:
    """One operation."""

    reads: tuple[Piece, ...]
    writes: tuple[Piece, ...]
    flops: float = 0.0
    """What it multiplies; 0: it only moves."""
    dtype: str = "fp32"
    is_attention: bool = False
    is_trained: bool = False
    """Whether one of its operands is a trained weight."""
    has_weights: bool = False
    """Whether one of its operands is a weight."""
    tiles: float = 1.0
    """How many pieces of 128 × 128 its result has: with few of them a large device is not busy."""


@dataclass
class Operations:
    """All that a call does."""

    listed: list[Operation] = field(default_factory=list)
    own: dict[StorageWeakRef, bool] = field(default_factory=dict)
    """What is made of weights alone, and whether of trained ones."""
    inputs: set[StorageWeakRef] = field(default_factory=set)
    outputs: dict[StorageWeakRef, int] = field(default_factory=dict)
    saved: dict[StorageWeakRef, int] = field(default_factory=dict)
    """What autograd keeps, weights left out."""
    keys: int = 0
    """Bytes of keys and values."""


def operations_of(
    called: Called, computed_in: torch.dtype, on_gpu: bool, is_causal: bool, run: Callable[[], Any] | None = None
) -> Operations:
    """Return what a call does.

    Args:
        called: On the meta device.
        computed_in: The precision of autocast; float32: without it.
        on_gpu: Whether it is a GPU that will compute it.
        is_causal: Whether its attention looks back only.
        run: Runs it. Default: what was called.
    """
    watch = _Watch(called, is_causal)

    def watched() -> None:
        # Inside what stands for autocast and for attention: it sees what they make of a call.
        with watch.functions, saved_tensors_hooks(watch.saved, lambda saved: saved), watch:
            result = called.module(*called.arguments, **called.named) if run is None else run()
        watch.ended(result)

    counted(called.module, watched, computed_in, on_gpu)
    return watch.found


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """Return what tells the memory of tensors apart."""
    return StorageWeakRef(tensor.untyped_storage())


class _Watch(TorchDispatchMode):
    """Sees every operation of a call."""

    def __init__(self, called: Called, is_causal: bool) -> None:
        super().__init__()
        self.found = Operations()
        self.functions = _Functions(self)
        self.is_causal = is_causal
        self.is_quiet = False
        self._alive: list[Tensor] = []  # or another tensor could take the place of one that is gone
        for parameter in called.module.parameters():
            self.found.own[storage_of(parameter)] = parameter.requires_grad
        for buffer in called.module.buffers():
            self.found.own.setdefault(storage_of(buffer), False)
        self.found.inputs = {storage_of(tensor) for tensor in called.inputs}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(named or {}))
        if self.is_quiet:
            return result
        packet, given, made = function.overloadpacket, _floats([arguments, named or {}]), _floats(result)
        self._alive += [one.detach() for one in made]
        before = {storage_of(tensor) for tensor in given}
        made = [one for one in made if storage_of(one) not in before]  # no views, nothing in place
        if packet in _PRODUCTS:
            flops = float(flop_registry[packet](*arguments, **(named or {}), out_val=result))
            self.multiplied(given, made, flops)
        elif given and made:
            if all(storage_of(one) in self.found.own for one in given):
                trained = any(self.found.own[storage_of(one)] for one in given)
                self.found.own.update({storage_of(one): trained for one in made})
            self.found.listed.append(Operation(_pieces(given), _pieces(made)))
        return result

    def multiplied(self, given: Sequence[Tensor], made: Sequence[Tensor], flops: float) -> None:
        """Note a product."""
        own = [self.found.own.get(storage_of(one)) for one in given]
        tiles = sum(one.numel() for one in made) / 128**2
        is_trained, has_weights = any(one is True for one in own), any(one is not None for one in own)
        self.found.listed.append(
            Operation(
                _pieces(given), _pieces(made), flops, _dtype(given), False, is_trained, has_weights, max(tiles, 1)
            )  # fmt: skip
        )

    def attended(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Note attention."""
        pairs = query.shape[-2] * key.shape[-2]
        is_causal = self.is_causal and query.shape[-2] == key.shape[-2]
        share = (1 + 1 / query.shape[-2]) / 2 if is_causal else 1.0
        rows = query.numel() // query.shape[-1] // query.shape[-2]
        flops = 2.0 * rows * pairs * share * (query.shape[-1] + value.shape[-1])
        dtype = _NAMES.get(output.dtype, "fp32")
        self._alive.append(output.detach())
        self.found.listed.append(Operation(_pieces([query, key, value]), _pieces([output]), flops, dtype, True))
        self.found.keys += sum(one.bytes for one in _pieces([key, value]))

    def saved(self, tensor: Tensor) -> Tensor:
        """Note what is kept."""
        storage = storage_of(tensor)
        if storage not in self.found.own:
            self.found.saved[storage] = tensor.untyped_storage().nbytes()
            self._alive.append(tensor.detach())
        return tensor

    def ended(self, result: Any) -> None:
        """Note what is returned."""
        values = list(result.values()) if isinstance(result, Mapping) else result
        for tensor in _floats(values):
            self.found.outputs[storage_of(tensor)] = tensor.numel() * tensor.element_size()
            self._alive.append(tensor.detach())


class _Functions(TorchFunctionMode):
    """Sees what is no operation of its own on the meta device: attention, and products with the matrices of experts."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        grouped = getattr(function, "__name__", "") in _GROUPED
        if function is not F.scaled_dot_product_attention and not grouped:
            return function(*arguments, **named)
        self._watch.is_quiet = True
        try:
            result = function(*arguments, **named)
        finally:
            self._watch.is_quiet = False
        if grouped:
            flops = 2.0 * arguments[0].numel() * arguments[1].shape[-1]
            self._watch.multiplied(_floats(arguments[:2]), [result], flops)
        else:
            inputs = [*arguments, *(named[name] for name in ("query", "key", "value") if name in named)][:3]
            self._watch.attended(inputs[0], inputs[1], inputs[2], result)
        return result


def _floats(value: Any) -> list[Tensor]:
    return [one for one in tensors_in(value) if one.numel()]


def _pieces(tensors: Sequence[Tensor]) -> tuple[Piece, ...]:
    found: dict[StorageWeakRef, int] = {}
    for tensor in tensors:
        size = min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
        storage = storage_of(tensor)
        found[storage] = max(size, found.get(storage, 0))
    return tuple(Piece(storage, size) for storage, size in found.items())


def _dtype(tensors: Sequence[Tensor]) -> str:
    return _NAMES.get(tensors[-1].dtype, "fp32")


# ---------------------------------------------------------------------------------------------------- kernels


@dataclass(frozen=True)
class Movement:
    """A kernel that only moves, and what of it the backward pass does."""

    operations: int
    """What was made one kernel."""
    read: int
    written: int
    gradients_read: int = 0
    gradients_written: int = 0
    again: int = 0
    """What is written once more, because products with trained weights read it."""
    is_weights: bool = False
    """Whether it only prepares weights: casts them."""

    @property
    def backward(self) -> int:
        """Bytes that its backward pass reads and writes, what is computed again for weights left out."""
        return self.gradients_read + self.gradients_written + (0 if self.is_weights else self.read)


def movements(found: Operations, is_fused: bool) -> Iterator[Movement]:
    """Yield the kernels that only move.

    Args:
        found: What a call does.
        is_fused: Whether it is compiled.
    """
    moves = [one for one in found.listed if not one.flops]
    groups = _groups(found.listed) if is_fused else [[one] for one in moves]
    readers: dict[StorageWeakRef, set[int]] = {}
    for number, group in enumerate(groups):
        for one in group:
            for piece in one.reads:
                readers.setdefault(piece.storage, set()).add(number)
    by_products = {piece.storage: one.is_trained for one in found.listed if one.flops for piece in one.reads}
    for number, group in enumerate(groups):
        made = {piece.storage: piece.bytes for one in group for piece in one.writes}
        taken = {piece.storage: piece.bytes for one in group for piece in one.reads if piece.storage not in made}
        out = {
            storage: size
            for storage, size in made.items()
            if storage in by_products or storage in found.outputs or readers.get(storage, set()) - {number}
        }
        flowing = {storage: size for storage, size in taken.items() if storage not in found.own}
        yield Movement(
            operations=len(group),
            read=sum(taken.values()),
            written=sum(out.values()),
            gradients_read=sum(out.values()),
            gradients_written=sum(flowing.values()) if flowing else sum(taken.values()),
            again=sum(size for storage, size in out.items() if by_products.get(storage) and is_fused),
            is_weights=not flowing,
        )


def _groups(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Return the operations that become one kernel each: neighbours with as many products before them."""
    depth: dict[StorageWeakRef, int] = {}
    group_of: dict[StorageWeakRef, int] = {}
    groups: dict[int, list[Operation]] = {}
    for number, one in enumerate(operations):
        level = max((depth.get(piece.storage, 0) for piece in one.reads), default=0)
        if one.flops:
            depth.update({piece.storage: level + 1 for piece in one.writes})
            continue
        near = {
            group_of[piece.storage]
            for piece in one.reads
            if piece.storage in group_of and depth.get(piece.storage, 0) == level
        }
        home = min(near, default=number)
        joined = [other for group in sorted(near) for other in groups.pop(group)]
        groups[home] = [*joined, one]
        for other in groups[home]:
            for piece in other.writes:
                depth[piece.storage], group_of[piece.storage] = level, home
    return list(groups.values())


def kept_bytes(found: Operations, is_fused: bool) -> int:
    """Return what is kept for the backward pass.

    Compiled layers keep what attention reads and writes. Of what else autograd would keep, they compute again what can
    be made, without products, of less.
    """
    if not is_fused:
        return sum(found.saved.values())
    kept: dict[StorageWeakRef, int] = {}
    for one in found.listed:
        if one.is_attention:
            kept.update({piece.storage: piece.bytes for piece in (*one.reads, *one.writes)})
    makers = {piece.storage: (one, piece.bytes) for one in found.listed for piece in one.writes}
    for storage, size in found.saved.items():
        kept.update(_least(storage, size, makers, kept, found, {}))
    return sum(kept.values())


def _least(
    storage: StorageWeakRef,
    size: int,
    makers: Mapping[StorageWeakRef, tuple[Operation, int]],
    kept: Mapping[StorageWeakRef, int],
    found: Operations,
    known: dict[StorageWeakRef, dict[StorageWeakRef, int]],
) -> dict[StorageWeakRef, int]:
    """Return the least that has to be kept beside what is, so that something is there in the backward pass."""
    if storage in kept or storage in found.own:
        return {}
    if storage not in makers:  # it goes into the layer
        return {storage: size}
    maker, size = makers[storage]
    if storage not in known:
        sources: dict[StorageWeakRef, int] = {}
        for piece in maker.reads if not maker.flops else ():
            sources.update(_least(piece.storage, piece.bytes, makers, kept, found, known))
        is_made_again = not maker.flops and sum(sources.values()) <= size
        known[storage] = sources if is_made_again else {storage: size}
    return known[storage]


__all__ = ["Movement", "Operation", "Operations", "kept_bytes", "movements", "operations_of", "storage_of"]
