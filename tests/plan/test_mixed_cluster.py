"""Clusters of several kinds of nodes: what plans over them are priced with, and the search against brute force."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from cornstarch.errors import ConfigError
from cornstarch.plan.candidates import SearchSpace
from cornstarch.plan.cluster import Cluster, read_cluster, write_cluster
from cornstarch.plan.communication import Link
from cornstarch.plan.cost import RunCost
from cornstarch.plan.mixed_cluster import combine_clusters, combine_costs, search_kinds
from cornstarch.plan.pipeline_cost import CostModel
from cornstarch.plan.predict import predict
from cornstarch.plan.search import TOLERANCE
from tests.plan.runs import cluster, enumerate_candidates, module, random_run

SMALL = SearchSpace(kinds=("ddp", "zero3"))
FILE = """
nodes:
- {count: 2, per_node: 8, device: H100}
- {count: 3, per_node: 4, device: A100-80, inside: PCIe 4}
between: {bandwidth: 25 GB/s, latency: 10 us}
"""


def build_kinds(draw: random.Random) -> tuple[RunCost, Cluster]:
    """Return a run on two or three kinds of nodes, of which some are fast, some have more memory, some faster links."""
    cost, machines = random_run(draw)
    parts, costs = [], []
    for number in range(draw.choice([2, 2, 3])):
        memory = int(machines.device.memory * draw.choice([0.7, 1, 2]))
        link = Link(machines.inside.bandwidth * draw.choice([0.2, 1]), 0.0)
        one = Cluster(draw.choice([1, 2]), 2, replace(machines.device, memory=memory), link, machines.between)
        parts.append(replace(one, name=f"kind{number}"))
        modules = [
            replace(part, layers=tuple(replace(layer, forward=layer.forward * slower) for layer in part.layers))
            for part, slower in ((part, draw.choice([0.5, 1, 4])) for part in cost.modules)
        ]
        costs.append(replace(cost, modules=tuple(modules)))
    return combine_costs(costs), combine_clusters(parts)


def price_by_hand(costs: list[RunCost], parts: list[Cluster]) -> tuple[RunCost, Cluster]:
    """Return the run and the cluster with the slowest figures of some kinds, written down one by one."""
    slowest = list(costs[0].modules)
    for number, own in enumerate(slowest):
        layers = list(own.layers)
        for place, layer in enumerate(layers):
            same = [one.modules[number].layers[place] for one in costs]
            times = ("forward", "input_gradient", "weight_gradient")
            layers[place] = replace(layer, **{name: max(getattr(one, name) for one in same) for name in times})
        slowest[number] = replace(own, layers=tuple(layers))
    device = replace(parts[0].device, memory=min(one.device.memory for one in parts))
    inside = Link(min(one.inside.bandwidth for one in parts), 0.0)
    nodes = sum(one.nodes for one in parts)
    return replace(costs[0], modules=tuple(slowest)), Cluster(nodes, 2, device, inside, parts[0].between)


def test_the_search_over_kinds_equals_brute_force() -> None:
    draw, used = random.Random(3), set()
    for number in range(14):
        cost, machines = build_kinds(draw)
        steps: dict[tuple[int, ...], float] = {}
        kinds = range(len(machines.parts))
        for chosen in (one for many in kinds for one in combinations(kinds, many + 1)):
            own, part = price_by_hand([cost.parts[k] for k in chosen], [machines.parts[k] for k in chosen])
            costs = CostModel(own, part)
            every = (predict(candidate, costs, part) for candidate in enumerate_candidates(own, part, SMALL))
            if (least := min((one.step for one in every if one.fits), default=None)) is not None:
                steps[chosen] = least
        found = search_kinds(cost, machines, SMALL, runners_up=2, polish=False)
        assert (found.best is None) == (not steps), number
        if found.best is not None:
            least = min(steps.values())
            assert least * (1 - 1e-9) <= found.best.step <= least / (1 - TOLERANCE) * (1 + 1e-9), number
            used.add(found.used.count("kind") or len(kinds))
    assert {1, 2} <= used  # one kind alone, and several together


def test_a_plan_over_all_waits_for_the_slowest() -> None:
    fast = replace(cluster(1, 2), name="fast")
    slow = replace(cluster(1, 2, inside=5e8), name="slow")
    runs = [RunCost((module("model", 4, seconds=seconds),), batch=8) for seconds in (1.0, 1.5)]
    best = search_kinds(combine_costs(runs), combine_clusters([fast, slow])).best
    alone = search_kinds(runs[0], fast).best
    assert best is not None and alone is not None
    assert best.candidate.world == 4 and best.step == pytest.approx(alone.step * 1.5 / 2, rel=0.01)
    runs[1] = RunCost((module("model", 4, seconds=4.0),), batch=8)
    found = search_kinds(combine_costs(runs), combine_clusters([fast, slow]))
    assert found.best is not None and found.used == "fast" and found.best.step == pytest.approx(alone.step)
    assert found.best.mfu is None or alone.mfu is None or found.best.mfu == pytest.approx(alone.mfu / 2)


def test_a_file_lists_kinds_of_nodes(tmp_path: Path) -> None:
    (tmp_path / "mixed.yaml").write_text(FILE)
    found = read_cluster(tmp_path / "mixed.yaml")
    assert [one.name for one in found.parts] == ["2x8xH100", "3x4xA100-80"]
    assert (found.nodes, found.per_node, found.devices) == (7, 4, 28)
    assert found.device.memory == found.parts[1].device.memory and found.device.bandwidth == 2039e9
    assert found.device.flops_of("bf16") == pytest.approx((16 * 989e12 + 12 * 312e12) / 28)
    assert found.inside.rate == found.parts[1].inside.rate and found.between.bandwidth == 25e9
    assert found.describe().startswith("2 nodes of 8 × H100") and "; 3 nodes of 4 × A100-80" in found.describe()
    write_cluster(tmp_path / "again.yaml", found)
    assert read_cluster(tmp_path / "again.yaml") == found
    assert found.resize(7, 4) is found
    with pytest.raises(ConfigError, match="the 7 × 4 devices that its file lists"):
        found.resize(8, 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FILE + "device: H100\n", "mixed.yaml:6  device = H100\n  With a list of `nodes`, each kind"),
        ("nodes:\n- {per_node: 8, device: H100}\n", "Expected 2 to 4 kinds of nodes"),
        (FILE.replace("count: 3", "count: no"), "mixed.yaml:4  nodes.1.count = "),
        (FILE.replace("A100-80", "cpu"), "Processors cannot be mixed"),
        (FILE.replace("inside: PCIe 4", "insid: PCIe 4"), "Did you mean `inside`?"),
    ],
)
def test_mistakes_name_the_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mixed.yaml").write_text(text)
    with pytest.raises(ConfigError) as found:
        read_cluster(tmp_path / "mixed.yaml")
    assert said in str(found.value)


def test_costs_of_one_device_are_refused() -> None:
    cost, machines = build_kinds(random.Random(1))
    with pytest.raises(ConfigError, match="has several kinds of devices"):
        search_kinds(replace(cost, parts=()), machines)
