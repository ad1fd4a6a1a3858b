"""Stages of `nn.Sequential`, and of lists of layers and functions: each stage runs its own, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.pipeline.parts import Call, StagePart, shared_parameters
from cornstarch.pipeline.payload import Payload
from cornstarch.trees import map_tensors


class Function(nn.Module):
    """A function among layers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call it."""
        return self.function(*inputs, **options)

    def extra_repr(self) -> str:
        """Name it."""
        return getattr(self.function, "__name__", type(self.function).__name__)


class SequentialPart(StagePart):
    """One stage of layers that are called one after the other; `model` is an `nn.Sequential` of those it owns."""

    def __init__(self, model: nn.Module, first: bool, last: bool, tied: Mapping[str, str], call: Call | None) -> None:
        nn.Module.__init__(self)
        self.model, self.first, self.last = model, first, last
        self.tied = dict(tied)
        self.call = call or call_with_one

    def forward(self, inputs: Mapping[str, Any], received: Payload | None = None) -> Payload | Any:
        """Run the layers of the stage on what the first layer is given, or on what the stage before returned."""
        if self.first != (received is None):
            raise ConfigError(
                "The first stage receives nothing; every other stage receives what the one before it returned."
            )
        if self.first:
            return self.call(self.model, inputs)
        # What arrives is the beginning of a graph, which nothing may be written on (`nn.ReLU(inplace=True)`).
        writes = any(getattr(layer, "inplace", False) for layer in self.model.modules())
        return self.model(map_tensors(Tensor.clone, received) if writes else received)

    def extra_repr(self) -> str:
        """Say nothing: the layers say what it has."""
        return ""


def call_with_one(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Run a model on the one thing in a batch, or on what is called `input`."""
    if "input" in inputs:
        return model(inputs["input"])
    if len(inputs) != 1:
        raise ConfigError(
            f"A chain of layers takes one input; the batch has {', '.join(inputs) or 'none'}. Call it `input`, or say "
            "how the first layer is called (call)."
        )
    return model(next(iter(inputs.values())))


def make_sequential_part(model: nn.Module, starts: Sequence[int], stage: int, call: Call | None) -> SequentialPart:
    """Make a stage out of an `nn.Sequential`, in place."""
    names = list(model._modules)
    ends = [*starts[1:], len(names)]
    stages = {name: {s for s, end in enumerate(ends) if starts[s] <= n < end} for n, name in enumerate(names)}
    tied = shared_parameters(model, stages, stage, set(range(len(starts))))
    for name in names:
        if stage not in stages[name]:
            del model._modules[name]
    return SequentialPart(model, stage == 0, stage == len(starts) - 1, tied, call)


def sequential_stages(
    layers: Sequence[nn.Module | Callable[..., Any]], boundaries: Sequence[int], call: Call | None = None
) -> list[SequentialPart]:
    """Return the stages of a list of layers and functions.

    Parameters are named as in an `nn.Sequential` of the list: by the number of their layer. The layers are not copied:
    one that is there twice is the same on both stages, and its parameters are listed as tied.

    Args:
        layers: What is called, one on the result of the other.
        boundaries: The numbers of the layers with which a new stage begins.
        call: How the first stage is run on a batch: its model and the batch. Default: on the batch's only entry, or
            the one called `input`.
    """
    starts = [0, *boundaries]
    if any(a >= b for a, b in zip(starts, [*boundaries, len(layers)], strict=True)):
        raise ConfigError(
            f"boundaries = {list(boundaries)}: expected growing numbers between 1 and {len(layers) - 1}, the layers "
            f"with which stages begin; there are {len(layers)} layers."
        )
    modules = [layer if isinstance(layer, nn.Module) else Function(layer) for layer in layers]
    return [make_sequential_part(nn.Sequential(*modules), starts, stage, call) for stage in range(len(starts))]


__all__ = ["Function", "SequentialPart", "call_with_one", "make_sequential_part", "sequential_stages"]
