"""Running a module for the shapes of its results, without weights and without the work."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from cornstarch.compat import content_before_sharding
from cornstarch.trees import map_tensors, tensors_in

Module = TypeVar("Module", bound=nn.Module)

# Where a tensor without values says it is. Of the CPU's type, so that code which asks for the type (autocast) goes on;
# not equal to the CPU, so that a cache by device never hands a tensor without values to a real model.
_NOWHERE = torch.device("cpu", 1)
_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


class Shape(Tensor):
    """A tensor without values: a shape and a precision."""

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor) -> Shape:
        """Wrap a meta tensor."""
        made = meta.as_subclass(cls)
        made.meta = meta
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the tensor says it is."""
        return _NOWHERE

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype) -> Shape:
        """Make a tensor without values."""
        return cls(torch.empty(tuple(shape), dtype=dtype, device="meta"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Shape:
        """Return itself: there is nothing to copy."""
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Travel to another process as what it is."""
        return Shape.of, (tuple(self.shape), self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute the shape of a result of which at least one argument is unknown."""
        _refuse_unknown_writes(func, args)
        if func in _INDEXING:  # how many elements a mask selects is known if the mask is
            args = (args[0], _as_positions(args[1]), *args[2:])
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        wrappers = {id(t.meta): t for t in tensors_in([args, kwargs]) if isinstance(t, Shape)}
        args, kwargs = map_tensors(lambda t: t.meta if isinstance(t, Shape) else t.to("meta"), (args, kwargs))
        # What an operation changes in place and returns stays the object that it was.
        results = map_tensors(lambda t: wrappers[id(t)] if id(t) in wrappers else cls(t), func(*args, **kwargs))
        if any(wrapper.shape != wrapper.meta.shape for wrapper in wrappers.values()):
            raise RuntimeError("the shape of a tensor was changed in place")
        return results


class KnownIntegers(TorchFunctionMode):
    """Computes floating-point tensors as shapes only, and integers for real.

    Integers (grids, masks, sizes) decide how many tokens come out, and encoders read them as numbers (`.tolist()`),
    which a tensor without values cannot give; floating-point tensors are what is large. What needs a value that is
    not known raises.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call one function; what it makes or moves to where a shape is becomes a shape too, unless it is integers."""
        kwargs = kwargs or {}
        if not any(isinstance(value, torch.device) and value == _NOWHERE for value in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        if any(isinstance(tensor, Shape) for tensor in tensors_in([args, kwargs])):
            return func(*args, **kwargs)
        made = _call_on("meta", func, args, kwargs)
        if isinstance(made, Tensor) and is_float(made):
            return Shape(made)
        return _call_on("cpu", func, args, kwargs)


def _call_on(device: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    here = torch.device(device)
    args = tuple(here if isinstance(value, torch.device) else value for value in args)
    return func(*args, **{name: here if isinstance(v, torch.device) else v for name, v in kwargs.items()})


def weightless(module: Module) -> Module:
    """Return a copy of a module whose weights are shapes; integer buffers keep their values, on the CPU."""

    def instead(tensor: Tensor) -> Tensor:
        kept = not is_float(tensor) and not tensor.is_meta
        return tensor.detach().cpu().clone() if kept else Shape.of(tensor.shape, tensor.dtype)

    return copied_with(module, instead).eval()


def copied_with(module: Module, instead: Callable[[Tensor], Tensor]) -> Module:
    """Return a copy of a module that has something else in the place of each parameter and buffer: none is copied."""
    # deepcopy takes what it finds here for copies that were made already
    memo: dict[int, Any] = {id(one): instead(one) for one in (*module.parameters(), *module.buffers())}
    for inner in reversed(list(module.modules())):  # what is inside first
        if isinstance(inner, FSDPModule):
            memo[id(inner)] = _copy_unsharded(inner, memo)
    return copy.deepcopy(module, memo)


def _copy_unsharded(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of a module as it was before `fully_shard`, which gives it another class, hooks and a state."""
    plain: Any = next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))
    copied: nn.Module = object.__new__(plain)
    copied.__dict__.update(copy.deepcopy(content_before_sharding(module), memo))
    return copied


def _refuse_unknown_writes(func: Any, args: tuple[Any, ...]) -> None:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and isinstance(value, Tensor) and not isinstance(value, Shape):
            raise RuntimeError("an unknown value is written into a known tensor")


def _as_positions(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    positions: list[Tensor | None] = []
    for index in indices:
        if index is None or isinstance(index, Shape) or index.dtype not in (torch.bool, torch.uint8):
            positions.append(index)
        else:
            positions.extend(index.nonzero().unbind(1))
    return positions


def is_float(tensor: Tensor) -> bool:
    """Whether a tensor holds real or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()
