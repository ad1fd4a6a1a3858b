"""`DistributedContext`: this process's rank, its place in the plan, and where it computes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from cornstarch.errors import ConfigError
from cornstarch.launch import current_world
from cornstarch.parallel import distributed
from cornstarch.parallel.device import DevicePlacement
from cornstarch.parallel.mesh import DeviceMeshes, Replica
from cornstarch.pipeline.stages import StageGroups
from cornstarch.plan.data_options import UNSYNCHRONIZED
from cornstarch.plan.layout import Layout, check_executable
from cornstarch.plan.plan import Plan


def build_layout(plan: Plan) -> Layout:
    """Return which rank holds what; refuses a plan that the runtime cannot execute, also in one process."""
    check_executable(plan)
    return Layout.of(plan, distributed.world_size(), distributed.ranks_per_node())


def check_process_group(what: str = "Make the trainer", otherwise: str = "use `cornstarch train`") -> None:
    """Refuse several processes without a process group: each would train the same model by itself."""
    if distributed.is_single_process() and (world := current_world()).size > 1:
        raise ConfigError(
            f"This is process {world.rank} of {world.size}, but they do not know one another. {what} inside `with "
            f"cornstarch.launch.start_process_group(cornstarch.launch.current_world(), device):`, or {otherwise}."
        )


@dataclass(frozen=True)
class DistributedContext:
    """This process's place in a plan.

    Device meshes and process groups are built once, when they are first read, which all ranks must do at the same
    point: parameters that were sharded while they were read must be on the same mesh as those that are sharded later.
    """

    layout: Layout
    """Which rank holds what."""
    placement: DevicePlacement
    """The device, the precision and the attention kernels of this process."""

    @property
    def plan(self) -> Plan:
        return self.layout.plan

    @property
    def device(self) -> torch.device:
        return self.placement.device

    @cached_property
    def rank(self) -> int:
        return distributed.rank()

    @property
    def world_size(self) -> int:
        return self.layout.world

    @cached_property
    def replica(self) -> Replica:
        """The processes that train on the same samples as this one."""
        return Replica.of(self.layout, self.rank)

    @property
    def is_pipeline(self) -> bool:
        return self.plan.is_pipeline and self.world_size > 1

    @property
    def is_unsynchronized(self) -> bool:
        """Whether every process trains on batches of its own, as in local SGD and gossip."""
        return self.world_size > 1 and self.plan.data.kind in UNSYNCHRONIZED

    @property
    def loss_shards(self) -> int:
        """The number of ranks that each compute a part of a step's loss."""
        # A process that trains by itself knows only the loss of its own batch.
        return 1 if self.is_unsynchronized else self.replica.token_shards

    @property
    def random_source(self) -> int:
        """The first rank that draws the same random numbers as this one."""
        own = self.replica.token_shard
        return next(rank for rank in range(self.world_size) if Replica.of(self.layout, rank).token_shard == own)

    @cached_property
    def meshes(self) -> DeviceMeshes:
        return DeviceMeshes(self.layout, self.device.type)

    @cached_property
    def stage_groups(self) -> StageGroups:
        """The process groups and meshes of this rank's stage."""
        return StageGroups(self.layout, self.device)
