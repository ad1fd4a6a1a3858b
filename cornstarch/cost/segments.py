"""The segments of a module, as pipelines cut it: its layers, the modules beside them, and how each is called.

Everything is on the meta device. A segment is the least that a stage can have (`cornstarch.pipeline.model_analysis`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.cost.tracer import trace_memory
from cornstarch.errors import UnsupportedModelError
from cornstarch.kernels.fused_loss import has_inline_loss
from cornstarch.models.multimodal_language_model import ModalEncoderModule
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.ddp_fsdp import wrapping_units
from cornstarch.pipeline.split import analyze_model
from cornstarch.trees import map_tensors, tensors_in

WHOLE = "(whole)"
"""The name of the only segment of a module that cannot be cut."""


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """A module and the arguments of a call."""

    module: nn.Module
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    is_layer: bool = False
    """Whether it is one of the layers that are compiled, and recomputed by activation checkpointing."""
    is_head: bool = False
    """Whether the fused loss takes its place."""

    def run(self) -> Any:
        return self.module(*self.arguments, **self.named)

    @property
    def inputs(self) -> list[Tensor]:
        return tensors_in([self.arguments, self.named])

    @property
    def has_upstream(self) -> bool:
        """Whether the gradients of inputs are needed."""
        return any(tensor.requires_grad for tensor in self.inputs)

    @property
    def is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.module.parameters())

    @property
    def kind(self) -> str:
        """A key that is equal for calls of equal cost."""
        forms = [(tuple(one.shape), one.dtype, one.requires_grad) for one in self.inputs]
        weights = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in self.module.named_parameters()]
        options = {name: value for name, value in self.named.items() if isinstance(value, bool | int | str)}
        return repr((type(self.module).__name__, forms, weights, options, self.is_layer, self.is_head))


@dataclass(frozen=True, eq=False)
class ModelSegment:
    """The least that a stage can have."""

    name: str
    calls: tuple[ModuleCall, ...]
    modules: tuple[nn.Module, ...]
    """The modules whose parameters belong to it."""


def find_segments(
    part: nn.Module, call: Callable[[], Any], compute_dtype: torch.dtype, on_gpu: bool
) -> list[ModelSegment]:
    """Return the segments of an encoder with its projector, a language model, or a whole model, in order."""
    # The arguments are those of `trace_memory`: `call` runs the part, which is on the meta device.
    try:
        found = analyze_model(part)
    except UnsupportedModelError:  # it cannot be cut
        return [ModelSegment(WHOLE, tuple(_record_calls(part, [part], call, compute_dtype, on_gpu)), (part,))]
    modules = {name: part.get_submodule(name) for name in found.modules}
    calls = _record_calls(part, list(modules.values()), call, compute_dtype, on_gpu)
    calls = [*_find_lookup(part, modules, calls), *calls]
    segments = []
    starts = [0, *found.boundaries]
    for start, end in zip(starts, [*starts[1:], len(found.layers) + 1], strict=True):
        own = {name: module for name, module in modules.items() if start <= found.segment_of(name) < end}
        layer = next((name for name in found.layers[start:end] if name in modules), next(reversed(own), ""))
        inside = tuple(one for one in calls if one.module in own.values())
        segments.append(ModelSegment(layer, inside, tuple(own.values())))
    return segments


def _find_lookup(part: nn.Module, modules: dict[str, nn.Module], calls: Sequence[ModuleCall]) -> Iterator[ModuleCall]:
    """Yield the embedding of a language model that was called with embedded tokens."""
    inner: Any = None if isinstance(part, ModalEncoderModule) else unwrap(part)
    table: Any = inner.get_input_embeddings() if isinstance(inner, PreTrainedModel) else None
    if table is None or table not in modules.values() or any(one.module is table for one in calls):
        return
    width = table.weight.shape[-1]
    states = next((one.inputs[0] for one in calls if one.is_layer and one.inputs[0].shape[-1] == width), None)
    if states is not None:
        yield ModuleCall(table, (torch.zeros(states.shape[:-1], dtype=torch.long, device="meta"),), {})


def _record_calls(
    part: nn.Module, modules: Sequence[nn.Module], call: Callable[[], Any], compute_dtype: torch.dtype, on_gpu: bool
) -> list[ModuleCall]:
    """Run a module and return the first call of each of the modules inside it."""
    found: dict[int, ModuleCall] = {}
    layers = set(map(id, wrapping_units(unwrap(part.module if isinstance(part, ModalEncoderModule) else part))))
    inner: Any = unwrap(part)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    # By the rule of `fuse_head_with_loss`:
    is_fused = type(head) is nn.Linear and hasattr(inner, "loss_function") and not has_inline_loss(type(inner))

    def record(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if id(module) not in found:
            given = map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), (list(arguments), dict(named)))
            is_head = is_fused and module is head
            found[id(module)] = ModuleCall(module, tuple(given[0]), given[1], id(module) in layers, is_head)

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(record, with_kwargs=True).remove)
        listed = set(map(id, modules))
        alone = [one for one in modules if id(one) in layers and not listed & {*map(id, one.modules())} - {id(one)}]
        try:
            with _repeat_results(alone):
                trace_memory(part, call, compute_dtype, on_gpu)
        except Exception:  # a layer leaves something for later ones beside its result, as shared keys and values
            found.clear()
            trace_memory(part, call, compute_dtype, on_gpu)
    return list(found.values())


@contextmanager
def _repeat_results(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Let a layer that is called as an equal one was return that one's result: only the forms of tensors count."""
    results: dict[str, Any] = {}

    def run(layer: nn.Module, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        kind = ModuleCall(layer, arguments, named).kind
        if kind not in results:
            results[kind] = forward(*arguments, **named)
            return results[kind]
        return map_tensors(lambda one: one.detach().requires_grad_(one.requires_grad), results[kind])

    own = [(one, one.__dict__.get("forward")) for one in layers]
    try:
        for layer in layers:
            layer.__dict__["forward"] = partial(run, layer, layer.forward)
        yield
    finally:
        for layer, forward in own:
            del layer.__dict__["forward"]
            if forward is not None:
                layer.__dict__["forward"] = forward
