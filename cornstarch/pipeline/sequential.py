"""Chains of layers as stages: what `Pipe` and `PipelineModule` have in common."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cornstarch.attention.backends import build_checkpoint_contexts
from cornstarch.pipeline.stage import FunctionLayer
from cornstarch.pipeline.template import PipelineTemplate
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import WHOLE_MODEL, ModulePlan, Plan

_is_recomputing: ContextVar[bool] = ContextVar("is_recomputing", default=False)


class SequentialLayers(nn.Sequential):
    """An `nn.Sequential` with activation checkpointing of groups of layers."""

    interval: int = 0
    """The number of layers that are recomputed together in the backward pass; 0: none are."""

    @classmethod
    def of(cls, layers: Mapping[str, nn.Module | Callable[..., Any]]) -> SequentialLayers:
        """Return layers and functions by name; the second occurrence of a module is wrapped, so that it has a name."""
        seen: set[int] = set()
        found: OrderedDict[str, nn.Module] = OrderedDict()
        for name, layer in layers.items():
            is_new_module = isinstance(layer, nn.Module) and id(layer) not in seen
            found[name] = layer if is_new_module and isinstance(layer, nn.Module) else FunctionLayer(layer)
            seen.add(id(layer))
        return cls(found)

    def forward(self, input: Any) -> Any:
        """Call each layer on the result of the one before."""
        layers = list(self)
        if not self.interval or not torch.is_grad_enabled():
            return _call_layers(layers, input)
        for first in range(0, len(layers), self.interval):
            input = _checkpoint_layers(layers[first : first + self.interval], input)
        return input


def _call_layers(layers: Sequence[nn.Module], input: Any) -> Any:
    if isinstance(input, Tensor) and torch.is_grad_enabled() and _modify_input(layers):
        # A received input is a leaf, and a checkpointed input is needed again: neither may be modified.
        input = input.clone()
    for layer in layers:
        input = layer(input)
    return input


def _modify_input(layers: Sequence[nn.Module]) -> bool:
    """Return whether layers may modify their input in place, as `nn.ReLU(inplace=True)` does."""
    for layer in layers:
        if any(getattr(part, "inplace", False) for part in layer.modules()):
            return True
        if any(True for _ in layer.parameters()):
            return False
    return False


def _checkpoint_layers(layers: Sequence[nn.Module], input: Any) -> Any:
    def make_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = build_checkpoint_contexts()
        return first, _freeze_statistics(layers, again)

    return checkpoint(_call_layers, layers, input, use_reentrant=False, context_fn=make_contexts)


@contextmanager
def _freeze_statistics(layers: Sequence[nn.Module], attending: AbstractContextManager[Any]) -> Iterator[None]:
    """Let batch norms not count values a second time when they are recomputed."""
    # A momentum of 0 instead of `track_running_stats = False`: checkpointing demands that the same tensors are saved.
    states = [(norm, norm.momentum, norm.num_batches_tracked) for norm in _find_batch_norms(layers)]
    token = _is_recomputing.set(True)
    for norm, _, _ in states:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        with attending:
            yield
    finally:
        _is_recomputing.reset(token)
        for norm, momentum, count in states:
            norm.momentum, norm.num_batches_tracked = momentum, count


def _find_batch_norms(layers: Iterable[nn.Module]) -> list[Any]:
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return [part for layer in layers for part in layer.modules() if isinstance(part, norms)]


class DeferredBatchNorm:
    """Updates the running statistics of batch norms once for all microbatches, as if these were one batch.

    Each microbatch is still normalized by itself.
    """

    def __init__(self, layers: nn.Module) -> None:
        self._sums: dict[Any, tuple[Tensor, Tensor, int]] = {}
        for norm in _find_batch_norms([layers]):
            if norm.track_running_stats:
                norm.track_running_stats = False  # stops the layer's own updates; evaluation still uses the statistics
                norm.register_forward_pre_hook(self._count)

    def _count(self, norm: Any, inputs: tuple[Tensor, ...]) -> None:
        if not norm.training or _is_recomputing.get():
            return
        values = inputs[0].detach().transpose(0, 1).flatten(1)  # [channels, all else]
        total, squares, count = self._sums.get(norm, (0.0, 0.0, 0))
        self._sums[norm] = total + values.sum(1), squares + values.square().sum(1), count + values.shape[1]

    @torch.no_grad()
    def commit(self) -> None:
        """Update the running statistics from all microbatches since the last call."""
        for norm, (total, squares, count) in self._sums.items():
            norm.num_batches_tracked += 1
            momentum = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
            mean = total / count
            variance = (squares - count * mean.square()) / max(count - 1, 1)
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
            norm.running_var.lerp_(variance.to(norm.running_var.dtype), momentum)
        self._sums = {}


def build_chain_layout(stages: int, world: int, schedule: str) -> Layout:
    """Return the layout of a chain of stages; processes beyond them are further replicas."""
    return Layout.of(Plan(modules={WHOLE_MODEL: ModulePlan(stages=stages)}, schedule=schedule), world)  # type: ignore[arg-type]


def build_chain_templates(layers: SequentialLayers, starts: Sequence[int]) -> dict[str, PipelineTemplate]:
    """Return the template of a chain, given the index of the first layer of each stage."""
    if len(starts) == 1:
        return {}
    names = [name for name, _ in layers.named_children()]
    ends = [*starts[1:], len(names)]
    stages = [names[start:end] for start, end in zip(starts, ends, strict=True)]
    return {WHOLE_MODEL: PipelineTemplate(PipelineTemplate.get_model_name(layers), stages)}
