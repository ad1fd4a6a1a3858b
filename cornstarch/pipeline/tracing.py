"""Finding out, by one forward pass and many small backward passes, how a model is made.

Every layer and every module beside the layers hands on a copy that is cut off from its graph. What a segment computes
is then differentiated: the copies that get a gradient are those that the segment reads, and so are the parameters. A
parameter of a layer that is read by another segment says that something went from one to the other unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.pipeline.anatomy import chosen_layers, full_name, layer_lists, siblings, weighs
from cornstarch.pipeline.findings import Survey, Unit
from cornstarch.pipeline.payload import take_apart
from cornstarch.trees import differentiable, map_tensors

Call = Callable[[], Any]


def trace(model: nn.Module, call: Call) -> Survey:
    """Return how a model is made.

    Args:
        model: A small model with all weights; its gradients and flags are left as they were.
        call: Runs it on some inputs and returns its output.
    """
    calls = _called(model, call)
    layers = chosen_layers(model, calls, layer_lists(model, calls))
    units = siblings(model, layers, set(calls))
    with _everything_trained(model):
        log = _Log(model, layers, units)
        with log.listening():
            output = call()
        log.finish(output)
        return _survey(model, log)


def _called(model: nn.Module, call: Call) -> list[str]:
    """Return the modules in the order in which they are called."""
    calls: list[str] = []
    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            hook = module.register_forward_pre_hook(lambda _, __, name=name: calls.append(name))
            stack.callback(hook.remove)
        call()
    return calls


@contextmanager
def _everything_trained(model: nn.Module) -> Iterator[None]:
    """Let every parameter take a gradient: what is frozen today may be trained tomorrow."""
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    for parameter in flags:
        parameter.requires_grad_(parameter.is_floating_point())
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)


@dataclass
class _Made:
    """What one call of a layer or a unit returned."""

    name: str
    segment: int
    raw: list[Tensor]
    copies: list[Tensor] = field(default_factory=list)
    """Cut off from the graph: they take the gradient."""
    given: list[Tensor] = field(default_factory=list)
    """What the rest of the model was given."""


class _Log:
    """Listens to one forward pass."""

    def __init__(self, model: nn.Module, layers: Sequence[str], units: Sequence[str]) -> None:
        self.model, self.layers, self.units = model, tuple(layers), tuple(units)
        self.segment, self.depth, self.in_layer = 0, 0, False
        self.made: list[_Made] = []
        self.calls: dict[str, set[int]] = {}
        self.inside: set[str] = set()
        self.unable: dict[int, str] = {}
        self.skipped = set(layers)

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            for number, name in enumerate(self.layers):
                module = self.model.get_submodule(name)
                stack.callback(module.register_forward_pre_hook(self._enter_layer).remove)
                leave = self._leave_layer(name, number)
                stack.callback(module.register_forward_hook(leave).remove)
            for name in self.units:
                module = self.model.get_submodule(name)
                stack.callback(module.register_forward_pre_hook(self._enter_unit(name)).remove)
                stack.callback(module.register_forward_hook(self._leave_unit(name)).remove)
            yield

    def _enter_layer(self, *_: Any) -> None:
        self.in_layer = True

    def _leave_layer(self, name: str, number: int) -> Callable[..., Any]:
        def leave(_: nn.Module, __: Any, output: Any) -> Any:
            self.in_layer = False
            self.skipped.discard(name)
            try:
                take_apart(output)
            except ConfigError as error:
                self.unable[number + 1] = str(error)
            copied = self._copied(name, output)
            self.segment = number + 1
            return copied

        return leave

    def _enter_unit(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self.calls.setdefault(name, set()).add(self.segment)
            if self.in_layer:
                self.inside.add(name)
            self.depth += 1

        return enter

    def _leave_unit(self, name: str) -> Callable[..., Any]:
        def leave(_: nn.Module, __: Any, output: Any) -> Any:
            self.depth -= 1
            # What is called inside a layer, or inside another unit, does not return to the model's own forward.
            return None if self.in_layer or self.depth else self._copied(name, output)

        return leave

    def _copied(self, name: str, output: Any) -> Any:
        made = _Made(name, self.segment, differentiable(output))
        self.made.append(made)

        def copy(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            made.copies.append(tensor.detach().requires_grad_())
            made.given.append(made.copies[-1].clone())  # no leaf: it may be changed in place
            return made.given[-1]

        return map_tensors(copy, output)

    def finish(self, output: Any) -> None:
        self.made.append(_Made("", self.segment, differentiable(output)))


def _survey(model: nn.Module, log: _Log) -> Survey:
    readers = _readers(model, log)
    live = {name: number + 1 for number, name in enumerate(log.layers)}  # also where no gradient flows
    for made in log.made:
        for segment in set().union(*(readers[id(tensor)] for tensor in made.copies)):
            if segment > made.segment:
                live[made.name] = max(live.get(made.name, 0), segment)
    written = {made.name for made in log.made if any(tensor._version for tensor in made.given)}
    return Survey(
        model_name=full_name(model),
        layers=log.layers,
        units=_units(model, log, readers),
        live=live,
        written=frozenset(written),
        barred=_barred(model, log, readers),
    )


def _readers(model: nn.Module, log: _Log) -> dict[int, set[int]]:
    """Return the segments that read each parameter, and each copy of what was handed on, by `id`."""
    read: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    read += [tensor for made in log.made for tensor in made.copies]
    readers: dict[int, set[int]] = {id(tensor): set() for tensor in read}
    for made in log.made:
        if not made.raw:
            continue
        ones = [torch.ones_like(tensor) for tensor in made.raw]
        gradients = torch.autograd.grad(made.raw, read, ones, retain_graph=True, allow_unused=True)
        for tensor, gradient in zip(read, gradients, strict=True):
            if gradient is not None:
                readers[id(tensor)].add(made.segment)
    return readers


def _units(model: nn.Module, log: _Log, readers: Mapping[int, set[int]]) -> dict[str, Unit]:
    order = sorted(log.units, key=lambda name: list(log.calls).index(name) if name in log.calls else len(log.calls))
    found = {}
    for name in order:
        module = model.get_submodule(name)
        elsewhere = _elsewhere(model, name)
        reads = [readers.get(id(p), set()) for p in module.parameters() if id(p) not in elsewhere]
        uses = set(log.calls.get(name, set())).union(*reads)
        found[name] = Unit(frozenset(uses), weighs(module), name in log.inside)
    return found


def _elsewhere(model: nn.Module, name: str) -> set[int]:
    """Return the parameters that have another name outside a module: which name was read cannot be told."""
    return {
        id(parameter)
        for other, parameter in model.named_parameters(remove_duplicate=False)
        if not other.startswith(f"{name}.")
    }


def _barred(model: nn.Module, log: _Log, readers: Mapping[int, set[int]]) -> dict[int, str]:
    """Return the boundaries across which something goes unseen."""
    homes: dict[int, set[int]] = {}
    for number, name in enumerate(log.layers):
        for parameter in model.get_submodule(name).parameters():
            homes.setdefault(id(parameter), set()).add(number)
    outside = {id(p) for name in log.units for p in model.get_submodule(name).parameters()}
    barred = dict(log.unable)
    for number, name in enumerate(log.layers):
        if name in log.skipped:
            barred[number + 1] = f"{name} is not called for every batch"
    for identity, numbers in homes.items():
        if identity in outside:
            continue
        first = min(numbers)
        for reader in sorted(readers.get(identity, set()) - numbers):
            what = f"layer {reader}" if reader < len(log.layers) else "what follows the layers"
            for boundary in range(first + 1, reader + 1):
                barred.setdefault(boundary, f"{what} reads what layer {first} computes inside (a loss, keys, values)")
    return barred


__all__ = ["trace"]
