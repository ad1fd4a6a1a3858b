"""Gradients over ranks: their mean, their norm and clipping, and the loss scale of fp16."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from cornstarch.compat import compute_total_norm, multiply_all
from cornstarch.errors import ConfigError
from cornstarch.parallel.distributed import to_local_tensor
from cornstarch.parallel.flat_shards import divide_into_buckets, find_shard

BUCKET_BYTES = 25 * 1024 * 1024
"""Bytes of gradients that are reduced together by default, as in DDP."""


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
    limit = BUCKET_BYTES if bucket_mb is None or bucket_mb == "auto" else int(bucket_mb * 1024 * 1024)
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
        yield from divide_into_buckets(same, limit)


def clip_gradients(
    wrapped: nn.Module | None,
    parameters: Sequence[nn.Parameter],
    most: float,
    holders: int | None = None,
    copies: Collection[nn.Parameter] = (),
    device: torch.device | None = None,
    is_divided: bool = False,
) -> Tensor:
    """Scale gradients so that their norm, over all parameters on all ranks, is at most `most`; return the norm.

    All ranks must call it. A gradient that is neither a DTensor nor of a ZeRO-1 shard must be the same on all
    ranks that hold it.

    Args:
        wrapped: The wrapped model (DDP, FSDP).
        parameters: The parameters of this rank.
        most: The maximum norm.
        holders: The number of ranks that hold these parameters, together or each. Default: all ranks.
        copies: Those of the parameters that another rank holds and counts, too.
        device: The device of this rank; needed only if it may have no parameters.
        is_divided: Whether ranks may have different parameters (ZeRO-1), and this one none.
    """
    device = parameters[0].device if parameters else device or torch.device("cpu")
    if isinstance(wrapped, FullyShardedDataParallel):
        return wrapped.clip_grad_norm_(most)
    is_whole = not any(isinstance(one, DTensor) or find_shard(one) is not None for one in parameters)
    if holders is None and is_whole and not is_divided:
        norm = compute_total_norm([one.grad for one in parameters if one.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return norm.to(device)
    with torch.no_grad():
        gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        uncounted = {id(parameter) for parameter in copies}
        # Each rank adds the squares of its shards, divided by the number of ranks that hold the same shard, and one
        # number is reduced. There may be no gradient at all: a text-only batch gives a projector none.
        by_copies: dict[int, list[Tensor]] = {}
        for parameter, gradient in gradients:
            if id(parameter) not in uncounted:
                number = _count_copies(parameter, gradient, holders or dist.get_world_size())
                by_copies.setdefault(number, []).append(to_local_tensor(gradient))
        squares = [compute_total_norm(one).float() ** 2 / number for number, one in by_copies.items()]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
        dist.all_reduce(total)
        norm = total.sqrt()
        factor = torch.clamp(most / (norm + 1e-6), max=1.0)
        multiply_all([to_local_tensor(gradient) for _, gradient in gradients], factor)
    return norm


def compute_clip_divisor(parameters: Sequence[nn.Parameter], most: float) -> tuple[Tensor, Tensor]:
    """Return the norm of gradients that are all on this rank, and the divisor that brings it down to `most`."""
    norm = compute_total_norm([one.grad for one in parameters if one.grad is not None])
    if parameters:
        norm = norm.to(parameters[0].device)  # without any gradient it is on the CPU
    return norm, torch.clamp((norm + 1e-6) / most, min=1.0)


def _count_copies(parameter: nn.Parameter, gradient: Tensor, holders: int) -> int:
    if (shard := find_shard(parameter)) is not None:  # what its ranks divide among them, each of them has once
        gradient, holders = shard.whole, holders // shard.ranks
    if not isinstance(gradient, DTensor):
        return holders
    assert not any(placement.is_partial() for placement in gradient.placements), "a gradient is not reduced yet"
    mesh = gradient.device_mesh
    # Not `is_shard()`: a tensor that is sharded twice along one dim has a placement that is not called a shard.
    sharded = [mesh.size(axis) for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return holders // math.prod(sharded)


class LossScale:
    """A dynamic loss scale, which keeps small fp16 gradients from vanishing and backs off when large ones overflow.

    torch's `GradScaler` looks at one optimizer in one process. Here the norm of all gradients on all ranks decides, so
    that either all ranks step or none does: backward of `value` × loss, `unscale`, the norm, the optimizer's step if it
    is finite, `update`. After `growth_interval` steps with finite gradients the scale is multiplied by `growth_factor`,
    after `hysteresis` steps with infinite ones by `backoff_factor`; it stays between `least` and `most`.
    """

    def __init__(
        self,
        initial: float = 2**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        least: float = 1.0,
        most: float = 2**32,
    ) -> None:
        if not (0 < least <= initial <= most):
            raise ConfigError(
                f"min_scale = {least}, initial_scale = {initial}, max_scale = {most}: expected numbers above 0 in "
                "this order."
            )
        if not (growth_factor >= 1 and 0 < backoff_factor <= 1 and growth_interval >= 1 and hysteresis >= 1):
            raise ConfigError(
                f"growth_factor = {growth_factor}, backoff_factor = {backoff_factor}, growth_interval = "
                f"{growth_interval}, hysteresis = {hysteresis}: expected at least 1, at most 1 and above 0, at least "
                "1, at least 1."
            )
        self.value = float(initial)
        self._growth, self._backoff, self._interval = growth_factor, backoff_factor, growth_interval
        self._hysteresis, self._least, self._most = hysteresis, float(least), float(most)
        self._finite_steps = self._infinite_steps = 0

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.value

    @torch.no_grad()
    def unscale(self, parameters: Sequence[nn.Parameter], factor: float = 1.0) -> None:
        """Divide the gradients of all parameters of this rank by the scale, and multiply them by `factor`."""
        gradients = [to_local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
        multiply_all(gradients, torch.tensor(factor / self.value))

    def get_scale(self) -> float:  # the name that torch's `GradScaler` has for it
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the keys of torch's `GradScaler`."""
        return {
            "scale": self.value,
            "growth_factor": self._growth,
            "backoff_factor": self._backoff,
            "growth_interval": self._interval,
            "_growth_tracker": self._finite_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self._finite_steps = float(state["scale"]), int(state["_growth_tracker"])
        self._growth, self._backoff = float(state["growth_factor"]), float(state["backoff_factor"])
        self._interval = int(state["growth_interval"])

    def update(self, is_finite: bool) -> None:
        """Adjust the scale after a step, given whether all gradients were finite."""
        if not is_finite:
            self._finite_steps, self._infinite_steps = 0, self._infinite_steps + 1
            if self._infinite_steps >= self._hysteresis:
                self.value = max(self._least, self.value * self._backoff)
                self._infinite_steps = 0
            return
        self._finite_steps += 1
        if self._finite_steps >= self._interval:
            self.value = min(self._most, self.value * self._growth)
            self._finite_steps = self._infinite_steps = 0
