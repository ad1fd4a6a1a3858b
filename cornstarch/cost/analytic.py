"""Analytic cost of a call: seconds and bytes from its trace and the data sheet of a device.

A kernel takes as long as the slower of two things, multiplying and moving memory, and a little to start. Programs reach
a fraction of a device's peak figures; the fractions are measured (docs/costs.md).

In compiled layers, operations without a product between them become one kernel: what passes between them is neither
written nor read, and what their backward pass needs is recomputed from their inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from cornstarch.cost.efficiency import Efficiency, find_efficiency
from cornstarch.cost.segments import ModuleCall
from cornstarch.cost.tracer import DTYPE_NAMES, EXPERTS, Operation, Trace, trace_memory
from cornstarch.errors import ConfigError
from cornstarch.kernels.cross_entropy import split_rows
from cornstarch.kernels.fp8 import MIN_DIM
from cornstarch.parallel.expert import find_experts
from cornstarch.plan.cluster import Device, find_device_or_unknown
from cornstarch.plan.expert_cost import ExpertCost


@dataclass(frozen=True)
class CallCost:
    """Seconds and bytes of a microbatch."""

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    kept: int = 0
    """Bytes kept for the backward pass."""
    recomputed: int = 0
    """Bytes kept for the backward pass if the call is recomputed there."""
    working: int = 0
    """Bytes needed beside, for a moment."""
    output: int = 0
    """Bytes of the result."""
    keys: int = 0
    """Bytes of keys and values."""
    flops: float = 0.0
    """Of the forward and the backward pass."""
    experts: ExpertCost | None = None
    """The part of all this that belongs to experts."""

    def __add__(self, other: CallCost) -> CallCost:
        sums = {name: value + getattr(other, name) for name, value in vars(self).items() if name != "experts"}
        sums |= {"working": max(self.working, other.working), "output": other.output or self.output}
        both = [one for one in (self.experts, other.experts) if one is not None]
        return CallCost(**sums, experts=sum(both[1:], both[0]) if both else None)


@dataclass(frozen=True)
class DeviceSpeed:
    device: Device
    efficiency: Efficiency

    @classmethod
    def of(cls, device: Device, is_measured: bool = False) -> DeviceSpeed:
        """Return the speed of a device, from its maker's figures or measured ones (`cornstarch doctor --measure`)."""
        if device.bandwidth is None:  # a driver knows the name and the memory only
            known = find_device_or_unknown(device.name)
            device = replace(device, flops=known.flops, rates=known.rates, bandwidth=known.bandwidth)
        if device.bandwidth is None:
            raise ConfigError(
                f"The memory bandwidth of {device.name} is not known. Describe the device in a file with "
                "`device.bandwidth`, or measure it: cornstarch doctor --measure."
            )
        return cls(device, find_efficiency(device, is_measured))

    def product(self, one: Operation, fp8: float = 0.0) -> float:
        """Return the seconds of a product, or of one of its gradients; fp8: as in `ComputeSetting`."""
        if not one.flops:
            return 0.0
        busy = one.tiles / (one.tiles + self.efficiency.few_tiles)
        rate = self.device.flops_of(one.dtype)
        if fp8 and self.device.flops_of("fp8") > rate:
            rate = self.device.flops_of("fp8") * fp8
        computing = one.flops / (rate * self.efficiency.matrices * busy)
        moving = self.move(sum(one.reads.values()) + sum(one.writes.values()))
        return max(computing + self.efficiency.start, moving)

    def attention(self, one: Operation, is_backward: bool = False) -> float:
        """Return the seconds of attention; its backward pass has 2.5 times the FLOPs."""
        fraction = self.efficiency.attention_backward if is_backward else self.efficiency.attention
        computing = one.flops * (2.5 if is_backward else 1.0) / (self.device.flops_of(one.dtype) * fraction)
        return computing + self.efficiency.start

    def move(self, size: float) -> float:
        """Return the seconds of a kernel that reads and writes `size` bytes."""
        assert self.device.bandwidth is not None
        return size / (self.device.bandwidth * self.efficiency.memory) + self.efficiency.start if size else 0.0


