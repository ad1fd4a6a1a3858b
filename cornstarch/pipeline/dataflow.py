"""Dataflow of a model: which segment reads which results, found by one forward pass and many small backward passes.

Each layer and each side module returns a copy that is detached from its graph. The outputs of a segment are then
differentiated: the copies and parameters that get a gradient are those that the segment reads. If a segment reads a
parameter of a layer outside it, something passed between the two without going through a module's result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.pipeline.message import flatten_payload
from cornstarch.pipeline.model_analysis import (
    ModelAnalysis,
    SideModule,
    choose_layers,
    find_layer_lists,
    find_side_modules,
    get_class_name,
    has_parameters,
)
from cornstarch.trees import differentiable, map_tensors

Call = Callable[[], Any]


def trace_dataflow(model: nn.Module, call: Call) -> ModelAnalysis:
    """Return the structure of a model and which results its segments read."""
    calls: list[str] = []
    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            hook = module.register_forward_pre_hook(lambda _, __, name=name: calls.append(name))
            stack.callback(hook.remove)
        call()
    layers = choose_layers(model, calls, find_layer_lists(model, calls))
    recorder = _DataflowRecorder(model, layers, find_side_modules(model, layers, set(calls)))
    with _train_everything(model):
        with recorder.record():
            output = call()
        recorder.results.append(_CallResult("", recorder.segment, differentiable(output)))
        return _build_analysis(model, recorder)


@contextmanager
def _train_everything(model: nn.Module) -> Iterator[None]:
    """Let every parameter require a gradient: a frozen module may be trained in the next run."""
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
class _CallResult:
    """The result of one call of a layer or a side module."""

    name: str
    segment: int
    outputs: list[Tensor]
    copies: list[Tensor] = field(default_factory=list)  # detached leaves, which get the gradient
    returned: list[Tensor] = field(default_factory=list)  # clones of them, which the rest of the model may modify


class _DataflowRecorder:
    """Records the calls of one forward pass by hooks."""

    def __init__(self, model: nn.Module, layers: Sequence[str], side_modules: Sequence[str]) -> None:
        self.model, self.layers, self.side_modules = model, tuple(layers), tuple(side_modules)
        self.segment, self.depth, self.in_layer = 0, 0, False
        self.results: list[_CallResult] = []
        self.calls: dict[str, set[int]] = {}  # the segments in which each side module is called, by first call
        self.called_by_layers: set[str] = set()
        self.unsendable: dict[int, str] = {}
        self.skipped = set(layers)

    @contextmanager
    def record(self) -> Iterator[None]:
        with ExitStack() as stack:
            for number, name in enumerate(self.layers):
                module = self.model.get_submodule(name)
                stack.callback(module.register_forward_pre_hook(self._enter_layer).remove)
                stack.callback(module.register_forward_hook(partial(self._leave_layer, name, number)).remove)
            for name in self.side_modules:
                module = self.model.get_submodule(name)
                stack.callback(module.register_forward_pre_hook(partial(self._enter_side_module, name)).remove)
                stack.callback(module.register_forward_hook(partial(self._leave_side_module, name)).remove)
            yield

    def _enter_layer(self, *_: Any) -> None:
        self.in_layer = True

    def _leave_layer(self, name: str, number: int, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        self.in_layer = False
        self.skipped.discard(name)
        try:
            flatten_payload(output)
        except ConfigError as error:
            self.unsendable[number + 1] = str(error)
        copied = self._detach(name, output)
        self.segment = number + 1
        return copied

    def _enter_side_module(self, name: str, *_: Any) -> None:
        self.calls.setdefault(name, set()).add(self.segment)
        if self.in_layer:
            self.called_by_layers.add(name)
        self.depth += 1

    def _leave_side_module(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        self.depth -= 1
        # A call inside a layer, or inside another side module, does not return to the model's own forward.
        return None if self.in_layer or self.depth else self._detach(name, output)

    def _detach(self, name: str, output: Any) -> Any:
        result = _CallResult(name, self.segment, differentiable(output))
        self.results.append(result)

        def copy(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            result.copies.append(tensor.detach().requires_grad_())
            result.returned.append(result.copies[-1].clone())  # a leaf could not be modified in place
            return result.returned[-1]

        return map_tensors(copy, output)


def _build_analysis(model: nn.Module, recorder: _DataflowRecorder) -> ModelAnalysis:
    readers = _find_readers(model, recorder)
    # The next segment reads each layer's result, even if no gradient flows there.
    last_reader = {name: number + 1 for number, name in enumerate(recorder.layers)}
    for result in recorder.results:
        for segment in set().union(*(readers[id(tensor)] for tensor in result.copies)):
            if segment > result.segment:
                last_reader[result.name] = max(last_reader.get(result.name, 0), segment)
    modified = {one.name for one in recorder.results if any(tensor._version for tensor in one.returned)}
    return ModelAnalysis(
        model_name=get_class_name(model),
        layers=recorder.layers,
        side_modules=_build_side_modules(model, recorder, readers),
        last_reader=last_reader,
        modified=frozenset(modified),
        barred=_find_barred_boundaries(model, recorder, readers),
    )


def _find_readers(model: nn.Module, recorder: _DataflowRecorder) -> dict[int, set[int]]:
    """Return the segments that read each parameter and each detached copy, by `id`."""
    read: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    read += [tensor for result in recorder.results for tensor in result.copies]
    readers: dict[int, set[int]] = {id(tensor): set() for tensor in read}
    for result in recorder.results:
        if not result.outputs:
            continue
        ones = [torch.ones_like(tensor) for tensor in result.outputs]
        gradients = torch.autograd.grad(result.outputs, read, ones, retain_graph=True, allow_unused=True)
        for tensor, gradient in zip(read, gradients, strict=True):
            if gradient is not None:
                readers[id(tensor)].add(result.segment)
    return readers


def _build_side_modules(
    model: nn.Module, recorder: _DataflowRecorder, readers: Mapping[int, set[int]]
) -> dict[str, SideModule]:
    uncalled = [name for name in recorder.side_modules if name not in recorder.calls]
    found = {}
    for name in (*recorder.calls, *uncalled):
        module = model.get_submodule(name)
        # Of a parameter that has another name outside the module, nobody knows which name was read.
        outside = {
            id(parameter)
            for other, parameter in model.named_parameters(remove_duplicate=False)
            if not other.startswith(f"{name}.")
        }
        reads = [readers.get(id(p), set()) for p in module.parameters() if id(p) not in outside]
        uses = recorder.calls.get(name, set()).union(*reads)
        found[name] = SideModule(frozenset(uses), has_parameters(module), name in recorder.called_by_layers)
    return found


def _find_barred_boundaries(
    model: nn.Module, recorder: _DataflowRecorder, readers: Mapping[int, set[int]]
) -> dict[int, str]:
    """Return the boundaries that something crosses without being a module's result, and why."""
    homes: dict[int, set[int]] = {}
    for number, name in enumerate(recorder.layers):
        for parameter in model.get_submodule(name).parameters():
            homes.setdefault(id(parameter), set()).add(number)
    outside = {id(p) for name in recorder.side_modules for p in model.get_submodule(name).parameters()}
    barred = dict(recorder.unsendable)
    for number, name in enumerate(recorder.layers):
        if name in recorder.skipped:
            barred[number + 1] = f"{name} is not called for every batch"
    for identity, numbers in homes.items():
        if identity in outside:
            continue
        first = min(numbers)
        for reader in sorted(readers.get(identity, set()) - numbers):
            what = f"layer {reader}" if reader < len(recorder.layers) else "what follows the layers"
            for boundary in range(first + 1, reader + 1):
                barred.setdefault(boundary, f"{what} reads what layer {first} computes inside (a loss, keys, values)")
    return barred
