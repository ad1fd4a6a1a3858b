"""The processes of a run as one of them sees them: its replica, and device meshes over process groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cornstarch.errors import ConfigError
from cornstarch.parallel import processes
from cornstarch.plan.layout import Layout


@dataclass(frozen=True)
class Replica:
    """The processes that work on the same samples, as one of them sees them."""

    index: int = 0
    """Which of the replicas this process belongs to."""
    count: int = 1
    """Replicas; each has samples of its own."""
    size: int = 1
    """Processes of a replica."""
    alike: int = 1
    """So many processes of a replica compute the same loss (tensor parallelism); among the others tokens are dealt
    out."""
    leads: bool = True
    """Whether this process is the first of its replica, which speaks for it."""

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Replica:
        """Return the replica of a rank, where all modules share their ranks."""
        (span,) = layout.placement.spans
        place = layout.place(rank)
        return cls(place.dp, layout.dp, span.ranks, span.tp, place.cp == place.tp == 0)

    @classmethod
    def here(cls) -> Replica:
        """Return this process as a replica of its own."""
        return cls(processes.rank(), processes.size())

    @property
    def shares(self) -> int:
        """Processes that have different shares of a step's tokens."""
        return self.count * self.size // self.alike


def data_mesh(device_type: str, replicate: int | None = None) -> DeviceMesh:
    """Return the mesh of data parallelism over all processes: one axis `dp`, or `replicate` and `shard`.

    Args:
        device_type: cpu or cuda.
        replicate: How many replicas there are, each sharded over the other processes (HSDP).
    """
    world = dist.get_world_size()
    if replicate is None:
        return init_device_mesh(device_type, (world,), mesh_dim_names=("dp",))
    if replicate < 1 or world % replicate:
        fitting = [number for number in range(1, world + 1) if world % number == 0]
        raise ConfigError(
            f"{replicate} replicas do not fit {world} processes; expected one of {', '.join(map(str, fitting))}."
        )
    return init_device_mesh(device_type, (replicate, world // replicate), mesh_dim_names=("replicate", "shard"))
