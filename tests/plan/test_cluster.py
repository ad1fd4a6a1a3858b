"""Clusters: names, files, links, and the fit of links to measured times."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cornstarch.errors import ConfigError
from cornstarch.plan.cluster import (
    DEVICES,
    DTYPES,
    Cluster,
    Device,
    Link,
    device,
    read_cluster,
    this_cpu,
    write_cluster,
)
from cornstarch.plan.cluster_file import Unit, format_quantity, parse_quantity
from cornstarch.plan.communication import LINKS

ROOT = Path(__file__).resolve().parents[2]
H100S = Cluster.parse("2x8xH100")
OWN = """\
nodes: 2
per_node: 4
device:
  name: Abacus 9
  memory: 64 GiB
  bandwidth: 2 TB/s
  flops: {fp32: 50 TFLOP/s, bf16: 400 TFLOP/s}
inside: {bandwidth: 200 GB/s, latency: 4 us}
between: {bandwidth: 200 Gbit/s, latency: 0.00001}
disk: 2e9
"""


def said(text: str, folder: Path) -> str:
    """Return the error of a file with that text."""
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        read_cluster(path)
    return str(error.value).replace(str(path), "cluster.yaml")


# ---------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "name", "inside"),
    [("8xH200", 1, 8, "H200", 450e9), ("2x8xH100", 2, 8, "H100", 450e9), ("4x8xA100-80G", 4, 8, "A100-80", 300e9),
     ("H100", 1, 1, "H100", 450e9), (" 2 x 8 x B200 ", 2, 8, "B200", 900e9), ("8×4090", 1, 8, "RTX-4090", 32e9),
     ("2x rtx 4090", 1, 2, "RTX-4090", 32e9), ("8xH100 PCIe", 1, 8, "H100-PCIe", 64e9), ("2XT4", 1, 2, "T4", 16e9),
     ("8xNVIDIA A100-PCIE-40GB", 1, 8, "A100-40-PCIe", 32e9), ("2xH100-NVL", 1, 2, "H100-NVL", 64e9),
     ("8xMI300X", 1, 8, "MI300X", 448e9)],
)  # fmt: skip
def test_parse_reads_names(text: str, nodes: int, per_node: int, name: str, inside: float) -> None:
    found = Cluster.parse(text)
    assert (found.nodes, found.per_node, found.device.name) == (nodes, per_node, name)
    assert found.devices == nodes * per_node
    assert found.inside.bandwidth == inside and found.between.bandwidth == 400e9 / 8
    assert not found.measured and found.name == text.strip()


def test_processes_divide_a_cpu() -> None:
    one, two = Cluster.parse("cpu"), Cluster.parse("2xcpu")
    assert two.device.memory == this_cpu().memory // 2 == one.device.memory // 2
    assert two.device.flops_of("fp32") == one.device.flops_of("fp32") / 2
    assert two.device.bandwidth is not None and one.device.bandwidth == 2 * two.device.bandwidth


@pytest.mark.parametrize(
    ("text", "words"),
    [("8xH1000", "cluster '8xH1000': There is no GPU 'H1000' in the catalogue. Did you mean H100?"),
     ("8xA100", "Did you mean A100-80 or A100-40?"), ("4xabacus", "Known are B200"), ("", "expected a name such as"),
     ("0xH100", "0 devices in a node"), ("0x8xH100", "0 nodes"), ("64xH100", "write 8x8xH100"),
     ("2x100xH100", "write 2x8xH100"),
     ("9" * 5000 + "xH100", "There is no GPU"), ("a" * 5000, "There is no GPU"),
     ("nothing.yaml", "no such file")],
)  # fmt: skip
def test_parse_refuses_wrong_names(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        Cluster.parse(text)


def test_describe_is_one_line() -> None:
    assert H100S.describe() == "2 nodes of 8 × H100, 79.1 GiB each, 450 GB/s inside a node, 50 GB/s between nodes"
    assert Cluster.parse("H200").describe() == "1 node of 1 × H200, 139.8 GiB each"


# ---------------------------------------------------------------------------------------------------- devices


def test_catalogue_rates_are_ordered_by_precision() -> None:
    for one in DEVICES.values():
        rates = dict(one.rates)
        assert rates["fp32"] < rates["fp16"] == one.flops
        assert ("bf16" in rates) == one.has_bf16
        assert rates["fp32"] <= rates.get("tf32", rates["fp32"]) < rates["fp16"] < rates.get("fp8", float("inf"))
        assert one.bandwidth is not None and 1e11 < one.bandwidth < 1e13
        assert one.link in LINKS


def test_catalogue_equals_its_documentation() -> None:
    page = (ROOT / "docs/clusters.md").read_text(encoding="utf-8")
    rows = {row.split("|")[1].strip(): row for row in page.splitlines() if row.startswith("|")}
    variants = [device(name) for name in ("H100 PCIe", "H100 NVL", "A100-80 PCIe", "A100-40 PCIe")]
    for one in [*DEVICES.values(), *variants]:
        cells = [cell.strip().replace(",", "") for cell in rows[one.name].split("|")[2:-1]]
        rates = {dtype: f"{rate / 1e12:g}" for dtype, rate in one.rates}
        expected = [f"{one.memory / 2**30:.1f}", f"{(one.bandwidth or 0) / 1e9:g}"]
        expected += [
            rates.get("fp32", "–"),
            rates.get("tf32", "–"),
            rates["fp16"],
            rates.get("fp8", "–"),
            one.link or "",
        ]
        assert cells[:7] == expected, one.name
        assert cells[7], one.name
    for name, link in LINKS.items():
        cells = [cell.strip() for cell in rows[name].split("|")[2:-1]]
        assert cells[:2] == [format_quantity(link.bandwidth, "B/s"), format_quantity(link.latency, "s")], name


def test_flops_of_an_unsupported_dtype_are_those_of_a_wider_one() -> None:
    assert device("T4").flops_of("bf16") == device("T4").flops_of("tf32") == 8.1e12
    assert device("T4").flops_of("fp16") == 65e12
    assert device("A100-80").flops_of("fp8") == 312e12
    assert Device("odd", 1, flops=7.0).flops_of("bf16") == 7.0
    with pytest.raises(ConfigError, match="odd multiplies in fp32 is not known"):
        Device("odd", 1, flops=7.0).flops_of("fp32")
    with pytest.raises(ConfigError, match="expected one of fp32, tf32"):
        device("T4").flops_of("int8")
    assert all(one.flops_of(dtype) > 1e12 for one in DEVICES.values() for dtype in DTYPES)


# ---------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize(
    ("ranks", "crossed"),
    [(range(8), "inside"), ((8, 15), "inside"), ((7, 8), "between"), ((0, 8), "between"), (range(9), "between"),
     ((3,), "inside"), ((3, 3), "inside"), ((), "inside")],
)  # fmt: skip
def test_link_of_a_group_depends_on_its_nodes(ranks: tuple[int, ...], crossed: str) -> None:
    assert H100S.link(ranks) is getattr(H100S, crossed)


def test_link_of_a_group_uses_all_cards_of_its_nodes() -> None:
    assert H100S.link(range(16)).rate == 8 * 50e9  # of 8 cards; a node's inside would carry more
    assert H100S.link((0, 1, 8, 9)).rate == 2 * 50e9
    assert H100S.link((0, 1, 2, 8)) is H100S.between  # the second node has one card in the group
    slow_inside = replace(H100S, inside=Link(1e9, 1e-6))
    assert slow_inside.link(range(16)).rate == pytest.approx(1e9 * 8 / 7)
    assert slow_inside.link((0, 8)) is slow_inside.between  # no two of them are in one node


def test_link_refuses_ranks_outside_the_cluster() -> None:
    with pytest.raises(ConfigError, match="rank 16: 2x8xH100 has ranks 0 to 15"):
        H100S.link((0, 16))
    with pytest.raises(ConfigError, match="nodes = 0"):
        replace(H100S, nodes=0)


# ---------------------------------------------------------------------------------------------------- files


def test_read_cluster_equals_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(OWN)
    found = Cluster.parse(str(path))
    assert found == read_cluster(path)
    own = Device("Abacus 9", 64 * 2**30, True, 400e12, (("fp32", 50e12), ("bf16", 400e12)), 2e12)
    assert found == Cluster(2, 4, own, Link(200e9, 4e-6), Link(25e9, 1e-5), 2e9, "mine")


def test_a_file_defaults_to_the_catalogue(tmp_path: Path) -> None:
    path = tmp_path / "ours.yml"
    path.write_text("per_node: 4\ndevice: H100\n")
    assert read_cluster(path) == replace(Cluster.parse("4xH100"), name="ours")
    path.write_text("per_node: 72\nnodes: 2\ndevice: {name: B200, memory: 160 GiB}\nbetween: PCIe 3\n")
    found = read_cluster(path)
    assert found.device == replace(DEVICES["B200"], memory=160 * 2**30)
    assert found.inside == LINKS["NVLink 5"] and found.between == LINKS["PCIe 3"]
    path.write_text("per_node: 2\ndevice: cpu\n")
    assert read_cluster(path).device == this_cpu(2)


LIMITED = "{name: H100, power: 500 W, spread: 0.02, slowdown: 0, reached: {products: 0.5, memory: 0.75}}"


def test_a_file_may_say_what_a_device_reaches(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(f"per_node: 8\ndevice: {LIMITED}\ninside: {{bandwidth: 400 GB/s, latency: 3 us, reached: 0.9}}\n")
    found = read_cluster(path)
    one = found.device
    assert (one.power, one.full_power, one.spread, one.slowdown) == (500.0, 700.0, 0.02, 0.0)
    assert dict(one.reached) == {"products": 0.5, "memory": 0.75}
    assert one.flops_of("bf16") == 989e12  # the peak, which MFU is relative to
    assert found.inside.rate == 360e9
    write_cluster(tmp_path / "again.yaml", found)
    assert replace(read_cluster(tmp_path / "again.yaml"), name="ours") == found


@pytest.mark.parametrize(
    ("device_text", "words"),
    [("{name: H100, power: 0 W}", "device.power = \"0 W\"\n  Expected a power such as `500 W`, more than 0."),
     ("{name: H100, power: 5 kg}", "The unit 'kg' is none of W, kW."),
     ("{name: H100, reached: {products: 1.2}}", "device.reached.products = 1.2\n  Expected a fraction such as 0.8"),
     ("{name: H100, reached: {matmul: 0.5}}", "There is no `matmul` in device.reached."),
     ("{name: H100, spread: -0.1}", "Expected a fraction such as 0.8, at least 0 and at most 1."),
     ("{name: Abacus, memory: 1e9, bandwidth: 1e9, flops: {fp32: 1e9}, power: 100}", "Give `full_power`.")],
)  # fmt: skip
def test_impossible_figures_of_a_device_are_reported(device_text: str, words: str, tmp_path: Path) -> None:
    assert words in said(f"per_node: 8\ndevice: {device_text}\n", tmp_path)


def test_a_power_limit_lowers_the_clock_by_its_cube_root() -> None:
    h100 = DEVICES["H100"]
    assert h100.clock == replace(h100, power=700.0).clock == replace(h100, power=900.0).clock == 1.0
    assert replace(h100, power=700.0 / 8).clock == pytest.approx(0.5)


def test_the_slowest_device_equals_that_of_random_ones() -> None:
    one = Device("toy", 1, spread=0.01)
    draw = random.Random(0)
    for many in (8, 64, 512):
        slowest = [max(draw.gauss(1.0, 0.01) for _ in range(many)) for _ in range(400)]
        assert one.find_slowest(many) == pytest.approx(sum(slowest) / 400, abs=1e-3)
    assert one.find_slowest(1) == replace(one, spread=0.0).find_slowest(512) == 1.0


@pytest.mark.parametrize("name", ["2x8xH100", "8xMI300X", "16xT4", "2xcpu"])
def test_a_written_file_reads_as_the_same_cluster(name: str, tmp_path: Path) -> None:
    each = (("all_reduce", Link(1.234e9, 5.678e-5)), ("send", Link(1 / 3, 0.0)))
    measured = replace(Cluster.parse(name), disk=1.5e9, disk_read=2.0, measured=True, inside=Link(2e9, 7e-6, each))  # type: ignore[arg-type]
    for cluster in (Cluster.parse(name), measured):
        write_cluster(tmp_path / "c.yaml", cluster)
        again = read_cluster(tmp_path / "c.yaml")
        assert replace(again, device=cluster.device) == cluster
        assert dict(again.device.rates) == dict(cluster.device.rates)
        assert (again.device.memory, again.device.bandwidth) == (cluster.device.memory, cluster.device.bandwidth)
        assert again.device.has_bf16 == cluster.device.has_bf16


MISTAKES = [
    ("nodes: 2\n", "nodes: 0\n", "cluster.yaml:1  nodes = 0\n  Expected a whole number of at least 1."),
    ("per_node: 4", "per_nod: 4", "cluster.yaml:2  per_nod = 4\n  There is no `per_nod`.\n  Did you mean `per_node`?"),
    ("per_node: 4\n", "", "per_node\n  It is missing. Expected a whole number of at least 1."),
    ("memory: 64 GiB", "memory: -3", 'cluster.yaml:5  device.memory = -3\n  Expected a size such as `80 GB`'),
    ("  memory: 64 GiB\n", "", "There is no GPU 'Abacus 9' in the catalogue."),
    ("  memory: 64 GiB\n", "", "Or describe it: memory is missing."),
    ("2 TB/s", "2 TB", "The unit 'TB' is none of B/s"),
    ("fp32: 50 TFLOP/s", "int8: 50 TFLOP/s", "device.flops.int8 = \"50 TFLOP/s\"\n  There is no `int8` in device."),
    ("fp32: 50 TFLOP/s", "fp32: fast", "cluster.yaml:7  device.flops.fp32 = fast\n  Expected operations a second"),
    ("latency: 4 us", "latency: -4 us", "inside.latency = \"-4 us\"\n  Expected a time such as `5 us`, at least 0."),
    (", latency: 4 us", "", "inside.latency\n  It is missing. Expected a time"),
    ("inside: {bandwidth: 200 GB/s, latency: 4 us}", "inside: NVLink 6", "Did you mean NVLink"),
    ("disk: 2e9", "disk: true", "disk = true\n  Expected bytes a second"),
    ("disk: 2e9", "disk: .inf", "Expected bytes a second such as `450 GB/s` or `400 Gbit/s`, more than 0."),
    ("disk: 2e9", "nodes: 3", "cluster.yaml:10  nodes is given twice; first in line 1."),
    ("disk: 2e9", "measured: perhaps", "measured = perhaps\n  Expected true or false."),
    ("disk: 2e9", "disk: [", "This is not YAML"),
    ("disk: 2e9", "disk: 2024-13-45", "this is not YAML"),
    ("disk: 2e9", "disk: 1e999", "more than 0."),
    ("disk: 2e9", f"disk: {10**400}", "Expected bytes a second"),
    ("disk: 2e9", "disk: 1e99999999", "Expected bytes a second"),
    ("disk: 2e9", "disk: " + "[" * 5000, "this is not YAML"),
    ("disk: 2e9", "1: 2", "There is no `1`."),
    ("disk: 2e9", "? [a]\n: 3", "This is not YAML"),
    ("nodes: 2", "nodes: 2.0", "nodes = 2.0\n  Expected a whole number"),
    (OWN, "", "the file = null\n  Expected a mapping with some of these keys: name, nodes, per_node"),
    (OWN, "- 1\n", "the file = [1]\n  Expected a mapping"),
    (OWN, "per_node: 8\n", "device\n  It is missing. Give a name of the catalogue"),
    (OWN, "per_node: 8\ndevice: H10\n", "cluster.yaml:2  device = H10\n  There is no GPU 'H10' in the catalogue."),
    (OWN, "per_node: 8\ndevice: {flops: {}}\n", "device.name\n  It is missing."),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "words"), MISTAKES)
def test_a_mistake_in_a_file_is_reported_with_its_line(old: str, new: str, words: str, tmp_path: Path) -> None:
    assert old in OWN
    assert words in said(OWN.replace(old, new), tmp_path)


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    message = said(OWN.replace("nodes: 2", "nodes: two").replace("64 GiB", "0").replace("4 us", "soon"), tmp_path)
    assert message.startswith("3 mistakes:\ncluster.yaml:1  nodes = two\n")
    assert "cluster.yaml:5  device.memory = 0" in message and "cluster.yaml:8  inside.latency = soon" in message


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_cluster(tmp_path / "latin.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_cluster(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_cluster(tmp_path / "no" / "folder.yaml", H100S)


# ---------------------------------------------------------------------------------------------------- quantities


@pytest.mark.parametrize(
    ("text", "unit", "number"),
    [("450 GB/s", "B/s", 450e9), ("400Gbit/s", "B/s", 50e9), ("3.4 us", "s", 3.4e-6), ("3.4 µs", "s", 3.4e-6),
     ("1e-6", "s", 1e-6), ("989 TFLOPS", "FLOP/s", 989e12), ("80 gib", "B", 80 * 2**30), (7, "B", 7.0),
     (".5 TB/s", "B/s", 5e11)],
)  # fmt: skip
def test_parse_quantity_converts_units(text: str | int, unit: Unit, number: float) -> None:
    assert parse_quantity(text, unit) == number


@pytest.mark.parametrize("value", [0.0, 3.4e-6, 1 / 3, 5e-10, 999.9996, 1e-12, 2.5])
def test_format_quantity_is_lossless(value: float) -> None:
    assert parse_quantity(format_quantity(value, "s"), "s", least=0) == value
    assert parse_quantity(format_quantity(value * 1e12, "B/s"), "B/s", least=0) == value * 1e12


def test_clusters_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\nfrom cornstarch.plan.cluster import Cluster\nCluster.parse('2x8xH100').describe()\n"
        "print([name for name in ('torch', 'numpy', 'yaml') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout.strip() == "[]", ran.stdout + ran.stderr
