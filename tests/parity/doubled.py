"""A second look in float64: what is rounding shrinks by orders of magnitude there, what is wrong stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from transformers.integrations import moe

from cornstarch.engine import run_model
from cornstarch.engine.model_parts import ModelPart
from cornstarch.parallel.device import DevicePlacement
from cornstarch.trees import map_tensors


@contextmanager
def computed_in_double() -> Iterator[None]:
    """Let trainers that are made in this block keep weights in float64 and compute in it, which no run can ask for."""
    with (
        patch.object(run_model, "cast_parts", _cast_to_double),
        patch.object(DevicePlacement, "dtype", property(lambda self: torch.float64)),
        patch.object(DevicePlacement, "forward_context", lambda self: nullcontext()),
        patch.object(DevicePlacement, "move_batch", _move_in_double),
        patch.object(moe, "_can_use_grouped_mm", lambda *_: False),  # torch multiplies no float64 in groups
        KeepDoubles(),
    ):
        yield


class KeepDoubles(TorchFunctionMode):
    """Leaves float64 as it is where a model computes "in full precision" by asking for float32, as norms do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func is torch.Tensor.backward:  # functions of Python in the graph ask for float32, too
                with KeepDoubles():
                    return torch.autograd.backward(args[0], kwargs.pop("gradient"), **kwargs)
            if func in _DOWNCASTS:
                args = tuple(torch.float64 if one is torch.float32 else one for one in args)
                kwargs = {name: torch.float64 if one is torch.float32 else one for name, one in kwargs.items()}
        elif len(args) > 1 and func in _LAYERS and args[1].dtype == torch.float64:  # an item that stands in for none
            args = (args[0].double(), *args[1:])
        return func(*args, **kwargs)


_LAYERS = {torch.nn.functional.linear, torch.conv1d, torch.conv2d}
_DOWNCASTS = {
    torch.Tensor.to,
    torch.Tensor.type,
    torch.softmax,
    torch.nn.functional.softmax,
    torch.Tensor.softmax,
    torch.Tensor.new_zeros,
    torch.Tensor.sum,
    torch.zeros_like,
    torch.linalg.vector_norm,
}


_move_batch = DevicePlacement.move_batch


def _move_in_double(self: DevicePlacement, inputs: Any) -> Any:
    """Move a batch as usual, its pixels and features in float64: no autocast turns them into what weights are."""

    def double(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.dtype == torch.float32 else tensor

    return map_tensors(double, _move_batch(self, inputs))


def _cast_to_double(parts: list[ModelPart], *_: object) -> None:
    for part in parts:
        for parameter in part.parameters.values():
            parameter.data = parameter.data.double()
