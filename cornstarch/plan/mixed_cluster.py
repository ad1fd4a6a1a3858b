"""Clusters of several kinds of nodes: what a plan that spans kinds is priced with, and the search over kinds; no torch.

Ranks of a plan wait for one another in every step. A plan over several kinds is therefore priced with the slowest pass
of each layer on any of them, with the least memory, and with the slowest links. A plan may also leave kinds idle: every
set of kinds is searched, one kind alone with its own figures. Stages are not assigned to kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import combinations
from math import gcd
from typing import TYPE_CHECKING, Any

from cornstarch.errors import ConfigError
from cornstarch.plan.cluster import DTYPES, Cluster, Device
from cornstarch.plan.communication import COLLECTIVES, Link
from cornstarch.plan.search import RUNNERS_UP, RunnerUp, SearchResult, search

if TYPE_CHECKING:
    from cornstarch.plan.candidates import SearchSpace
    from cornstarch.plan.cost import LayerCost, ModuleCost, RunCost
    from cornstarch.plan.predict import Prediction

MOST_KINDS = 4
_TIMES = ("forward", "input_gradient", "weight_gradient", "again")


def combine_clusters(parts: Sequence[Cluster], name: str = "") -> Cluster:
    """Return a cluster of several kinds of nodes, with the figures that plans over all of them are priced with.

    Where nodes differ in size, a part of a node counts as a node: links between parts are priced as between nodes.
    """
    per_node = reduce(gcd, (part.per_node for part in parts))
    nodes = sum(part.devices for part in parts) // per_node
    inside = combine_links([part.inside for part in parts])
    between = combine_links([part.between for part in parts])
    name = name or " + ".join(part.name for part in parts)
    measured, device = all(part.measured for part in parts), combine_devices(parts)
    return Cluster(nodes, per_node, device, inside, between, name=name, measured=measured, parts=(*parts,))


def combine_links(links: Sequence[Link]) -> Link:
    """Return a link as slow as the slowest of several, for each kind of message."""
    kinds = [kind for kind in COLLECTIVES if any(dict(link.collectives).get(kind) for link in links)]
    each = [(kind, combine_links([dict(link.collectives).get(kind, link) for link in links])) for kind in kinds]
    bandwidth = min(link.bandwidth * link.reached for link in links)
    return Link(bandwidth, max(link.latency for link in links), tuple(each))


def combine_devices(parts: Sequence[Cluster]) -> Device:
    """Return the least memory and bandwidth of several kinds; FLOP/s are their mean, of which MFU is a fraction."""
    devices, many = [part.device for part in parts], sum(part.devices for part in parts)
    rates = {}
    for dtype in DTYPES:
        try:
            rates[dtype] = sum(part.devices * part.device.flops_of(dtype) for part in parts) / many
        except ConfigError:  # one of them has no figure
            continue
    known = [one.bandwidth for one in devices if one.bandwidth is not None]
    return Device(
        " + ".join(dict.fromkeys(one.name for one in devices)),
        min(one.memory for one in devices),
        has_bf16=all(one.has_bf16 for one in devices),
        rates=tuple(rates.items()),
        bandwidth=min(known) if len(known) == len(devices) else None,
        spread=max(one.spread for one in devices),
        slowdown=max(one.slowdown for one in devices),
    )


def combine_costs(costs: Sequence[RunCost]) -> RunCost:
    """Return the costs of a run on several kinds of devices: of each pass of each layer, the slowest."""
    return replace(
        costs[0],
        modules=_combine_modules([one.modules for one in costs]),
        eager=_combine_modules([one.eager for one in costs]),
        gathered=_combine_modules([one.gathered for one in costs]),
        parts=(*costs,),
    )


def _combine_modules(every: Sequence[tuple[ModuleCost, ...]]) -> tuple[ModuleCost, ...]:
    combined = []
    for modules in zip(*every, strict=True):
        layers = zip(*(module.layers for module in modules), strict=True)
        combined.append(replace(modules[0], layers=tuple(map(_combine_layers, layers))))
    return tuple(combined)


def _combine_layers(layers: Sequence[LayerCost]) -> LayerCost:
    slowest: dict[str, Any] = {name: max(getattr(one, name) or 0.0 for one in layers) for name in _TIMES}
    if layers[0].again is None:
        slowest.pop("again")
    return replace(layers[0], **slowest)


def list_kind_sets(cluster: Cluster, cost: RunCost) -> Iterator[tuple[Cluster, RunCost]]:
    """Yield every set of the kinds of a cluster, all of them first, with the costs of a run on it."""
    if len(cost.parts) != len(cluster.parts):
        raise ConfigError(f"{cluster.name} has several kinds of devices, and the costs are those of one.")
    kinds = range(len(cluster.parts))
    for many in reversed(kinds):
        for chosen in combinations(kinds, many + 1):
            parts, costs = [cluster.parts[kind] for kind in chosen], [cost.parts[kind] for kind in chosen]
            if len(chosen) == 1:
                yield parts[0], costs[0]
            else:
                yield replace(combine_clusters(parts), parts=()), replace(combine_costs(costs), parts=())


def search_kinds(
    cost: RunCost, cluster: Cluster, space: SearchSpace | None = None, runners_up: int = RUNNERS_UP, polish: bool = True
) -> SearchResult:
    """Return what `search` does; of a cluster of several kinds of nodes, the fastest plan on any set of them."""
    if not cluster.parts:
        return search(cost, cluster, space, runners_up, polish)
    every = [(one, search(own, one, space, runners_up, polish)) for one, own in list_kind_sets(cluster, cost)]
    tried = sum(found.tried for _, found in every)
    fitting = [(one, found, found.best) for one, found in every if found.best is not None]
    if not fitting:
        smallest = [found.smallest for one, found in every[-len(cluster.parts) :] if found.smallest is not None]
        least = min(smallest, key=lambda one: one.devices, default=None)
        return SearchResult(None, (), every[0][1].refused, least, tried)
    where, found, best = min(fitting, key=lambda one: one[2].step)
    others = sorted(((one, other) for one, _, other in fitting if one is not where), key=lambda one: one[1].step)
    losers = [
        RunnerUp(_rescale_mfu(other, one, cluster, cost), f"+{other.step / best.step - 1:.1%}: on {one.name}")
        for one, other in others
    ]
    own = [replace(one, prediction=_rescale_mfu(one.prediction, where, cluster, cost)) for one in found.runners_up]
    kept = sorted([*losers, *own], key=lambda one: one.prediction.step)[:runners_up]
    used = "" if where.devices == cluster.devices else where.name
    best = _rescale_mfu(best, where, cluster, cost)
    return replace(found, best=best, runners_up=tuple(kept), tried=tried, used=used)


def _rescale_mfu(one: Prediction, where: Cluster, cluster: Cluster, cost: RunCost) -> Prediction:
    """Return a prediction with the MFU over all devices of a cluster, of which it uses some."""
    if one.mfu is None:
        return one
    used, every = (each.devices * each.device.flops_of(cost.precision) for each in (where, cluster))
    return replace(one, mfu=one.mfu * used / every)
