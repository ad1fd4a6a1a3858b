"""What one call of a module costs, as it is reckoned from its operations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cornstarch.compute.cross_entropy import portions
from cornstarch.train.costing.operations import Operation, Operations, kept_bytes, movements, operations_of
from cornstarch.train.costing.pace import Pace
from cornstarch.train.costing.segments import Called


@dataclass(frozen=True)
class CallCost:
    """Seconds and bytes of a microbatch."""

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    kept: int = 0
    """Bytes that are kept for the backward pass."""
    recomputed: int = 0
    """Bytes that are kept of them where it is computed again."""
    working: int = 0
    """Bytes that are there beside, for a moment."""
    output: int = 0
    """Bytes that it returns."""
    keys: int = 0
    """Bytes of keys and values."""
    flops: float = 0.0
    """Operations that it needs, forward and backward."""
    attends: bool = False

    def __add__(self, other: CallCost) -> CallCost:
        """Return what both cost, one after the other."""
        return CallCost(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
            self.kept + other.kept,
            self.recomputed + other.recomputed,
            max(self.working, other.working),
            other.output or self.output,
            self.keys + other.keys,
            self.flops + other.flops,
            self.attends or other.attends,
        )


@dataclass(frozen=True)
class Setting:
    """How a part of a run is computed."""

    computed_in: torch.dtype
    on_gpu: bool
    compiled: bool
    is_causal: bool
    labels: int
    """Tokens of a microbatch that the head computes."""

    @property
    def device_type(self) -> str:
        """What the kernels are those of."""
        return "cuda" if self.on_gpu else "cpu"


class Reckoned:
    """Reckons what calls cost, each kind once.

    Args:
        pace: Of the device.
        setting: How they are computed.
    """

    def __init__(self, pace: Pace, setting: Setting) -> None:
        self.pace, self.setting = pace, setting
        self._known: dict[str, CallCost] = {}

    def __call__(self, called: Called) -> CallCost:
        """Return what a call costs."""
        if called.kind not in self._known:
            self._known[called.kind] = self._cost(called)
        return self._known[called.kind]

    def _cost(self, called: Called) -> CallCost:
        if called.is_head:
            return head_cost(called, self.pace, self.setting)
        if isinstance(called.module, nn.Embedding):
            return table_cost(called, self.pace)
        setting = self.setting
        found = operations_of(called, setting.computed_in, setting.on_gpu, setting.is_causal)
        is_fused = setting.compiled and called.is_layer
        cost = _times(found, self.pace, is_fused)
        upstream, trained = called.has_upstream, called.is_trained
        outputs = sum(found.outputs.values())
        if not upstream and not trained:
            most = max((one.read + one.written for one in movements(found, is_fused)), default=0)
            return replace(cost, input_gradient=0.0, weight_gradient=0.0, working=most, output=outputs)
        if not upstream:  # gradients inside it lead to its own weights
            cost = replace(cost, input_gradient=0.0, weight_gradient=cost.weight_gradient + cost.input_gradient)
        kept = kept_bytes(found, is_fused)
        given = max((one.numel() * one.element_size() for one in called.inputs), default=0)
        most = max(
            (one.gradients_read + one.gradients_written + one.again for one in movements(found, is_fused)), default=0
        )
        return replace(
            cost,
            kept=kept,
            recomputed=min(kept, given) if called.is_layer else kept,
            working=most + (outputs if called.is_layer else 0),  # what goes past its parts needs the output's gradient
            output=outputs,
            flops=cost.flops + _backward_flops(found, upstream),
        )


def _times(found: Operations, pace: Pace, is_fused: bool) -> CallCost:
    forward = inputs = weights = 0.0
    for one in found.listed:
        if one.is_attention:
            forward += pace.attention(one)
            inputs += pace.attention(one, is_backward=True)
        elif one.flops:
            forward += pace.product(one)
            inputs += pace.product(one) * (1 if one.has_weights else 2)
            weights += pace.product(one) if one.is_trained else 0.0
    for kernel in movements(found, is_fused):
        forward += pace.forward(kernel)
        if kernel.is_weights:
            weights += pace.backward(kernel)
        else:
            inputs += pace.backward(kernel)
        weights += pace.moved(kernel.again) - pace.shares.start if kernel.again else 0.0
    total = sum(one.flops for one in found.listed)
    attends = any(one.is_attention for one in found.listed) or any(not one.has_weights for one in _products(found))
    return CallCost(forward, inputs, max(0.0, weights), keys=found.keys, flops=total, attends=attends)


def _products(found: Operations) -> Iterable[Operation]:
    return (one for one in found.listed if one.flops and not one.is_attention)


def _backward_flops(found: Operations, upstream: bool) -> float:
    total = 0.0
    for one in found.listed:
        if one.is_attention or not one.has_weights:
            total += 2 * one.flops
        else:
            total += one.flops * (int(upstream) + int(one.is_trained))
    return total


# ---------------------------------------------------------------------------------------------------- what is special


def head_cost(called: Called, pace: Pace, setting: Setting) -> CallCost:
    """Return what the head costs with the loss behind it (`cornstarch.compute.cross_entropy`).

    Its forward pass computes the gradients as well; its backward pass only scales them.
    """
    weight: Any = called.module.weight
    words, width = weight.shape
    itemsize = setting.computed_in.itemsize if setting.computed_in is not torch.float32 else weight.element_size()
    rows = setting.labels
    upstream, trained = called.has_upstream, weight.requires_grad
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(setting.computed_in, "fp32")
    product = Operation((), (), 2.0 * rows * words * width, dtype, tiles=rows * words / 128**2)
    sizes = portions(rows, words, itemsize, torch.device(setting.device_type))
    logits, states, table = rows * words * itemsize, rows * width * itemsize, words * width * 4
    products = 1 + int(upstream) + int(trained)
    forward = products * pace.product(product) + pace.moved(3 * logits) + pace.moved(2 * states)
    if trained:  # added up in float32, portion by portion
        forward += pace.moved(table * (1 + 2 * len(sizes)))
    selected = states if rows < called.inputs[0].numel() // width else 0
    kept = int(upstream) * states + int(trained) * table
    # A portion's logits go when the next one's are there. Torch's own kernels copy them.
    at_once = 1 if setting.on_gpu and len(sizes) == 1 else 2
    return CallCost(
        forward=forward,
        input_gradient=pace.moved(3 * states) if upstream else 0.0,
        weight_gradient=pace.moved(table + words * width * weight.element_size()) if trained else 0.0,
        kept=kept,
        recomputed=kept,
        working=at_once * max(sizes) * words * itemsize + selected,
        output=4,
        flops=products * product.flops,
    )


def table_cost(called: Called, pace: Pace) -> CallCost:
    """Return what looking words up costs; the gradient is as large as the table, and added to that of a tied head."""
    table: Any = called.module.weight
    rows, size = called.inputs[0].numel(), table.element_size()
    looked_up = rows * table.shape[1] * size
    trained = table.requires_grad
    return CallCost(
        forward=pace.moved(2 * looked_up),
        weight_gradient=pace.moved(4 * table.numel() * size + 2 * looked_up) if trained else 0.0,
        kept=called.inputs[0].numel() * 8 if trained else 0,
        recomputed=called.inputs[0].numel() * 8 if trained else 0,
        working=table.numel() * size if trained else 0,
        output=looked_up,
    )


__all__ = ["CallCost", "Reckoned", "Setting", "head_cost", "table_cost"]
