"""A process group of its own for comparisons, with which nothing mixes where ranks are out of step elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cornstarch.compat import default_store
from cornstarch.parallel import distributed
from cornstarch.parallel.activity import here

_TIMEOUT = timedelta(minutes=30)


class ComparisonGroup:
    """All ranks of a run, over gloo and CPU memory. All ranks must make theirs at the same point."""

    def __init__(self) -> None:
        self.rank, self.size = distributed.rank(), distributed.world_size()
        # Not by `new_group`: it derives a group's name from the number of groups of this process, which differs
        # between the stages of a pipeline.
        store = default_store()
        number = store.add(f"cornstarch/comparison/{self.rank}", 1)
        prefix = f"cornstarch/comparison_group/{number}"
        self.group: Any = dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), self.rank, self.size, _TIMEOUT)
        self.seconds = 0.0
        """What the last exchange took."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums of numbers over all ranks; whole numbers are exact up to 2**53."""
        together = torch.tensor(values, dtype=torch.float64)
        began = time.perf_counter()
        here.begin_wait("the comparison of ranks")
        self.group.allreduce([together]).wait()
        here.end_wait()
        self.seconds = time.perf_counter() - began
        return together.tolist()

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return the 64-bit integers of all ranks, by rank."""
        own = torch.tensor(values, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.size)]
        here.begin_wait("the comparison of ranks")
        self.group.allgather([found], [own]).wait()
        here.end_wait()
        return [one.tolist() for one in found]

    def gather_json(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank."""
        content = json.dumps(value).encode()
        sizes = [size for (size,) in self.gather([len(content)])]
        padded = content.ljust(-(-max(sizes) // 8) * 8)
        words = torch.frombuffer(bytearray(padded), dtype=torch.int64).tolist()
        found = self.gather(words)
        tensors = [torch.tensor(one, dtype=torch.int64).view(torch.uint8) for one in found]
        return [json.loads(bytes(one[:size].tolist())) for one, size in zip(tensors, sizes, strict=True)]
