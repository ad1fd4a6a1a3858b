"""Rank and world queries, small collectives, and point-to-point transport; all work in a single process, too."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def rank() -> int:
    """Return the global rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_single_process() -> bool:
    """Return whether this process is the only one."""
    return world_size() == 1


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the sums of numbers over all ranks; whole numbers are exact up to 2**53."""
    return begin_sum_over_ranks(values)()


def begin_sum_over_ranks(values: Sequence[float]) -> Callable[[], list[float]]:
    """Start to sum numbers over all ranks; the returned function waits and returns the sums."""
    if is_single_process():
        alone = [float(value) for value in values]
        return lambda: alone
    together = torch.tensor(list(values), dtype=torch.float64)
    work = dist.all_reduce(together, async_op=True)

    def wait() -> list[float]:
        work.wait()
        return together.tolist()

    return wait


def all_gather_json(value: Any) -> list[Any]:
    """Return the values of all ranks in rank order. They travel as JSON, so that nothing is unpickled."""
    if is_single_process():
        return [value]
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    dist.all_gather(sizes, torch.tensor([content.numel()]))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: content.numel()] = content
    gathered = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world_size())]
    dist.all_gather(gathered, padded)
    return [json.loads(bytes(one[: int(size)].tolist())) for one, size in zip(gathered, sizes, strict=True)]


def broadcast_json(value: Any, source: int = 0) -> Any:
    """Return the value of one rank on all ranks."""
    return value if is_single_process() else all_gather_json(value if rank() == source else None)[source]


# ---------------------------------------------------------------------------------------------------- transport


def get_device_backend(group: dist.ProcessGroup | None, device_type: str) -> str | None:
    """Return the backend of a group (default: the world) for a device type; None if it has none.

    A group may have one backend for the CPU and another for GPUs; `torch.distributed.get_backend` then returns both.
    """
    backends = dict(one.split(":", 1) for one in dist.get_backend_config(group).split(","))
    return backends.get(device_type)


@dataclass(frozen=True)
class TensorTransport:
    """Sends and receives single tensors of a device.

    Most of gloo's collectives copy GPU tensors through CPU memory by themselves. Its point-to-point messages do not:
    they abort the process. With `through_cpu`, tensors are copied to CPU memory here and back at the other end.
    """

    device: torch.device
    """The device of the tensors before and after."""
    through_cpu: bool = False

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, device: torch.device) -> TensorTransport:
        """Return the transport for the tensors of a device in a group."""
        return cls(device, device.type != "cpu" and get_device_backend(group, device.type) == "gloo")

    def prepare_send(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor that can be sent."""
        if not self.through_cpu:
            return tensor.to(self.device).contiguous()  # small metadata may be on the CPU
        return self.allocate_receive(tensor.shape, tensor.dtype).copy_(tensor)  # waits for the GPU

    def allocate_receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an empty tensor to receive into."""
        if not self.through_cpu:
            return torch.empty(shape, dtype=dtype, device=self.device)
        # Copies between a GPU and pinned memory are several times as fast.
        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    def finish_receive(self, tensor: Tensor) -> Tensor:
        """Return a received tensor on the device."""
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
