"""Where an exchange of gradients sits in a model that is wrapped for data parallelism."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from cornstarch.parallel.exchange.hooks import CompressedBuckets, CompressedCopies, MeetingGradients
from cornstarch.parallel.exchange.powersgd import FactoredBuckets
from cornstarch.plan.exchange import Compression

_ATTACHED: WeakKeyDictionary[nn.Module, MeetingGradients] = WeakKeyDictionary()


def compressed(wrapped: nn.Module, mesh: DeviceMesh, how: Compression) -> nn.Module:
    """Let the gradients of a wrapped model travel compressed, and return it; all processes must call it.

    Args:
        wrapped: In DDP, or in units that are sharded over the axis `shard` of the mesh.
        mesh: The processes: of one axis, or (replicate, shard).
        how: What is sent; none: nothing is changed.
    """
    if how.kind == "none":
        return wrapped
    members = dist.get_process_group_ranks((mesh["replicate"] if mesh.ndim == 2 else mesh).get_group())
    # Of its own: what is sent in it is sent by a thread, and must not get between what the loop sends.
    group = dist.new_group(members, use_local_synchronization=True)
    if not isinstance(wrapped, DistributedDataParallel):
        _ATTACHED[wrapped] = CompressedCopies(wrapped, how, group)
    elif how.kind == "powersgd":
        _ATTACHED[wrapped] = FactoredBuckets(wrapped, how, group)
    else:
        _ATTACHED[wrapped] = CompressedBuckets(wrapped, how, group)
    return wrapped


def exchange_within(wrapped: nn.Module | None) -> MeetingGradients | None:
    """Return the exchange of gradients that sits in a model, if there is one."""
    return None if wrapped is None else _ATTACHED.get(wrapped)


__all__ = ["compressed", "exchange_within"]
