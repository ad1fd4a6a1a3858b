"""What a compiled layer keeps for the backward pass: less than a plain one, and only the compiler knows what.

So one layer is compiled and run where the run computes, on numbers that mean nothing but have the right shapes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cornstarch.compat import set_activation_budget
from cornstarch.compute.compiling import compile_layers
from cornstarch.train.activations import LayerCall, SavedBytes
from cornstarch.train.precision import Placement
from cornstarch.trees import map_tensors, tensors_in


def compiled_bytes(call: LayerCall, placement: Placement, **options: Any) -> int:
    """Return the bytes that a layer keeps beside its inputs if it is compiled; of one that cannot be, plainly.

    Args:
        call: The layer and what it is called with, on the meta device.
        placement: Where it computes, and in what.
        options: Of `torch.compile`.
    """
    bare, arguments, named = call
    set_activation_budget(1.0)
    gpus = [placement.device] if placement.device.type == "cuda" else []
    with torch.random.fork_rng(gpus), torch.enable_grad():
        layer = copy.deepcopy(bare).to_empty(device=placement.device)
        for tensor in (*layer.parameters(), *layer.buffers()):
            fill(tensor)
        arguments, named = map_tensors(lambda tensor: _real(tensor, placement), (list(arguments), dict(named)))
        compile_layers([layer], lambda reason: None, **options)
        count = SavedBytes(layer)
        for tensor in tensors_in([arguments, named]):
            count.leave_out(tensor)
        with placement.computing(), saved_tensors_hooks(count.add, lambda tensor: tensor):
            layer(*arguments, **named)
    return count.total().saved


def _real(tensor: Tensor, placement: Placement) -> Tensor:
    made = torch.empty_like(tensor, device=placement.device)
    fill(made)
    return made.requires_grad_(tensor.requires_grad)


@torch.no_grad()
def fill(tensor: Tensor) -> None:
    """Give a tensor numbers that mean nothing, and are small."""
    if tensor.is_floating_point():
        tensor.normal_(std=0.02)
    else:
        tensor.zero_()
