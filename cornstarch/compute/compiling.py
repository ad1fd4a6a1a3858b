"""Layers compiled one by one: equal layers share what is compiled, and what stands around them stays plain Python.

A layer's `forward` is compiled and nothing else of it: hooks that shard or count are called around it as before, what
computes it again (`recomputing`) stays around it, and names of parameters do not change.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from cornstarch.compat import compile_error, compiled
from cornstarch.compute.recomputing import RecomputedForward

OnFailure = Callable[[str], None]


class CompiledForward:
    """The compiled forward of a layer; the plain one, if it turns out that it cannot be compiled."""

    def __init__(
        self, plain: Callable[..., Any], layer: nn.Module, on_failure: OnFailure | None, **options: Any
    ) -> None:
        self.plain = plain
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


class ItemwiseForward:
    """The forward of attention that goes through the items of a row one by one, and is not compiled for it.

    Encoders over the patches of many images (Qwen2-VL) attend so where no kernel is told where each image ends. A graph
    of it would be one for that number of images, and every other number would be compiled anew.
    """

    def __init__(self, module: nn.Module) -> None:
        self.plain = module.forward
        functools.update_wrapper(self, self.plain)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Attend."""
        return self.plain(*args, **kwargs)


def _itemwise(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield what is told where items end, inside a layer."""
    for module in layer.modules():
        if module is not layer and "cu_seqlens" in inspect.signature(module.forward).parameters:
            yield module


def compile_layers(layers: Iterable[nn.Module], on_failure: OnFailure | None = None, **options: Any) -> int:
    """Compile the forward of layers, in place; return how many.

    Args:
        layers: The layers; one that is compiled already is left as it is.
        on_failure: Told why a layer is computed without being compiled after all; left out, that is an error.
        options: Of `torch.compile`.
    """
    count = 0
    for layer in layers:
        around = layer.__dict__.get("forward")
        own = around.inner if isinstance(around, RecomputedForward) else layer.forward
        if isinstance(own, CompiledForward):
            continue
        for module in _itemwise(layer):
            module.__dict__["forward"] = ItemwiseForward(module)
        made = CompiledForward(own, layer, on_failure, **options)
        if isinstance(around, RecomputedForward):
            around.inner = made
        else:
            layer.__dict__["forward"] = made
        count += 1
    return count


def plain_layers(layers: Iterable[nn.Module]) -> None:
    """Undo `compile_layers`."""
    for layer in layers:
        found = layer.__dict__.get("forward")
        if isinstance(found, RecomputedForward) and isinstance(found.inner, CompiledForward):
            found.inner = found.inner.plain
        for module in layer.modules():
            found = module.__dict__.get("forward")
            if isinstance(found, CompiledForward | ItemwiseForward):
                bound_by_class = getattr(found.plain, "__func__", None) is type(module).forward
                module.__dict__.pop("forward")
                if not bound_by_class:
                    module.__dict__["forward"] = found.plain


__all__ = ["CompiledForward", "ItemwiseForward", "compile_layers", "plain_layers"]
