"""ZeRO-1: gradients are reduce-scattered, each rank steps its shard of the parameters, and all-gathers follow.

An all-reduce is a reduce-scatter and an all-gather; the optimizer's step between the two needs 1/N of its state on each
of N ranks. So a step sends as many bytes as DDP's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cornstarch.compat import all_gather_flat, reduce_scatter_flat
from cornstarch.errors import ConfigError
from cornstarch.parallel.distributed import get_device_backend
from cornstarch.parallel.flat_shards import FlatBuffer, divide_into_buckets
from cornstarch.parallel.gradients import BUCKET_BYTES


class Zero1:
    """Trained parameters in flat buffers, of which each rank reduces, steps and sends one shard.

    Build the optimizer from `shards`. A step is: forward and backward of all microbatches, the last one inside
    `overlap_reduction()`; `reduce_gradients()`; the optimizer's step; `gather_parameters()`. All ranks make the same
    calls. Gradients then are in the shards, and those of the model's parameters are None.

    Args:
        parameters: All trained parameters by name, in the same order on every rank, with the same values.
        group: The ranks that hold the same parameters. Default: all.
        bucket_bytes: Gradients that are reduced together.
        keep_whole: Give each parameter to one rank, for optimizers that look at whole matrices.
        alone: Parameters that pipeline stages share: each gets a buffer of its own, so that stages divide it alike.
        is_stage: Whether they are of one of several pipeline stages, some of which may have little to train.
        fewer: By id, the ranks of parameters that only some ranks of `group` have (experts); each list is alike there.
        averaged: Gradients are averaged in the backward pass (DDP with compression): take this rank's part of them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup | None = None,
        *,
        bucket_bytes: int | None = None,
        keep_whole: bool = False,
        alone: Collection[nn.Parameter] = (),
        averaged: bool = False,
        is_stage: bool = False,
        fewer: Mapping[int, dist.ProcessGroup] | None = None,
    ) -> None:
        self._group, self._is_averaged = group or dist.group.WORLD, averaged
        ranks, fewer = dist.get_world_size(group), fewer or {}
        if keep_whole and len(parameters) < ranks and not is_stage:
            raise ConfigError(
                f"zero1 gives whole parameters to ranks for this optimizer, and there are {len(parameters)} for "
                f"{ranks} processes. Use fewer processes, the kind ddp, or an optimizer such as adamw."
            )
        limit = float("inf") if keep_whole else bucket_bytes or BUCKET_BYTES
        groups = _group_parameters(parameters, limit, {id(one) for one in alone}, fewer)
        holders = [fewer.get(id(next(iter(one.values()))), self._group) for one in groups]
        self._buckets = [_Bucket(one, group, keep_whole) for one, group in zip(groups, holders, strict=True)]
        order = {name: None for name in parameters}
        found = {name: one.stepped for bucket in self._buckets for name, one in bucket.flat.shards.items()}
        self.shards: dict[str, nn.Parameter] = {name: found[name] for name in order if name in found}
        """By name, what this rank steps: of some parameters all, of others an interval, of most nothing."""
        self._is_overlapping, self._next = False, 0
        self._in_flight: list[tuple[_Bucket, Tensor, Callable[[], object]]] = []
        for bucket in self._buckets:
            for parameter in bucket.flat.parameters.values():
                parameter.register_post_accumulate_grad_hook(partial(self._count_gradient, bucket))

    @contextmanager
    def overlap_reduction(self) -> Iterator[None]:
        """Run a block with the last backward pass of a step: buckets are reduced as soon as they are complete."""
        for bucket in self._buckets:
            bucket.missing = len(bucket.flat.parameters)
        # Gradients that DDP averages are means only when the whole backward pass is over.
        self._is_overlapping = not self._is_averaged
        try:
            yield
        finally:
            self._is_overlapping = False

    def _count_gradient(self, bucket: _Bucket, parameter: nn.Parameter) -> None:
        if not self._is_overlapping:
            return
        bucket.missing -= 1
        # In one order on all ranks: a bucket with a parameter that was not used waits for the end of the step, and so
        # do those behind it.
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._launch_bucket(self._buckets[self._next])

    @torch.no_grad()
    def _launch_bucket(self, bucket: _Bucket) -> None:
        self._next += 1
        parameters = bucket.flat.parameters.values()
        bucket.used = [parameter.grad is not None for parameter in parameters]
        flat = bucket.flat.flatten([parameter.grad for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None
        own = torch.empty_like(bucket.flat.own)
        if self._is_averaged:
            at = bucket.flat.own.storage_offset() - bucket.flat.values.storage_offset()
            own.copy_(flat[at : at + len(own)])
            self._in_flight.append((bucket, own, lambda: None))
        else:  # divided before they are added up, as DDP does: sums of large gradients could overflow
            ranks = dist.get_world_size(bucket.group)
            self._in_flight.append((bucket, own, _begin_reduce_scatter(own, flat.div_(ranks), bucket.group)))

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Reduce the gradients that are not on their way yet, and put the means into the gradients of the shards.

        A missing gradient counts as zeros where another rank has one. Where no rank has one, it stays None.
        """
        launched = self._buckets[: self._next]
        if any(one.grad is not None for bucket in launched for one in bucket.flat.parameters.values()):
            raise RuntimeError("A parameter got a second gradient in one backward pass, after the first was reduced.")
        for bucket in self._buckets[self._next :]:
            self._launch_bucket(bucket)
        used = self._find_used([flag for bucket in self._buckets for flag in bucket.used])
        names = [name for bucket in self._buckets for name in bucket.flat.parameters]
        is_used = dict(zip(names, used, strict=True))
        for bucket, own, wait in self._in_flight:
            wait()
            for name, shard, gradient in bucket.flat.split_own(own):
                if is_used[name]:
                    earlier = shard.stepped.grad  # of a step that is computed in several calls
                    shard.stepped.grad = gradient if earlier is None else earlier.add_(gradient)
        self._in_flight, self._next = [], 0

    def _find_used(self, here: list[bool]) -> list[bool]:
        """Return whether any rank has a gradient, for each parameter."""
        if self._is_averaged or not here:
            return here
        # On the CPU where the group can: reading the result then does not wait for the GPU.
        first = self._buckets[0].flat.values.device
        device = torch.device("cpu") if get_device_backend(self._group, "cpu") is not None else first
        flags = torch.tensor(here, dtype=torch.uint8, device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in flags.tolist()]

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Send every rank the shards that the others have stepped."""
        works = []
        for bucket in self._buckets:
            assert bucket.flat.is_intact(), "parameters were moved out of the buffers that ZeRO-1 divides"
            works.append(all_gather_flat(bucket.flat.values, bucket.flat.own, bucket.group))
        for work in works:
            work.wait()

    @torch.no_grad()
    def gather_gradients(self) -> dict[str, Tensor | None]:
        """Return all gradients by name, as whole as the parameters; to look at them, training does not need it."""
        found: dict[str, Tensor | None] = {}
        for bucket in self._buckets:
            flat, own = torch.zeros_like(bucket.flat.values), torch.zeros_like(bucket.flat.own)
            for _, shard, place in bucket.flat.split_own(own):
                if shard.stepped.grad is not None:
                    place.copy_(shard.stepped.grad)
            all_gather_flat(flat, own, bucket.group).wait()
            shards = bucket.flat.shards
            here = [name in shards and shards[name].stepped.grad is not None for name in bucket.flat.parameters]
            has_gradient = torch.tensor(here, dtype=torch.uint8, device=flat.device)
            dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=bucket.group)
            parts = zip(bucket.flat.parameters.items(), bucket.flat.unflatten(flat), has_gradient.tolist(), strict=True)
            found |= {name: _wrap_like(parameter, part) if flag else None for (name, parameter), part, flag in parts}
        return found


class _Bucket:
    """A flat buffer of parameters whose gradients are reduced together."""

    def __init__(self, parameters: dict[str, nn.Parameter], group: dist.ProcessGroup | None, whole: bool) -> None:
        self.group = group  # the ranks that have these parameters
        self.flat = FlatBuffer(parameters, dist.get_world_size(group), dist.get_rank(group), whole)
        self.missing = 0  # gradients of the last backward pass that have not come yet
        self.used: list[bool] = []


def _begin_reduce_scatter(own: Tensor, flat: Tensor, group: dist.ProcessGroup | None) -> Callable[[], object]:
    """Begin to sum a flat tensor over a group into this rank's shard of it; return a function that finishes."""
    if flat.device.type != "cpu" or get_device_backend(group, "cpu") != "gloo":
        return partial(_wait, reduce_scatter_flat(own, flat, group), flat)
    # torch runs a reduce-scatter on gloo as an all-reduce, which sends twice as much. An all-to-all does not.
    parts = torch.empty_like(flat)
    work = dist.all_to_all_single(parts, flat, group=group, async_op=True)

    def finish() -> None:
        _wait(work, flat)
        torch.sum(parts.view(-1, len(own)), 0, out=own)

    return finish


def _wait(work: Any, _: Tensor) -> None:
    """Wait for a collective; the tensor that it reads must exist until then."""
    work.wait()


def _group_parameters(
    parameters: Mapping[str, nn.Parameter], limit: float, alone: Collection[int], fewer: Mapping[int, object]
) -> list[dict[str, nn.Parameter]]:
    """Return the parameters of each bucket, the bucket whose gradients are complete first, first."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    kinds: dict[tuple[object, ...], list[nn.Parameter]] = {}
    for parameter in reversed(list(parameters.values())):
        # Parameters that tensor parallelism has cut lie apart: ranks of a tensor-parallel group may have different
        # numbers of them, and must divide alike what they have in common.
        cut = isinstance(parameter, DTensor) and not all(one.is_replicate() for one in parameter.placements)
        holders = fewer.get(id(parameter))
        kind = (parameter.dtype, parameter.device, cut, holders, id(parameter) if id(parameter) in alone else None)
        kinds.setdefault(kind, []).append(parameter)
    position = {id(parameter): number for number, parameter in enumerate(reversed(list(parameters.values())))}
    buckets = [bucket for same in kinds.values() for bucket in divide_into_buckets(same, limit)]
    buckets.sort(key=lambda bucket: max(position[id(parameter)] for parameter in bucket))
    return [{names[id(parameter)]: parameter for parameter in bucket} for bucket in buckets]


def _wrap_like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    mesh, shape = parameter.device_mesh, parameter.shape
    return DTensor.from_local(
        local, mesh, parameter.placements, run_check=False, shape=shape, stride=parameter.stride()
    )
