"""The machines: nodes, their devices, and the links between them; no torch.

Cluster.parse("2x8xH100")        # 2 nodes of 8 GPUs, from the catalogue
Cluster.parse("cluster.yaml")    # as described, or as `cornstarch doctor --measure` measured it
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from statistics import NormalDist

from cornstarch.errors import ConfigError
from cornstarch.plan.communication import BETWEEN_NODES, LINKS, Link, join_links
from cornstarch.plan.data_statistics import write_text

KEPT_FREE = 0.05
"""The fraction of a device's memory that plans leave free: driver, libraries, fragmentation."""
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
"""Data types of matrix multiplications; tf32 must be enabled by the program."""
REACHED = ("products", "attention", "attention_backward", "memory")
"""What programs reach a fraction of: the peak rate in products of matrices and attention, the memory's bandwidth."""
ERRORS = (*REACHED, "layers", "links")
"""What measurements have an error of: the fractions that are reached, layers of a run, and links inside a node."""
MOST_IN_A_NODE = 16
"""More GPUs than this in a node are treated as a typo in a name; a file may describe larger nodes."""

_NAME = re.compile(r"(?:(\d{1,6})\s*[x×*]\s*)?(?:(\d{1,6})\s*[x×*]\s*)?(\S.*)", re.IGNORECASE)


@dataclass(frozen=True)
class Device:
    """The device of one rank."""

    name: str
    memory: int
    """Bytes that programs see: a little less than advertised, because of the driver and error correction."""
    has_bf16: bool = True
    """Whether the hardware computes in bfloat16."""
    flops: float | None = None
    """Peak FLOP/s of dense half-precision matrices accumulated in float32; None: unknown."""
    rates: tuple[tuple[str, float], ...] = ()
    """Known FLOP/s by data type (`DTYPES`)."""
    bandwidth: float | None = None
    """Bytes per second read from or written to its memory; None: unknown."""
    link: str | None = None
    """The link between several of them in a node, by its name in `cornstarch.plan.communication.LINKS`."""
    full_power: float | None = None
    """Watts of the vendor's limit; None: unknown."""
    power: float | None = None
    """Watts that it is limited to. Default: the vendor's limit."""
    spread: float = 0.0
    """The standard deviation of the speed of equal devices, relative to the mean."""
    slowdown: float = 0.0
    """How much slower it computes while it communicates: 0.19 is 19 % more time."""
    reached: tuple[tuple[str, float], ...] = ()
    """The fractions of its peak figures that programs reach (`REACHED`). Default: those of docs/costs.md."""

    @property
    def is_cpu(self) -> bool:
        """Whether the device is a machine's cores, which also move the messages between ranks of that machine."""
        return self.name == "cpu"

    @property
    def clock(self) -> float:
        """The clock that the power limit leaves to products of matrices, relative to that at the vendor's limit.

        Power grows with the clock and the square of the voltage, which grows with the clock: with its third power.
        """
        if self.power is None or self.full_power is None:
            return 1.0
        return min(1.0, (self.power / self.full_power) ** (1 / 3))

    def find_slowest(self, devices: int) -> float:
        """Return the time that the slowest of this many devices takes, relative to the mean of all."""
        # The expected maximum of normal variables, by Blom's formula; one device is as fast as the mean.
        if devices < 2 or not self.spread:
            return 1.0
        return 1 + self.spread * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))

    @property
    def usable(self) -> int:
        """Bytes that plans may use."""
        return int(self.memory * (1 - KEPT_FREE))

    def flops_of(self, dtype: str) -> float:
        """Return the FLOP/s of matrices in a data type."""
        if dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}.")
        known = dict(self.rates)
        if self.flops is not None:
            known = {**({"bf16": self.flops} if self.has_bf16 else {}), "fp16": self.flops, **known}
        # Types without hardware support run in a wider one, at its speed: fp8 in half precision, others in fp32.
        for one in (dtype, *(("bf16", "fp16") if dtype == "fp8" else ()), "fp32"):
            if one in known:
                return known[one]
        raise ConfigError(
            f"How quickly {self.name} multiplies in {dtype} is not known. Describe it in a file with `device.flops`, "
            "or measure it: cornstarch doctor --measure."
        )


