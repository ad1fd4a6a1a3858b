"""`parallel: auto`: which plan a run has, decided when it is started, once for all of its processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cornstarch.errors import ConfigError
from cornstarch.plan.cluster import Cluster, Device, device, joined, this_cpu
from cornstarch.plan.compared import size_name
from cornstarch.plan.links import BETWEEN_NODES, LINKS
from cornstarch.plan.predict import Prediction
from cornstarch.plan.search import Found
from cornstarch.report.plan_words import sentence
from cornstarch.train.config import RunConfig
from cornstarch.train.planning import WHOLE, cost_of, plan_file, plan_run, sections_of, with_sections

if TYPE_CHECKING:
    import torch

    from cornstarch.plan.cost import RunCost


@dataclass(frozen=True)
class Decision:
    """What was decided."""

    config: RunConfig
    """The run, with its plan."""
    text: str
    """The decision on one line."""
    file: str
    """The plan as YAML."""


def decide(config: RunConfig, ranks: int, per_node: int, own: torch.device | None = None) -> Decision:
    """Return the plan for the processes that there are; all of them must call it, and all get the first one's.

    Raises the same ConfigError in all of them if nothing fits.

    Args:
        config: The run, with `parallel: auto`.
        ranks: How many processes there are.
        per_node: How many of them are on one machine.
        own: This process's device. Default: the config's.
    """
    from cornstarch.parallel import processes

    said: dict[str, Any] = {}
    if processes.rank() == 0:
        try:
            best, cluster = choose(config, ranks, per_node, own)
            plan, file = sections_of(best, config), plan_file(best, config, cluster)
            said = {"plan": plan, "text": sentence(best, cluster), "file": file}
        except ConfigError as error:  # the others wait for an answer
            said = {"wrong": str(error)}
    said = processes.broadcast_data(said)
    if "wrong" in said:
        raise ConfigError(said["wrong"])
    return Decision(with_sections(config, said["plan"]), said["text"], said["file"])


def choose(config: RunConfig, ranks: int, per_node: int, own: torch.device | None = None) -> tuple[Prediction, Cluster]:
    """Return the fastest plan that uses every process, and the cluster that it was chosen for."""
    cluster = this_cluster(config, ranks, per_node, own)
    cost = cost_of(config, cluster, config.parallel.costs)
    found = plan_run(config, cluster, cost)
    if found.best is None:
        raise ConfigError(impossible(found, cluster))
    return using_all(found, config, cluster, cost), cluster


def using_all(found: Found, config: RunConfig, cluster: Cluster, cost: RunCost) -> Prediction:
    """Return the fastest plan that leaves no device idle: processes that are there must have something to do."""
    assert found.best is not None
    best = found.best.choice
    if best.world == cluster.devices:
        return found.best
    simple = plan_run(config, cluster, cost, space=WHOLE)
    others = [one.prediction for one in (*found.runners_up, *simple.runners_up)]
    others = [one for one in (simple.best, *others) if one is not None and one.choice.world == cluster.devices]
    if others:
        return min(others, key=lambda one: one.step)
    raise ConfigError(
        f"parallel: auto: no plan was found that gives all {cluster.devices} processes something to do. With "
        f"{best.world} it would be: {best.describe()}.\n  Start {best.world} processes, or let loop.batch_size = "
        f"{config.loop.batch_size} be a multiple of {cluster.devices}."
    )


def impossible(found: Found, cluster: Cluster) -> str:
    """Return why a run has no plan, and what would help."""
    lines = [f"No plan of this run fits {cluster.name or 'the cluster'} ({cluster.describe()})."]
    lines += [f"  nearest: {one}" for one in found.refused[:3]]
    if found.smallest is not None:
        lines.append(f"  The smallest cluster of these devices that would do: {found.smallest.name}.")
    else:
        lines.append("  No cluster of these devices would do, however large.")
    advice = "a smaller data.max_length, fewer trained weights (`train: lora`), or devices with more memory"
    return "\n".join([*lines, f"  Or try {advice}."])


# ------------------------------------------------------------------------------------------------ this machine


def this_cluster(config: RunConfig, ranks: int, per_node: int, own: torch.device | None = None) -> Cluster:
    """Return what the processes of a run are on: what the config names, else this machine, by the catalogue."""
    if ranks % per_node:
        raise ConfigError(
            f"parallel: auto: {ranks} processes, {per_node} on this machine: it plans for machines with equally many.\n"
            "  Say the plan yourself (docs/layout.md), or start equally many on each."
        )
    nodes = ranks // per_node
    if config.parallel.cluster is not None:
        named = Cluster.parse(config.parallel.cluster)
        return replace(named, nodes=nodes, per_node=per_node, name=size_name(named.device, nodes, per_node))
    from cornstarch.train.precision import choose_placement

    place = choose_placement(str(own or config.device), "auto").device
    one = _this_gpu(place) if place.type == "cuda" else this_cpu(per_node)
    return Cluster(nodes, per_node, one, joined(one), LINKS[BETWEEN_NODES], name=size_name(one, nodes, per_node))


def _this_gpu(place: torch.device) -> Device:
    import torch

    properties = torch.cuda.get_device_properties(place)
    try:
        known = device(properties.name)
    except ConfigError as error:
        raise ConfigError(
            f"parallel: auto: {error}\n  Measure this machine: cornstarch doctor --measure --output cluster.yaml; then "
            "parallel.cluster=cluster.yaml."
        ) from None
    return replace(known, memory=int(properties.total_memory))