# Of the layers that multiply in fp8 in a step on an H200 (benchmarks/results/h200_fp8.md), 180 ms in bf16, fp8 saved
# 30 and 44, scaling included, where the data sheet has twice the rate.
FP8_REACHES = {"off": 0.0, "rowwise": 0.60, "tensorwise": 0.66}
"""By scaling, the fraction of fp8's peak that products reach, over the fraction of bf16's."""


@dataclass(frozen=True)
class ComputeSetting:
    """How a part of a run is computed."""

    dtype: torch.dtype
    """The precision of autocast; float32: no autocast."""
    on_gpu: bool
    compiled: bool
    is_causal: bool
    labels: int
    """Tokens of a microbatch that have a label: the head computes no others."""
    budget: float = 1.0
    """The fraction of their activations that compiled layers keep (`loop.activation_budget`)."""
    fp8: float = 0.0
    """Large linear layers multiply in fp8: the fraction of its peak that they reach, over that of bf16. 0: they do not.
    """


class AnalyticCost:
    def __init__(self, speed: DeviceSpeed, setting: ComputeSetting, traces: dict[str, Trace] | None = None) -> None:
        self.speed, self.setting = speed, setting
        self._known: dict[str, CallCost] = {}
        self._traces: dict[str, Trace] = {} if traces is None else traces
        plain = replace(setting, compiled=False)
        self.eager = AnalyticCost(speed, plain, self._traces) if setting.compiled else None
        """The costs of the same calls where layers are not compiled; None: these are they."""

    def __call__(self, call: ModuleCall) -> CallCost:
        if call.kind not in self._known:
            self._known[call.kind] = self._compute(call)
        return self._known[call.kind]

    def _compute(self, call: ModuleCall) -> CallCost:
        if call.is_head:
            return _head_cost(call, self.speed, self.setting)
        if isinstance(call.module, nn.Embedding):
            return _embedding_cost(call, self.speed)
        setting = self.setting
        if (trace := self._traces.get(call.kind)) is None:
            trace = trace_memory(call.module, call.run, setting.dtype, setting.on_gpu, is_causal=setting.is_causal)
            self._traces[call.kind] = trace
        is_fused = setting.compiled and call.is_layer
        kernels = list(list_memory_kernels(trace, is_fused))
        cost = _add_times(trace, kernels, self.speed, setting.fp8 if call.is_layer and call.is_trained else 0.0)
        experts = self._find_expert_cost(call, trace, is_fused, cost)
        kept, again = _apply_budget(list_kept(trace, is_fused), trace, self.speed, setting.budget if is_fused else 1.0)
        outputs = sum(trace.outputs.values())
        if not call.has_upstream and not call.is_trained:
            most = max((one.read + one.written for one in kernels), default=0)
            return replace(
                cost, input_gradient=0.0, weight_gradient=0.0, working=most, output=outputs, experts=experts
            )
        cost = replace(cost, input_gradient=cost.input_gradient + again)
        if not call.has_upstream:  # gradients inside it lead to its own weights
            cost = replace(cost, input_gradient=0.0, weight_gradient=cost.weight_gradient + cost.input_gradient)
        largest_input = max((one.numel() * one.element_size() for one in call.inputs), default=0)
        most = max((one.written + one.gradients_written + one.rewritten for one in kernels), default=0)
        backward = sum(
            2 * one.flops if one.is_attention or not one.has_weights
            else one.flops * (int(call.has_upstream) + int(one.is_trained))
            for one in trace.operations
        )  # fmt: skip
        return replace(
            cost,
            kept=kept,
            recomputed=min(kept, largest_input) if call.is_layer else kept,
            working=most + (outputs if call.is_layer else 0),  # the residual stream needs the output's gradient
            output=outputs,
            flops=cost.flops + backward,
            experts=experts,
        )

    def _find_expert_cost(self, call: ModuleCall, trace: Trace, is_fused: bool, cost: CallCost) -> ExpertCost | None:
        """Return what experts have of the cost of a call; None without any."""
        modules = list(find_experts(call.module).values())
        if not modules:
            return None
        weights = [parameter for one in modules for parameter in one.parameters(recurse=False)]
        # What would be left of the times if weights took no memory, and of that, what is spent inside of experts.
        light = [_drop_storages(one, trace.experts) for one in trace.operations]
        parts = []
        for operations in (light, [one for one in light if one.section == EXPERTS]):
            part = replace(trace, operations=operations)
            parts.append(_add_times(part, list(list_memory_kernels(part, is_fused)), self.speed, 0.0))
        rest, tokens = (_list_passes(one, call) for one in parts)
        moved = [max(0.0, all_ - one) for all_, one in zip(_list_passes(cost, call), rest, strict=True)]
        times = {f"tokens_{name}": one for name, one in zip(_PASSES, tokens, strict=True)}
        times |= {f"weights_{name}": one for name, one in zip(_PASSES, moved, strict=True)}
        made = {storage for one in trace.operations if one.section == EXPERTS for storage in one.writes}
        kept = list_kept(trace, is_fused).items()
        has_backward = call.has_upstream or call.is_trained
        return ExpertCost(
            parameters=sum(one.numel() for one in weights),
            parameter_bytes=sum(one.nbytes for one in weights),
            trained_parameters=sum(one.numel() for one in weights if one.requires_grad),
            sent_bytes=trace.sent_bytes,
            experts=sum(int(one.__dict__["num_experts"]) for one in modules),
            modules=len(modules),
            kept_bytes=sum(size for storage, size in kept if storage in made) if has_backward else 0,
            **times,
        )


