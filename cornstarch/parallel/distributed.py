"""Rank queries, small collectives (also in a single process), point-to-point transport."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from cornstarch.parallel.activity import here


def rank() -> int:
    """Return the global rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def ranks_per_node() -> int:
    """Return the number of processes of this run on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def is_single_process() -> bool:
    return world_size() == 1


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the sums of numbers over all ranks; whole numbers are exact up to 2**53."""
    return begin_sum_over_ranks(values)()


def begin_sum_over_ranks(values: Sequence[float]) -> Callable[[], list[float]]:
    """Start to sum numbers over all ranks; the returned function waits and returns the sums."""
    if is_single_process():
        alone = [float(value) for value in values]  # no tensor: reading one would count as waiting for a device
        return lambda: alone
    together = torch.tensor(list(values), dtype=torch.float64)
    here.note_collective("all_reduce", len(together))
    work = dist.all_reduce(together, async_op=True)

    def wait() -> list[float]:
        here.begin_wait("all_reduce of counts")
        work.wait()
        here.end_wait()
        return together.tolist()

    return wait


def all_gather(own: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return the tensors of all ranks, which have the same shape, in rank order."""
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    if group is None:
        here.note_collective("all_gather", own.numel())
    here.begin_wait(f"all_gather {list(own.shape)}")
    dist.all_gather(found, own, group=group)
    here.end_wait()
    return found


def all_gather_json(value: Any) -> list[Any]:
    """Return the values of all ranks in rank order. They travel as JSON, so that nothing is unpickled."""
    if is_single_process():
        return [value]
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [int(size) for size in all_gather(torch.tensor([content.numel()]))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: content.numel()] = content
    return [json.loads(bytes(one[:size].tolist())) for one, size in zip(all_gather(padded), sizes, strict=True)]


def broadcast_json(value: Any, source: int = 0) -> Any:
    return value if is_single_process() else all_gather_json(value if rank() == source else None)[source]


class Collective(torch.autograd.Function):
    """Calls one function in the forward pass, and another one with the gradient, both with the same arguments."""

    @staticmethod
    def forward(context: Any, x: Tensor, run: Callable[..., Tensor], back: Callable[..., Tensor], *rest: Any) -> Tensor:
        context.back, context.rest = back, rest
        return run(x, *rest)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return context.back(gradients[0], *context.rest), None, None, *(None for _ in context.rest)


def get_device_backend(group: dist.ProcessGroup | None, device_type: str) -> str | None:
    """Return the backend of a group (default: the world) for a device type, of which it may have several, or None."""
    return dict(one.split(":", 1) for one in dist.get_backend_config(group).split(",")).get(device_type)


@dataclass(frozen=True)
class TensorTransport:
    """Sends and receives single tensors of a device.

    Most of gloo's collectives copy GPU tensors through CPU memory by themselves. Its point-to-point messages do not:
    they abort the process. With `through_cpu`, tensors are copied to CPU memory here and back at the other end.
    """

    device: torch.device  # the device of the tensors before and after
    through_cpu: bool = False

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, device: torch.device) -> TensorTransport:
        return cls(device, device.type != "cpu" and get_device_backend(group, device.type) == "gloo")

    def prepare_send(self, tensor: Tensor) -> Tensor:
        if not self.through_cpu:
            return tensor.to(self.device).contiguous()  # small metadata may be on the CPU
        return self.allocate_receive(tensor.shape, tensor.dtype).copy_(tensor)  # waits for the GPU

    def allocate_receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if not self.through_cpu:
            return torch.empty(shape, dtype=dtype, device=self.device)
        # Copies between a GPU and pinned memory are several times as fast.
        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    def finish_receive(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)


def to_full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor on every rank; other tensors are returned as they are."""
    if not isinstance(tensor, DTensor):
        return tensor
    if TensorTransport.of(tensor.device_mesh.get_group(0), tensor.device).through_cpu:
        # gloo crashes when it gathers shards that are on GPUs (pytorch/pytorch#152645).
        return cast(DTensor, tensor.cpu()).full_tensor().to(tensor.device)
    return tensor.full_tensor()


def to_local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor; other tensors are returned as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
