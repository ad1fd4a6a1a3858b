"""Device meshes of a layout, and the replica that this process belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cornstarch.errors import ConfigError
from cornstarch.parallel import distributed
from cornstarch.parallel.distributed import get_device_backend
from cornstarch.plan.expert_options import has_shared_experts
from cornstarch.plan.layout import Layout
from cornstarch.plan.stage_graph import place_of


@dataclass(frozen=True)
class Replica:
    """The processes that work on the same samples, as one of them sees them."""

    index: int = 0  # the data-parallel index of this replica
    count: int = 1  # the number of replicas; each has samples of its own
    size: int = 1  # the number of processes in a replica
    loss_copies: int = 1
    """How many processes of a replica compute the same loss, as with tensor parallelism. A sum of losses over all ranks
    counts it that many times."""
    token_shard: int = 0  # the index of this process's shard of the tokens of a step
    is_leader: bool = True
    """Whether this process is the first one of its replica that has a loss. It reports for the replica."""
    token_shards: int = 1  # the number of shards that the tokens of a step are divided into

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Replica:
        place, size = layout.place(rank), layout.plan.replica
        # The last module has the loss: it is the language model.
        last, plan = list(layout.plan.modules.items())[-1]
        shards, is_first = layout.dp * plan.cp, place.cp == place.tp == 0
        if not layout.plan.is_pipeline:
            shard = place.dp * plan.cp + place.cp % plan.cp
            return cls(place.dp, layout.dp, size, size // plan.cp, shard, is_first, shards)
        # The shard seeds random numbers. Stages must draw different ones; tensor-parallel ranks of a stage the same.
        shard = (place_of(layout, rank) * layout.dp + place.dp) * layout.span(place.modules[-1]).cp + place.cp
        has_loss = last in place.modules and place.stage == layout.span(last).stages_of(last) - 1
        return cls(place.dp, layout.dp, size, plan.tp, shard, has_loss and is_first, shards)

    @classmethod
    def here(cls) -> Replica:
        """Return this process as a replica of its own."""
        rank, world = distributed.rank(), distributed.world_size()
        return cls(rank, world, token_shard=rank, token_shards=world)


@dataclass(frozen=True)
class ExpertMeshes:
    """The ranks that experts are shared out over, and those that have the same experts."""

    across: DeviceMesh
    """The axis `ep`: ranks that have all experts together; with tensor parallelism also the axis `tp`."""
    data: DeviceMesh
    """The ranks that have the same experts: one axis, or two as the mesh of all other parameters."""

    @classmethod
    def of(cls, mesh: DeviceMesh) -> ExpertMeshes:
        """Return the parts of a mesh with the axes of data parallelism, `ep`, and perhaps `tp`."""
        names = mesh.mesh_dim_names
        assert names is not None
        at = names.index("ep")
        across: Any = names[at:] if len(names) > at + 1 else "ep"
        return cls(mesh[across], mesh[names[:at]])


class DeviceMeshes:
    """The device meshes of a layout in which all modules share their ranks.

    All processes must create it and call `context` equally: that creates process groups, a collective operation.
    """

    data: DeviceMesh
    """The ranks that hold the same tensor-parallel shards: one axis, or two for HSDP. Context-parallel ranks are among
    them, because they hold the same parameters, too."""
    tensor: DeviceMesh | None  # the tensor-parallel ranks

    def __init__(self, layout: Layout, device_type: str) -> None:
        (self._span,) = layout.placement.spans
        self._layout, self._device = layout, device_type
        tp, replicate = self._span.tp, layout.replicate
        ranks = layout.world // tp
        is_cut = tp > 1 or has_shared_experts(layout.plan)
        if layout.plan.data.kind == "ddp" and is_cut:
            # DDP does not know DTensors. FSDP 2 with shards of one rank does the same.
            replicate = ranks
        axes = _data_axes(ranks, replicate)
        # tp is the innermost axis, so that its ranks are neighbours on the fastest link.
        whole = {**axes, "tp": tp} if tp > 1 else axes
        mesh = _mesh_of_all(device_type, whole)
        self.data = mesh[tuple(axes)] if tp > 1 else mesh
        self.tensor = mesh["tp"] if tp > 1 else None
        self._context: dict[int, DeviceMesh] = {}
        self._experts: dict[int, ExpertMeshes] = {}

    def context(self, cp: int) -> DeviceMesh:
        """Return the ranks that share the tokens of a row when it is split into `cp` parts."""
        if cp not in self._context:
            axes = {"other": self._layout.dp * self._span.cp // cp, "cp": cp, "tp": self._span.tp}
            self._context[cp] = _mesh_of_all(self._device, axes)["cp"]
        return self._context[cp]

    def experts(self, ep: int) -> ExpertMeshes:
        """Return the meshes of a module whose experts are shared out over `ep` ranks."""
        if ep not in self._experts:
            # The ranks of `ep` are neighbours: they exchange most, after those of `tp`.
            sizes = _expert_axes(self.data, ep, self._span.tp)
            self._experts[ep] = ExpertMeshes.of(_mesh_of_all(self._device, sizes))
        return self._experts[ep]

    def replicas(self) -> DeviceMesh:
        """Return the ranks at this rank's place in each replica, with a process group that nothing else uses."""
        line = self._layout.group("dp", self._span.modules[0], distributed.rank())
        return _mesh_of(line, ("replica",), self._device)


