"""Messages between stages: payloads of nested tensors, described by a JSON spec; nothing is pickled."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from cornstarch.errors import ConfigError

_SMALL = 2**15  # bytes; smaller tensors are packed into one message, because a copy costs less than a message
_ALIGNMENT = 16  # bytes

Payload = Any  # tensors in lists, tuples, dictionaries and `ModelOutput`s, beside None, numbers and strings


class TensorSpec(NamedTuple):
    """Dtype, shape and `requires_grad` of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


class MessageLayout(NamedTuple):
    """How the tensors of a payload are distributed over messages. Empty tensors are not sent."""

    separate: tuple[int, ...]  # indices of the tensors that have a message of their own
    packed: tuple[tuple[int, int, int], ...]  # (index, begin, end) in bytes of the tensors packed into one message
    packed_bytes: int


@dataclass(frozen=True)
class PayloadSpec:
    """The structure of a payload and the specs of its tensors."""

    tree: Any  # the nesting, as JSON; tensors are represented by their index
    tensors: tuple[TensorSpec, ...]

    def to_json(self) -> bytes:
        tensors = [[str(one.dtype).removeprefix("torch."), one.shape, one.requires_grad] for one in self.tensors]
        return json.dumps([self.tree, tensors]).encode()

    @classmethod
    def from_json(cls, content: bytes) -> PayloadSpec:
        tree, tensors = json.loads(content)
        return cls(tree, tuple(TensorSpec(getattr(torch, name), tuple(shape), grad) for name, shape, grad in tensors))

    @cached_property
    def gradients(self) -> PayloadSpec:
        """The spec of the gradients that are sent back: one for each tensor that requires a gradient."""
        return PayloadSpec(None, tuple(one for one in self.tensors if one.requires_grad))

    @cached_property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in self.tensors)

    @cached_property
    def messages(self) -> MessageLayout:
        """The messages in which the tensors are sent; both ends derive the same layout from the spec."""
        sizes = [one.num_bytes for one in self.tensors]
        small = [index for index, size in enumerate(sizes) if 0 < size <= _SMALL]
        if len(small) < 2:
            return MessageLayout(tuple(index for index, size in enumerate(sizes) if size), (), 0)
        packed, begin = [], 0
        for index in small:
            packed.append((index, begin, begin + sizes[index]))
            begin += -(-sizes[index] // _ALIGNMENT) * _ALIGNMENT  # views of other dtypes must be aligned
        return MessageLayout(tuple(index for index, size in enumerate(sizes) if size > _SMALL), tuple(packed), begin)

    def detach(self) -> PayloadSpec:
        return PayloadSpec(self.tree, tuple(one._replace(requires_grad=False) for one in self.tensors))


def flatten_payload(payload: Payload) -> tuple[PayloadSpec, list[Tensor]]:
    """Return the spec of a payload and its tensors; a tensor that occurs twice is listed once."""
    tensors: list[Tensor] = []
    tree = _flatten(payload, tensors, {})
    specs = tuple(TensorSpec(one.dtype, one.shape, one.requires_grad) for one in tensors)
    return PayloadSpec(tree, specs), tensors


def unflatten_payload(spec: PayloadSpec, tensors: Sequence[Tensor]) -> Payload:
    return _unflatten(spec.tree, tensors)


def _flatten(value: Any, tensors: list[Tensor], indices: dict[int, int]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in indices:
            indices[id(value)] = len(tensors)
            tensors.append(value)
        return {"tensor": indices[id(value)]}
    if isinstance(value, ModelOutput):
        kind = f"{type(value).__module__}:{type(value).__qualname__}"
        return {"output": kind, "items": {key: _flatten(one, tensors, indices) for key, one in value.items()}}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ConfigError("The dictionaries that a stage sends may have only strings as keys.")
        return {"mapping": {key: _flatten(one, tensors, indices) for key, one in value.items()}}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_flatten(one, tensors, indices) for one in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise ConfigError(
        f"A stage returns a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent to another "
        "process. Only tensors, numbers, strings, and lists, tuples, dictionaries and ModelOutputs of them can."
    )


def _unflatten(tree: Any, tensors: Sequence[Tensor]) -> Any:
    match tree:
        case {"tensor": index}:
            return tensors[index]
        case {"value": value}:
            return value
        case {"list": items}:
            return [_unflatten(one, tensors) for one in items]
        case {"tuple": items}:
            return tuple(_unflatten(one, tensors) for one in items)
        case {"mapping": items}:
            return {key: _unflatten(one, tensors) for key, one in items.items()}
        case {"output": kind, "items": items}:
            module, _, name = kind.partition(":")
            output: Any = reduce(getattr, name.split("."), importlib.import_module(module))
            # The class is named by another process: never call anything but an output class.
            assert isinstance(output, type) and issubclass(output, ModelOutput), kind
            return output(**{key: _unflatten(one, tensors) for key, one in items.items()})
    raise AssertionError(tree)
