"""Rank queries, small collectives (also in a single process), point-to-point transport; gradients over ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from cornstarch.compat import multiply_all


def rank() -> int:
    """Return the global rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_single_process() -> bool:
    return world_size() == 1


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the sums of numbers over all ranks; whole numbers are exact up to 2**53."""
    return begin_sum_over_ranks(values)()


def begin_sum_over_ranks(values: Sequence[float]) -> Callable[[], list[float]]:
    """Start to sum numbers over all ranks; the returned function waits and returns the sums."""
    together = torch.tensor(list(values), dtype=torch.float64)
    work = None if is_single_process() else dist.all_reduce(together, async_op=True)

    def wait() -> list[float]:
        if work is not None:
            work.wait()
        return together.tolist()

    return wait


def all_gather(own: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return the tensors of all ranks, which have the same shape, in rank order."""
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
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


_BUCKET = 25 * 1024 * 1024  # bytes of one all-reduce; DDP's default


@torch.no_grad()
def average_gradients(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, bucket_mb: float | Literal["auto"] | None = None
) -> None:
    """Replace gradients by their mean over a group, once per step; for pipelines, which accumulate over many passes.

    A missing gradient counts as zeros where another rank has one. Where no rank has one, it stays None.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or (ranks := dist.get_world_size(group)) == 1:
        return
    # Nothing is computed at the same time, so that a bucket size measured for the link (auto) would gain nothing.
    limit = _BUCKET if bucket_mb is None or bucket_mb == "auto" else int(bucket_mb * 1024 * 1024)
    travelling = []
    for bucket in _iter_buckets(trained, limit):
        device, dtype = to_local_tensor(bucket[0]).device, bucket[0].dtype
        # How many ranks have each gradient travels behind the gradients themselves: one message instead of two.
        counts = torch.tensor([parameter.grad is not None for parameter in bucket], dtype=dtype, device=device)
        gradients = [to_local_tensor(p if p.grad is None else p.grad).reshape(-1) for p in bucket]
        values = [torch.zeros_like(g) if p.grad is None else g for p, g in zip(bucket, gradients, strict=True)]
        flat = torch.cat([*values, counts])
        travelling.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    # All buckets are on their way before the first is waited for.
    for bucket, flat, work in travelling:
        assert work is not None
        work.wait()
        sizes = [to_local_tensor(parameter).numel() for parameter in bucket]
        *parts, counts = flat.split([*sizes, len(bucket)])
        for parameter, part, count in zip(bucket, parts, counts.tolist(), strict=True):
            if not count:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            to_local_tensor(parameter.grad).copy_(part.div_(ranks).view_as(to_local_tensor(parameter)))


def _iter_buckets(parameters: Sequence[nn.Parameter], limit: int) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one dtype and device that are reduced together, in reverse order of the model."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in reversed(parameters):
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for same in kinds.values():
        bucket: list[nn.Parameter] = []
        size = 0
        for parameter in same:
            if bucket and size + to_local_tensor(parameter).nbytes > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += to_local_tensor(parameter).nbytes
        yield bucket


def clip_gradients(
    wrapped: nn.Module | None,
    parameters: Sequence[nn.Parameter],
    most: float,
    holders: int | None = None,
    copies: Collection[nn.Parameter] = (),
    device: torch.device | None = None,
) -> Tensor:
    """Scale gradients so that their norm, over all parameters on all ranks, is at most `most`; return the norm.

    All ranks must call it. A gradient that is not a DTensor must be the same on all ranks that hold it.

    Args:
        wrapped: The wrapped model (DDP, FSDP).
        parameters: The parameters of this rank.
        most: The maximum norm.
        holders: The number of ranks that hold these parameters, together or each. Default: all ranks.
        copies: Those of the parameters that another rank holds and counts, too.
        device: The device of this rank; needed only if it may have no parameters.
    """
    device = parameters[0].device if parameters else device or torch.device("cpu")
    if isinstance(wrapped, FullyShardedDataParallel):
        return wrapped.clip_grad_norm_(most)
    if holders is None and not any(isinstance(parameter, DTensor) for parameter in parameters):
        return torch.nn.utils.clip_grad_norm_(parameters, most).to(device)
    with torch.no_grad():
        gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        uncounted = {id(parameter) for parameter in copies}
        # Each rank adds the squares of its shards, divided by the number of ranks that hold the same shard, and one
        # number is reduced. There may be no gradient at all: a text-only batch gives a projector none.
        by_copies: dict[int, list[Tensor]] = {}
        for parameter, gradient in gradients:
            if id(parameter) not in uncounted:
                number = _count_copies(gradient, holders or dist.get_world_size())
                by_copies.setdefault(number, []).append(to_local_tensor(gradient))
        squares = [torch.nn.utils.get_total_norm(one).float() ** 2 / number for number, one in by_copies.items()]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
        dist.all_reduce(total)
        norm = total.sqrt()
        factor = torch.clamp(most / (norm + 1e-6), max=1.0)
        multiply_all([to_local_tensor(gradient) for _, gradient in gradients], factor)
    return norm


def compute_clip_divisor(parameters: Sequence[nn.Parameter], most: float) -> tuple[Tensor, Tensor]:
    """Return the norm of gradients that are all on this rank, and the divisor that brings it down to `most`."""
    norm = torch.nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])
    if parameters:
        norm = norm.to(parameters[0].device)  # without any gradient it is on the CPU
    return norm, torch.clamp((norm + 1e-6) / most, min=1.0)


def _count_copies(gradient: Tensor, holders: int) -> int:
    if not isinstance(gradient, DTensor):
        return holders
    assert not any(placement.is_partial() for placement in gradient.placements), "a gradient is not reduced yet"
    mesh = gradient.device_mesh
    # Not `is_shard()`: a tensor that is sharded twice along one dim has a placement that is not called a shard.
    sharded = [mesh.size(axis) for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return holders // math.prod(sharded)
