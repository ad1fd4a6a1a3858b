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
    """So many processes of a replica compute the same loss, as with tensor parallelism; others have other tokens."""
    share: int = 0
    """Which of all shares of a step's tokens this process has."""
    leads: bool = True
    """Whether this process is the first of its replica, which speaks for it."""

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Replica:
        """Return the replica of a rank, where all modules share their ranks."""
        (span,) = layout.placement.spans
        place = layout.place(rank)
        cp = list(layout.plan.modules.values())[-1].cp  # of what has the loss: the language model is the last
        share = place.dp * cp + place.cp % cp
        return cls(place.dp, layout.dp, span.ranks, span.ranks // cp, share, place.cp == place.tp == 0)

    @classmethod
    def here(cls) -> Replica:
        """Return this process as a replica of its own."""
        return cls(processes.rank(), processes.size(), share=processes.rank())

    @property
    def shares(self) -> int:
        """Processes that have different shares of a step's tokens."""
        return self.count * self.size // self.alike


class Meshes:
    """The device meshes of a layout in which all modules share their ranks.

    All processes must make it, and ask for the same sizes of `context` in the same order.
    """

    def __init__(self, layout: Layout, device_type: str) -> None:
        (self._span,) = layout.placement.spans
        self._layout, self._device = layout, device_type
        tp, replicate = self._span.tp, layout.replicate
        shares = layout.world // tp
        if layout.plan.data.kind == "ddp" and tp > 1:  # DDP knows no parts of matrices: FSDP 2, in shards of one
            replicate = shares
        axes = {"dp": shares} if replicate is None else {"replicate": replicate, "shard": shares // replicate}
        whole = {**axes, "tp": tp} if tp > 1 else axes
        mesh = init_device_mesh(device_type, tuple(whole.values()), mesh_dim_names=tuple(whole))
        self.data: DeviceMesh = mesh[tuple(axes)] if tp > 1 else mesh
        """The processes that hold the same parts of matrices: one axis, or two for HSDP. A module that is there several
        times in a replica is on all of them."""
        self.tensor: DeviceMesh | None = mesh["tp"] if tp > 1 else None
        """The processes that matrices are cut over."""
        self._context: dict[int, DeviceMesh] = {}

    def context(self, cp: int) -> DeviceMesh:
        """Return the processes among which tokens are dealt out in `cp` parts."""
        if cp not in self._context:
            shape = (self._layout.dp * self._span.cp // cp, cp, self._span.tp)
            self._context[cp] = init_device_mesh(self._device, shape, mesh_dim_names=("other", "cp", "tp"))["cp"]
        return self._context[cp]


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
