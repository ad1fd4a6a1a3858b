"""Run a module for the shapes of its results, without weights and without the work.

`ShapeTensor` is a tensor without values. Floating-point tensors become shapes; integers (grids, masks, sizes) keep
their values, because encoders read them as numbers to decide how many tokens come out.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from cornstarch.compat import content_before_sharding
from cornstarch.errors import ConfigError
from cornstarch.trees import map_tensors, tensors_in

from .unwrap import get_argument_names, is_instrumented, unwrap

if TYPE_CHECKING:
    from .encoder import ModalEncoderModule

Module = TypeVar("Module", bound=nn.Module)

# The device that a ShapeTensor reports. Its type is "cpu", so that code which branches on the type (autocast) works.
# It is not equal to the CPU, so that a cache keyed by device never hands a ShapeTensor to a real model.
_SHAPE_DEVICE = torch.device("cpu", 1)
_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


class ShapeTensor(Tensor):
    """A tensor without values: a shape and a dtype."""

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor) -> ShapeTensor:
        wrapped = meta.as_subclass(cls)
        wrapped.meta = meta
        return wrapped

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _SHAPE_DEVICE

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype) -> ShapeTensor:
        return cls(torch.empty(tuple(shape), dtype=dtype, device="meta"))

    def __deepcopy__(self, memo: dict[int, Any]) -> ShapeTensor:
        """Return the tensor itself: there are no values to copy."""
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return ShapeTensor.of, (tuple(self.shape), self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute the shape of a result of which at least one argument has no values."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, Tensor) and not isinstance(value, ShapeTensor):
                raise RuntimeError("an unknown value is written into a known tensor")
        if func in _INDEXING:  # the number of elements that a mask selects is known if the mask has values
            positions: list[Tensor | None] = []
            for index in args[1]:
                if index is None or isinstance(index, ShapeTensor) or index.dtype not in (torch.bool, torch.uint8):
                    positions.append(index)
                else:
                    positions.extend(index.nonzero().unbind(1))
            args = (args[0], positions, *args[2:])
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        wrappers = {id(t.meta): t for t in tensors_in([args, kwargs]) if isinstance(t, ShapeTensor)}
        args, kwargs = map_tensors(lambda t: t.meta if isinstance(t, ShapeTensor) else t.to("meta"), (args, kwargs))
        # The result of an in-place operation must be the same Python object as its argument.
        results = map_tensors(lambda t: wrappers[id(t)] if id(t) in wrappers else cls(t), func(*args, **kwargs))
        if any(wrapper.shape != wrapper.meta.shape for wrapper in wrappers.values()):
            raise RuntimeError("the shape of a tensor was changed in place")
        return results


class ShapeInferenceMode(TorchFunctionMode):
    """Computes floats as shapes only, and integers with their values; an operation on an unknown value raises."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function; floating-point tensors that it creates on the device of shapes become shapes."""
        kwargs = kwargs or {}
        if not any(isinstance(value, torch.device) and value == _SHAPE_DEVICE for value in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        if any(isinstance(tensor, ShapeTensor) for tensor in tensors_in([args, kwargs])):
            return func(*args, **kwargs)
        result = _call_on("meta", func, args, kwargs)
        if isinstance(result, Tensor) and is_float(result):
            return ShapeTensor(result)
        return _call_on("cpu", func, args, kwargs)


def _call_on(device: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    here = torch.device(device)
    args = tuple(here if isinstance(value, torch.device) else value for value in args)
    return func(*args, **{name: here if isinstance(v, torch.device) else v for name, v in kwargs.items()})


def is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def copy_without_weights(module: Module) -> Module:
    """Return a copy of a module whose weights are shapes; integer buffers keep their values, on the CPU."""

    def replace(tensor: Tensor) -> Tensor:
        has_values = not is_float(tensor) and not tensor.is_meta
        return tensor.detach().cpu().clone() if has_values else ShapeTensor.of(tensor.shape, tensor.dtype)

    return copy_with_tensors(module, replace).eval()


def copy_with_tensors(module: Module, replace: Callable[[Tensor], Tensor]) -> Module:
    """Return a copy of a module with `replace(tensor)` in place of each parameter and buffer, which are not copied."""
    # deepcopy takes entries of its memo for copies that exist already.
    memo: dict[int, Any] = {id(tensor): replace(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for inner in reversed(list(module.modules())):  # children before their parents
        if isinstance(inner, FSDPModule):
            # fully_shard gives a module another class, hooks and a state: copy the module as it was before.
            plain: Any = next(base for base in type(inner).__mro__ if not issubclass(base, FSDPModule))
            copied: nn.Module = object.__new__(plain)
            copied.__dict__.update(copy.deepcopy(content_before_sharding(inner), memo))
            memo[id(inner)] = copied
    return copy.deepcopy(module, memo)


def build_dummy_items(module: nn.Module, count: int) -> dict[str, Tensor]:
    """Return images or sounds of the size that an encoder's config states, on the meta device."""
    config, names = getattr(unwrap(module), "config", None), get_argument_names(module)
    side, bins = read_size(config, "image_size", "img_size"), read_size(config, "num_mel_bins")
    positions = read_size(config, "max_source_positions")
    if "pixel_values" in names and side is not None:
        return {"pixel_values": torch.empty(count, _read_channels(config), side, side, device="meta")}
    if "input_features" in names and bins is not None and positions is not None:
        return {"input_features": torch.empty(count, bins, 2 * positions, device="meta")}
    raise ConfigError(f"the config of {type(unwrap(module)).__name__} does not say how large its items are")


def build_dummy_item(module: nn.Module) -> dict[str, Tensor]:
    """Return one valid item of any size for an encoder; integer tensors have values."""
    config, names = getattr(unwrap(module), "config", None), get_argument_names(module)
    patch, strides = read_size(config, "patch_size"), getattr(config, "conv_stride", None)
    if "hidden_states" in names and "grid_thw" in names and patch is not None:
        side = 2 * (read_size(config, "spatial_merge_size") or 1)
        width = _read_channels(config) * (read_size(config, "temporal_patch_size") or 1) * patch**2
        patches = torch.empty(side**2, width, device="meta")
        return {"hidden_states": patches, "grid_thw": torch.tensor([[1, side, side]])}
    if "input_values" in names and isinstance(strides, (list, tuple)):
        return {"input_values": torch.empty(1, 16 * math.prod(strides), device="meta")}
    return build_dummy_items(module, 1)


def read_size(config: Any, *names: str) -> int | None:
    """Return the first of these numbers that a config has; for a pair (height and width), its first number."""
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int) and value > 0:
            return value
    return None


def _read_channels(config: Any) -> int:
    return read_size(config, "num_channels", "in_channels", "in_chans") or 3


def find_unused_parameters(encoder: ModalEncoderModule, inputs: dict[str, Any] | None = None) -> list[str]:
    """Return the names of an encoder's trained parameters on which its tokens do not depend.

    A norm over CLIP's pooled output, say: it never gets a gradient, and a plain `DistributedDataParallel` would wait
    for it. The result is empty if a copy of the encoder cannot run on shapes alone, if it draws random numbers (the
    layers in use may then differ from step to step), or if modules are hooked or sharded.
    """
    trained = [parameter.requires_grad for parameter in encoder.parameters()]
    if not any(trained) or is_instrumented(encoder):
        return []
    try:
        twin = copy_without_weights(encoder).train()
        for shape, is_trained in zip(twin.parameters(), trained, strict=True):
            shape.requires_grad_(is_trained)
        named = encoder.rename_inputs(dict(inputs or build_dummy_item(encoder.module)))
        shapes = map_tensors(lambda t: ShapeTensor.of(t.shape, t.dtype) if is_float(t) else t.cpu(), named)
        with torch.enable_grad(), ShapeInferenceMode(), _detect_randomness() as drew:
            used = {id(leaf) for leaf in _graph_leaves(twin.features(shapes).tensors())}
    except Exception:
        return []  # unknown; DDP itself reports the parameter that it waits for
    if drew:
        return []
    pairs = zip(encoder.named_parameters(), twin.parameters(), strict=True)
    return [name for (name, parameter), shape in pairs if parameter.requires_grad and id(shape) not in used]


@contextmanager
def _detect_randomness() -> Iterator[list[str]]:
    """Yield a list that names, at exit, the generators that were used; their states are restored."""
    drew: list[str] = []
    before = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield drew
    finally:
        drew += ["torch"] if not torch.equal(before[0], torch.random.get_rng_state()) else []
        drew += ["numpy"] if repr(before[1]) != repr(np.random.get_state()) else []
        drew += ["random"] if before[2] != random.getstate() else []
        torch.random.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def _graph_leaves(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors at the leaves of the autograd graphs of `tensors`."""
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        node: Any = pending.pop()
        if hasattr(node, "variable"):
            yield node.variable
        fresh = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= fresh
        pending += fresh
