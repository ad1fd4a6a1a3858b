"""What calls cost where they are computed: one of each kind is run there, on numbers that mean nothing."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.compat import set_activation_budget
from cornstarch.compute.compiling import compile_layers
from cornstarch.compute.cross_entropy import linear_cross_entropy
from cornstarch.models.multimodal_language_model.facts import IGNORED
from cornstarch.plan.cluster import Device
from cornstarch.train.compiled_layers import fill
from cornstarch.train.costing.calls import CallCost, Reckoned, Setting
from cornstarch.train.costing.pace import ON_CPU, ON_GPU, Pace
from cornstarch.train.costing.segments import Called
from cornstarch.train.precision import Placement
from cornstarch.trees import differentiable, map_tensors, tensors_in

_ROUNDS = 3  # of which the median counts
TURNS = 3
"""How often the kinds of a run are measured on a CPU, one after the other; the median counts. What else a machine does
makes it slower for seconds, and what is measured once, and taken for every layer, would be that much too slow."""
_SECONDS = 0.08  # that a round takes, about
_MOST = 20  # runs in a round
_AHEAD = 24  # large products, which a GPU is busy with while what is timed is handed to it
_SIZE = 8192

_NOMINAL = Device("", 1, flops=5e14, rates=(("fp32", 5e13),), bandwidth=3e12)


class Measured:
    """Measures what calls cost, each kind once.

    How a backward pass is shared between gradients of inputs and of weights, and what is no time, is reckoned.

    Args:
        placement: Where, and in which precision.
        setting: How they are computed.
        known: What was measured before, by kind; what is measured is added.
        tell: Told what is measured.
    """

    def __init__(
        self,
        placement: Placement,
        setting: Setting,
        known: dict[str, CallCost] | None = None,
        tell: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.placement, self.setting, self._tell = placement, setting, tell
        self._known = {} if known is None else known
        self._own: dict[str, tuple[Called, list[CallCost]]] = {}
        self._rounds = _ROUNDS if placement.device.type == "cuda" else 1  # on a CPU in turns
        self._reckoned = Reckoned(Pace(_NOMINAL, ON_GPU if setting.on_gpu else ON_CPU), setting)

    def __call__(self, called: Called) -> CallCost:
        """Return what a call costs."""
        key = f"{called.kind} {self.setting.labels if called.is_head else ''}"
        if key not in self._known:
            self._tell(f"{type(called.module).__name__}{' with its loss' if called.is_head else ''}")
            self._known[key] = self._measured(called)
            self._own[key] = called, [self._known[key]]
        return self._known[key]

    def again(self) -> None:
        """Measure once more what this one measured; from now on the median counts."""
        for key, (called, found) in self._own.items():
            found.append(self._measured(called))
            self._known[key] = _median(found)

    def _measured(self, called: Called) -> CallCost:
        reckoned = self._reckoned(called)
        run = _Run(called, self.placement, self.setting)
        try:
            forward = run.seconds(self._rounds, backward=False)
            both = run.seconds(self._rounds, backward=True) if run.has_backward else forward
            cost = _shared_out(reckoned, forward, max(0.0, both - forward))
            if self.placement.device.type != "cuda":
                return cost
            kept, most = run.memory()
        finally:
            run.free()
        if not run.has_backward:
            return replace(cost, kept=0, recomputed=0, working=most)
        again = min(cost.output, kept) if called.is_layer else kept
        return replace(cost, kept=kept, recomputed=again, working=max(0, most - kept))


def _shared_out(reckoned: CallCost, forward: float, backward: float) -> CallCost:
    """Return costs with measured times; what backward takes is shared out as it was reckoned."""
    total = reckoned.input_gradient + reckoned.weight_gradient
    share = reckoned.input_gradient / total if total else 0.0
    return replace(reckoned, forward=forward, input_gradient=backward * share, weight_gradient=backward * (1 - share))


def _median(found: Sequence[CallCost]) -> CallCost:
    """Return costs that differ only in their times with the medians of these."""
    times = {
        name: median(getattr(one, name) for one in found) for name in ("forward", "input_gradient", "weight_gradient")
    }
    return replace(found[0], **times)


@dataclass(frozen=True)
class _Made:
    """What is run."""

    module: nn.Module
    call: Callable[[], Any]
    inputs: list[Tensor]


class _Run:
    """A call on a device."""

    def __init__(self, called: Called, placement: Placement, setting: Setting) -> None:
        self.called, self.placement, self.device = called, placement, placement.device
        self.has_backward = called.has_upstream or called.is_trained
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            self._made = self._head(setting.labels) if called.is_head else self._module(setting.compiled)
        self._result: Any = None

    def _module(self, compiled: bool) -> _Made:
        called = self.called
        module = filled(copy.deepcopy(called.module).to_empty(device=self.device))
        words = module.num_embeddings if isinstance(module, nn.Embedding) else 1
        given = map_tensors(lambda tensor: self._real(tensor, words), (list(called.arguments), called.named))
        if called.is_layer and compiled:
            set_activation_budget(1.0)
            compile_layers([module], lambda reason: None)
        return _Made(module, lambda: module(*given[0], **given[1]), tensors_in(list(given)))

    def _head(self, labels: int) -> _Made:
        module: Any = filled(copy.deepcopy(self.called.module).to_empty(device=self.device))
        states = self._real(self.called.inputs[0], 1)
        rows = states.numel() // states.shape[-1]
        wanted = torch.randint(0, module.weight.shape[0], (rows,), device=self.device)
        wanted[labels:] = IGNORED

        def call() -> Tensor:
            return linear_cross_entropy(states, module.weight, wanted, bias=module.bias, at_most=labels)

        return _Made(module, call, [states])

    def _real(self, tensor: Tensor, words: int) -> Tensor:
        made = torch.empty_like(tensor, device=self.device)
        if tensor.is_floating_point():
            return made.normal_().requires_grad_(tensor.requires_grad)
        return made.random_(0, words) if words > 1 else made.zero_()

    # ------------------------------------------------------------------ running

    def forward(self) -> Any:
        """Compute it."""
        with self.placement.computing(), nullcontext() if self.has_backward else torch.no_grad():
            return self._made.call()

    def backward(self, result: Any) -> None:
        """Compute the gradients of something that was computed, and forget them."""
        wanted = differentiable(result)
        torch.autograd.backward(wanted, [torch.ones_like(one) for one in wanted])
        for tensor in (*self._made.module.parameters(), *self._made.inputs):
            tensor.grad = None

    def seconds(self, rounds: int, backward: bool) -> float:
        """Return the time of a forward pass, or of both."""

        def once() -> None:
            result = self.forward()
            if backward:
                self.backward(result)

        return time_of(once, self.device, rounds)

    def memory(self) -> tuple[int, int]:
        """Return the bytes that a forward pass leaves, its result among them, and the most that a pass takes."""
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        result = self.forward()
        kept = torch.cuda.memory_allocated(self.device) - before
        if self.has_backward:
            self.backward(result)
        most = torch.cuda.max_memory_allocated(self.device) - before
        return kept, most

    def free(self) -> None:
        """Give its memory back."""
        self._made = _Made(nn.Identity(), lambda: None, [])
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def filled(module: nn.Module) -> nn.Module:
    """Give every weight a small number."""
    for tensor in (*module.parameters(), *module.buffers()):
        fill(tensor)
    return module


def time_of(once: Callable[[], Any], device: torch.device, rounds: int = _ROUNDS) -> float:
    """Return the seconds of something, the median of some rounds: on a GPU, those in which it is busy with it.

    On a CPU with one thread the processor's time counts, so that waiting for what else the machine does is left out.
    """
    if device.type == "cuda":
        for _ in range(3):  # the first time compiles it
            once()
        return _median_of(rounds, lambda times: _gpu_seconds(once, times, device))
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    once()
    return _median_of(rounds, lambda times: _cpu_seconds(once, times, clock))


def _median_of(rounds: int, seconds: Callable[[int], float]) -> float:
    """Return the median of some rounds, each of as many runs as there is time for."""
    times = max(2, min(_MOST, int(_SECONDS / max(seconds(1), 1e-9))))
    return median(seconds(times) / times for _ in range(rounds))


def _cpu_seconds(once: Callable[[], Any], times: int, clock: Callable[[], float]) -> float:
    begin = clock()
    for _ in range(times):
        once()
    return clock() - begin


def _gpu_seconds(once: Callable[[], Any], times: int, device: torch.device) -> float:
    left = torch.ones(_SIZE, _SIZE, dtype=torch.float16, device=device)
    out = torch.empty_like(left)
    torch.cuda.synchronize(device)
    for _ in range(_AHEAD):
        torch.mm(left, left, out=out)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        once()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3


__all__ = ["TURNS", "Measured", "filled", "time_of"]
