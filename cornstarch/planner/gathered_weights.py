"""Models as sharded kinds compute them: weights are stored in float32, gathered and multiplied in bf16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from cornstarch.plan.cost import LayerCost, ModuleCost
from cornstarch.plan.expert_cost import ExpertCost


def gathers_halves(model: nn.Module, dtype: torch.dtype, on_gpu: bool) -> bool:
    """Return whether sharded kinds gather float32 weights of a model in bf16, as `choose_sharded_dtypes` decides."""
    return on_gpu and dtype is torch.bfloat16 and any(one.dtype is torch.float32 for one in model.parameters())


@contextmanager
def halve_weights(model: nn.Module) -> Iterator[None]:
    """Store the float32 parameters of a model on the meta device in bf16, as gathered ones are, within this block."""
    stored = {one: one.data for one in model.parameters() if one.dtype is torch.float32}
    try:
        for parameter, data in stored.items():
            parameter.data = data.to(torch.bfloat16)
        yield
    finally:
        for parameter, data in stored.items():
            parameter.data = data


def keep_sizes(modules: Sequence[ModuleCost], stored: Sequence[ModuleCost]) -> tuple[ModuleCost, ...]:
    """Return modules with the bytes of parameters as they are stored."""
    names = ("parameter_bytes", "shared_bytes")
    return tuple(
        replace(
            one,
            layers=tuple(
                replace(layer, **{name: getattr(own, name) for name in names}, experts=_keep_expert_sizes(layer, own))
                for layer, own in zip(one.layers, other.layers, strict=True)
            ),
        )
        for one, other in zip(modules, stored, strict=True)
    )


def _keep_expert_sizes(layer: LayerCost, stored: LayerCost) -> ExpertCost | None:
    if layer.experts is None or stored.experts is None:
        return None
    return replace(layer.experts, parameter_bytes=stored.experts.parameter_bytes)
