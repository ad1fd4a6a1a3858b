"""torch's AdamW at the speed of a GPU's memory.

torch's fused kernel reads and writes at half of that speed on an H200 (torch 2.11: 10.5 ms for 1.7 billion parameters
in bf16). What is kept, and how it is saved, is torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cornstarch.compat import add_to_all, has_triton


class QuickAdamW(torch.optim.AdamW):
    """AdamW whose step is one pass over each parameter; where that cannot be, torch's own step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do a step."""
        if closure is not None or not all(_is_quick(group) for group in self.param_groups):
            return super().step(closure)
        for device in {parameter.device for group in self.param_groups for parameter in group["params"]}:
            with torch.cuda.device(device):
                self._step_on(device)
        return None

    def _step_on(self, device: torch.device) -> None:
        from cornstarch.compute.triton_adamw import adamw

        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        divisor = torch.ones((), device=device) if scale is None else scale.to(device)
        skip = torch.zeros((), device=device) if found is None else found.to(device)
        steps: list[Tensor] = []
        work: list[tuple[Any, ...]] = []
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            logs = (math.log(beta1) if beta1 else -math.inf, math.log(beta2) if beta2 else -math.inf)
            numbers = (float(group["lr"]), group["weight_decay"], *logs, 1 - beta1, 1 - beta2, group["eps"])
            for parameter in group["params"]:
                if parameter.grad is None or parameter.device != device:
                    continue
                state = self._state_of(parameter)
                steps.append(state["step"])
                averages = state["exp_avg"], state["exp_avg_sq"]
                work.append((parameter, parameter.grad, *averages, state["step"], divisor, skip, numbers))
        if not work:
            return
        add_to_all(steps, 1.0)
        for one in work:
            adamw(*one)
        if found is not None:
            add_to_all(steps, -skip.float())

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def _is_quick(group: dict[str, Any]) -> bool:
    """Whether a group is of the plain kind: no variants of the algorithm, tensors that lie whole on a GPU."""
    variants = ("amsgrad", "maximize", "capturable", "differentiable")
    if any(group.get(name) for name in variants) or isinstance(group["lr"], Tensor) or not group.get("fused"):
        return False
    return all(_lies_whole(parameter) for parameter in group["params"])


def _lies_whole(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return (
        type(parameter) is torch.nn.Parameter
        and parameter.is_cuda
        and parameter.is_contiguous()
        and parameter.numel() > 0
        and (gradient is None or (type(gradient) is Tensor and gradient.is_contiguous()))
    )


def quick(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return what to use for an optimizer of torch whose parameters are on GPUs."""
    return QuickAdamW if kind is torch.optim.AdamW and has_triton() else kind


__all__ = ["QuickAdamW", "quick"]
