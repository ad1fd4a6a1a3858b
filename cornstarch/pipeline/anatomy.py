"""Where the layers of a model are, and what stands beside them; looking through what is wrapped around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import GradientCheckpointingLayer, PreTrainedModel

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap


@dataclass(frozen=True)
class Frame:
    """The model that has the layers, and where it stands in the module that was given."""

    inner: nn.Module
    path: str
    """What stands before a name of `inner` in the given module: "", "module.", "base_model.model."."""
    shown: str
    """What stands before it in a template, where the wrappers of other libraries are left out."""
    before: tuple[str, ...] = ()
    """Modules with parameters of the given module that run before `inner`."""
    behind: tuple[str, ...] = ()
    """Those that run behind it: a projector."""


def full_name(model: nn.Module) -> str:
    """Return the class of a model, with its module."""
    kind = type(model)
    return f"{kind.__module__}.{kind.__qualname__}"


def frame_of(model: nn.Module) -> Frame:
    """Find the model inside an encoder with its projector, inside PEFT, inside torch.compile."""
    if isinstance(model, MultimodalModel):
        parts = ", ".join([*(f"{name}_encoder" for name in model.encoder_names), "language_model"])
        raise ConfigError(f"A MultimodalModel is cut part by part: take its {parts} instead.")
    if not isinstance(model, ModalEncoderModule):
        inner = unwrap(model)
        return Frame(inner, _path(model, inner), "")
    inner = unwrap(model.module)
    before = _weighing(model, ["preprocess_callback"])
    behind = _weighing(model, ["postprocess_module_callback", "projector", "postprocess_projector_callback"])
    return Frame(inner, _path(model, inner), "module.", before, behind)


def _weighing(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    children = dict(model.named_children())
    return tuple(name for name in names if name in children and weighs(children[name]))


def _path(model: nn.Module, inner: nn.Module) -> str:
    name = next(name for name, module in model.named_modules() if module is inner)
    return f"{name}." if name else ""


def weighs(module: nn.Module) -> bool:
    """Say whether a module has parameters."""
    return next(module.parameters(), None) is not None


def joined(*names: str) -> str:
    """Return a dotted name."""
    return ".".join(name for name in names if name)


def siblings(model: nn.Module, layers: Sequence[str], called: set[str]) -> list[str]:
    """Return the names of the modules beside the layers, each as large as it is called as a whole.

    Args:
        model: The model.
        layers: The names of its layers.
        called: The names of the modules whose forward was called.
    """
    on_the_way = {prefix for name in layers for prefix in _prefixes(name)}
    own = set(layers)
    seen: set[int] = set()

    def inside(module: nn.Module, name: str) -> Iterator[str]:
        for key, child in module.named_children():
            full = joined(name, key)
            if full in own or id(child) in seen:
                continue
            if full in on_the_way:
                yield from inside(child, full)
            elif full not in called and any(other.startswith(f"{full}.") for other in called):
                yield from inside(child, full)  # its pieces are called one by one
            else:
                seen.add(id(child))
                yield full

    return list(inside(model, ""))


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    for length in range(1, len(parts)):
        yield ".".join(parts[:length])


def layer_lists(model: nn.Module, calls: Sequence[str]) -> dict[str, list[str]]:
    """Return the lists whose elements are called once, in order, by name; those inside a layer are left out.

    Elements may be left out by some batches: layers that look at images, where there are none.

    Args:
        model: The model.
        calls: The names of the modules in the order in which they were called.
    """
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or not weighs(module):
            continue
        if any(name.startswith(f"{other}.") for other in found):
            continue
        elements = [joined(name, key) for key, _ in module.named_children()]
        numbers = {element: number for number, element in enumerate(elements)}
        order = [numbers[call] for call in calls if call in numbers]
        if order and order == sorted(set(order)):
            found[name] = elements
    chain = [] if found or isinstance(model, PreTrainedModel) else _called_once(model, calls)
    return {"": chain} if len(chain) > 1 else found


def _called_once(model: nn.Module, calls: Sequence[str]) -> list[str]:
    """Return the modules with parameters that a forward without lists calls itself, one after the other."""
    own = {name for name, child in model.named_children() if weighs(child)}
    order = [call for call in calls if call in own]
    return order if len(set(order)) == len(order) else []


def chosen_layers(model: nn.Module, calls: Sequence[str], lists: dict[str, list[str]]) -> list[str]:
    """Return the names of the layers at which a model is cut: its largest list; of encoder-decoders, both lists."""
    kind = type(model).__name__
    sizes = {name: sum(p.numel() for p in model.get_submodule(name).parameters()) for name in lists}
    largest = max(sizes.values(), default=0)
    for name, size in _looped(model, calls):
        if size > largest:
            raise UnsupportedModelError(f"{kind} cannot be cut into stages: it runs through its layers ({name}) again.")
    if not lists:
        advice = " Let its forward call modules one after the other, each once, or those of an nn.ModuleList."
        raise UnsupportedModelError(
            f"{kind} cannot be cut into stages: it has no list of layers called one by one."
            f"{'' if isinstance(model, PreTrainedModel) else advice}"
        )
    blocks = {name: _is_list_of_blocks(model.get_submodule(name)) for name in lists}
    chosen = [max(sizes, key=lambda name: (blocks[name], sizes[name]))]
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        chosen = [name for name in lists if blocks[name] == blocks[chosen[0]] and sizes[name] >= largest / 10]
    first = {name: min(calls.index(element) for element in lists[name] if element in calls) for name in chosen}
    return [element for name in sorted(chosen, key=lambda name: first[name]) for element in lists[name]]


def _is_list_of_blocks(layers: nn.Module) -> bool:
    """Say whether transformers itself takes the elements for layers: their activations can be computed again."""
    return all(isinstance(layer, GradientCheckpointingLayer) for layer in layers.children())


def _looped(model: nn.Module, calls: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Go through the lists whose elements were all called several times, with their sizes."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module):
            elements = [joined(name, key) for key, _ in module.named_children()]
            if all(calls.count(element) > 1 for element in elements):
                yield name, sum(parameter.numel() for parameter in module.parameters())


__all__ = ["Frame", "chosen_layers", "frame_of", "full_name", "joined", "layer_lists", "siblings", "weighs"]
