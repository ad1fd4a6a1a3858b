"""Going through the tensors in what modules take and return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput

_ROWS = (list, tuple)
_SINGLE = (int, float, str, type(None))


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return nested lists, tuples, dictionaries and outputs with each tensor replaced; all else stays what it is."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, ModelOutput):
        return type(value)(**{key: map_tensors(function, one) for key, one in value.items()})
    if isinstance(value, dict):
        return {key: map_tensors(function, one) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, one) for one in value))
    if isinstance(value, list | tuple):
        return type(value)([map_tensors(function, one) for one in value])
    return value


def leaves(value: Any) -> Iterator[Any]:
    """Go through everything that is not a container."""
    if isinstance(value, (*_ROWS, Mapping)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(one)
    else:
        yield value


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors, in order."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    # Asked for every operation of a traced model: the most frequent first, and those that are slow to ask for last.
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, _ROWS):
        for one in value:
            _collect(one, found)
    elif not isinstance(value, _SINGLE) and isinstance(value, Mapping):
        for one in value.values():
            _collect(one, found)


def differentiable(value: Any) -> list[Tensor]:
    """Return the tensors that a gradient may flow through."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]
