"""What stages hand on: tensors, and how they lie in tuples, dictionaries and outputs, without pickling anything."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from cornstarch.errors import ConfigError

_SMALL = 2**15  # bytes of a tensor that travels together with others: a copy costs less than a message
_ALIGNED = 16  # bytes

Payload = Any
"""Tensors in lists, tuples, dictionaries and `ModelOutput`s, beside None, numbers and texts."""


class TensorForm(NamedTuple):
    """A tensor without its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    takes_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """Return the form of a tensor."""
        return cls(tensor.dtype, tensor.shape, tensor.requires_grad)

    @property
    def bytes(self) -> int:
        """What it takes."""
        return self.dtype.itemsize * prod(self.shape)

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor of this form, to be filled."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Parcels(NamedTuple):
    """Which tensors of a payload have a message of their own, and how the others lie in one that they share."""

    alone: tuple[int, ...]
    """By number; those that are empty do not travel."""
    together: tuple[tuple[int, int, int], ...]
    """Their number, and where they begin and end, in bytes."""
    size: int
    """Of the shared message, in bytes."""


@dataclass(frozen=True)
class Form:
    """A payload without its numbers."""

    tree: Any
    """How it is nested, as JSON: tensors are there by their number."""
    tensors: tuple[TensorForm, ...]

    def encoded(self) -> bytes:
        """Return the form as JSON."""
        tensors = [[str(one.dtype).removeprefix("torch."), one.shape, one.takes_gradient] for one in self.tensors]
        return json.dumps([self.tree, tensors]).encode()

    @classmethod
    def decoded(cls, content: bytes) -> Form:
        """Return the form that was encoded."""
        tree, tensors = json.loads(content)
        return cls(tree, tuple(TensorForm(getattr(torch, name), tuple(shape), grad) for name, shape, grad in tensors))

    @cached_property
    def gradients(self) -> Form:
        """The form of what comes back: the gradients of those tensors that take one."""
        return Form(None, tuple(one for one in self.tensors if one.takes_gradient))

    @cached_property
    def bytes(self) -> int:
        """What its tensors take."""
        return sum(one.bytes for one in self.tensors)

    @cached_property
    def parcels(self) -> Parcels:
        """How its tensors travel."""
        sizes = [one.bytes for one in self.tensors]
        small = [number for number, size in enumerate(sizes) if 0 < size <= _SMALL]
        if len(small) < 2:
            return Parcels(tuple(number for number, size in enumerate(sizes) if size), (), 0)
        together, begin = [], 0
        for number in small:
            together.append((number, begin, begin + sizes[number]))
            begin += -(-sizes[number] // _ALIGNED) * _ALIGNED
        return Parcels(tuple(number for number, size in enumerate(sizes) if size > _SMALL), tuple(together), begin)

    def without_gradient(self) -> Form:
        """Return the form of the same payload, of which nothing takes a gradient."""
        return Form(self.tree, tuple(one._replace(takes_gradient=False) for one in self.tensors))


def take_apart(payload: Payload) -> tuple[Form, list[Tensor]]:
    """Return the form of a payload, and its tensors; one that is there twice counts once."""
    tensors: list[Tensor] = []
    tree = _tree(payload, tensors, {})
    return Form(tree, tuple(map(TensorForm.of, tensors))), tensors


def put_together(form: Form, tensors: Sequence[Tensor]) -> Payload:
    """Return the payload of a form and its tensors."""
    return _value(form.tree, tensors)


def _tree(value: Any, tensors: list[Tensor], numbers: dict[int, int]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in numbers:
            numbers[id(value)] = len(tensors)
            tensors.append(value)
        return {"tensor": numbers[id(value)]}
    if isinstance(value, ModelOutput):
        kind = f"{type(value).__module__}:{type(value).__qualname__}"
        return {"output": kind, "items": {key: _tree(one, tensors, numbers) for key, one in value.items()}}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ConfigError("Stages hand on dictionaries with texts as keys only.")
        return {"mapping": {key: _tree(one, tensors, numbers) for key, one in value.items()}}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_tree(one, tensors, numbers) for one in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise ConfigError(
        f"A stage hands on a {type(value).__module__}.{type(value).__qualname__}, which cannot travel to another "
        "process: only tensors, numbers, texts, and lists, tuples, dictionaries and outputs of them can."
    )


def _value(tree: Any, tensors: Sequence[Tensor]) -> Any:
    match tree:
        case {"tensor": number}:
            return tensors[number]
        case {"value": value}:
            return value
        case {"list": items}:
            return [_value(one, tensors) for one in items]
        case {"tuple": items}:
            return tuple(_value(one, tensors) for one in items)
        case {"mapping": items}:
            return {key: _value(one, tensors) for key, one in items.items()}
        case {"output": kind, "items": items}:
            return _output_class(kind)(**{key: _value(one, tensors) for key, one in items.items()})
    raise AssertionError(tree)


def _output_class(kind: str) -> type[ModelOutput]:
    module, _, name = kind.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert isinstance(found, type) and issubclass(found, ModelOutput), kind
    return found


__all__ = ["Form", "Parcels", "Payload", "TensorForm", "put_together", "take_apart"]
