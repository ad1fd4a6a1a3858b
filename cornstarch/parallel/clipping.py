"""The norm of all gradients together, wherever they are, and gradients kept below it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from cornstarch.compat import multiply_all


def clip_gradients(
    wrapped: nn.Module | None,
    parameters: Sequence[nn.Parameter],
    most: float,
    holders: int | None = None,
    copies: Collection[nn.Parameter] = (),
    device: torch.device | None = None,
) -> Tensor:
    """Scale gradients so that their norm, over all parameters on all processes, is at most `most`; return the norm.

    All processes must call it. A gradient that is no DTensor must be the same on all of its holders.

    Args:
        wrapped: What is called instead of the model.
        parameters: Those of this process.
        most: The largest norm.
        holders: So many processes hold these parameters, together or each; others hold others. Default: all.
        copies: Those of the parameters that count in another process, which has them, too.
        device: Where this process computes; needed only if it may have no parameters.
    """
    device = parameters[0].device if parameters else device or torch.device("cpu")
    if isinstance(wrapped, FullyShardedDataParallel):
        return wrapped.clip_grad_norm_(most)
    if holders is None and not any(isinstance(parameter, DTensor) for parameter in parameters):
        return torch.nn.utils.clip_grad_norm_(parameters, most).to(device)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    here = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    with torch.no_grad():
        uncounted = {id(parameter.grad) for parameter in copies}
        counted = [
            (gradient, part) for gradient, part in zip(gradients, here, strict=True) if id(gradient) not in uncounted
        ]
        norm = _norm(counted, holders or dist.get_world_size(), device)
        multiply_all(here, torch.clamp(most / (norm + 1e-6), max=1.0))
    return norm


def clipping_divisor(parameters: Sequence[nn.Parameter], most: float) -> tuple[Tensor, Tensor]:
    """Return the norm of gradients that are all here, and what they are to be divided by so that it is at most `most`.

    An optimizer that divides gradients while it reads them saves a pass over all of them.
    """
    norm = torch.nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])
    if parameters:
        norm = norm.to(parameters[0].device)  # of no gradient at all it is on the CPU
    return norm, torch.clamp((norm + 1e-6) / most, min=1.0)


def _norm(gradients: Sequence[tuple[Tensor, Tensor]], holders: int, device: torch.device) -> Tensor:
    """Return the norm of gradients, each with the part that this process has; one exchange of one number.

    Each process adds the squares of what it holds, divided by the number of processes that hold the same. There may be
    no gradient at all: text alone teaches a projector nothing.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for gradient, part in gradients:
        by_copies.setdefault(_copies(gradient, holders), []).append(part)
    squares = [torch.nn.utils.get_total_norm(parts).float() ** 2 / copies for copies, parts in by_copies.items()]
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    dist.all_reduce(total)
    return total.sqrt()


def _copies(gradient: Tensor, holders: int) -> int:
    """Return how many of the holders of a gradient hold the same part."""
    if not isinstance(gradient, DTensor):
        return holders
    assert not any(placement.is_partial() for placement in gradient.placements), "a gradient is not added up yet"
    mesh = gradient.device_mesh
    # What is cut twice along one dim has a placement that is not called a shard.
    cut = [mesh.size(axis) for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return holders // math.prod(cut)


__all__ = ["clip_gradients", "clipping_divisor"]
