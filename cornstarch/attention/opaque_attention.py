"""Attention of any kind as one operator of a compiled layer, for attention that torch cannot compile.

With context parallelism a layer attends by masks, sizes and messages that differ between ranks and batches. In a
compiled layer all of that is one node: an operator which is given the number of its mask, and runs the same Python code
that an eager layer runs. Any mode works so, also one that a user registered; a layer still compiles as a whole.

The forward operator lets autograd record what the attention does, and the backward operator lets autograd run it. The
record is handed on as a tensor (`hold`), which a compiled graph keeps for its backward pass like any other; no more is
kept than in an eager layer. One thing needs care: memory of a compiled graph is used again as soon as the graph does
not need it. So the query, which attention keeps as it is, goes to the backward operator as well, and the record has a
hole in its place. Whatever else lies in the memory of the operator's inputs is copied.

Shape letters: B rows, H heads, s tokens of this rank, D head size.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from cornstarch.compat.compiler import record_in_operator, save_results


class OpaqueMask(Protocol):
    """A mask that attends by itself."""

    def attend_with(
        self, options: Sequence[Any], query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Return the output [B, s, H, D] for states [B, H, s, D]; options: scale, softcap, dropout, training."""
        ...


_masks: WeakValueDictionary[int, OpaqueMask] = WeakValueDictionary()
_held: dict[int, Any] = {}
_numbers = itertools.count()


def number_mask(mask: OpaqueMask) -> Tensor:
    """Return a tensor by which the operator finds a mask; the mask must live until layers have attended."""
    # A tensor, because torch would compile a layer again for every other number.
    number = next(_numbers)
    _masks[number] = mask
    return torch.tensor([number])


def hold(value: Any) -> Tensor:
    """Return a tensor on the CPU that stands for a value, which lives as long as the tensor's memory."""
    owner = np.array([next(_numbers)])
    _held[int(owner[0])] = value
    weakref.finalize(owner, _held.pop, int(owner[0])).atexit = False
    return torch.from_numpy(owner)


def count_held() -> int:
    """Return how many values tensors stand for at present."""
    return len(_held)


# ------------------------------------------------------------------------------------------------ what is kept


@dataclass
class _Hole:
    """A saved tensor that lies in the memory of the query."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Record:
    """What autograd recorded of one attention."""

    query: Tensor | None
    """During a pass; the backward pass gets its own."""
    layout: tuple[tuple[int, ...], int]
    """The strides and the offset of the query in the forward pass."""
    copied: set[int]
    """The memory of the other inputs."""
    kept: set[int] = field(default_factory=set)
    """The memory of what is saved."""
    inputs: list[GradientEdge] = field(default_factory=list)
    output: GradientEdge | None = None
    """Where gradients come out, and where they go in; the tensors themselves are not kept. None: nothing depends."""

    def pack(self, tensor: Tensor) -> Tensor | _Hole:
        place = _get_memory(tensor)
        if self.query is not None and place == _get_memory(self.query):
            return _Hole(tensor.shape, tensor.stride(), int(tensor.storage_offset()) - self.layout[1])
        tensor = tensor.clone() if place in self.copied else tensor
        self.kept.add(_get_memory(tensor))
        return tensor

    def unpack(self, saved: Tensor | _Hole) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        assert self.query is not None
        return self.query.as_strided(saved.size, saved.stride, self.query.storage_offset() + saved.offset)

    def give_query(self, query: Tensor) -> None:
        """Put the query of the backward pass, which may have been computed again, where that of the forward was."""
        if query.stride() != self.layout[0]:
            other = torch.empty_strided(query.shape, self.layout[0], dtype=query.dtype, device=query.device)
            query = other.copy_(query)
        self.query = query


class _Enter(torch.autograd.Function):
    """Lets autograd record from here on, for tensors that need no gradient outside."""

    @staticmethod
    def forward(context: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(one.view_as(one) for one in tensors)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[None, ...]:
        return (None,) * (1 + len(gradients))


def _get_memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# ------------------------------------------------------------------------------------------------ operators


def _attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: Tensor,
    scale: float, softcap: float | None, dropout: float, training: bool, differentiate: bool, passes_query: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    by, options = _masks[int(mask)], (scale, softcap, dropout, training)
    with torch.autocast(query.device.type, enabled=False):  # states have the precision that they are to have
        if not differentiate:
            found = by.attend_with(options, query, key, value, sinks)
            return _own(found, {_get_memory(one) for one in (query, key, value)}), torch.zeros(1, dtype=torch.long)
        own = _get_memory(query)
        key, value = (one.clone() if _get_memory(one) == own else one for one in (key, value))
        others = {_get_memory(one) for one in (key, value, *([] if sinks is None else [sinks]))}
        record = _Record(query, (query.stride(), int(query.storage_offset())), others)
        if not passes_query:  # the backward pass is given none
            record.query, record.copied = None, {*others, own}
        given = (query, key, value) if sinks is None else (query, key, value, sinks)
        with record_in_operator(), saved_tensors_hooks(record.pack, record.unpack):
            states = _Enter.apply(torch.zeros((), requires_grad=True), *given)
            record.inputs = [get_gradient_edge(one) for one in states]
            query, key, value, *rest = states
            found = by.attend_with(options, query, key, value, rest[0] if rest else None)
            record.output = get_gradient_edge(found) if found.requires_grad else None
    record.query = None
    return _own(found.detach(), {own, *others, *record.kept}), hold(record)


def _attend_backward(
    gradient: Tensor, query: Tensor | None, record: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, ...]:
    recorded: _Record = _held[int(record)]
    if query is not None:
        recorded.give_query(query)
    found: Sequence[Tensor | None] = [None] * len(recorded.inputs)
    if recorded.output is not None:
        with torch.autocast(gradient.device.type, enabled=False), record_in_operator():
            found = torch.autograd.grad([recorded.output], recorded.inputs, [gradient], allow_unused=True)
    recorded.query = recorded.output = None
    taken, gradients = {_get_memory(gradient)}, []
    for one, shape in zip(found, _list_shapes(gradient, sizes), strict=False):  # there may be no sinks
        gradients.append(gradient.new_zeros(shape) if one is None else _own(one, taken))
        taken.add(_get_memory(gradients[-1]))
    return (*gradients, gradient.new_empty(0, dtype=torch.float32))[:4]


def _list_shapes(gradient: Tensor, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shapes of query, key, value and sinks; `sizes`: heads of keys, width of keys, number of sinks."""
    rows, tokens, heads, value_width = gradient.shape
    groups, width, sinks = sizes
    return [(rows, heads, tokens, width), (rows, groups, tokens, width), (rows, groups, tokens, value_width), (sinks,)]


