"""What the machines are: nodes, their devices, and what joins them; no torch.

Cluster.parse("2x8xH100")        # 2 nodes of 8 GPUs, from the catalogue
Cluster.parse("cluster.yaml")    # as described, or as `cornstarch doctor --measure` found it
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cornstarch.errors import ConfigError
from cornstarch.plan.devices import DEVICES, DTYPES, KEPT_FREE, Device, device, peak_flops, this_cpu
from cornstarch.plan.links import BETWEEN_NODES, LINKS, Link

__all__ = [
    "DEVICES", "DTYPES", "KEPT_FREE", "Cluster", "Device", "Link", "device", "peak_flops", "read_cluster", "this_cpu",
    "write_cluster",
]  # fmt: skip

MOST_IN_A_NODE = 16
"""More GPUs than this in a node are taken for a mistake in a name; a file may say otherwise."""

_NAME = re.compile(r"(?:(\d{1,6})\s*[x×*]\s*)?(?:(\d{1,6})\s*[x×*]\s*)?(\S.*)", re.IGNORECASE)
_FILE = (".yaml", ".yml")


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices. Ranks are numbered node by node."""

    nodes: int
    per_node: int
    """Devices, and so ranks, in each node."""
    device: Device
    inside: Link
    """What joins the devices of a node."""
    between: Link
    """What joins a device to those of other nodes."""
    disk: float | None = None
    """Bytes a second that a node writes; None: unknown."""
    name: str = ""
    disk_read: float | None = None
    """Bytes a second that a node reads; None: unknown."""
    measured: bool = False
    """Whether the figures are what programs reach, and not what makers promise at best."""

    def __post_init__(self) -> None:
        for what, count in (("nodes", self.nodes), ("per_node", self.per_node)):
            if count < 1:
                raise ConfigError(f"{what} = {count}: a cluster has at least 1.")

    @staticmethod
    def parse(text: str) -> Cluster:
        """Return the cluster that a name (`8xH200`, `2x8xH100`, `2xcpu`) or the path of a YAML file stands for."""
        text = text.strip()
        if text.lower().endswith(_FILE) or os.path.isfile(text):
            return read_cluster(text)
        found = _NAME.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"cluster {text!r}: expected a name such as 8xH200 (one node of 8), 2x8xH100 (two nodes) or 2xcpu, or "
                "the path of a YAML file."
            )
        first, second, name = found.groups()
        nodes, per_node = (int(first), int(second)) if second else (1, int(first or 1))
        if not (nodes and per_node):
            raise ConfigError(f"cluster {text!r}: 0 {'devices in a node' if nodes else 'nodes'}; expected at least 1.")
        try:
            one = device(name)
        except ConfigError as error:
            raise ConfigError(f"cluster {text!r}: {error}") from None
        if one.is_cpu:
            one = this_cpu(per_node)
        elif per_node > MOST_IN_A_NODE:
            split = f"{per_node // 8}x8x{name}" if per_node % 8 == 0 and not second else f"2x8x{name}"
            raise ConfigError(
                f"cluster {text!r}: {per_node} GPUs in one node. The first of two numbers counts nodes: "
                f"write {split}, or describe such a node in a YAML file."
            )
        return Cluster(nodes, per_node, one, joined(one), LINKS[BETWEEN_NODES], name=text)

    @property
    def devices(self) -> int:
        """How many devices, and so ranks, there are."""
        return self.nodes * self.per_node

    def link(self, ranks: Sequence[int]) -> Link:
        """Return the slowest link that a group of ranks crosses.

        Two ranks of different nodes cross what is between nodes; two of one node what is inside. One rank alone crosses
        nothing, and is given what is inside.
        """
        different = set(ranks)
        lowest, highest = min(different, default=0), max(different, default=0)
        if lowest < 0 or highest >= self.devices:
            outside = lowest if lowest < 0 else highest
            raise ConfigError(f"rank {outside}: {self.name or 'the cluster'} has ranks 0 to {self.devices - 1}.")
        if lowest // self.per_node == highest // self.per_node:
            return self.inside
        if len({rank // self.per_node for rank in different}) == len(different):  # no two of them in one node
            return self.between
        return min(self.between, self.inside, key=lambda link: link.bandwidth)

    def describe(self) -> str:
        """Return what it is on one line."""
        from cornstarch.plan.quantities import written

        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''} of {self.per_node} × {self.device.name}"
        words = [nodes, f"{self.device.memory / 2**30:.1f} GiB each"]
        links = [("inside a node", self.inside)] * (self.per_node > 1) + [("between nodes", self.between)] * (
            self.nodes > 1
        )
        return ", ".join([*words, *(f"{written(_rounded(link.bandwidth), 'B/s')} {where}" for where, link in links)])


def joined(one: Device) -> Link:
    """Return what joins several of a device in a node, by the catalogue; PCIe 4 where that is not known."""
    return LINKS[one.link or "PCIe 4"]


def read_cluster(path: str | Path) -> Cluster:
    """Return the cluster that a YAML file describes; every mistake in it is told, with its line."""
    from cornstarch.plan.cluster_file import read

    return read(Path(path))


def write_cluster(path: str | Path, cluster: Cluster) -> None:
    """Write a YAML file that `read_cluster` reads as the same cluster."""
    from cornstarch.plan.cluster_file import as_yaml

    try:
        Path(path).write_text(as_yaml(cluster), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
