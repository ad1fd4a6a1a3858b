"""The structure of a model, as far as splitting it into stages is concerned: plain data, and where its layers are.

Layers are counted from 0 to n - 1. The forward pass is divided into *segments*: segment k is everything between the
return of layer k - 1 and the return of layer k; segment n is everything behind the last layer. *Boundary* k lies
between the segments k - 1 and k. A stage is a range of segments, from one boundary to the next.

One stage may be less than a segment: a first stage of embeddings only, which ends when the first layer is called. It
and the second stage then both begin with segment 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from transformers import GradientCheckpointingLayer, PreTrainedModel

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap


@dataclass(frozen=True)
class SideModule:
    """A module beside the layers: embeddings, a norm, a head."""

    uses: frozenset[int]
    """The segments in which it is called or its parameters are read. Empty: it is never used."""
    has_parameters: bool
    in_layer: bool = False
    """Whether layers call it."""


@dataclass(frozen=True)
class ModelAnalysis:
    """Where a model may be split, and which results its stages exchange."""

    model_name: str
    """The qualified name of the class."""
    layers: tuple[str, ...]
    """The names of the layers, in the order of their calls."""
    side_modules: Mapping[str, SideModule]
    """The modules beside the layers, in the order of their first calls."""
    last_reader: Mapping[str, int]
    """By name of a layer or side module: the last segment that reads its result, if that is not its own segment."""
    modified: frozenset[str] = frozenset()
    """The names whose results are modified in place later."""
    barred: Mapping[int, str] = field(default_factory=dict)
    """The boundaries at which the model cannot be split, and why."""

    @property
    def boundaries(self) -> list[int]:
        """The boundaries at which the model may be split."""
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

    def is_before_layers(self, name: str) -> bool:
        """Return whether a module runs before the first layer, and not inside it."""
        module = self.side_modules.get(name)
        return module is not None and 0 in module.uses and not module.in_layer

    def segment_of(self, name: str) -> int:
        """Return the segment to which a listed module belongs."""
        if name in self.side_modules:
            return min(self.side_modules[name].uses, default=len(self.layers))
        return self.layers.index(name)


# ---------------------------------------------------------------------------------------------------- wrappers


@dataclass(frozen=True)
class WrappedModel:
    """The model that has the layers, and the module around it."""

    inner: nn.Module
    path: str
    """The prefix of the inner names in the outer module: "", "module.", "base_model.model."."""
    template_prefix: str
    """Their prefix in a template, which leaves out the wrappers of other libraries."""
    before: tuple[str, ...] = ()
    """Modules with parameters of the outer module that run before `inner`."""
    after: tuple[str, ...] = ()
    """Those that run after it, such as a projector."""


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

    children = dict(model.named_children())
    own = {name for name, child in children.items() if has_parameters(child)}
    after = ("postprocess_module_callback", "projector", "postprocess_projector_callback")
    before = ("preprocess_callback",) if "preprocess_callback" in own else ()
    return WrappedModel(inner, path, "module.", before, tuple(name for name in after if name in own))


def get_class_name(model: nn.Module) -> str:
    """Return the qualified name of the class of a model."""
    return f"{type(model).__module__}.{type(model).__qualname__}"


def has_parameters(module: nn.Module) -> bool:
    """Return whether a module has parameters."""
    return next(module.parameters(), None) is not None


# ---------------------------------------------------------------------------------------------------- layers


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)


def find_side_modules(model: nn.Module, layers: Sequence[str], called: set[str]) -> list[str]:
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


def find_layer_lists(model: nn.Module, calls: Sequence[str]) -> dict[str, list[str]]:
    """Return the module lists whose elements are called once and in order; lists inside a layer are left out.

    Some batches may skip elements, such as cross-attention layers when there are no images. A user's own module without
    such a list is treated as a list of the children that its forward calls once each.
    """
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
    children = {name for name, child in model.named_children() if has_parameters(child)}
    chain = [call for call in calls if call in children]
    return {"": chain} if len(chain) > 1 and len(set(chain)) == len(chain) else {}


def choose_layers(model: nn.Module, calls: Sequence[str], lists: dict[str, list[str]]) -> list[str]:
    """Return the names of the layers at which a model is split: its largest list; of encoder-decoders, both lists."""
    kind = type(model).__name__
    sizes = {name: _count_parameters(model.get_submodule(name)) for name in lists}
    largest = max(sizes.values(), default=0)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module):
            is_repeated = all(calls.count(_join(name, key)) > 1 for key, _ in module.named_children())
            if is_repeated and _count_parameters(module) > largest:
                raise UnsupportedModelError(
                    f"{kind} cannot be cut into stages: it runs through its layers ({name}) again."
                )
    if not lists:
        advice = " Let its forward call modules one after the other, each once, or those of an nn.ModuleList."
        raise UnsupportedModelError(
            f"{kind} cannot be cut into stages: it has no list of layers called one by one."
            f"{'' if isinstance(model, PreTrainedModel) else advice}"
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


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
