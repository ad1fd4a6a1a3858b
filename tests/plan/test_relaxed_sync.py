"""Plans that change the training are listed between nodes that are far apart, and are never chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cornstarch.plan.cluster import Cluster
from cornstarch.plan.cost import RunCost
from cornstarch.plan.data_options import UNSYNCHRONIZED
from cornstarch.plan.relaxed_sync import SLOW
from cornstarch.plan.search import search
from tests.plan.runs import cluster, module

COST = RunCost((module("model", 2, parameters=10**6, parameter_bytes=2 * 10**6, seconds=1e-3, tp_sizes=(1,)),), batch=8)


def build_machines(between: float, memory: int = 10**9) -> Cluster:
    machines = cluster(2, 2, memory=memory, inside=1e10, between=between)
    return replace(machines, device=replace(machines.device, bandwidth=1e12))


def test_they_are_listed_where_links_are_slow() -> None:
    found = search(COST, build_machines(1e7))
    assert found.best is not None and found.best.candidate.kind not in UNSYNCHRONIZED
    assert {one.prediction.candidate.kind for one in found.relaxed} == {"ddp", "local_sgd", "diloco"}
    for one in found.relaxed:
        assert one.reason.startswith("changes the training: ")
        assert one.prediction.step < 0.9 * found.best.step
        assert one.prediction.samples_per_second == pytest.approx(COST.batch / one.prediction.step)
        assert one.prediction.fits
    assert all(one.prediction.candidate.kind not in UNSYNCHRONIZED for one in found.runners_up)
    assert search(COST, build_machines(1e7), runners_up=0).relaxed == ()


def test_none_is_listed_where_links_are_fast_or_nothing_is_gained() -> None:
    assert search(COST, build_machines(SLOW)).relaxed == ()
    frozen = RunCost((module("model", 2, trained=False, tp_sizes=(1,)),), batch=8)
    assert search(frozen, build_machines(1e7)).relaxed == ()


def test_their_copies_of_the_weights_must_fit() -> None:
    """A copy has 8 MB: one for compressed gradients and for local SGD, two for DiLoCo, three where it overlaps."""
    listed = {}
    for memory in (39, 80):
        found = search(COST, build_machines(1e7, memory * 10**6))
        assert found.best is not None
        listed[memory] = {one.prediction.candidate.kind for one in found.relaxed}
        assert all(one.prediction.peak <= found.best.limit for one in found.relaxed)
    assert listed == {39: {"ddp", "local_sgd"}, 80: {"ddp", "local_sgd", "diloco"}}
