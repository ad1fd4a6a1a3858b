"""Layers that keep their inputs alone for the backward pass, and compute everything else once more there.

A layer's `forward` is changed and nothing else of it, as by `compiling`: hooks are called around it as before, and
names of parameters do not change. What is compiled stays inside: it is the compiled layer that is computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cornstarch.attention.choice import attending_again

# What a layer would write to a second time. A step of training has no use for it.
_CACHES = ("past_key_values", "past_key_value", "layer_past")


class RecomputedForward:
    """The forward of a layer whose activations are computed again.

    Unlike transformers' own, it does not ask for train mode: through a frozen language model, which is in eval mode,
    gradients of a projector flow as well.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.inner: Callable[..., Any] = layer.forward
        functools.update_wrapper(self, self.inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer."""
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        kwargs |= {name: None for name in _CACHES if name in kwargs}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        return checkpoint(self.inner, *args, use_reentrant=False, context_fn=attending_again, **kwargs)


def recompute_layer(layer: nn.Module) -> None:
    """Let a layer compute its activations again, in place; one that does so is left as it is."""
    if not isinstance(layer.__dict__.get("forward"), RecomputedForward):
        layer.__dict__["forward"] = RecomputedForward(layer)


__all__ = ["RecomputedForward", "recompute_layer"]
