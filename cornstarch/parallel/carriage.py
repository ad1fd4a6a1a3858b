"""How a tensor gets from one process to another: gloo can neither send nor receive what is in a GPU's memory.

Most of its collectives can; they go through the CPU's memory by themselves. A message from one process to another
aborts the process instead, so it is put into the CPU's memory here, and taken out of it at the other end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


def backend_of(group: dist.ProcessGroup | None, device_type: str) -> str | None:
    """Return what carries tensors of a type of device in a group (without one: of all processes); None: nothing does.

    A group may have one for the CPU and another for GPUs; `torch.distributed.get_backend` then returns both.
    """
    backends = dict(one.split(":", 1) for one in dist.get_backend_config(group).split(","))
    return backends.get(device_type)


@dataclass(frozen=True)
class Carriage:
    """How tensors of a device are sent and received, one by one, in a group."""

    device: torch.device
    """Where they are before and after."""
    through_cpu: bool = False
    """Whether they travel in the CPU's memory, and are copied at both ends."""

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, device: torch.device) -> Carriage:
        """Return how tensors of a device travel in a group."""
        return cls(device, device.type != "cpu" and backend_of(group, device.type) == "gloo")

    def outgoing(self, tensor: Tensor) -> Tensor:
        """Return what is sent of a tensor, without gaps: itself, or a copy that is complete."""
        if not self.through_cpu:
            return tensor.to(self.device).contiguous()  # small facts may be on the CPU
        return self.room(tensor.shape, tensor.dtype).copy_(tensor)  # waits for the GPU

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory into which a tensor can be received."""
        if not self.through_cpu:
            return torch.empty(shape, dtype=dtype, device=self.device)
        # A GPU copies from and to pinned memory several times as fast.
        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    def arrived(self, tensor: Tensor) -> Tensor:
        """Return a tensor that has been received, on the device."""
        return tensor.to(self.device)


__all__ = ["Carriage", "backend_of"]
