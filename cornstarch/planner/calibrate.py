"""Measures this machine and the layers of a run, and writes both to files from which predictions get an error bar."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cornstarch.config import RunConfig
from cornstarch.errors import ConfigError
from cornstarch.launch.hardware_probe import probe_hardware
from cornstarch.launch.local_launcher import core_count, gpu_count
from cornstarch.parallel.device import choose_placement
from cornstarch.plan.cluster import write_cluster
from cornstarch.plan.data_statistics import DataStatistics
from cornstarch.planner.build_cost import get_device_name, profile_run, write_costs

_FEW = 2  # processes that any machine without GPUs may be measured with


@dataclass(frozen=True)
class Calibration:
    """The files of a calibration, and the run that uses them."""

    cluster: Path
    costs: Path
    config: RunConfig


def calibrate_run(
    config: RunConfig,
    folder: Path,
    nproc: int | None = None,
    quick: bool = False,
    facts: DataStatistics | None = None,
    on_measure: Callable[[str], None] = lambda words: None,
) -> Calibration:
    """Measure this machine and the layers of a run on it; write `cluster.yaml` and `costs.yaml` into a folder.

    The processes are started as by `cornstarch doctor --measure`; layers are measured as by `cornstarch profile`, with
    as many threads as one of `nproc` processes has. `quick` is less exact.
    """
    _check_folder(folder)
    _check_processes(config, nproc)
    on_measure("products, kernels and links")
    cluster = probe_hardware(folder, nproc, quick).cluster
    spread: list[float] = []
    with _share_cores(config, cluster.per_node):
        cost = profile_run(config, facts, on_measure, spread)
    cluster = replace(cluster, errors=(*cluster.errors, ("layers", float(f"{spread[0]:.4g}"))))
    files = folder / "cluster.yaml", folder / "costs.yaml"
    write_cluster(files[0], cluster)
    write_costs(files[1], cost, get_device_name(config))
    parallel = replace(config.parallel, cluster=str(files[0]), costs=str(files[1]))
    return Calibration(*files, config.model_copy(update={"parallel": parallel}))


def _check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written to, before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--calibrate {folder}: the folder cannot be created: {error.strerror}.") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--calibrate {folder}: the folder is not writable. Name another one.")


def _check_processes(config: RunConfig, nproc: int | None) -> None:
    device, cores = choose_placement(config.device, config.precision, config.attention).device, core_count()
    if device.type == "cpu" and gpu_count():
        raise ConfigError("device = cpu: this machine has GPUs, which are what would be measured. Hide them first.")
    if device.type == "cpu" and nproc is not None and nproc > max(cores, _FEW):
        raise ConfigError(
            f"nproc = {nproc}: {cores} cores cannot be measured by more processes, which would wait for one another. "
            f"Use at most {max(cores, _FEW)}."
        )


@contextmanager
def _share_cores(config: RunConfig, processes: int) -> Iterator[None]:
    """Let this process have as many threads as each of several on this machine; a run's own number stays."""
    before = torch.get_num_threads()
    if config.threads is None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, core_count() // processes))
    try:
        yield
    finally:
        torch.set_num_threads(before)
