"""`parallel: auto`: choose the plan of a run when it starts, once for all of its processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cornstarch.config import RunConfig
from cornstarch.config.config_file import plan_sections, replace_sections
from cornstarch.errors import ConfigError
from cornstarch.plan.cluster import Cluster, Device, device, find_node_link, format_cluster_name, this_cpu
from cornstarch.plan.communication import BETWEEN_NODES, LINKS
from cornstarch.plan.predict import Prediction
from cornstarch.plan.search import SearchResult
from cornstarch.planner.search_run import WITHOUT_PIPELINE, cost_of, format_plan_file, plan_run
from cornstarch.report.plan_text import describe_auto_plan

if TYPE_CHECKING:
    import torch

    from cornstarch.plan.cost import RunCost


@dataclass(frozen=True)
class AutoPlan:
    """The plan that was chosen for a run."""

    config: RunConfig
    """The run with its plan."""
    text: str
    """The plan on one line."""
    file: str
    """The plan as YAML."""


def choose_plan(config: RunConfig, ranks: int, per_node: int, own: torch.device | None = None) -> AutoPlan:
    """Return the fastest plan that uses every process. All processes must call it; all get the plan of rank 0.

    Raises the same ConfigError in all of them if nothing fits.

    Args:
        config: The run, with `parallel: auto`.
        ranks: The number of processes.
        per_node: How many of them are on one machine.
        own: The device of this process. Default: the config's.
    """
    from cornstarch.parallel import distributed

    answer: dict[str, Any] = {}
    if distributed.rank() == 0:
        try:
            cluster = build_cluster(config, ranks, per_node, own)
            cost = cost_of(config, cluster, config.parallel.costs)
            found = plan_run(config, cluster, cost)
            if found.best is None:
                raise ConfigError(explain_failure(found, cluster))
            best = use_all_devices(found, config, cluster, cost)
            plan, file = plan_sections(best, config), format_plan_file(best, config, cluster)
            answer = {"plan": plan, "text": describe_auto_plan(best, cluster), "file": file}
        except ConfigError as error:  # the other ranks wait for an answer
            answer = {"wrong": str(error)}
    answer = distributed.broadcast_json(answer)
    if "wrong" in answer:
        raise ConfigError(answer["wrong"])
    return AutoPlan(replace_sections(config, answer["plan"]), answer["text"], answer["file"])


def use_all_devices(found: SearchResult, config: RunConfig, cluster: Cluster, cost: RunCost) -> Prediction:
    """Return the fastest plan that leaves no device idle: every started process must take part."""
    assert found.best is not None
    best = found.best.candidate
    if best.world == cluster.devices:
        return found.best
    simple = plan_run(config, cluster, cost, space=WITHOUT_PIPELINE)
    others = [one.prediction for one in (*found.runners_up, *simple.runners_up)]
    others = [one for one in (simple.best, *others) if one is not None and one.candidate.world == cluster.devices]
    if others:
        return min(others, key=lambda one: one.step)
    raise ConfigError(
        f"parallel: auto: no plan uses all {cluster.devices} processes. With {best.world} it would be: "
        f"{best.describe()}.\n  Start {best.world} processes, or let loop.batch_size = {config.loop.batch_size} be a "
        f"multiple of {cluster.devices}."
    )


def explain_failure(found: SearchResult, cluster: Cluster) -> str:
    """Explain why no plan fits, and what would help."""
    lines = [f"No plan of this run fits {cluster.name or 'the cluster'} ({cluster.describe()})."]
    lines += [f"  nearest: {one}" for one in found.refused[:3]]
    if found.smallest is not None:
        lines.append(f"  The smallest cluster of these devices that would do: {found.smallest.name}.")
    else:
        lines.append("  No cluster of these devices would do, however large.")
    advice = "a smaller data.max_length, fewer trained weights (`train: lora`), or devices with more memory"
    return "\n".join([*lines, f"  Or try {advice}."])


# ------------------------------------------------------------------------------------------------ this machine


def build_cluster(config: RunConfig, ranks: int, per_node: int, own: torch.device | None = None) -> Cluster:
    """Return the cluster of a run's processes: the config's, else this machine with the catalogue's figures."""
    if ranks % per_node:
        raise ConfigError(
            f"parallel: auto: {ranks} processes, {per_node} on this machine: every machine must have equally many.\n"
            "  Write the plan yourself (docs/layout.md), or start equally many on each machine."
        )
    nodes = ranks // per_node
    if config.parallel.cluster is not None:
        named = Cluster.parse(config.parallel.cluster)
        return replace(named, nodes=nodes, per_node=per_node, name=format_cluster_name(named.device, nodes, per_node))
    from cornstarch.parallel.device import choose_placement

    place = choose_placement(str(own or config.device), "auto").device
    one = _describe_gpu(place) if place.type == "cuda" else this_cpu(per_node)
    return Cluster(
        nodes, per_node, one, find_node_link(one), LINKS[BETWEEN_NODES], name=format_cluster_name(one, nodes, per_node)
    )


def _describe_gpu(place: torch.device) -> Device:
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
