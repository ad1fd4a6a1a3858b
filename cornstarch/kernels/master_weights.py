"""Float32 master weights beside weights in bf16, in 2 more bytes per number instead of 4.

The bits of a master are those of its weight, in the upper half, plus a signed 16-bit remainder: the weight is the
master rounded to the nearest bf16, and the remainder says what rounding took away. Nothing is lost, so that a step on
the master is a step of float32 training.

Ties are rounded away from zero. With torch's rounding to even, remainders of ties would be from -2^15 to 2^15, one more
than 16 bits can hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

REMAINDER = "master_remainder"
"""The optimizer state that holds the remainders; until there is an optimizer, the attribute of a parameter."""


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 masters as weights in bf16 and remainders in int16."""
    bits = master.contiguous().view(torch.int32)
    upper = (bits + 0x8000) >> 16
    remainder = (bits - (upper << 16)).to(torch.int16)
    weight = upper.to(torch.int16).view(torch.bfloat16)
    # Rounding would carry the bits of some NaNs into the exponent or the sign, and make numbers of them.
    is_nan = master.isnan()
    return weight.masked_fill(is_nan, torch.nan), remainder.masked_fill(is_nan, 0)


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 masters of weights and remainders."""
    bits = weight.contiguous().view(torch.int16).to(torch.int32) << 16
    return (bits + remainder).view(torch.float32)


@torch.no_grad()
def round_to_weight(parameter: nn.Parameter) -> None:
    """Turn a parameter into bf16, and attach the remainders for the optimizer that will step it."""
    value = parameter.data
    if value.dtype == torch.bfloat16 or value.is_meta:
        parameter.data = value.to(torch.bfloat16).contiguous()
        setattr(parameter, REMAINDER, None)  # all are 0
        return
    parameter.data, remainder = split_master(value.float())
    setattr(parameter, REMAINDER, remainder if remainder.any() else None)


def has_master(parameter: Tensor) -> bool:
    """Return whether a parameter was rounded to bf16 and wants an optimizer with float32 masters."""
    return hasattr(parameter, REMAINDER)


def take_remainder(parameter: Tensor) -> Tensor:
    """Return the remainders of a parameter, on its device; the parameter keeps only the mark that it has a master."""
    remainder = getattr(parameter, REMAINDER)
    setattr(parameter, REMAINDER, None)
    if remainder is None:
        return torch.zeros_like(parameter, dtype=torch.int16, memory_format=torch.contiguous_format)
    return remainder.to(parameter.device)


class MasterWeight:
    """A parameter in bf16 with its remainders, read and written as the float32 tensor that both stand for."""

    dtype = torch.float32

    def __init__(self, parameter: Tensor, remainder: Tensor) -> None:
        self._parameter, self._remainder = parameter, remainder
        self.shape, self.device, self.requires_grad = parameter.shape, parameter.device, parameter.requires_grad

    def detach(self) -> MasterWeight:
        return self

    def numel(self) -> int:
        return self.shape.numel()

    @torch.no_grad()
    def read(self) -> Tensor:
        return join_master(self._parameter.detach(), self._remainder)

    @torch.no_grad()
    def write(self, master: Tensor) -> None:
        weight, remainder = split_master(master.to(self.device, torch.float32))
        self._parameter.detach().copy_(weight)
        self._remainder.copy_(remainder)


def find_master(optimizer: torch.optim.Optimizer | None, parameter: Tensor) -> MasterWeight | None:
    """Return the master of a parameter, if the optimizer has one."""
    state: dict[str, Any] = {} if optimizer is None else optimizer.state.get(parameter, {})
    return MasterWeight(parameter, state[REMAINDER]) if REMAINDER in state else None


class GradientSums:
    """Adds up the gradients of several microbatches in float32, of weights in bf16 whose `grad_dtype` says so.

    autograd would first write each gradient in float32, and then add it: twice the bytes. Here a gradient is added as
    it is, as soon as it is complete, so that only one in bf16 exists at a time.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [
            one for one in parameters if one.dtype == torch.bfloat16 and one.grad_dtype == torch.float32
        ]
        self._sums: dict[nn.Parameter, Tensor] = {}
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._add)
        self._is_open = False

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Add up the gradients of all backward passes in this block, and leave the sums in the parameters."""
        if not self._parameters:
            yield
            return
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._sums[parameter], parameter.grad = parameter.grad, None
            parameter.grad_dtype = torch.bfloat16
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            for parameter in self._parameters:
                parameter.grad = None
                parameter.grad_dtype = torch.float32
                parameter.grad = self._sums.pop(parameter, None)

    def _add(self, parameter: Tensor) -> None:
        if not self._is_open:
            return
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        before = self._sums.get(parameter)
        self._sums[parameter] = gradient.float() if before is None else before.add_(gradient)
