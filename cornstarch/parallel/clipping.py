"""The norm of all gradients together, wherever they are, and gradients kept below it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from cornstarch.compat import multiply_all


def clip_gradients(wrapped: nn.Module | None, parameters: Sequence[nn.Parameter], most: float) -> Tensor:
    """Scale gradients so that their norm, over all parameters on all processes, is at most `most`; return the norm.

    All processes must call it. A gradient that is no DTensor must be the same on all of them.
    """
    if isinstance(wrapped, FullyShardedDataParallel):
        return wrapped.clip_grad_norm_(most)
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return torch.nn.utils.clip_grad_norm_(parameters, most)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    here = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    with torch.no_grad():
        norm = _norm(gradients, here, parameters[0].device)
        multiply_all(here, torch.clamp(most / (norm + 1e-6), max=1.0))
    return norm


def _norm(gradients: Sequence[Tensor], here: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the norm of gradients of which each process has the parts `here`; one exchange of one number.

    Each process adds the squares of what it holds, divided by the number of processes that hold the same. There may be
    no gradient at all: text alone teaches a projector nothing.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for gradient, part in zip(gradients, here, strict=True):
        by_copies.setdefault(_copies(gradient), []).append(part)
    squares = [torch.nn.utils.get_total_norm(parts).float() ** 2 / copies for copies, parts in by_copies.items()]
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    dist.all_reduce(total)
    return total.sqrt()


def _copies(gradient: Tensor) -> int:
    """Return how many processes hold the same part of a gradient."""
    world = dist.get_world_size()
    if not isinstance(gradient, DTensor):
        return world
    assert not any(placement.is_partial() for placement in gradient.placements), "a gradient is not added up yet"
    mesh = gradient.device_mesh
    # What is cut twice along one dim has a placement that is not called a shard.
    cut = [mesh.size(axis) for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return world // math.prod(cut)


__all__ = ["clip_gradients"]