_PASSES = ("forward", "input_gradient", "weight_gradient")


def _list_passes(cost: CallCost, call: ModuleCall) -> tuple[float, float, float]:
    """Return the seconds of the three passes as far as they are run."""
    inputs, weights = cost.input_gradient, cost.weight_gradient if call.is_trained else 0.0
    return (cost.forward, inputs, weights) if call.has_upstream else (
        cost.forward, 0.0, inputs + weights if call.is_trained else 0.0
    )  # fmt: skip


def _drop_storages(one: Operation, storages: Set[StorageWeakRef]) -> Operation:
    """Return an operation for which some storages have no bytes."""
    reads = {storage: 0 if storage in storages else size for storage, size in one.reads.items()}
    writes = {storage: 0 if storage in storages else size for storage, size in one.writes.items()}
    return replace(one, reads=reads, writes=writes)


def _add_times(trace: Trace, kernels: Sequence[MemoryKernel], speed: DeviceSpeed, fp8: float) -> CallCost:
    forward = inputs = weights = 0.0
    for one in trace.operations:
        if one.is_attention:
            forward += speed.attention(one)
            inputs += speed.attention(one, is_backward=True)
        elif one.flops:
            seconds = speed.product(one, fp8 if one.has_weights and one.least_dim >= MIN_DIM else 0.0)
            forward += seconds
            inputs += seconds * (1 if one.has_weights else 2)
            weights += seconds if one.is_trained else 0.0
    for kernel in kernels:
        forward += speed.move(kernel.read + kernel.written)
        if kernel.is_weights:
            weights += speed.move(kernel.backward)
        else:
            inputs += speed.move(kernel.backward)
        weights += speed.move(kernel.rewritten) - speed.efficiency.start if kernel.rewritten else 0.0
    flops = sum(one.flops for one in trace.operations)
    return CallCost(forward, inputs, max(0.0, weights), keys=trace.kv_bytes, flops=flops)


