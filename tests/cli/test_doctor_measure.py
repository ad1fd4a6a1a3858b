"""`cornstarch doctor --measure`: real processes, tiny amounts, and a file that is read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from cornstarch.errors import ConfigError
from cornstarch.launch import hardware_probe
from cornstarch.launch.hardware_probe import MIB, build_cluster, measure_disk
from cornstarch.plan.cluster import Cluster
from cornstarch.plan.communication import COLLECTIVES, LINKS, Link, Timing, collective_seconds
from tests.cli.small_runs import Command


def test_a_machine_is_measured(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = tmp_path / "machine.yaml"
    code, out, err = command("doctor", "--measure", "--quick", "--nproc", 2, "--output", path)
    assert code == 0, err
    found = Cluster.parse(str(path))
    assert (found.nodes, found.per_node, found.device.name, found.measured) == (1, 2, "cpu", True)
    assert found.device.memory == Cluster.parse("2xcpu").device.memory
    assert 1e8 < found.device.flops_of("fp32") < 1e14 and 1e7 < (found.device.bandwidth or 0) < 1e13
    assert [kind for kind, _ in found.inside.collectives] == list(COLLECTIVES)
    assert all(1e5 < link.bandwidth < 1e12 and 0 <= link.latency < 1 for _, link in found.inside.collectives)
    assert found.disk is not None and found.disk_read is not None and found.disk > 1e5
    assert all(word in out for word in ("matmul in bf16", "all-reduce", "send", "disk write", str(path)))
    assert [one.name for one in tmp_path.iterdir()] == ["machine.yaml"]  # what was written to measure is gone


@pytest.mark.parametrize("arguments", [["--output", "c.yaml"], ["--nproc", 2], ["--quick"]])
def test_options_of_measure_need_it(command: Command, arguments: list[str]) -> None:
    code, _, err = command("doctor", *arguments)
    assert code != 0 and f"{arguments[0]} is an option of --measure. Add --measure." in err


def test_an_unwritable_output_is_refused_before_measuring(command: Command, tmp_path: Path) -> None:
    for output in (tmp_path, tmp_path / "no" / "folder.yaml"):
        code, _, err = command("doctor", "--measure", "--quick", "--output", output)
        assert code != 0 and "expected the path of a file" in err


def test_zero_processes_are_refused(command: Command) -> None:
    code, _, err = command("doctor", "--measure", "--quick", "--nproc", 0)
    assert code != 0 and "nproc = 0" in err


def test_a_process_of_torchrun_starts_no_more(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": 1,
        "LOCAL_RANK": 1,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_PORT": 29500,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    code, _, err = command("doctor", "--measure", "--quick")
    assert code != 0 and "without torchrun" in err


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware_probe, "gpu_count", lambda: 2)
    with pytest.raises(ConfigError, match="Use at most 2"):
        hardware_probe.probe_hardware(tmp_path, nproc=3)


def test_the_disk_is_measured(tmp_path: Path) -> None:
    writing, reading = measure_disk(tmp_path, MIB)
    assert writing > 0 and reading > 0 and not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="cannot be measured"):
        measure_disk(tmp_path / "nowhere", MIB)


def test_measurements_become_a_cluster() -> None:
    found = {"name": "NVIDIA H200", "memory": 150 * 10**9, "has_bf16": True, "bandwidth": 4.23456e12,
             "rates": {"fp32": 50e12, "bf16": 765.4321e12}}  # fmt: skip
    link = Link(400e9, 5e-6)
    times = [
        Timing(kind, size, 8, collective_seconds(kind, size, 8, link)) for kind in COLLECTIVES for size in (1e5, 1e8)
    ]
    cluster = build_cluster(found, times, 8)
    assert cluster.device.name == "H200" and cluster.device.flops_of("bf16") == 765.4e12
    assert cluster.inside.of("all_to_all") == link and cluster.device.bandwidth == 4.235e12
    alone = build_cluster(found, [], 1)
    assert alone.inside == LINKS["NVLink 4"]
