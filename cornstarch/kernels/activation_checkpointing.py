"""Activation checkpointing of single layers: only inputs are kept, the rest is recomputed in the backward pass.

Only a layer's `forward` is wrapped, as in `compile`: hooks run around it as before, and parameter names do not change.
A compiled forward stays inside the wrapper, so that the compiled layer is recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cornstarch.attention.backends import build_checkpoint_contexts

# Recomputing a layer would write to these caches a second time. Training does not need them.
_CACHES = ("past_key_values", "past_key_value", "layer_past")


class CheckpointedForward:
    """The forward of a layer whose activations are recomputed.

    Unlike transformers' gradient checkpointing, it also works in eval mode: gradients of a projector flow through a
    frozen language model, which is in eval mode.
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
        return checkpoint(self.inner, *args, use_reentrant=False, context_fn=build_checkpoint_contexts, **kwargs)


def checkpoint_layer(layer: nn.Module) -> None:
    """Recompute a layer's activations in the backward pass, in place; calling it twice changes nothing."""
    if not isinstance(layer.__dict__.get("forward"), CheckpointedForward):
        layer.__dict__["forward"] = CheckpointedForward(layer)
