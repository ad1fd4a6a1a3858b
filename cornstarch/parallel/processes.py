"""The processes of a run, as one of them sees the others; alone, if there is no process group."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def is_alone() -> bool:
    """Whether this process is the only one."""
    return size() == 1


def rank() -> int:
    """Return the number of this process."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Return numbers added up over all processes, exactly for whole numbers up to 2**53."""
    return begin_sum(values)()


def begin_sum(values: Sequence[float]) -> Callable[[], list[float]]:
    """Begin to add up numbers over all processes; return what waits for the sums and gives them."""
    if is_alone():
        alone = [float(value) for value in values]
        return lambda: alone
    together = torch.tensor(list(values), dtype=torch.float64)
    work = dist.all_reduce(together, async_op=True)

    def sums() -> list[float]:
        work.wait()
        return together.tolist()

    return sums


def gather_data(value: Any) -> list[Any]:
    """Return what each process has, in the order of their numbers; it travels as JSON, not as pickle."""
    if is_alone():
        return [value]
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(size())]
    dist.all_gather(sizes, torch.tensor([content.numel()]))
    longest = max(int(one) for one in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: content.numel()] = content
    found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(size())]
    dist.all_gather(found, padded)
    return [json.loads(bytes(one[: int(n)].tolist())) for one, n in zip(found, sizes, strict=True)]


def broadcast_data(value: Any, source: int = 0) -> Any:
    """Return what one process has, on all of them."""
    return value if is_alone() else gather_data(value if rank() == source else None)[source]
