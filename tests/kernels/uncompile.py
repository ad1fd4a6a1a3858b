"""Layers as they were before `compile_layers`, to be compared with."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from cornstarch.kernels.compile import CheckpointedForward, CompiledForward, UncompiledForward


def uncompile_layers(layers: Iterable[nn.Module]) -> None:
    """Undo `compile_layers`."""
    for layer in layers:
        found = layer.__dict__.get("forward")
        if isinstance(found, CheckpointedForward) and isinstance(found.inner, CompiledForward):
            found.inner = found.inner.plain
        for module in layer.modules():
            found = module.__dict__.get("forward")
            if isinstance(found, CompiledForward | UncompiledForward):
                bound_by_class = getattr(found.plain, "__func__", None) is type(module).forward
                module.__dict__.pop("forward")
                if not bound_by_class:
                    module.__dict__["forward"] = found.plain