def _head_cost(call: ModuleCall, speed: DeviceSpeed, setting: ComputeSetting) -> CallCost:
    """Return the cost of the head with the fused loss (`cornstarch.kernels.fused_loss`)."""
    # Its forward pass computes the gradients as well; its backward pass only scales them.
    weight: Any = call.module.weight
    words, width = weight.shape
    itemsize = setting.dtype.itemsize if setting.dtype is not torch.float32 else weight.element_size()
    rows = setting.labels
    upstream, trained = call.has_upstream, weight.requires_grad
    dtype = DTYPE_NAMES.get(setting.dtype, "fp32")
    product = Operation(2.0 * rows * words * width, dtype, tiles=rows * words / 128**2)
    chunks = split_rows(rows, words, itemsize, torch.device("cuda" if setting.on_gpu else "cpu"))
    logits, states, table = rows * words * itemsize, rows * width * itemsize, words * width * 4
    products = 1 + int(upstream) + int(trained)
    forward = products * speed.product(product) + speed.move(3 * logits) + speed.move(2 * states)
    if trained:  # accumulated in float32, chunk by chunk
        forward += speed.move(table * (1 + 2 * len(chunks)))
    selected = states if rows < call.inputs[0].numel() // width else 0
    kept = int(upstream) * states + int(trained) * table
    # The logits of a chunk are freed once those of the next one exist. Torch's own kernels copy them.
    at_once = 1 if setting.on_gpu and len(chunks) == 1 else 2
    return CallCost(
        forward=forward,
        input_gradient=speed.move(3 * states) if upstream else 0.0,
        weight_gradient=speed.move(table + words * width * weight.element_size()) if trained else 0.0,
        kept=kept,
        recomputed=kept,
        working=at_once * max(chunks) * words * itemsize + selected,
        output=4,
        flops=products * product.flops,
    )


def _embedding_cost(call: ModuleCall, speed: DeviceSpeed) -> CallCost:
    """Return the cost of a lookup; its gradient has the size of the table, and is added to that of a tied head."""
    table: Any = call.module.weight
    rows, size = call.inputs[0].numel(), table.element_size()
    output = rows * table.shape[1] * size
    if not table.requires_grad:
        return CallCost(speed.move(2 * output), output=output)
    gradient = speed.move(4 * table.numel() * size + 2 * output)
    return CallCost(speed.move(2 * output), 0.0, gradient, rows * 8, rows * 8, table.numel() * size, output)


@dataclass(frozen=True)
class MemoryKernel:
    """A kernel that only moves memory, and its backward pass."""

    read: int
    written: int
    """Its backward pass reads as many bytes of gradients."""
    gradients_written: int = 0
    rewritten: int = 0
    """Bytes that the backward pass writes once more, because products with trained weights read them."""
    is_weights: bool = False
    """Whether it only prepares weights: casts them."""

    @property
    def backward(self) -> int:
        """Bytes that its backward pass moves, without what is rewritten for weights."""
        return self.written + self.gradients_written + (0 if self.is_weights else self.read)


def list_memory_kernels(trace: Trace, is_fused: bool) -> Iterator[MemoryKernel]:
    """Yield the kernels of a call that only move memory; `is_fused`: it is compiled."""
    groups = _fuse(trace.operations) if is_fused else [[one] for one in trace.operations if not one.flops]
    readers: defaultdict[StorageWeakRef, set[int]] = defaultdict(set)
    for number, group in enumerate(groups):
        for storage in chain.from_iterable(one.reads for one in group):
            readers[storage].add(number)
    by_products = {storage: one.is_trained for one in trace.operations if one.flops for storage in one.reads}
    for number, group in enumerate(groups):
        made = {storage: size for one in group for storage, size in one.writes.items()}
        read = {storage: size for one in group for storage, size in one.reads.items() if storage not in made}
        out = {
            storage: size
            for storage, size in made.items()
            if storage in by_products or storage in trace.outputs or readers[storage] - {number}
        }
        activations = {storage: size for storage, size in read.items() if storage not in trace.own}
        yield MemoryKernel(
            read=sum(read.values()),
            written=sum(out.values()),
            gradients_written=sum(activations.values()) if activations else sum(read.values()),
            rewritten=sum(size for storage, size in out.items() if by_products.get(storage) and is_fused),
            is_weights=not activations,
        )


