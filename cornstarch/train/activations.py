"""How much memory activations take, estimated by running a model on the meta device: shapes without numbers.

What the backward pass will need is what autograd saves in the forward pass; each saved tensor is counted once, with its
whole storage, and parameters are not. Two more tensors like the largest one are added: the gradients on both sides of
the operation that saved it (for a language model that is the loss over the vocabulary).

It is an estimate: kernels keep workspaces, allocators leave gaps, and attention is taken to keep no scores, as fused
kernels do. On a GPU there is no such kernel for float32 with fewer heads for keys than for queries: it keeps them then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface, PreTrainedModel

from cornstarch.compat import TorchDispatchMode
from cornstarch.compute.head import LazyLogits, fuse_head_with_loss
from cornstarch.parallel import wrapping_units
from cornstarch.train.layers_kept import OUTSIDE, LayerActivations, Stored
from cornstarch.trees import tensors_in

_IMPLEMENTATION = "cornstarch_shapes"
_GRADIENTS = 2  # beside the largest saved tensor


@dataclass(frozen=True)
class Activations:
    """Bytes that the forward pass leaves for the backward pass."""

    saved: int = 0
    """All of it."""
    largest: int = 0
    """The largest tensor."""
    outside: int = 0
    """What is saved outside layers."""
    inputs: int = 0
    """What goes into layers."""
    layer: int = 0
    """What the largest layer saves."""
    copies: int = 0
    """The copies of weights that autocast makes, and has until the forward pass ends."""

    def __add__(self, other: Activations) -> Activations:
        return Activations(
            self.saved + other.saved,
            max(self.largest, other.largest),
            self.outside + other.outside,
            self.inputs + other.inputs,
            max(self.layer, other.layer),
            self.copies + other.copies,
        )

    def most(self, recomputed: bool, budget: int | None = None) -> int:
        """Return the most bytes at one time.

        Args:
            recomputed: Layers keep their inputs only (activation checkpointing).
            budget: As many layers do so as are needed to keep no more than this.
        """
        again = min(self.saved, self.outside + self.inputs + max(self.layer, self.copies))
        kept = again if recomputed else self.saved if budget is None else max(again, min(self.saved, budget))
        return kept + _GRADIENTS * self.largest


def measure(
    model: nn.Module,
    call: Callable[[], Any],
    computed_in: torch.dtype,
    on_gpu: bool = True,
    casts_weights: bool = True,
) -> Activations:
    """Return what a forward pass on the meta device saves.

    Args:
        model: On the meta device.
        call: Runs it.
        computed_in: The precision of autocast; float32: without it.
        on_gpu: Whether it is a GPU that will compute it.
        casts_weights: Whether autocast makes copies of the weights. It does not where they are gathered in what is
            computed in (`param_dtype`).
    """
    return counted(model, call, computed_in, on_gpu, casts_weights).total()


def counted(
    model: nn.Module,
    call: Callable[[], Any],
    computed_in: torch.dtype,
    on_gpu: bool = True,
    casts_weights: bool = True,
) -> SavedBytes:
    """Return the same as `measure`, told apart by layers."""
    count = SavedBytes(model)
    with ExitStack() as stack:
        for layer in wrapping_units(model):  # what activation checkpointing would run again
            stack.enter_context(count.watched(layer))
        stack.enter_context(_without_masks(model))
        dtype = None if computed_in is torch.float32 else computed_in
        told = count.copied if casts_weights else count.leave_out
        stack.enter_context(_Computing(dtype, on_gpu, told, count.worked))
        stack.enter_context(_Products(count.worked))
        stack.enter_context(saved_tensors_hooks(count.add, lambda saved: saved))
        call()
    return count


# ---------------------------------------------------------------------------------------------------- counting


LayerCall = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class SavedBytes:
    """Counts the storages that are saved, each once, and which layer saved them; those of the model are left out."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {_storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        self._saved: dict[StorageWeakRef, tuple[int, nn.Module | None]] = {}
        self._savers: dict[StorageWeakRef, set[nn.Module | None]] = {}
        self._inputs: dict[StorageWeakRef, int] = {}
        self._readers: dict[StorageWeakRef, set[nn.Module]] = {}
        self._layers: dict[nn.Module, float] = {}  # in the order in which they run: what they multiply
        self.calls: list[LayerCall] = []
        """How layers were called, in the order in which they ran."""
        self._alive: list[Tensor] = []  # or a storage of another tensor could take the place of one that is counted
        self._layer: nn.Module | None = None
        self._copies = 0

    def add(self, tensor: Tensor) -> Tensor:
        """Count a tensor."""
        storage = _storage(tensor)
        if storage not in self._own:
            self._savers.setdefault(storage, set()).add(self._layer)
            if storage not in self._saved:
                self._saved[storage] = (tensor.untyped_storage().nbytes(), self._layer)
                self._alive.append(tensor.detach())
        return tensor

    def copied(self, weight: Tensor) -> None:
        """Note a copy of a weight."""
        self._copies += weight.nbytes

    def worked(self, operations: float) -> None:
        """Note what was multiplied."""
        if self._layer is not None:
            self._layers[self._layer] += operations

    def leave_out(self, tensor: Tensor) -> None:
        """Take a tensor for one of the model's own."""
        self._own.add(_storage(tensor))
        self._alive.append(tensor.detach())

    @contextmanager
    def watched(self, layer: nn.Module) -> Iterator[None]:
        """Note what goes into a layer, and that it is running."""

        def begin(module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            self._layer = module
            if module not in self._layers:
                self._layers[module] = 0.0
                self.calls.append((module, arguments, dict(named)))
            tensors = tensors_in([arguments, named])
            if any(tensor.requires_grad for tensor in (*tensors, *module.parameters())):
                for tensor in tensors:
                    self._inputs[_storage(tensor)] = tensor.untyped_storage().nbytes()
                    self._readers.setdefault(_storage(tensor), set()).add(module)
                self._alive += [tensor.detach() for tensor in tensors]

        def end(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            self._layer = None

        handles = [layer.register_forward_pre_hook(begin, with_kwargs=True), layer.register_forward_hook(end)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def total(self) -> Activations:
        """Return what was counted."""
        sizes: dict[nn.Module | None, int] = {None: 0}
        for size, layer in self._saved.values():
            sizes[layer] = sizes.get(layer, 0) + size
        outside = sizes.pop(None)
        counted = {storage for storage, (_, layer) in self._saved.items() if layer is None}
        inputs = sum(size for storage, size in self._inputs.items() if storage not in counted)
        largest = max((size for size, _ in self._saved.values()), default=0)
        saved, most = outside + sum(sizes.values()), max(sizes.values(), default=0)
        return Activations(saved, largest, outside, inputs, most, self._copies)

    def by_layer(self, names: Mapping[nn.Module, str]) -> LayerActivations:
        """Return what was counted, told apart by layers.

        Args:
            names: Of the layers.
        """
        order: dict[nn.Module | None, int] = {layer: number for number, layer in enumerate(self._layers)}
        order[None] = OUTSIDE
        stored = [
            Stored(
                self._saved[storage][0] if storage in self._saved else self._inputs[storage],
                frozenset(order[layer] for layer in self._savers.get(storage, ())),
                frozenset(order[layer] for layer in self._readers.get(storage, ())),
            )
            for storage in {**self._saved, **self._inputs}
        ]
        sizes = [sum(one.size for one in stored if number in one.savers) for number in range(len(self._layers))]
        kinds = [
            f"{names[layer].rpartition('.')[0]} {type(layer).__name__} {size} {work:.0f}"
            for (layer, work), size in zip(self._layers.items(), sizes, strict=True)
        ]
        return LayerActivations(
            tuple(names[layer] for layer in self._layers), tuple(kinds), tuple(self._layers.values()), tuple(stored)
        )


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


class _Products(TorchDispatchMode):
    """Tells how much is multiplied."""

    def __init__(self, told: Callable[[float], None]) -> None:
        super().__init__()
        self._told = told

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(named or {}))
        if function.overloadpacket in flop_registry:
            self._told(float(flop_registry[function.overloadpacket](*arguments, **(named or {}), out_val=result)))
        return result


# ---------------------------------------------------------------------------------------------------- attention


class _Attention(torch.autograd.Function):
    """Keeps its inputs; a fused kernel its output and one number for each query, another one its scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_fused: bool) -> Tensor:
        if is_fused and query.dim() > 2:  # laid as the next layer wants it: that keeps no other
            *rows, heads, tokens, _ = query.shape
            output = query.new_empty(*rows, tokens, heads, value.shape[-1]).transpose(-2, -3)
        else:
            output = query.new_empty(*query.shape[:-1], value.shape[-1])
        scores = query.new_empty(
            query.shape[:-1] if is_fused else (*query.shape[:-1], key.shape[-2]), dtype=torch.float32
        )
        ctx.save_for_backward(query, key, value, scores, *([output] if is_fused else []))
        return output


class _Product(torch.autograd.Function):
    """Keeps what the product of rows with the matrices of experts keeps: both."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(rows.shape[0], matrices.shape[-1])


class _Loss(torch.autograd.Function):
    """Keeps what the loss without all logits keeps: the gradients of what it is computed from."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        needed = [
            hidden.new_empty(hidden.shape, dtype=dtype) if ctx.needs_input_grad[0] else None,
            weight.new_empty(weight.shape, dtype=torch.float32) if ctx.needs_input_grad[1] else None,
            bias.new_empty(bias.shape, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None,
        ]
        ctx.save_for_backward(*needed)
        return hidden.new_empty((), dtype=torch.float32)


def keep_as_fused_loss(model: nn.Module, computed_in: torch.dtype) -> None:
    """Let a language model on the meta device keep what it keeps where its loss is computed without all logits.

    Args:
        model: The model; one whose loss cannot be computed so is left as it is.
        computed_in: The precision of autocast; float32: without it.
    """
    if fuse_head_with_loss(model) is not None:
        return
    plain: Any = model.loss_function
    dtype = None if computed_in is torch.float32 else computed_in

    def loss(logits: Any, *given: Any, **options: Any) -> Any:
        if not isinstance(logits, LazyLogits):  # its model has looked at them
            return plain(logits, *given, **options)
        return _Loss.apply(logits.hidden, logits.weight, logits.bias, dtype or logits.weight.dtype)

    model.loss_function = loss  # type: ignore[assignment]


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).contiguous(), None


# Only as attention, not as a mask: transformers then makes no masks, for which it would look at numbers.
AttentionInterface.register(_IMPLEMENTATION, _attend)


@contextmanager
def _without_masks(model: nn.Module) -> Iterator[None]:
    """Let the transformers models in a model attend without masks."""
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    before = [(module, module.config._attn_implementation) for module in inner]
    try:
        for module in inner:
            if module.config._attn_implementation == "sdpa":
                module.set_attn_implementation(_IMPLEMENTATION)
        yield
    finally:
        for module, implementation in before:
            if module.config._attn_implementation != implementation:
                module.set_attn_implementation(implementation)


# ---------------------------------------------------------------------------------------------------- precision

# What autocast computes in half precision, and in float32; torch's autocast itself does nothing on the meta device.
_HALF = {
    F.linear, F.bilinear, F.multi_head_attention_forward, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm,
    Tensor.bmm, torch.mm, Tensor.mm, torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm, torch.addbmm,
    torch.einsum, torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d,
}  # fmt: skip
_FULL = {
    F.layer_norm, torch.layer_norm, F.group_norm, F.softmax, torch.softmax, Tensor.softmax, F.log_softmax,
    torch.log_softmax, Tensor.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss, torch.pow, Tensor.pow, torch.rsqrt,
    Tensor.rsqrt, torch.exp, Tensor.exp, torch.cumsum, Tensor.cumsum, torch.sum, Tensor.sum,
}  # fmt: skip
_QKV = ("query", "key", "value")
_GROUPED = ("grouped_mm", "_grouped_mm")
_CAST = (torch.float32, torch.bfloat16, torch.float16)


class _Computing(TorchFunctionMode):
    """Casts as autocast does, and replaces attention.

    Args:
        dtype: What autocast casts to; None: it is off.
        on_gpu: Whether it is a GPU that will compute it.
        told: What is told each copy of a weight.
        worked: What is told how much is multiplied where nothing is.
    """

    def __init__(
        self,
        dtype: torch.dtype | None,
        on_gpu: bool,
        told: Callable[[Tensor], None],
        worked: Callable[[float], None],
    ) -> None:
        super().__init__()
        self._dtype, self._on_gpu, self._told, self._worked = dtype, on_gpu, told, worked
        self._weights: dict[nn.Parameter, Tensor] = {}  # autocast makes one copy of each too

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if function is F.scaled_dot_product_attention:
            inputs = [arguments[n] if n < len(arguments) else named[name] for n, name in enumerate(_QKV)]
            return self._attended(*(self._cast(value, self._dtype) for value in inputs))
        if getattr(function, "__name__", "") in _GROUPED:  # it has kernels for some precisions only, and no autocast
            self._worked(2.0 * arguments[0].numel() * arguments[1].shape[-1])
            return _Product.apply(*arguments[:2])
        wanted = self._dtype if function in _HALF else torch.float32 if function in _FULL else None
        if self._dtype is None or wanted is None:
            return function(*arguments, **named)
        arguments = tuple(self._cast(value, wanted) for value in arguments)
        return function(*arguments, **{name: self._cast(value, wanted) for name, value in named.items()})

    def _attended(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        self._worked(2.0 * query.numel() * key.shape[-2] * (1 + value.shape[-1] / query.shape[-1]))
        same_heads = query.dim() < 4 or query.shape[1] == key.shape[1]
        return _Attention.apply(query, key, value, same_heads or query.dtype != torch.float32 or not self._on_gpu)

    def _cast(self, value: Any, dtype: torch.dtype | None) -> Any:
        if dtype is None or not isinstance(value, Tensor) or value.dtype not in _CAST or value.dtype is dtype:
            return value
        if not isinstance(value, nn.Parameter):
            return value.to(dtype)
        if value not in self._weights:
            self._weights[value] = value.to(dtype)
            self._told(self._weights[value])
        return self._weights[value]
