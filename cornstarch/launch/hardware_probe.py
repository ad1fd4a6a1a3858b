"""Measure matrix products, memory, collectives and disk of this machine, in processes of this file. No torch here."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, pstdev
from typing import TYPE_CHECKING, Any, NamedTuple

from cornstarch.errors import ConfigError
from cornstarch.launch.launcher import World, current_world, launch
from cornstarch.launch.local_launcher import gpu_count
from cornstarch.launch.process_group import start_process_group
from cornstarch.plan.cluster import Cluster, find_device_or_unknown, find_node_link, replace_rates
from cornstarch.plan.communication import (
    BETWEEN_NODES,
    COLLECTIVES,
    LINKS,
    Collective,
    Link,
    Timing,
    find_spread,
    fit_links,
)

if TYPE_CHECKING or __name__ == "__main__":  # only the processes that measure need torch
    import psutil
    import torch
    from torch import distributed

MIB = 2**20
BLOCKS = 5  # each time is the best of 5 blocks of repetitions: other programs disturb some of them
MAX_REPETITIONS = 200
CPU_PROCESSES = 2  # the number of processes on a machine without GPUs


@dataclass(frozen=True)
class ProbeSizes:
    matrix: int  # rows and columns of the matrices
    copied: int  # bytes of a copy within memory; more than caches hold
    messages: tuple[int, ...]  # bytes of the tensors in collectives
    seconds: float  # about how long each measurement is repeated


ON_CPU = ProbeSizes(1024, 128 * MIB, (4096, 32768, 256 * 1024, 2 * MIB, 16 * MIB), 0.5)
ON_GPU = ProbeSizes(8192, 2048 * MIB, (32768, 256 * 1024, 2 * MIB, 16 * MIB, 128 * MIB), 0.5)
QUICK = ProbeSizes(256, 8 * MIB, (4096, 64 * 1024, MIB), 0.02)
FILE, QUICK_FILE = 256 * MIB, 8 * MIB


class ProbeResult(NamedTuple):
    cluster: Cluster
    timings: list[Timing]  # the times that the links were fitted to; empty for one process


def probe_hardware(folder: Path, nproc: int | None = None, quick: bool = False) -> ProbeResult:
    """Measure this machine, and the disk of `folder`; default: one process per GPU, or 2. `quick` is less exact."""
    if current_world().size > 1:
        raise ConfigError("Measure a machine with one command, which starts its processes itself: without torchrun.")
    gpus = gpu_count()
    if nproc is not None and nproc > gpus > 0:
        raise ConfigError(f"nproc = {nproc}: {gpus} GPUs cannot be measured by more processes. Use at most {gpus}.")
    processes = nproc if nproc is not None else gpus or CPU_PROCESSES
    write_rate, read_rate = measure_disk(folder, QUICK_FILE if quick else FILE)
    with tempfile.TemporaryDirectory(prefix="cornstarch-measure-") as place:
        results = Path(place) / "times.json"
        command = [sys.executable, "-m", "cornstarch.launch.hardware_probe", str(results)]
        command += ["quick"] if quick else []
        code = launch(command, processes, Path(place) / "logs")
        if code != 0:
            which = "its process" if processes == 1 else f"one of its {processes} processes"
            raise ConfigError(f"The machine could not be measured: {which} ended with exit code {code}.")
        found = json.loads(results.read_text(encoding="utf-8"))
    timings = [Timing(*one) for one in found["timings"]]
    cluster = build_cluster(found, timings, processes)
    return ProbeResult(replace(cluster, disk=_round(write_rate), disk_read=_round(read_rate)), timings)


def build_cluster(found: Mapping[str, Any], timings: list[Timing], processes: int) -> Cluster:
    """Return one node with the measured figures; the catalogue supplies the rest."""
    rates = {dtype: _round(rate) for dtype, rate in found["rates"].items()}
    one = replace(
        replace_rates(find_device_or_unknown(found["name"]), rates),
        memory=found["memory"],
        bandwidth=_round(found["bandwidth"]),
        has_bf16=found["has_bf16"],
        reached=tuple((name, _round(value)) for name, value in found.get("reached", {}).items()),
    )
    inside = _round_link(fit_links(timings)) if timings else find_node_link(one)
    found_errors = {**found.get("errors", {}), **({"links": find_spread(timings, inside)} if timings else {})}
    errors = tuple((name, _round(value)) for name, value in found_errors.items())
    between, name = LINKS[BETWEEN_NODES], f"{processes}x{one.name}"
    return Cluster(1, processes, one, inside, between, name=name, measured=True, errors=errors)


def _round_link(link: Link) -> Link:
    each = tuple((kind, _round_link(one)) for kind, one in link.collectives)
    return Link(_round(link.bandwidth), _round(link.latency), each)


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def measure_disk(folder: Path, size: int) -> tuple[float, float]:
    """Return the write and read rates of a folder's disk in bytes per second, without the page cache."""
    block = os.urandom(MIB)  # random, so that compression does not help
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".cornstarch-measure-") as file:
            start = time.perf_counter()
            for _ in range(size // MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            write_rate = size / (time.perf_counter() - start)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            with open(file.name, "rb", buffering=0) as again:
                while again.read(MIB):
                    pass
            return write_rate, size / (time.perf_counter() - start)
    except OSError as error:
        needs = f"{size // MIB} MiB must be free for a moment"
        raise ConfigError(f"{folder}: the disk cannot be measured: {error.strerror}. {needs}.") from error


class SynchronizedTimer:
    """Measures times that are the same on all ranks: those of the slowest."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device, self._seconds = device, seconds
        self.spreads: list[float] = []
        """The relative standard deviation between the repetitions of each time."""

    def time(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call. Every rank must time it, and repeats it equally often."""
        call()  # warm-up: the first call sets things up
        once = self._slowest(self._block(call, 1))
        repetitions = min(MAX_REPETITIONS, max(1, int(self._seconds / BLOCKS / max(once, 1e-9))))
        blocks = BLOCKS if once < self._seconds else 1
        times = [self._block(call, repetitions) for _ in range(blocks)]
        self.spreads += [self._slowest(pstdev(times) / mean(times))] if blocks > 1 else []
        return self._slowest(min(times))

    def _block(self, call: Callable[[], object], repetitions: int) -> float:
        self._slowest(0.0)  # a barrier: all begin together
        self._synchronize()
        start = time.perf_counter()
        for _ in range(repetitions):
            call()
        self._synchronize()
        return (time.perf_counter() - start) / repetitions

    def _slowest(self, seconds: float) -> float:
        """Return the longest time of all ranks; they wait for one another here."""
        value = torch.tensor([seconds], dtype=torch.float64)
        distributed.all_reduce(value, op=distributed.ReduceOp.MAX)
        return float(value)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure_matmul(timer: SynchronizedTimer, device: torch.device, size: int) -> dict[str, float]:
    """Return the FLOP/s of square matrix products, by dtype."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if device.type == "cuda":
        dtypes = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            del dtypes["bf16"]
    rates = {}
    for name, dtype in dtypes.items():
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        try:
            rates[name] = 2 * size**3 / timer.time(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))  # type: ignore[misc]
        finally:
            torch.set_float32_matmul_precision(before)
    return rates


def _build_collective(kind: Collective, count: int, device: torch.device, world: World) -> Callable[[], object]:
    """Return a function that runs a collective once. "send" is a round trip between ranks 0 and 1; the others idle."""
    whole, other = torch.zeros(count, device=device), torch.zeros(count, device=device)
    part = torch.zeros(count // world.size, device=device)

    def round_trip() -> None:
        if world.rank == 0:
            distributed.send(whole, 1)
            distributed.recv(whole, 1)
        elif world.rank == 1:
            distributed.recv(whole, 0)
            distributed.send(whole, 0)

    calls: dict[Collective, Callable[[], object]] = {
        "all_reduce": lambda: distributed.all_reduce(whole),
        "all_gather": lambda: distributed.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: distributed.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: distributed.all_to_all_single(other, whole),
        "send": round_trip,
    }
    return calls[kind]


def _run_worker(results: Path, quick: bool) -> None:
    # Newer versions of torch rename some collectives; older versions do not have the new names.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated")
    from cornstarch.launch.kernel_probe import measure_kernels

    world = current_world()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = QUICK if quick else ON_GPU if device_type == "cuda" else ON_CPU
    with start_process_group(world, device_type, timeout=300.0) as device:
        timer = SynchronizedTimer(device, sizes.seconds)
        has_bf16 = device_type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        name, memory, ranks = "cpu", psutil.virtual_memory().total, world.local_size
        if device_type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            name, memory, ranks = properties.name, properties.total_memory, -(-ranks // torch.cuda.device_count())
        found: dict[str, Any] = {"name": name, "memory": int(memory) // ranks, "has_bf16": has_bf16}
        found["rates"] = measure_matmul(timer, device, sizes.matrix)
        source = torch.ones(sizes.copied // 4, device=device)
        target = torch.empty_like(source)
        # Bytes per second of a copy within memory, read and written bytes together.
        found["bandwidth"] = 2 * sizes.copied / timer.time(lambda: target.copy_(source))
        found |= measure_kernels(timer, device, sizes.matrix, found["rates"], sizes.copied, found["bandwidth"])
        found["timings"] = []
        for size in sizes.messages if world.size > 1 else ():
            count = -(-size // (4 * world.size)) * world.size  # a multiple of the world size: equal shards
            for kind in COLLECTIVES:
                seconds = timer.time(_build_collective(kind, count, device, world))
                one_way = seconds / (2 if kind == "send" else 1)
                found["timings"].append(Timing(kind, 4 * count, world.size, one_way))
        if world.rank == 0:
            results.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _run_worker(Path(sys.argv[1]), "quick" in sys.argv[2:])
