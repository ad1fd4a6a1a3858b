"""Every private name of torch and transformers that is used, and every branch on a version, in one place.

Each entry says which versions it is for, why it is needed, and when it can go.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def is_flattened(parameter: Any) -> bool:
    """Say whether FSDP1 keeps a parameter in a flat one, cut into intervals.

    torch 2.11 to 2.15 mark it on the parameter, and have no public way to ask: a model inside the outermost
    `FullyShardedDataParallel` shows intervals in place of parameters and nothing that says so. Goes when FSDP1 goes.
    """
    return bool(getattr(parameter, "_fsdp_flattened", False))


def multiply_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors, in place, by a number on their device, in one kernel where there is one.

    torch 2.11 to 2.15 have this under a private name only (`torch._foreach_mul_`, which their own clipping calls); a
    loop would start a kernel for each tensor. Goes when there is a public one.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, group in by_device.items():
        torch._foreach_mul_(group, factor.to(device))


def buffer_options(sent: bool) -> dict[str, Any]:
    """Return the argument of `DistributedDataParallel` that says whether buffers are sent round in every step.

    torch 2.11 and 2.12 call it `broadcast_buffers`; 2.13 warns of that name and has `forward_sync_buffers`. Goes with
    torch 2.12.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": sent}
