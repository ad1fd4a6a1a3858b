"""Whether anything fits at all, and the smallest cluster on which something does; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from typing import TYPE_CHECKING

from cornstarch.plan.assembly import Assembly, Costs
from cornstarch.plan.bounds import Bounds
from cornstarch.plan.choice import Choice
from cornstarch.plan.cost import ModuleCost, RunCost
from cornstarch.plan.space import MOST_STAGES, Shape, Space, checkpointings, leaves, portions, shapes, standings

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster

MOST_DEVICES = 8192
_LOOKED_AT = 200  # shapes of each standing, those that spread most
_NEAREST = 8  # those among them that are told about where nothing fits


def can_fit(costs: Costs, space: Space) -> bool:
    """Say whether some choice fits.

    Of each shape the fewest and the most microbatches are looked at: one needs no room for earlier gradients, many are
    small. Of very many shapes, those that spread a replica, or its bytes, most.
    """
    cost, usable = costs.cost, costs.cluster.device.usable
    bounds = Bounds(costs, space)
    for shape in _widest(costs, space, bounds):
        many = portions(shape, cost, space)
        for few, again in product(dict.fromkeys((*many[-1:], *many[:1])), reversed(checkpointings(cost, space))):
            for choice in leaves(shape, again, few, cost, space):
                if bounds.fits(shape, choice.kind) and Assembly(choice, costs).least_peak <= usable:
                    return True
    return False


def nearest(costs: Costs, space: Space) -> list[tuple[int, Choice]]:
    """Return what comes nearest to fitting, with the bytes of its fullest rank: of each kind the one that needs least.

    Looked at are the shapes that spread a replica, or its bytes, most.
    """
    cost, bounds = costs.cost, Bounds(costs, space)
    found: dict[tuple[str, bool], tuple[int, Choice]] = {}
    for shape in _widest(costs, space, bounds, _NEAREST):
        many = portions(shape, cost, space)
        for few, again in product(dict.fromkeys((*many[-1:], *many[:1])), checkpointings(cost, space)):
            for choice in leaves(shape, again, few, cost, space):
                key, peak = (choice.kind, any(again)), Assembly(choice, costs).least_peak
                if key not in found or peak < found[key][0]:
                    found[key] = peak, choice
    return sorted(found.values(), key=lambda one: one[0])


def _widest(costs: Costs, space: Space, bounds: Bounds, most: int = _LOOKED_AT) -> Iterator[Shape]:
    """Yield shapes of each standing: those with the largest replicas, then those with the fewest bytes on a rank."""
    size = {module.name: sum(states) for module, states in zip(costs.cost.modules, bounds.states, strict=True)}
    share = {(name, tp, cp): size[name] / (tp * cp) for name, tp, cp in bounds.work}
    for ranks in standings(costs.cost, space):
        one = replace(space, ranks=(ranks,))
        yield from islice(shapes(costs.cost, costs.cluster, one), most)
        yield from islice(shapes(costs.cost, costs.cluster, one, share), most)


def smallest_cluster(cost: RunCost, cluster: Cluster, space: Space) -> Cluster | None:
    """Return the smallest cluster of the same devices and links on which something fits; None: none up to a limit.

    Sizes are doubled until something fits, within a node first; then the numbers of nodes in between are tried.
    """

    def fits(nodes: int, per_node: int) -> Cluster | None:
        one = replace(cluster, nodes=nodes, per_node=per_node, name=_name(cluster, nodes, per_node))
        return one if can_fit(Costs(cost, one), space) else None

    most = min(MOST_DEVICES, cost.batch * sum(_most_ranks(module) for module in cost.modules))  # more would be idle
    per_node = 1
    while per_node < cluster.per_node:
        if found := fits(1, per_node):
            return found
        per_node *= 2
    nodes = 1
    while (nodes - 1) * cluster.per_node < most:
        if found := fits(nodes, cluster.per_node):
            low, high = nodes // 2, nodes  # low does not fit
            while high - low > 1:
                middle = (low + high) // 2
                if better := fits(middle, cluster.per_node):
                    found, high = better, middle
                else:
                    low = middle
            return found
        nodes *= 2
    return None


def _most_ranks(module: ModuleCost) -> int:
    return max(module.tp_sizes) * max(module.cp_sizes) * min(MOST_STAGES, len(module.layers))


def _name(cluster: Cluster, nodes: int, per_node: int) -> str:
    return f"{nodes}x{per_node}x{cluster.device.name}" if nodes > 1 else f"{per_node}x{cluster.device.name}"
