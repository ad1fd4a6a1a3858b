"""Layers compiled one by one: equal layers share what is compiled, and what stands around them stays plain Python.

A layer's `forward` is compiled and nothing else of it: hooks that shard, count or recompute are called around it as
before, and names of parameters do not change.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from cornstarch.compat import compile_error, compiled

OnFailure = Callable[[str], None]


class CompiledForward:
    """The compiled forward of a layer; the plain one, if it turns out that it cannot be compiled."""

    def __init__(self, layer: nn.Module, on_failure: OnFailure | None, **options: Any) -> None:
        self.plain = layer.forward
        self._compiled: Callable[..., Any] | None = compiled(self.plain, **options)
        self._on_failure, self._layer = on_failure, type(layer).__name__
        functools.update_wrapper(self, self.plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer."""
        if self._compiled is None:
            return self.plain(*args, **kwargs)
        try:
            return self._compiled(*args, **kwargs)
        except compile_error() as error:
            if self._on_failure is None:
                raise
            self._compiled = None
            self._on_failure(f"{self._layer} cannot be compiled: {str(error).strip().splitlines()[0]}")
            return self.plain(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the plain forward of the layer's copy: what is compiled belongs to this layer."""
        return copy.deepcopy(self.plain, memo)


def compile_layers(layers: Iterable[nn.Module], on_failure: OnFailure | None = None, **options: Any) -> int:
    """Compile the forward of layers, in place; return how many.

    Args:
        layers: The layers; one that is compiled already is left as it is.
        on_failure: Told why a layer is computed without being compiled after all; left out, that is an error.
        options: Of `torch.compile`.
    """
    count = 0
    for layer in layers:
        if isinstance(layer.__dict__.get("forward"), CompiledForward):
            continue
        layer.__dict__["forward"] = CompiledForward(layer, on_failure, **options)
        count += 1
    return count


def plain_layers(layers: Iterable[nn.Module]) -> None:
    """Undo `compile_layers`."""
    for layer in layers:
        found = layer.__dict__.get("forward")
        if isinstance(found, CompiledForward):
            bound_by_class = getattr(found.plain, "__func__", None) is type(layer).forward
            layer.__dict__.pop("forward")
            if not bound_by_class:
                layer.__dict__["forward"] = found.plain


__all__ = ["CompiledForward", "compile_layers", "plain_layers"]