# GiB as torch reports them (`total_memory`), rounded down. GB/s of the memory, and TFLOP/s in fp32, tf32, half
# precision and fp8, from the vendors' data sheets, without sparsity (docs/clusters.md has the sources).
_Row = tuple[str, float, float, float, float | None, float, float | None, str]
_ROWS: list[_Row] = [
    ("B200", 178.0, 8000, 80, 1100, 2250, 4500, "NVLink 5"),
    ("H200", 139.8, 4800, 67, 494.5, 989, 1979, "NVLink 4"),
    ("H100", 79.1, 3350, 67, 494.5, 989, 1979, "NVLink 4"),
    ("A100-80", 79.1, 2039, 19.5, 156, 312, None, "NVLink 3"),
    ("A100-40", 39.4, 1555, 19.5, 156, 312, None, "NVLink 3"),
    ("L40S", 44.4, 864, 91.6, 183, 362, 733, "PCIe 4"),
    ("L4", 22.0, 300, 30.3, 60, 121, 242.5, "PCIe 4"),
    ("A40", 44.4, 696, 37.4, 74.8, 149.7, None, "PCIe 4"),
    ("A10", 22.0, 600, 31.2, 62.5, 125, None, "PCIe 4"),
    ("RTX-A6000", 47.4, 768, 38.7, 77.4, 154.8, None, "PCIe 4"),
    ("RTX-5090", 31.3, 1792, 104.8, 104.8, 209.5, 419, "PCIe 5"),
    ("RTX-4090", 23.5, 1008, 82.6, 82.6, 165.2, 330.3, "PCIe 4"),
    ("RTX-3090", 23.5, 936, 35.6, 35.6, 71, None, "PCIe 4"),
    ("V100-32", 31.7, 900, 15.7, None, 125, None, "NVLink 2"),
    ("V100-16", 15.7, 900, 15.7, None, 125, None, "NVLink 2"),
    ("T4", 14.5, 320, 8.1, None, 65, None, "PCIe 3"),
    ("MI300X", 191.0, 5300, 163.4, 653.7, 1307.4, 2614.9, "Infinity Fabric"),
]  # fmt: skip
# Slower cards of the same name, by another word in their names. Bridges join only two of them: a node has PCIe.
_OTHER_ROWS: dict[tuple[str, str], _Row] = {
    ("H100", "pcie"): ("H100-PCIe", 79.1, 2000, 51, 378, 756, 1513, "PCIe 5"),
    ("H100", "nvl"): ("H100-NVL", 93.0, 3900, 60, 417.5, 835, 1670.5, "PCIe 5"),
    ("A100-80", "pcie"): ("A100-80-PCIe", 79.1, 1935, 19.5, 156, 312, None, "PCIe 4"),
    ("A100-40", "pcie"): ("A100-40-PCIe", 39.4, 1555, 19.5, 156, 312, None, "PCIe 4"),
}
_WITHOUT_BF16 = ("V100-32", "V100-16", "T4")
# Sinha et al., "Not All GPUs Are Created Equal" (SC'22): 8 % variation on average among equal GPUs of a cluster, about
# the range of 300 devices with this standard deviation.
_SPREAD = 0.014
# "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning" (arXiv 2507.03114): on
# average; collectives take multiprocessors, memory bandwidth and power.
_SLOWDOWN = 0.189
# Watts, from the same data sheets.
_POWER = {
    "B200": 1000, "H200": 700, "H100": 700, "H100-PCIe": 350, "H100-NVL": 400, "A100-80": 400, "A100-40": 400,
    "A100-80-PCIe": 300, "A100-40-PCIe": 250, "L40S": 350, "L4": 72, "A40": 300, "A10": 150, "RTX-A6000": 300,
    "RTX-5090": 575, "RTX-4090": 450, "RTX-3090": 350, "V100-32": 300, "V100-16": 300, "T4": 70, "MI300X": 750,
}  # fmt: skip


def _build_device(row: _Row) -> Device:
    name, gibibytes, memory, fp32, tf32, half, fp8, link = row
    has_bf16 = name not in _WITHOUT_BF16
    tera = {"fp32": fp32, "tf32": tf32, "bf16": half if has_bf16 else None, "fp16": half, "fp8": fp8}
    rates = tuple((dtype, rate * 1e12) for dtype, rate in tera.items() if rate is not None)
    known = Device(name, int(gibibytes * 2**30), has_bf16, half * 1e12, rates, memory * 1e9, link)
    return replace(known, full_power=_POWER[name], spread=_SPREAD, slowdown=_SLOWDOWN)


