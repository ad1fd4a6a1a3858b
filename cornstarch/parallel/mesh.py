"""Device meshes of the process group that a run has."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cornstarch.errors import ConfigError


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
