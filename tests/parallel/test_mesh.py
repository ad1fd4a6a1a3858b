"""Groups of many processes, counted without them: a group that only pretends to have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from cornstarch.parallel.mesh import DeviceMeshes
from cornstarch.pipeline.stages import StageGroups
from cornstarch.plan import Layout, ModulePlan, Plan

SHARED = Plan({"model": ModulePlan(tp=2, cp=2)}, ranks="shared")
STAGES = Plan(
    {"vision": ModulePlan(tp=2), "audio": ModulePlan(), "language_model": ModulePlan(stages=3, tp=2, cp=2)},
    ranks="own",
)
CPU = torch.device("cpu")


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Return what counts how many processes each group has that a rank of a large world makes."""

    def counted(rank: int, world: int, work: Callable[[], Any]) -> list[int]:
        made: list[int] = []
        make = distributed_c10d._new_group_with_tag

        def note(ranks: list[int] | None, timeout: Any, backend: Any, *rest: Any, **more: Any) -> Any:
            made.append(world if ranks is None else len(ranks))
            return make(ranks, timeout, "fake", *rest, **more)

        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            with monkeypatch.context() as patched:
                patched.setattr(distributed_c10d, "_new_group_with_tag", note)
                work()
        finally:
            dist.destroy_process_group()
        return made

    return counted


def test_group_count_of_a_pipeline_rank_does_not_depend_on_world_size(count: Callable[..., list[int]]) -> None:
    """So that all together make a number that is linear in the world size."""
    per_rank = {}
    for replicas in (1, 2, 8, 32):
        layout = Layout.of(STAGES, replicas * STAGES.replica)
        ranks = [layout.mesh(name)[0, -1, 0, 0] for name in STAGES.modules]
        made = [count(int(rank), layout.world, lambda layout=layout: StageGroups(layout, CPU)) for rank in ranks]
        assert all(max(sizes) <= max(STAGES.replica, 2 * replicas) for sizes in made)  # none spans the world
        per_rank[replicas] = [len(sizes) for sizes in made]
    assert len({*map(tuple, per_rank.values())}) == 1, per_rank
    assert max(per_rank[1]) <= 4  # its replica, and the axes of its stage


def test_group_count_with_shared_ranks_is_linear_in_world_size(count: Callable[..., list[int]]) -> None:
    """In each process: torch makes all lines of a mesh everywhere."""
    made = {}
    for world in (16, 64, 256):
        layout = Layout.of(SHARED, world)

        def meshes(layout: Layout = layout) -> None:
            DeviceMeshes(layout, "cpu").context(2)

        made[world] = len(count(world - 1, world, meshes))
    assert made[64] <= 4 * made[16] and made[256] <= 4 * made[64], made
    assert made[256] <= 3 * 256
