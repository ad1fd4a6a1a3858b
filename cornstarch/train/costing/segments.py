"""A module taken apart as pipelines do it: layers, and what stands beside them, with what they are called with.

Everything is on the meta device. Each segment is the least that a stage can hold (`cornstarch.pipeline.findings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.compute.head import computes_loss_itself
from cornstarch.errors import UnsupportedModelError
from cornstarch.models.multimodal_language_model import ModalEncoderModule
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.units import wrapping_units
from cornstarch.pipeline.findings import Survey
from cornstarch.pipeline.survey import survey
from cornstarch.train.activations import counted
from cornstarch.trees import map_tensors, tensors_in

WHOLE = "(whole)"
"""The name of the only segment of a module that cannot be taken apart."""


@dataclass(frozen=True, eq=False)
class Called:
    """A module, and what it is called with."""

    module: nn.Module
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    is_layer: bool = False
    """Whether it is one of the layers that are compiled, and computed again by activation checkpointing."""
    is_head: bool = False
    """Whether the loss is computed from its input, without all logits."""

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that it is given."""
        return tensors_in([self.arguments, self.named])

    @property
    def has_upstream(self) -> bool:
        """Whether gradients of what it is given are needed."""
        return any(tensor.requires_grad for tensor in self.inputs)

    @property
    def is_trained(self) -> bool:
        """Whether something in it is trained."""
        return any(parameter.requires_grad for parameter in self.module.parameters())

    @property
    def kind(self) -> str:
        """What is the same for calls that cost the same."""
        forms = [(tuple(one.shape), one.dtype, one.requires_grad) for one in self.inputs]
        weights = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in self.module.named_parameters()]
        options = {name: value for name, value in self.named.items() if isinstance(value, bool | int | str)}
        return repr((type(self.module).__name__, forms, weights, options, self.is_layer, self.is_head))


@dataclass(frozen=True, eq=False)
class Segment:
    """What a stage holds at least."""

    name: str
    calls: tuple[Called, ...]
    modules: tuple[nn.Module, ...]
    """Whose parameters it has."""


def segments_of(part: nn.Module, call: Callable[[], Any], computed_in: torch.dtype, on_gpu: bool) -> list[Segment]:
    """Return the segments of an encoder with its projector, a language model, or a whole model, in order.

    Args:
        part: On the meta device.
        call: Runs it there.
        computed_in: The precision of autocast; float32: without it.
        on_gpu: Whether it is a GPU that will compute it.
    """
    try:
        found = survey(part)
    except UnsupportedModelError:  # it cannot be cut
        return [Segment(WHOLE, tuple(_watched(part, [part], call, computed_in, on_gpu)), (part,))]
    names = found.modules
    modules = {name: part.get_submodule(name) for name in names}
    calls = _watched(part, list(modules.values()), call, computed_in, on_gpu)
    return list(_joined(found, modules, [*_looked_up(part, modules, calls), *calls]))


def _looked_up(part: nn.Module, modules: dict[str, nn.Module], calls: Sequence[Called]) -> Iterator[Called]:
    """Yield the table of words of a language model whose words were looked up before it was called."""
    inner: Any = unwrap(part)
    table: Any = inner.get_input_embeddings() if isinstance(inner, PreTrainedModel) and not _is_encoder(part) else None
    if table is None or table not in modules.values() or any(one.module is table for one in calls):
        return
    width = table.weight.shape[-1]
    states = next((one.inputs[0] for one in calls if one.is_layer and one.inputs[0].shape[-1] == width), None)
    if states is not None:
        yield Called(table, (torch.zeros(states.shape[:-1], dtype=torch.long, device="meta"),), {})


def _joined(found: Survey, modules: dict[str, nn.Module], calls: Sequence[Called]) -> Iterator[Segment]:
    """Yield what lies between two boundaries."""
    starts = [0, *found.boundaries]
    for start, end in zip(starts, [*starts[1:], len(found.layers) + 1], strict=True):
        names = [name for name in modules if start <= found.segment_of(name) < end]
        own = [modules[name] for name in names]
        layer = next((name for name in found.layers[start:end] if name in modules), names[-1] if names else "")
        inside = {id(module) for module in own}
        yield Segment(layer, tuple(one for one in calls if id(one.module) in inside), tuple(own))


def _watched(
    part: nn.Module, modules: Sequence[nn.Module], call: Callable[[], Any], computed_in: torch.dtype, on_gpu: bool
) -> list[Called]:
    """Run a module, and return how modules inside it were called, each once."""
    found: dict[int, Called] = {}
    layers = {id(layer) for layer in wrapping_units(unwrap(_with_layers(part)))}
    head = _fused_head(part)

    def note(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if id(module) not in found:
            given = map_tensors(_bare, (list(arguments), dict(named)))
            found[id(module)] = Called(module, tuple(given[0]), given[1], id(module) in layers, module is head)

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        counted(part, call, computed_in, on_gpu)
    return list(found.values())


def _bare(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _with_layers(part: nn.Module) -> nn.Module:
    return part.module if isinstance(part, ModalEncoderModule) else part


def _is_encoder(part: nn.Module) -> bool:
    return isinstance(part, ModalEncoderModule)


def _fused_head(part: nn.Module) -> nn.Module | None:
    """Return the head of a language model whose loss is computed without all logits; as `fuse_head_with_loss`."""
    inner: Any = unwrap(part)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if type(head) is not nn.Linear or not hasattr(inner, "loss_function") or computes_loss_itself(type(inner)):
        return None
    return head


__all__ = ["WHOLE", "Called", "Segment", "segments_of"]
