"""The processes of a run as one of them sees them: its replica, and device meshes over process groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cornstarch.errors import ConfigError
from cornstarch.parallel import processes
from cornstarch.parallel.carriage import backend_of
from cornstarch.plan.layout import Layout
from cornstarch.plan.stages import place_of


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
    """So many processes of a replica compute the same loss, as with tensor parallelism; others have other tokens, or
    none."""
    share: int = 0
    """Which of all shares of a step's tokens this process has."""
    leads: bool = True
    """Whether this process is the first of those of its replica that have a loss, and speaks for it."""
    shares: int = 1
    """Processes that have different shares of a step's tokens."""

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Replica:
        """Return the replica of a rank."""
        place, size = layout.place(rank), layout.plan.replica
        last, plan = list(layout.plan.modules.items())[-1]  # what has the loss: the language model is the last
        shares, leads = layout.dp * plan.cp, place.cp == place.tp == 0
        if not layout.plan.is_pipeline:
            share = place.dp * plan.cp + place.cp % plan.cp
            return cls(place.dp, layout.dp, size, size // plan.cp, share, leads, shares)
        # Stages draw different random numbers, but not the processes that matrices are cut over.
        share = (place_of(layout, rank) * layout.dp + place.dp) * layout.span(place.modules[-1]).cp + place.cp
        has_loss = last in place.modules and place.stage == layout.span(last).stages_of(last) - 1
        return cls(place.dp, layout.dp, size, plan.tp, share, has_loss and leads, shares)

    @classmethod
    def here(cls) -> Replica:
        """Return this process as a replica of its own."""
        return cls(processes.rank(), processes.size(), share=processes.rank(), shares=processes.size())


class Meshes:
    """The device meshes of a layout in which all modules share their ranks.

    All processes must make it, and ask for the same sizes of `context` in the same order.
    """

    data: DeviceMesh
    """The processes that hold the same parts of matrices: one axis, or two for HSDP. A module that is there several
    times in a replica is on all of them."""
    tensor: DeviceMesh | None
    """The processes that matrices are cut over."""

    def __init__(self, layout: Layout, device_type: str) -> None:
        (self._span,) = layout.placement.spans
        self._layout, self._device = layout, device_type
        tp, replicate = self._span.tp, layout.replicate
        shares = layout.world // tp
        if layout.plan.data.kind == "ddp" and tp > 1:  # DDP knows no parts of matrices: FSDP 2, in shards of one
            replicate = shares
        axes = _data_axes(shares, replicate)
        whole = {**axes, "tp": tp} if tp > 1 else axes
        mesh = _mesh_of_all(device_type, tuple(whole.values()), tuple(whole))
        self.data = mesh[tuple(axes)] if tp > 1 else mesh
        self.tensor = mesh["tp"] if tp > 1 else None
        self._context: dict[int, DeviceMesh] = {}

    def context(self, cp: int) -> DeviceMesh:
        """Return the processes among which tokens are dealt out in `cp` parts."""
        if cp not in self._context:
            shape = (self._layout.dp * self._span.cp // cp, cp, self._span.tp)
            self._context[cp] = _mesh_of_all(self._device, shape, ("other", "cp", "tp"))["cp"]
        return self._context[cp]

    def replicas(self) -> DeviceMesh:
        """Return the processes with this one's place in each replica, over a process group that nothing else uses."""
        rank = processes.rank()
        line = self._layout.group("dp", self._span.modules[0], rank)
        return _mesh_of(line, ("replica",), rank, self._device)


class StageMeshes:
    """The device meshes of one stage, whose ranks are its own.

    Only the processes of a group make it, so that many stages cost no more than one.
    """

    def __init__(self, layout: Layout, device_type: str) -> None:
        rank = processes.rank()
        place = layout.place(rank)
        ranks = layout.mesh(place.modules[0])[place.stage]
        dp, cp, tp = ranks.shape
        axes = _data_axes(dp * cp, layout.replicate)
        whole = {**axes, "tp": tp} if tp > 1 else axes
        mesh = _mesh_of(ranks.reshape(tuple(whole.values())), tuple(whole), rank, device_type)
        self.data: DeviceMesh = mesh[tuple(axes)] if tp > 1 else mesh
        """The processes that hold the same parts of matrices: one axis, or two for HSDP."""
        self.tensor: DeviceMesh | None = mesh["tp"] if tp > 1 else None
        """The processes that matrices are cut over."""
        self._context = _mesh_of(ranks[place.dp, :, place.tp], ("cp",), rank, device_type) if cp > 1 else None

    def context(self, cp: int) -> DeviceMesh:
        """Return the processes among which tokens, or items, are dealt out in `cp` parts."""
        assert self._context is not None and self._context.size() == cp
        return self._context

    def every(self) -> list[DeviceMesh]:
        """Return all of them."""
        return [mesh for mesh in (self.data, self.tensor, self._context) if mesh is not None]


def _data_axes(shares: int, replicate: int | None) -> dict[str, int]:
    """Return the axes of data parallelism: one, or two for HSDP."""
    return {"dp": shares} if replicate is None else {"replicate": replicate, "shard": shares // replicate}


def _mesh_of(ranks: np.ndarray, names: tuple[str, ...], rank: int, device_type: str) -> DeviceMesh:
    """Return a mesh over some of all processes, of which this one is one."""
    at = np.argwhere(ranks == rank)[0]
    groups = []
    for axis in range(ranks.ndim):
        line = ranks[tuple(slice(None) if i == axis else int(at[i]) for i in range(ranks.ndim))]
        groups.append(dist.new_group(line.tolist(), use_local_synchronization=True))
    whole = torch.from_numpy(np.ascontiguousarray(ranks)).to(torch.int)
    return DeviceMesh.from_group(groups if len(groups) > 1 else groups[0], device_type, whole, mesh_dim_names=names)


def data_mesh(device_type: str, replicate: int | None = None) -> DeviceMesh:
    """Return the mesh of data parallelism over all processes: one axis `dp`, or `replicate` and `shard`.

    Args:
        device_type: cpu or cuda.
        replicate: How many replicas there are, each sharded over the other processes (HSDP).
    """
    world = dist.get_world_size()
    if replicate is None:
        return _mesh_of_all(device_type, (world,), ("dp",))
    if replicate < 1 or world % replicate:
        fitting = [number for number in range(1, world + 1) if world % number == 0]
        raise ConfigError(
            f"{replicate} replicas do not fit {world} processes; expected one of {', '.join(map(str, fitting))}."
        )
    return _mesh_of_all(device_type, (replicate, world // replicate), ("replicate", "shard"))


def _mesh_of_all(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh over all processes, whose groups carry what the group of all does."""
    # Some versions of torch take NCCL for a mesh of GPUs wherever the group of all is called "gloo", also where
    # processes share a GPU, which NCCL refuses.
    is_gloo = device_type != "cpu" and dist.is_initialized() and backend_of(None, device_type) == "gloo"
    override: dict[Any, Any] | None = dict.fromkeys(names, "gloo") if is_gloo else None
    return init_device_mesh(device_type, shape, mesh_dim_names=names, backend_override=override)