DEVICES = {row[0]: _build_device(row) for row in _ROWS}
"""The catalogue."""
_VARIANTS = {key: _build_device(row) for key, row in _OTHER_ROWS.items()}

# Measured on one core of a server: an AMD EPYC of family 25, model 17 (docs/clusters.md describes how).
_CORE_RATES = {"fp32": 94e9, "bf16": 200e9}
_CORE_BANDWIDTH = 19.6e9


def device(name: str) -> Device:
    """Return a device of the catalogue by any spelling of its name; `cpu` is this machine."""
    wanted = _normalize(name)
    if wanted == "cpu":
        return this_cpu()
    known = {_normalize(one): found for one, found in DEVICES.items()}
    without_size = _normalize(re.sub(r"\d+\s*gi?b?\b", "", name.lower()))
    for plain in (wanted, f"rtx{wanted}", without_size):  # `4090` is an RTX-4090, `H100 80GB` an H100
        if plain in known:
            found = known[plain]
            variants = (one for (base, word), one in _VARIANTS.items() if base == found.name and word in name.lower())
            return next(variants, found)
    several = [found.name for plain, found in known.items() if wanted and plain.startswith(wanted)]
    close = several or [known[plain].name for plain in get_close_matches(wanted, list(known), n=1, cutoff=0.5)]
    advice = f"Did you mean {' or '.join(close)}?" if close else f"Known are {', '.join([*DEVICES, 'cpu'])}."
    raise ConfigError(f"There is no GPU {name!r} in the catalogue. {advice}")


def _normalize(name: str) -> str:
    """Return a name without vendor words and separators: `NVIDIA A100 80GB` is `a10080`."""
    optional = r"nvidia|geforce|amd|instinct|tesla|sxm\d?|pcie|\bnvl\b|hbm\d?e?|(?<=\d)\s*gi?b?\b"
    return re.sub(r"[^a-z0-9]", "", re.sub(optional, "", name.lower()))


def find_device_or_unknown(name: str) -> Device:
    """Return a device of the catalogue, or one with nothing but its name."""
    try:
        return device(name)
    except ConfigError:
        return Device(name, 0)


def replace_rates(one: Device, rates: Mapping[str, float]) -> Device:
    """Return a device with these FLOP/s by data type, and none from the catalogue."""
    half = [rate for dtype, rate in rates.items() if dtype in ("bf16", "fp16")]
    return replace(one, rates=tuple(rates.items()), flops=max(half, default=None))


