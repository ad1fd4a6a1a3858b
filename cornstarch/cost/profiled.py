"""Profiled cost of calls: one call of each kind is run on the device, on random numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from statistics import mean, median, pstdev
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.compat.compiler import set_activation_budget
from cornstarch.cost.activations import materialize
from cornstarch.cost.analytic import AnalyticCost, CallCost, ComputeSetting, DeviceSpeed
from cornstarch.cost.efficiency import ON_CPU, ON_GPU
from cornstarch.cost.segments import ModuleCall
from cornstarch.kernels.compile import compile_layers
from cornstarch.kernels.cross_entropy import linear_cross_entropy
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX
from cornstarch.parallel.device import DevicePlacement
from cornstarch.plan.cluster import Device
from cornstarch.trees import differentiable, map_tensors, tensors_in

_ROUNDS = 3  # the median counts
PASSES = 3
"""How often all kinds of a run are measured on a CPU; the median counts. Other programs slow a machine down for
seconds, and a layer that is measured once stands for all layers of its kind."""
_SECONDS = 0.08  # about the length of a round
_MOST = 20  # runs in a round
_AHEAD = 24  # large products that keep a GPU busy while the timed kernels are launched
_SIZE = 8192
_TIMES = ("forward", "input_gradient", "weight_gradient")  # of a `CallCost`

_NOMINAL = Device("", 1, flops=5e14, rates=(("fp32", 5e13),), bandwidth=3e12)


class ProfiledCost:
    """Measures the times of calls, once for each kind; all else is analytic, also how the backward pass is divided.

    `known` has earlier measurements by kind, and new ones are added; `on_measure` is called with each new kind.
    """

    eager: AnalyticCost | None = None
    """Layers are measured as this run computes them, compiled or not."""

    def __init__(
        self,
        placement: DevicePlacement,
        setting: ComputeSetting,
        known: dict[str, CallCost] | None = None,
        on_measure: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.placement, self.setting, self._on_measure = placement, setting, on_measure
        self._known = {} if known is None else known
        self._own: dict[str, tuple[ModuleCall, list[CallCost]]] = {}
        self._rounds = _ROUNDS if placement.device.type == "cuda" else 1  # on a CPU: `PASSES`
        self._analytic = AnalyticCost(DeviceSpeed(_NOMINAL, ON_GPU if setting.on_gpu else ON_CPU), setting)

    def __call__(self, call: ModuleCall) -> CallCost:
        key = f"{call.kind} {self.setting.labels if call.is_head else ''}"
        if key not in self._known:
            self._on_measure(f"{type(call.module).__name__}{' with its loss' if call.is_head else ''}")
            self._known[key] = self._measure(call)
            self._own[key] = call, [self._known[key]]
        return self._known[key]

    def measure_again(self) -> None:
        """Measure all calls of this object once more; from now on the median counts."""
        for key, (call, costs) in self._own.items():
            costs.append(self._measure(call))
            times = {name: median(getattr(one, name) for one in costs) for name in _TIMES}
            self._known[key] = replace(costs[0], **times)

    def list_spreads(self) -> list[tuple[float, float]]:
        """Return the time of each kind of call, and the standard deviation between its measurements."""
        passes = ([sum(getattr(one, name) for name in _TIMES) for one in costs] for _, costs in self._own.values())
        return [(mean(times), pstdev(times)) for times in passes]

    def _measure(self, call: ModuleCall) -> CallCost:
        analytic = self._analytic(call)
        run = _DeviceCall(call, self.placement, self.setting)
        try:
            forward = run.seconds(self._rounds, backward=False)
            both = run.seconds(self._rounds, backward=True) if run.has_backward else forward
            backward, total = max(0.0, both - forward), analytic.input_gradient + analytic.weight_gradient
            of_inputs = backward * analytic.input_gradient / total if total else 0.0
            experts = analytic.experts
            if experts is not None:
                ratios = forward / analytic.forward if analytic.forward else 1.0, backward / total if total else 1.0
                experts = experts.scale_times(*ratios)
            cost = replace(
                analytic,
                forward=forward,
                input_gradient=of_inputs,
                weight_gradient=backward - of_inputs,
                experts=experts,
            )
            if self.placement.device.type != "cuda":
                return cost
            kept, most = run.memory()
        finally:
            run.free()
        if not run.has_backward:
            return replace(cost, kept=0, recomputed=0, working=most)
        recomputed = min(cost.output, kept) if call.is_layer else kept
        return replace(cost, kept=kept, recomputed=recomputed, working=max(0, most - kept))


class _DeviceCall:
    def __init__(self, call: ModuleCall, placement: DevicePlacement, setting: ComputeSetting) -> None:
        self.placement, self.device = placement, placement.device
        self.has_backward = call.has_upstream or call.is_trained
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            self._module: Any = materialize(call.module, self.device)
            if call.is_head:
                self._use_head(call, setting.labels)
                return
            module = self._module
            words = module.num_embeddings if isinstance(module, nn.Embedding) else 1
            given = map_tensors(lambda tensor: self._randomize(tensor, words), (list(call.arguments), call.named))
            if call.is_layer and setting.compiled:
                set_activation_budget(1.0)
                compile_layers([module], lambda reason: None)
            self._call, self._inputs = lambda: module(*given[0], **given[1]), tensors_in(list(given))

    def _use_head(self, call: ModuleCall, labels: int) -> None:
        module, states = self._module, self._randomize(call.inputs[0], 1)
        rows = states.numel() // states.shape[-1]
        wanted = torch.randint(0, module.weight.shape[0], (rows,), device=self.device)
        wanted[labels:] = IGNORE_INDEX
        options: dict[str, Any] = {"bias": module.bias, "max_trained_rows": labels}
        self._inputs, self._call = [states], lambda: linear_cross_entropy(states, module.weight, wanted, **options)

    def _randomize(self, tensor: Tensor, words: int) -> Tensor:
        real = torch.empty_like(tensor, device=self.device)
        if tensor.is_floating_point():
            return real.normal_().requires_grad_(tensor.requires_grad)
        return real.random_(0, words) if words > 1 else real.zero_()

    def _forward(self) -> Any:
        with self.placement.forward_context(), nullcontext() if self.has_backward else torch.no_grad():
            return self._call()

    def _backward(self, result: Any) -> None:
        wanted = differentiable(result)
        torch.autograd.backward(wanted, [torch.ones_like(one) for one in wanted])
        for tensor in (*self._module.parameters(), *self._inputs):
            tensor.grad = None

    def seconds(self, rounds: int, backward: bool) -> float:
        """Return the time of a forward pass, or of both."""

        def run() -> None:
            result = self._forward()
            if backward:
                self._backward(result)

        return measure_seconds(run, self.device, rounds)

    def memory(self) -> tuple[int, int]:
        """Return the bytes that a forward pass leaves, its result included, and the peak of both passes."""
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        result = self._forward()
        kept = torch.cuda.memory_allocated(self.device) - before
        if self.has_backward:
            self._backward(result)
        return kept, torch.cuda.max_memory_allocated(self.device) - before

    def free(self) -> None:
        self._module, self._call, self._inputs = nn.Identity(), lambda: None, []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def measure_seconds(run: Callable[[], Any], device: torch.device, rounds: int = _ROUNDS) -> float:
    """Return the median time of a function over some rounds; on a GPU, the time that the GPU is busy."""
    # With one thread it is processor time, so that waiting for other programs does not count.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def measure(times: int) -> float:
        if device.type == "cuda":
            return _time_on_gpu(run, times, device)
        begin = clock()
        for _ in range(times):
            run()
        return clock() - begin

    for _ in range(3 if device.type == "cuda" else 1):  # the first one compiles
        run()
    times = max(2, min(_MOST, int(_SECONDS / max(measure(1), 1e-9))))  # as many runs as fit into a round
    return median(measure(times) / times for _ in range(rounds))


def _time_on_gpu(run: Callable[[], Any], times: int, device: torch.device) -> float:
    left = torch.ones(_SIZE, _SIZE, dtype=torch.float16, device=device)
    out = torch.empty_like(left)
    torch.cuda.synchronize(device)
    for _ in range(_AHEAD):
        torch.mm(left, left, out=out)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3