class StageMeshes:
    """The device meshes of one pipeline stage, which only its own ranks create: the cost must not grow with stages."""

    def __init__(self, layout: Layout, device_type: str) -> None:
        place = layout.place(distributed.rank())
        ranks = layout.mesh(place.modules[0])[place.stage]
        dp, cp, tp = ranks.shape
        axes = _data_axes(dp * cp, layout.replicate)
        whole = {**axes, "tp": tp} if tp > 1 else axes
        mesh = _mesh_of(ranks.reshape(tuple(whole.values())), tuple(whole), device_type)
        self.data: DeviceMesh = mesh[tuple(axes)] if tp > 1 else mesh
        """The ranks that hold the same tensor-parallel shards: one axis, or two for HSDP."""
        self.tensor: DeviceMesh | None = mesh["tp"] if tp > 1 else None  # the tensor-parallel ranks
        self._context = _mesh_of(ranks[place.dp, :, place.tp], ("cp",), device_type) if cp > 1 else None
        self._experts: dict[int, ExpertMeshes] = {}
        for ep in sorted({layout.plan.modules[name].ep for name in place.modules} - {1}):
            sizes = _expert_axes(self.data, ep, tp)
            mesh = _mesh_of(ranks.reshape(*sizes.values()), tuple(sizes), device_type)
            self._experts[ep] = ExpertMeshes.of(mesh)

    def context(self, cp: int) -> DeviceMesh:
        assert self._context is not None and self._context.size() == cp
        return self._context

    def experts(self, ep: int) -> ExpertMeshes:
        return self._experts[ep]

    def all_meshes(self) -> list[DeviceMesh]:
        own = [mesh for mesh in (self.data, self.tensor, self._context) if mesh is not None]
        return own + [mesh for one in self._experts.values() for mesh in (one.across, one.data)]


def _data_axes(ranks: int, replicate: int | None) -> dict[str, int]:
    return {"dp": ranks} if replicate is None else {"replicate": replicate, "shard": ranks // replicate}


def _expert_axes(data: DeviceMesh, ep: int, tp: int) -> dict[str, int]:
    """Return all axes of a mesh for experts, given that of data parallelism for all other parameters."""
    names = data.mesh_dim_names
    assert names is not None
    sizes = [data.size(axis) for axis in range(data.ndim)]
    # The innermost axis has them: that of shards, unless there are replicas only.
    axis = max(number for number, size in enumerate(sizes) if size % ep == 0)
    sizes[axis] //= ep
    return {**dict(zip(names, sizes, strict=True)), "ep": ep, **({"tp": tp} if tp > 1 else {})}


def _mesh_of(ranks: np.ndarray, names: tuple[str, ...], device_type: str) -> DeviceMesh:
    """Return a mesh over some of all ranks, among them this process."""
    at = np.argwhere(ranks == distributed.rank())[0]
    groups = []
    for axis in range(ranks.ndim):
        line = ranks[tuple(slice(None) if i == axis else int(at[i]) for i in range(ranks.ndim))]
        # Local synchronization: the ranks of other stages do not take part in this call.
        groups.append(dist.new_group(line.tolist(), use_local_synchronization=True))
    whole = torch.from_numpy(np.ascontiguousarray(ranks)).to(torch.int)
    return DeviceMesh.from_group(groups if len(groups) > 1 else groups[0], device_type, whole, mesh_dim_names=names)


def data_mesh(device_type: str, replicate: int | None = None) -> DeviceMesh:
    """Return the mesh of data parallelism over all processes: one axis `dp`, or `replicate` and `shard`.

    Args:
        device_type: cpu or cuda.
        replicate: The number of replicas, each of which is sharded over the other processes (HSDP).
    """
    world = dist.get_world_size()
    if replicate is not None and (replicate < 1 or world % replicate):
        fitting = ", ".join(str(number) for number in range(1, world + 1) if world % number == 0)
        raise ConfigError(f"{replicate} replicas do not fit {world} processes; expected one of {fitting}.")
    return _mesh_of_all(device_type, _data_axes(world, replicate))


def _mesh_of_all(device_type: str, axes: dict[str, int]) -> DeviceMesh:
    # Some versions of torch choose NCCL for a mesh of GPUs wherever the world's backend is called "gloo", also where
    # processes share a GPU, which NCCL refuses. So the backend of the world is passed on explicitly.
    is_gloo = device_type != "cpu" and dist.is_initialized() and get_device_backend(None, device_type) == "gloo"
    override: dict[Any, Any] | None = dict.fromkeys(axes, "gloo") if is_gloo else None
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes), backend_override=override)