def _own(result: Tensor, taken: set[int]) -> Tensor:
    """Return a result of an operator: contiguous, in memory that nobody else has."""
    result = result.contiguous()
    return result.clone() if _get_memory(result) in taken else result


_operator = torch.library.custom_op(
    "cornstarch::attend_opaquely", _attend, mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor mask, float scale, float? softcap, "
    "float dropout, bool training, bool differentiate, bool passes_query) -> (Tensor, Tensor)",
)  # fmt: skip
_backward_operator = torch.library.custom_op(
    "cornstarch::attend_opaquely_backward", _attend_backward, mutates_args=(),
    schema="(Tensor gradient, Tensor? query, Tensor record, SymInt[] sizes) -> (Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip


@_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    rows, heads, tokens, _ = query.shape
    output = query.new_empty(rows, tokens, heads, value.shape[3])
    return output, torch.empty(1, dtype=torch.long, device="cpu")


@_backward_operator.register_fake
def _(gradient: Tensor, query: Tensor | None, record: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    *shapes, sinks = _list_shapes(gradient, sizes)
    return (*map(gradient.new_empty, shapes), gradient.new_empty(sinks, dtype=torch.float32))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, _, sinks = inputs[:4]
    ctx.save_for_backward(query if inputs[-1] else None, output[1])
    ctx.sizes = [key.shape[1], key.shape[3], 0 if sinks is None else sinks.shape[0]]
    ctx.has_sinks, ctx.count = sinks is not None, len(inputs)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *found, sinks = _backward_operator(gradient.contiguous(), *ctx.saved_tensors, ctx.sizes)
    return (*found, sinks if ctx.has_sinks else None, *[None] * (ctx.count - 4))


_operator.register_autograd(_differentiate, setup_context=_save)


@torch.compiler.allow_in_graph
def attend_opaquely(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: Tensor, options: Sequence[Any],
    passes_query: bool,
) -> Tensor:  # fmt: skip
    """Attend by the mask of a number: [B, H, s, D] -> [B, s, H, D], in a layer that is being compiled.

    `passes_query`: whether what autograd records contains the query, which then goes to the backward pass.
    """
    # As one call in the graph, so that it runs while torch differentiates the graph, where results can be marked.
    differentiate = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    differentiate = differentiate or (sinks is not None and sinks.requires_grad and torch.is_grad_enabled())
    # Never computed again by itself: it sends messages, and each rank compiles for itself.
    with save_results():
        output: Tensor = _operator(query, key, value, sinks, mask, *options, differentiate, passes_query)[0]
    return output