def _fuse(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Return the operations that become one kernel each: neighbours behind equally many products."""
    depth: dict[StorageWeakRef, int] = {}
    group_of: dict[StorageWeakRef, int] = {}
    groups: dict[int, list[Operation]] = {}
    for number, one in enumerate(operations):
        level = max((depth.get(storage, 0) for storage in one.reads), default=0)
        if one.flops:
            depth.update(dict.fromkeys(one.writes, level + 1))
            continue
        near = {group_of[read] for read in one.reads if read in group_of and depth.get(read, 0) == level}
        home = min(near, default=number)
        groups[home] = [*(other for group in sorted(near) for other in groups.pop(group)), one]
        for storage in chain.from_iterable(other.writes for other in groups[home]):
            depth[storage], group_of[storage] = level, home
    return list(groups.values())


def _apply_budget(
    kept: Mapping[StorageWeakRef, int], trace: Trace, speed: DeviceSpeed, budget: float
) -> tuple[int, float]:
    """Return the bytes that are kept within a budget, and the seconds of the products that are recomputed instead.

    As the compiler does, the cheapest are recomputed until the fraction `budget` of all bytes is left.
    """
    left, again = sum(kept.values()), 0.0
    most = left * budget
    makers = {storage: one for one in trace.operations if one.flops for storage in one.writes}
    costs = {
        storage: speed.attention(makers[storage]) if makers[storage].is_attention else speed.product(makers[storage])
        for storage in kept
        if storage in makers
    }
    for storage in sorted(costs, key=lambda one: costs[one] / max(1, kept[one])):
        if left <= most:
            break
        left, again = left - kept[storage], again + costs[storage]
    return left, again


def list_kept(trace: Trace, is_fused: bool) -> dict[StorageWeakRef, int]:
    """Return the bytes of the storages that are kept for the backward pass."""
    # What autograd saves, without weights and copies of them.
    saved = {storage: size for storage, size in trace.saved.sizes.items() if storage not in trace.own}
    if not is_fused:
        return saved
    # Compiled layers keep what attention reads and writes; of the rest they recompute what follows from fewer bytes
    # without products.
    kept: dict[StorageWeakRef, int] = {}
    for one in trace.operations:
        if one.is_attention:
            kept.update({**one.reads, **one.writes})
    makers = {storage: (one, size) for one in trace.operations for storage, size in one.writes.items()}
    for storage, size in saved.items():
        kept.update(_find_smallest(storage, size, makers, kept, trace, {}))
    return kept


def _find_smallest(
    storage: StorageWeakRef,
    size: int,
    makers: Mapping[StorageWeakRef, tuple[Operation, int]],
    kept: Mapping[StorageWeakRef, int],
    trace: Trace,
    known: dict[StorageWeakRef, dict[StorageWeakRef, int]],
) -> dict[StorageWeakRef, int]:
    """Return the smallest set of storages that must be kept, beside `kept`, to have one in the backward pass."""
    if storage in kept or storage in trace.own:
        return {}
    if storage not in makers:  # an input of the layer
        return {storage: size}
    maker, size = makers[storage]
    if storage not in known:
        sources: dict[StorageWeakRef, int] = {}
        for source, bytes_read in maker.reads.items() if not maker.flops else ():
            sources.update(_find_smallest(source, bytes_read, makers, kept, trace, known))
        is_recomputed = not maker.flops and sum(sources.values()) <= size
        known[storage] = sources if is_recomputed else {storage: size}
    return known[storage]
