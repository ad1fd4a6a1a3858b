"""What a search is shown beside: the plan that a config has already, and clusters of other sizes; no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cornstarch.errors import ConfigError

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster, Device
    from cornstarch.plan.plan import Plan
    from cornstarch.plan.predict import Prediction


@dataclass(frozen=True)
class Own:
    """What the config itself says about `parallel`, predicted."""

    plan: Plan
    prediction: Prediction | None
    """None: it cannot be run on the cluster, or what it takes cannot be predicted."""
    trouble: str = ""
    """Why not."""


@dataclass(frozen=True)
class Scaled:
    """The best plan on a cluster of another size."""

    cluster: Cluster
    best: Prediction | None
    """None: nothing fits."""
    efficiency: float | None
    """Samples a second of a device, as a share of those on the smallest cluster that does."""


def resized(cluster: Cluster, devices: int) -> Cluster:
    """Return a cluster of so many of the same devices: whole nodes, or a part of one."""
    nodes, left = divmod(devices, cluster.per_node)
    if left and nodes:
        raise ConfigError(
            f"{devices} devices do not fill nodes of {cluster.per_node}; {nodes * cluster.per_node} and "
            f"{(nodes + 1) * cluster.per_node} do."
        )
    nodes, each = (nodes, cluster.per_node) if nodes else (1, devices)
    return replace(cluster, nodes=nodes, per_node=each, name=size_name(cluster.device, nodes, each))


def size_name(device: Device, nodes: int, per_node: int) -> str:
    """Return what a cluster of such a size is called."""
    return f"{nodes}x{per_node}x{device.name}" if nodes > 1 else f"{per_node}x{device.name}"
