"""The size of DDP's buckets, chosen for the link that joins the processes: measured when a run begins."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from cornstarch.plan.links import Link, Timing, fit_link
from cornstarch.plan.network import bucket_bytes
from cornstarch.plan.quantities import written

_SIZES = (2**10, 2**19, 2**21)  # bytes; all of it takes a second at 100 Mbit/s
_REPETITIONS = 3
_MIB = 2**20


@dataclass(frozen=True)
class ChosenBucket:
    """The size of a bucket, and the link that it was chosen for."""

    size: int
    """Bytes."""
    link: Link
    """As an all-reduce finds it."""

    @property
    def megabytes(self) -> float:
        """The size as DistributedDataParallel takes it."""
        return self.size / _MIB

    @property
    def line(self) -> str:
        """What was chosen and why, on one line."""
        rate, wait = written(_short(self.link.bandwidth), "B/s"), written(_short(self.link.latency), "s")
        return f"buckets of {self.megabytes:.3g} MiB for a link of {rate} and {wait} a message, measured"


def chosen_bucket(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, device: torch.device) -> ChosenBucket:
    """Return the size of the buckets in which gradients go round; every process of the group must ask for it."""
    size = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    link = measured_link(group, device)
    return ChosenBucket(bucket_bytes(link, dist.get_world_size(group), size), link)


def measured_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Return what joins the processes of a group, as an all-reduce finds it; the same on every process."""
    ranks = dist.get_world_size(group)
    return fit_link([Timing("all_reduce", size, ranks, _seconds(size, group, device)) for size in _SIZES])


def _seconds(size: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return how long an all-reduce takes: the quickest of some, in the slowest process."""
    value = torch.zeros(size // 4, device=device)
    taken = []
    for _ in range(_REPETITIONS + 1):
        _wait(device)
        start = time.perf_counter()
        dist.all_reduce(value, group=group)
        _wait(device)
        taken.append(time.perf_counter() - start)
    slowest = torch.tensor([min(taken[1:])], dtype=torch.float64, device=device)  # the first sets connections up
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return float(slowest)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _short(value: float) -> float:
    return float(f"{value:.3g}")


__all__ = ["ChosenBucket", "chosen_bucket", "measured_link"]