def peak_flops(name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a device by its driver's name; None if unknown, or for fp32, which may run as TF32."""
    found = find_device_or_unknown(name)
    if precision not in ("bf16", "fp16") or (precision == "bf16" and not found.has_bf16):
        return None
    return found.flops


def this_cpu(processes: int = 1) -> Device:
    """Return the equal part of this machine's CPU for each process; a core is as fast as that of a measured server."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    part = cores / processes
    rates = tuple((dtype, rate * part) for dtype, rate in _CORE_RATES.items())
    memory = int(psutil.virtual_memory().total) // processes
    return Device("cpu", memory, False, None, rates, _CORE_BANDWIDTH * part, "loopback")


def find_node_link(one: Device) -> Link:
    """Return the link between several of a device in a node, by the catalogue; PCIe 4 where that is not known."""
    return LINKS[one.link or "PCIe 4"]


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices. Ranks are numbered node by node."""

    nodes: int
    per_node: int
    """Devices, and so ranks, in each node."""
    device: Device
    inside: Link
    """Between the devices of a node."""
    between: Link
    """Between devices of different nodes."""
    disk: float | None = None
    """Bytes per second that a node writes; None: unknown."""
    name: str = ""
    disk_read: float | None = None
    """Bytes per second that a node reads; None: unknown."""
    measured: bool = False
    """Whether the figures were measured, rather than taken from data sheets."""
    errors: tuple[tuple[str, float], ...] = ()
    """The relative standard errors of measured figures (`ERRORS`), from which predictions get an error bar."""
    parts: tuple[Cluster, ...] = ()
    """Its kinds of nodes, in the order of ranks, if it has several (`cornstarch.plan.mixed_cluster`)."""

    def __post_init__(self) -> None:
        for what, count in (("nodes", self.nodes), ("per_node", self.per_node)):
            if count < 1:
                raise ConfigError(f"{what} = {count}: a cluster has at least 1.")

    @staticmethod
    def parse(text: str) -> Cluster:
        """Return the cluster of a name (`8xH200`, `2x8xH100`, `2xcpu`) or of a YAML file."""
        text = text.strip()
        if text.lower().endswith((".yaml", ".yml")) or os.path.isfile(text):
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
        return replace(Cluster.of(one, nodes, per_node), name=text)

    @staticmethod
    def of(one: Device, nodes: int, per_node: int) -> Cluster:
        """Return nodes of a device with the links of the catalogue."""
        name = format_cluster_name(one, nodes, per_node)
        return Cluster(nodes, per_node, one, find_node_link(one), LINKS[BETWEEN_NODES], name=name)

    def resize(self, nodes: int, per_node: int) -> Cluster:
        """Return another number of the same devices and links."""
        if self.parts:
            if (nodes, per_node) == (self.nodes, self.per_node):
                return self
            raise ConfigError(
                f"{self.name}: a cluster of several kinds of nodes has the {self.nodes} × {self.per_node} devices that "
                f"its file lists, not {nodes} × {per_node}."
            )
        return replace(self, nodes=nodes, per_node=per_node, name=format_cluster_name(self.device, nodes, per_node))

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    def link(self, ranks: Sequence[int]) -> Link:
        """Return the link that a group of ranks communicates over; for a single rank, the link inside a node.

        A group with several ranks in every node of its own sends over the network cards of all of them (`join_links`).
        """
        different = set(ranks)
        lowest, highest = min(different, default=0), max(different, default=0)
        if lowest < 0 or highest >= self.devices:
            outside = lowest if lowest < 0 else highest
            raise ConfigError(f"rank {outside}: {self.name or 'the cluster'} has ranks 0 to {self.devices - 1}.")
        if lowest // self.per_node == highest // self.per_node:
            return self.inside
        members = Counter(rank // self.per_node for rank in different)
        return join_links(self.inside, self.between, len(members), min(members.values()), one_ring=self.device.is_cpu)

    def describe(self) -> str:
        """Return the cluster on one line."""
        from cornstarch.plan.cluster_file import format_quantity

        if self.parts:
            return "; ".join(part.describe() for part in self.parts)
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''} of {self.per_node} × {self.device.name}"
        words = [nodes, f"{self.device.memory / 2**30:.1f} GiB each"]
        links = [(self.per_node, self.inside, "inside a node"), (self.nodes, self.between, "between nodes")]
        rates = [(format_quantity(float(f"{link.bandwidth:.3g}"), "B/s"), where) for n, link, where in links if n > 1]
        return ", ".join([*words, *(f"{rate} {where}" for rate, where in rates)])


def resize_cluster(cluster: Cluster, devices: int) -> Cluster:
    """Return a cluster with this number of the same devices: whole nodes, or a part of one."""
    nodes, left = divmod(devices, cluster.per_node)
    if left and nodes:
        raise ConfigError(
            f"{devices} devices do not fill nodes of {cluster.per_node}; {nodes * cluster.per_node} and "
            f"{(nodes + 1) * cluster.per_node} do."
        )
    return cluster.resize(nodes, cluster.per_node) if nodes else cluster.resize(1, devices)


def format_cluster_name(device: Device, nodes: int, per_node: int) -> str:
    """Return the name of a cluster of such a size: `2x8xH100`."""
    return f"{nodes}x{per_node}x{device.name}" if nodes > 1 else f"{per_node}x{device.name}"


def read_cluster(path: str | Path) -> Cluster:
    """Return the cluster that a YAML file describes; an error names every mistake with its line."""
    from cornstarch.plan.cluster_file import read

    return read(Path(path))


def write_cluster(path: str | Path, cluster: Cluster) -> None:
    """Write a YAML file that `read_cluster` reads as the same cluster."""
    from cornstarch.plan.cluster_file import as_yaml

    write_text(path, as_yaml(cluster))
