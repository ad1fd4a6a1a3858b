"""What a forward pass multiplies and what its backward pass will, found by running it on shapes alone.

A copy of the module has shapes for weights. Whatever it multiplies passes by: matrix products and convolutions, and the
attention of layers that attend through transformers' interface, with the mask they were given. Which gradients are
needed is read where autograd keeps it: of an operand that requires a gradient, and whose product has a way to the
result, one more product of the same size is computed in the backward pass. What is multiplied anew there is activation
checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel

from cornstarch.attention.interface import attend_by, make_masks_by
from cornstarch.attention.mask import CAUSAL, MaskPattern, MaskSpec
from cornstarch.compat import TorchDispatchMode, grouped_products
from cornstarch.compute.pairs import EVERYTHING, recognised
from cornstarch.compute.shadows import checkpointing
from cornstarch.errors import UnsupportedModelError
from cornstarch.models.multimodal_language_model.preprocessing.shape_inference import (
    KnownIntegers,
    Shape,
    is_float,
)
from cornstarch.trees import tensors_in

_aten = torch.ops.aten
# Where each product has its two operands.
_OPERANDS = {
    _aten.mm: (0, 1), _aten.addmm: (1, 2), _aten.bmm: (0, 1), _aten.baddbmm: (1, 2), _aten.convolution: (0, 1),
    **dict.fromkeys(grouped_products(), (0, 1)),
}  # fmt: skip
_GROUPED = frozenset(grouped_products())
_BATCHED = (_aten.bmm, _aten.baddbmm)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")


@dataclass(frozen=True)
class Work:
    """Floating-point operations of a step."""

    forward: float = 0.0
    inputs: float = 0.0
    """Of the backward pass: gradients of what is computed."""
    weights: float = 0.0
    """Of the backward pass: gradients of weights."""
    again: float = 0.0
    """Of the forward pass, computed once more in the backward pass (activation checkpointing)."""
    idle: float = 0.0
    """For experts that were not chosen, where a model computes them all the same."""

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self.numbers, other.numbers, strict=True)))

    def __mul__(self, factor: float) -> Work:
        return Work(*(factor * one for one in self.numbers))

    @property
    def numbers(self) -> tuple[float, float, float, float, float]:
        """All of it."""
        return self.forward, self.inputs, self.weights, self.again, self.idle


@dataclass(frozen=True)
class Attention:
    """One time that a layer attended."""

    per_pair: Work
    """For each pair of a query and a key."""
    rows: int
    queries: int
    keys: int
    pattern: MaskPattern
    spec: MaskSpec | None
    """The padding of its rows; None: there is none."""
    section: str = ""


@dataclass(frozen=True)
class Product:
    """One product of matrices, or a convolution."""

    work: Work
    has_weights: bool
    section: str = ""


@dataclass
class Trace:
    """What was multiplied, in order."""

    products: list[Product] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    patterns: list[MaskPattern] = field(default_factory=list)
    """What masks were made for."""
    result: Any = None


def trace(
    module: nn.Module, call: Callable[[], Any], roots: Callable[[Any], Any], sections: Mapping[str, nn.Module]
) -> Trace:
    """Run a shadow, forward and backward, and return what was multiplied.

    Args:
        module: The shadow.
        call: Runs it.
        roots: Returns what of its result the loss depends on.
        sections: Modules inside it whose products are told apart, by name.
    """
    try:
        with torch.random.fork_rng(devices=[]):  # a layer that is left out by chance must not change the run's chance
            with checkpointing() as checkpoints:
                found = _watched(module, call, roots, sections, is_backward=False)
            # Only then the backward pass computes anything that is not known by now.
            return _watched(module, call, roots, sections, is_backward=True) if checkpoints else found
    except Exception as error:  # whatever a model's code does with numbers that are not there
        said = str(error).splitlines()[0] if str(error) else ""
        raise UnsupportedModelError(
            f"What {type(module).__name__} computes cannot be counted: its code raised {type(error).__name__} when it "
            f"was run on shapes ({said})."
        ) from error
    finally:
        for parameter in module.parameters():
            parameter.grad = None


def _watched(
    module: nn.Module,
    call: Callable[[], Any],
    roots: Callable[[Any], Any],
    sections: Mapping[str, nn.Module],
    is_backward: bool,
) -> Trace:
    watch = _Watch(module)
    ends = [make_masks_by(watch.made_mask), attend_by(watch.attended)]
    try:
        with watch.sectioned(sections), KnownIntegers(), watch:
            result = call()
            used = [tensor for tensor in tensors_in(_plain(roots(result))) if tensor.requires_grad]
            watch.settle(used)
            if used and is_backward:
                watch.is_backward = True
                torch.autograd.backward(used, [Shape.of(one.shape, one.dtype) for one in used])
    finally:
        for end in reversed(ends):
            end()
    return watch.told(result)


def _plain(value: Any) -> Any:
    return list(value.values()) if isinstance(value, Mapping) else value


# ---------------------------------------------------------------------------------------------------- watching


@dataclass
class _Seen:
    """A product or an attention, and what of its backward pass may be needed."""

    forward: float
    gradients: list[tuple[float, bool]]
    """Operations for the gradient of an operand, and whether that is a weight."""
    output: Tensor | None
    section: str
    idle_share: float = 0.0
    has_weights: bool = False
    attention: tuple[int, int, int, MaskPattern, MaskSpec | None] | None = None
    is_used: bool = False

    def work(self, is_again: bool) -> Work:
        needed = self.gradients if self.is_used else []
        inputs = sum(count for count, is_weight in needed if not is_weight)
        weights = sum(count for count, is_weight in needed if is_weight)
        forward, own = self.forward, 1 - self.idle_share
        if is_again:
            return Work(again=forward * own, idle=forward * self.idle_share)
        return Work(forward * own, inputs * own, weights * own, 0.0, (forward + inputs + weights) * self.idle_share)


class _Attended(torch.autograd.Function):
    """Stands for attention: a result and gradients of the right shapes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.forms = [(one.shape, one.dtype) for one in (query, key, value)]
        return Shape.of((query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), query.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return tuple(
            Shape.of(*form) if needed else None for form, needed in zip(ctx.forms, ctx.needs_input_grad, strict=True)
        )


class _Watch(TorchDispatchMode):
    """Sees every operation of a shadow."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.is_backward = False
        self._section = ""
        self._seen: list[_Seen] = []
        self._again: list[_Seen] = []
        self._masks: dict[int, tuple[MaskPattern, MaskSpec | None, Tensor]] = {}
        # A weight keeps its storage when it is transposed; what is made of weights alone is one, too.
        self._weights = {_storage(parameter) for parameter in module.parameters()}
        self._idle = _idle_shares(module)
        self._forms: dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        """Compute the shape of a result, and note what is multiplied."""
        named, packet = named or {}, function.overloadpacket
        result = _grouped(*arguments, *named.values()) if packet in _GROUPED else self._run(function, arguments, named)
        if packet in _OPERANDS:
            self._multiplied(packet, arguments, named, result)
        elif not self.is_backward and packet is not _aten.embedding:
            self._inherit(arguments, result)
        return result

    def _run(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Compute a result, or take its form from a time before: layers are alike, and forms cost more than they."""
        given = tensors_in([arguments, named])
        if not all(isinstance(tensor, Shape) for tensor in given):
            return function(*arguments, **named)
        key = repr((function, _formed(arguments), _formed(named)))
        if key in self._forms:
            size, stride, dtype = self._forms[key]
            return Shape(torch.empty_strided(size, stride, dtype=dtype, device="meta"))
        result = function(*arguments, **named)
        if isinstance(result, Shape) and _storage(result) not in map(_storage, given):  # no view, and not in place
            self._forms[key] = (tuple(result.shape), result.stride(), result.dtype)
        return result

    def _multiplied(self, packet: Any, arguments: tuple[Any, ...], named: dict[str, Any], result: Tensor) -> None:
        if self.is_backward and not torch.is_grad_enabled():
            return  # a gradient, known from what it is of
        operands = [arguments[place] for place in _OPERANDS[packet]]
        count = _operations(packet, arguments, named, result)
        are_weights = [_storage(operand) in self._weights for operand in operands]
        gradients = [
            (count, is_weight)
            for operand, is_weight in zip(operands, are_weights, strict=True)
            if operand.requires_grad
        ]
        idle = max((self._idle.get(_storage(one), 0.0) for one in operands), default=0.0) if packet in _BATCHED else 0.0
        self._note(_Seen(count, gradients, result, self._section, idle, any(are_weights)))

    def _note(self, seen: _Seen) -> None:
        (self._again if self.is_backward else self._seen).append(seen)

    def _inherit(self, arguments: Any, result: Any) -> None:
        given = [tensor for tensor in tensors_in(arguments) if is_float(tensor)]
        if given and all(_storage(tensor) in self._weights for tensor in given):
            self._weights.update(_storage(tensor) for tensor in tensors_in(result))

    # ------------------------------------------------------------------ attention

    def made_mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        *,
        mask_function: Any,
        attention_mask: Tensor | None,
        **_: Any,
    ) -> Tensor:
        """Return what stands for a mask, and remember what it was made for."""
        pattern = recognised(mask_function) or CAUSAL
        spec = None
        known = attention_mask is not None and attention_mask.dim() == 2 and not isinstance(attention_mask, Shape)
        if known and q_length == kv_length == attention_mask.shape[1]:  # type: ignore[union-attr]
            spec = MaskSpec.from_padding(attention_mask)  # type: ignore[arg-type]
        mask = Shape.of((batch_size, 1, q_length, kv_length), torch.bool)
        self._masks[id(mask)] = pattern, spec, mask
        return mask

    def attended(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> tuple[Tensor, None]:
        """Attend for a layer."""
        pattern, spec = self._mask_of(module, mask, options, query.shape[2] == key.shape[2])
        result = _Attended.apply(query, key, value)
        heads = query.shape[1]
        scores, sums = 2.0 * heads * query.shape[-1], 2.0 * heads * value.shape[-1]
        scored = query.requires_grad or key.requires_grad
        wanted = (
            (scores, query.requires_grad),
            (scores, key.requires_grad),
            (sums, scored),
            (sums, value.requires_grad),
        )
        gradients = [(count, False) for count, is_needed in wanted if is_needed]
        form = (query.shape[0], query.shape[2], key.shape[2], pattern, spec)
        self._note(_Seen(scores + sums, gradients, result, self._section, attention=form))
        return result, None

    def _mask_of(
        self, module: nn.Module, mask: Any, options: dict[str, Any], is_square: bool
    ) -> tuple[MaskPattern, MaskSpec | None]:
        if mask is not None:
            made = list(self._masks.values())
            found = self._masks.get(id(mask)) or (made[0] if len(made) == 1 else None)
            return (found[0], found[1]) if found is not None else (EVERYTHING, None)
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", False) if causal is None else causal
        return (CAUSAL if causal and is_square else EVERYTHING), None

    # ------------------------------------------------------------------ the result

    @contextmanager
    def sectioned(self, sections: Mapping[str, nn.Module]) -> Iterator[None]:
        """Tell apart what modules multiply."""
        handles = []
        for name, module in sections.items():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._enter(name)))
            handles.append(module.register_forward_hook(lambda *_: self._enter("")))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, section: str) -> None:
        self._section = section

    def settle(self, roots: Sequence[Tensor]) -> None:
        """Note which products the roots depend on: the others get no gradient."""
        reached: set[Any] = set()
        waiting: list[Any] = [root.grad_fn for root in roots]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in reached:
                reached.add(node)
                waiting += [following for following, _ in node.next_functions]
        for seen in self._seen:
            seen.is_used = seen.output is not None and seen.output.grad_fn in reached
            seen.output = None

    def told(self, result: Any) -> Trace:
        """Return what was seen."""
        trace = Trace(patterns=[pattern for pattern, _, _ in self._masks.values()], result=result)
        for seen, is_again in [*((one, False) for one in self._seen), *((one, True) for one in self._again)]:
            work = seen.work(is_again)
            if seen.attention is not None:
                trace.attentions.append(Attention(work, *seen.attention, seen.section))
            else:
                trace.products.append(Product(work, seen.has_weights, seen.section))
        return trace


