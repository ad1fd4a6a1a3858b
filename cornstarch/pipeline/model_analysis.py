"""The structure of a model, as far as splitting it into stages is concerned, found by running it.

Layers are counted from 0 to n - 1. The forward pass is divided into *segments*: segment k is everything between the
return of layer k - 1 and the return of layer k; segment n is everything behind the last layer. *Boundary* k lies
between the segments k - 1 and k. A stage is a range of segments, from one boundary to the next.

One stage may be less than a segment: a first stage of embeddings only, which ends when the first layer is called. It
and the second stage then both begin with segment 0.

`trace_dataflow` finds which segment reads which results, by one forward pass and many small backward passes. Each layer
and each side module returns a copy that is detached from its graph. The outputs of a segment are then differentiated:
the copies and parameters that get a gradient are those that the segment reads. If a segment reads a parameter of a
layer outside it, something passed between the two without going through a module's result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GradientCheckpointingLayer, PreTrainedModel

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.pipeline.message import flatten_payload
from cornstarch.trees import differentiable, map_tensors


@dataclass(frozen=True)
class SideModule:
    """A module beside the layers: embeddings, a norm, a head."""

    uses: frozenset[int]  # the segments in which it is called or its parameters are read; empty: it is never used
    has_parameters: bool
    in_layer: bool = False  # whether layers call it


@dataclass(frozen=True)
class ModelAnalysis:
    """Where a model may be split, and which results its stages exchange."""

    model_name: str  # the qualified name of the class
    layers: tuple[str, ...]  # the names of the layers, in the order of their calls
    side_modules: Mapping[str, SideModule]  # the modules beside the layers, in the order of their first calls
    last_reader: Mapping[str, int]
    """By name of a layer or side module: the last segment that reads its result, if that is not its own segment."""
    modified: frozenset[str] = frozenset()  # the names whose results are modified in place later
    barred: Mapping[int, str] = field(default_factory=dict)
    """The boundaries at which the model cannot be split, and why."""

    @property
    def boundaries(self) -> list[int]:
        end = len(self.layers)
        has_head = any(one.has_parameters and end in one.uses for one in self.side_modules.values())
        return [place for place in range(1, end + has_head) if place not in self.barred]

    @property
    def modules(self) -> list[str]:
        """The names of all modules with parameters, in the order of the forward pass, as templates list them."""
        by_segment: list[list[str]] = [[] for _ in range(len(self.layers) + 2)]
        for name, module in self.side_modules.items():
            if module.has_parameters:
                by_segment[min(module.uses, default=len(self.layers) + 1)].append(name)
        return [name for k, names in enumerate(by_segment) for name in (*names, *self.layers[k : k + 1])]

    def segment_of(self, name: str) -> int:
        if name in self.side_modules:
            return min(self.side_modules[name].uses, default=len(self.layers))
        return self.layers.index(name)


@dataclass(frozen=True)
class WrappedModel:
    """The model that has the layers, and the module around it."""

    inner: nn.Module
    path: str  # the prefix of the inner names in the outer module: "", "module.", "base_model.model."
    template_prefix: str  # their prefix in a template, which leaves out the wrappers of other libraries
    before: tuple[str, ...] = ()  # modules with parameters of the outer module that run before `inner`
    after: tuple[str, ...] = ()  # those that run after it, such as a projector

    @property
    def class_name(self) -> str:
        return get_class_name(self.inner)

    def get_template_name(self, name: str) -> str:
        return self.template_prefix + name.removeprefix(self.path) if name.startswith(self.path) else name

    def list_template_names(self, analysis: ModelAnalysis) -> list[str]:
        return [self.get_template_name(name) for name in analysis.modules]

    def add_outer_names(self, analysis: ModelAnalysis) -> ModelAnalysis:
        """Return an analysis of `inner` with the names of the outer module, and with the modules around the model."""
        end, path = len(analysis.layers), self.path
        side_modules = {name: SideModule(frozenset({0}), True) for name in self.before}
        side_modules |= {f"{path}{name}": one for name, one in analysis.side_modules.items()}
        side_modules |= {name: SideModule(frozenset({end}), True) for name in self.after}
        return replace(
            analysis,
            layers=tuple(f"{path}{name}" for name in analysis.layers),
            side_modules=side_modules,
            last_reader={f"{path}{name}": last for name, last in analysis.last_reader.items()},
            modified=frozenset(f"{path}{name}" for name in analysis.modified),
        )


def find_wrapped_model(model: nn.Module) -> WrappedModel:
    """Find the model inside an encoder with its projector, inside PEFT, inside torch.compile."""
    if isinstance(model, MultimodalModel):
        parts = ", ".join([*(f"{name}_encoder" for name in model.encoder_names), "language_model"])
        raise ConfigError(f"A MultimodalModel is cut part by part: take its {parts} instead.")
    inner = unwrap(model.module if isinstance(model, ModalEncoderModule) else model)
    name = next(name for name, module in model.named_modules() if module is inner)
    path = f"{name}." if name else ""
    if not isinstance(model, ModalEncoderModule):
        return WrappedModel(inner, path, "")
    own = {name for name, child in model.named_children() if has_parameters(child)}
    after = ("postprocess_module_callback", "projector", "postprocess_projector_callback")
    before = ("preprocess_callback",) if "preprocess_callback" in own else ()
    return WrappedModel(inner, path, "module.", before, tuple(name for name in after if name in own))


def get_class_name(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# ---------------------------------------------------------------------------------------------------- layers


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)


def _find_side_modules(model: nn.Module, layers: Sequence[str], called: set[str]) -> list[str]:
    """Return the names of the modules beside the layers, each as large as it is called as a whole."""
    parents = {name[:end] for name in layers for end, letter in enumerate(name) if letter == "."}
    seen: set[int] = set()

    def visit(module: nn.Module, name: str) -> Iterator[str]:
        for key, child in module.named_children():
            full = _join(name, key)
            if full in layers or id(child) in seen:
                continue
            is_called_in_parts = full not in called and any(other.startswith(f"{full}.") for other in called)
            if full in parents or is_called_in_parts:
                yield from visit(child, full)
            else:
                seen.add(id(child))
                yield full

    return list(visit(model, ""))


def _find_layer_lists(model: nn.Module, calls: Sequence[str]) -> dict[str, list[str]]:
    """Return the module lists whose elements are called once and in order; lists inside a layer are left out."""
    # Some batches may skip elements, such as cross-attention layers when there are no images.
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or not has_parameters(module):
            continue
        if any(name.startswith(f"{other}.") for other in found):
            continue
        elements = [_join(name, key) for key, _ in module.named_children()]
        positions = {element: position for position, element in enumerate(elements)}
        order = [positions[call] for call in calls if call in positions]
        if order and order == sorted(set(order)):
            found[name] = elements
    if found or isinstance(model, PreTrainedModel):
        return found
    # A user's own module: its forward may call its children one after the other, each once.
    children = {name for name, child in model.named_children() if has_parameters(child)}
    chain = [call for call in calls if call in children]
    return {"": chain} if len(chain) > 1 and len(set(chain)) == len(chain) else {}


def _choose_layers(model: nn.Module, calls: Sequence[str], lists: dict[str, list[str]]) -> list[str]:
    """Return the names of the layers at which a model is split: its largest list; of encoder-decoders, both lists."""
    kind = type(model).__name__
    sizes = {name: count_parameters(model.get_submodule(name)) for name in lists}
    largest = max(sizes.values(), default=0)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module):
            is_repeated = all(calls.count(_join(name, key)) > 1 for key, _ in module.named_children())
            if is_repeated and count_parameters(module) > largest:
                raise UnsupportedModelError(
                    f"{kind} cannot be cut into stages: it runs through its layers ({name}) again."
                )
    if not lists:
        advice = " Let its forward call modules one after the other, each once, or those of an nn.ModuleList."
        advice = "" if isinstance(model, PreTrainedModel) else advice
        raise UnsupportedModelError(
            f"{kind} cannot be cut into stages: it has no list of layers called one by one.{advice}"
        )
    # transformers marks the layers that it can checkpoint: those are layers even if another list is larger.
    blocks = {
        name: all(isinstance(layer, GradientCheckpointingLayer) for layer in model.get_submodule(name).children())
        for name in lists
    }
    chosen = [max(sizes, key=lambda name: (blocks[name], sizes[name]))]
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        chosen = [name for name in lists if blocks[name] == blocks[chosen[0]] and sizes[name] >= largest / 10]
    first = {name: min(calls.index(element) for element in lists[name] if element in calls) for name in chosen}
    return [element for name in sorted(chosen, key=lambda name: first[name]) for element in lists[name]]


# ---------------------------------------------------------------------------------------------------- dataflow


def trace_dataflow(model: nn.Module, call: Callable[[], Any]) -> ModelAnalysis:
    """Return the structure of a model and which results its segments read; `call` runs the model.

    The model must be a copy: its hooks and `requires_grad` flags are changed.
    """
    calls: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, __, name=name: calls.append(name))
    with torch.no_grad():
        call()
    layers = _choose_layers(model, calls, _find_layer_lists(model, calls))
    recorder = _DataflowRecorder(model, layers, _find_side_modules(model, layers, set(calls)))
    for parameter in model.parameters():  # also those that are frozen: they may be trained in the next run
        parameter.requires_grad_(parameter.is_floating_point())
    with torch.enable_grad():
        output = call()
        recorder.results.append(_CallResult("", recorder.segment, differentiable(output)))
        return _build_analysis(model, recorder)


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
        self.layers, self.side_modules = tuple(layers), tuple(side_modules)
        self.segment, self.depth, self.in_layer = 0, 0, False
        self.results: list[_CallResult] = []
        self.calls: dict[str, set[int]] = {}  # the segments in which each side module is called, by first call
        self.called_by_layers: set[str] = set()
        self.unsendable: dict[int, str] = {}
        self.skipped = set(layers)
        for number, name in enumerate(self.layers):
            module = model.get_submodule(name)
            module.register_forward_pre_hook(self._enter_layer)
            module.register_forward_hook(partial(self._leave_layer, name, number))
        for name in self.side_modules:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(partial(self._enter_side_module, name))
            module.register_forward_hook(partial(self._leave_side_module, name))

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
    # The segments that read each parameter and each detached copy, by `id`.
    read: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    read += [tensor for result in recorder.results for tensor in result.copies]
    readers: dict[int, set[int]] = {id(tensor): set() for tensor in read}
    for result in recorder.results:
        if result.outputs:
            ones = [torch.ones_like(tensor) for tensor in result.outputs]
            gradients = torch.autograd.grad(result.outputs, read, ones, retain_graph=True, allow_unused=True)
            for tensor, gradient in zip(read, gradients, strict=True):
                if gradient is not None:
                    readers[id(tensor)].add(result.segment)
    # The next segment reads each layer's result, even if no gradient flows there.
    last_reader = {name: number + 1 for number, name in enumerate(recorder.layers)}
    for result in recorder.results:
        for segment in set().union(*(readers[id(tensor)] for tensor in result.copies)):
            if segment > result.segment:
                last_reader[result.name] = max(last_reader.get(result.name, 0), segment)
    side_modules = {}
    for name in dict.fromkeys([*recorder.calls, *recorder.side_modules]):
        module = model.get_submodule(name)
        # Of a parameter that has another name outside the module, nobody knows which name was read.
        named = model.named_parameters(remove_duplicate=False)
        outside = {id(parameter) for other, parameter in named if not other.startswith(f"{name}.")}
        reads = [readers.get(id(p), set()) for p in module.parameters() if id(p) not in outside]
        uses = frozenset(recorder.calls.get(name, set()).union(*reads))
        side_modules[name] = SideModule(uses, has_parameters(module), name in recorder.called_by_layers)
    modified = frozenset(one.name for one in recorder.results if any(tensor._version for tensor in one.returned))
    barred = _find_barred_boundaries(model, recorder, readers)
    return ModelAnalysis(get_class_name(model), recorder.layers, side_modules, last_reader, modified, barred)


def _find_barred_boundaries(
    model: nn.Module, recorder: _DataflowRecorder, readers: Mapping[int, set[int]]
) -> dict[int, str]:
    """Return the boundaries that something crosses without being a module's result, and why."""
    homes: dict[int, set[int]] = {}  # by `id` of a parameter: the layers that have it
    barred = dict(recorder.unsendable)
    for number, name in enumerate(recorder.layers):
        for parameter in model.get_submodule(name).parameters():
            homes.setdefault(id(parameter), set()).add(number)
        if name in recorder.skipped:
            barred[number + 1] = f"{name} is not called for every batch"
    outside = {id(p) for name in recorder.side_modules for p in model.get_submodule(name).parameters()}
    for identity, numbers in homes.items():
        if identity in outside:
            continue
        first = min(numbers)
        for reader in sorted(readers.get(identity, set()) - numbers):
            what = f"layer {reader}" if reader < len(recorder.layers) else "what follows the layers"
            for boundary in range(first + 1, reader + 1):
                barred.setdefault(boundary, f"{what} reads what layer {first} computes inside (a loss, keys, values)")
    return barred
