"""Layers that follow one another, as stages: what `Pipe` and `PipelineModule` have in common."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cornstarch.attention.choice import attending_again
from cornstarch.pipeline.sequential import Function
from cornstarch.pipeline.template import PipelineTemplate
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import WHOLE_MODEL, ModulePlan, Plan

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


class Layers(nn.Sequential):
    """Layers of which some runs are computed again in the backward pass, instead of being kept."""

    interval: int = 0
    """So many layers are recomputed together; 0: none are."""

    @classmethod
    def of(cls, layers: Mapping[str, nn.Module | Callable[..., Any]]) -> Layers:
        """Return layers and functions by their names; a module that is there again is told apart by what holds it."""
        seen: set[int] = set()
        found: OrderedDict[str, nn.Module] = OrderedDict()
        for name, layer in layers.items():
            is_new = isinstance(layer, nn.Module) and id(layer) not in seen
            found[name] = layer if is_new and isinstance(layer, nn.Module) else Function(layer)
            seen.add(id(layer))
        return cls(found)

    def forward(self, input: Any) -> Any:
        """Call one layer on the result of the other."""
        layers = list(self)
        if not self.interval or not torch.is_grad_enabled():
            return _called(layers, input)
        for first in range(0, len(layers), self.interval):
            input = _recomputed(layers[first : first + self.interval], input)
        return input


def _called(layers: Sequence[nn.Module], input: Any) -> Any:
    if isinstance(input, Tensor) and torch.is_grad_enabled() and _change_in_place(layers):
        input = input.clone()  # what another process has sent takes a gradient; what is computed again is needed again
    for layer in layers:
        input = layer(input)
    return input


def _change_in_place(layers: Sequence[nn.Module]) -> bool:
    """Whether layers may write on what they are given, as `nn.ReLU(inplace=True)` does."""
    for layer in layers:
        if any(getattr(part, "inplace", False) for part in layer.modules()):
            return True
        if any(True for _ in layer.parameters()):
            return False
    return False


def _recomputed(layers: Sequence[nn.Module], input: Any) -> Any:
    """Return what layers make of an input; only the input is kept for the backward pass."""

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = attending_again()
        return first, _second_time(layers, again)

    return checkpoint(_called, layers, input, use_reentrant=False, context_fn=contexts)


@contextmanager
def _second_time(layers: Sequence[nn.Module], attending: AbstractContextManager[Any]) -> Iterator[None]:
    """Let batch norms that see the same values again not count them again."""
    # They keep the same tensors as the first time, as checkpointing demands: only how much they learn is nothing.
    counting = [(norm, norm.momentum, norm.num_batches_tracked) for norm in _norms(layers)]
    token = _recomputing.set(True)
    for norm, _, _ in counting:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        with attending:
            yield
    finally:
        _recomputing.reset(token)
        for norm, momentum, count in counting:
            norm.momentum, norm.num_batches_tracked = momentum, count


def _norms(layers: Iterable[nn.Module]) -> list[Any]:
    return [part for layer in layers for part in layer.modules() if isinstance(part, NORMS)]


class DeferredStatistics:
    """Running statistics of batch norms that are updated once for all microbatches, as if these were one batch.

    Each microbatch is still normalised by itself.
    """

    def __init__(self, layers: nn.Module) -> None:
        self._sums: dict[Any, tuple[Tensor, Tensor, int]] = {}
        for norm in _norms([layers]):
            if norm.track_running_stats:
                norm.track_running_stats = False  # the layer's own way; it still uses them for evaluation
                norm.register_forward_pre_hook(self._count)

    def _count(self, norm: Any, inputs: tuple[Tensor, ...]) -> None:
        if not norm.training or _recomputing.get():
            return
        values = inputs[0].detach().transpose(0, 1).flatten(1)  # [channels, all else]
        total, squares, count = self._sums.get(norm, (0.0, 0.0, 0))
        self._sums[norm] = total + values.sum(1), squares + values.square().sum(1), count + values.shape[1]

    @torch.no_grad()
    def commit(self) -> None:
        """Update the running statistics from all microbatches since the last time."""
        for norm, (total, squares, count) in self._sums.items():
            norm.num_batches_tracked += 1
            share = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
            mean = total / count
            variance = (squares - count * mean.square()) / max(count - 1, 1)
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
            norm.running_var.lerp_(variance.to(norm.running_var.dtype), share)
        self._sums = {}


def chain_layout(stages: int, world: int, schedule: str) -> Layout:
    """Return who holds which of so many stages; processes beyond them are further replicas."""
    return Layout.of(Plan(modules={WHOLE_MODEL: ModulePlan(stages=stages)}, schedule=schedule), world)  # type: ignore[arg-type]


def chain_templates(layers: Layers, starts: Sequence[int]) -> dict[str, PipelineTemplate]:
    """Return which layers each stage has; starts: the numbers of the layers with which stages begin."""
    if len(starts) == 1:
        return {}
    names = [name for name, _ in layers.named_children()]
    ends = [*starts[1:], len(names)]
    stages = [names[start:end] for start, end in zip(starts, ends, strict=True)]
    return {WHOLE_MODEL: PipelineTemplate(PipelineTemplate.get_model_name(layers), stages)}


__all__ = ["DeferredStatistics", "Layers", "chain_layout", "chain_templates"]