def _formed(value: Any) -> Any:
    """Return arguments with forms in the place of tensors."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, dict):
        return {name: _formed(one) for name, one in value.items()}
    return [_formed(one) for one in value] if isinstance(value, list | tuple) else value


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _operations(packet: Any, arguments: tuple[Any, ...], named: dict[str, Any], result: Tensor) -> float:
    if packet in _GROUPED:  # torch's counter does not know it: every row is multiplied with one of the matrices
        return 2.0 * arguments[0].shape[0] * arguments[0].shape[1] * arguments[1].shape[-1]
    return float(flop_registry[packet](*arguments, **named, out_val=result))


def _grouped(rows: Tensor, matrices: Tensor, *others: Any) -> Tensor:
    """Return the shape of products with experts' matrices; torch itself has it for some precisions only."""
    if matrices.dim() == 3:
        return Shape.of((rows.shape[0], matrices.shape[-1]), rows.dtype)
    ends = next(one for one in others if isinstance(one, Tensor))
    return Shape.of((len(ends), rows.shape[0], matrices.shape[-1]), rows.dtype)


def _idle_shares(module: nn.Module) -> dict[StorageWeakRef, float]:
    """Return, of matrices of experts that lie in one tensor, which share a token does not choose."""
    shares: dict[StorageWeakRef, float] = {}
    for part in module.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        experts, chosen = (_first(part.config, names) for names in (_EXPERTS, _CHOSEN))
        if experts and chosen and chosen < experts:
            stacked = [p for p in part.parameters() if p.dim() == 3 and p.shape[0] == experts]
            shares.update({_storage(parameter): 1 - chosen / experts for parameter in stacked})
    return shares


def _first(config: Any, names: Sequence[str]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


__all__ = ["Attention", "Product", "Trace", "Work", "trace"]
