"""Measuring a machine: matrices, memory, what processes exchange, and the disk. torch is imported late.

`measure` starts processes of this file, which take the times together; rank 0 writes them down. What is made of them, a
`Cluster`, is made without torch.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cornstarch.errors import ConfigError
from cornstarch.launch.local import _gpu_count, launch
from cornstarch.launch.world import World, current_world, start_process_group
from cornstarch.plan.cluster import Cluster, joined
from cornstarch.plan.devices import device_or_unknown, with_rates
from cornstarch.plan.links import BETWEEN_NODES, COLLECTIVES, LINKS, Collective, Link, Timing, fit_links

if TYPE_CHECKING:
    import torch

MIB = 2**20
BLOCKS = 5
"""Each time is that of the quickest of so many blocks of repetitions: what else the machine does disturbs some."""
MOST_REPETITIONS = 200
CPU_PROCESSES = 2
"""Without GPUs, so many processes share the machine."""


@dataclass(frozen=True)
class Amounts:
    """How much is measured with."""

    matrix: int
    """Rows and columns of the matrices."""
    copied: int
    """Bytes that are copied within the memory; more than caches hold."""
    messages: tuple[int, ...]
    """Bytes of the tensors that processes exchange."""
    seconds: float
    """How long each thing is repeated, about."""


ON_CPU = Amounts(1024, 128 * MIB, (4096, 32768, 256 * 1024, 2 * MIB, 16 * MIB), 0.5)
ON_GPU = Amounts(8192, 2048 * MIB, (32768, 256 * 1024, 2 * MIB, 16 * MIB, 128 * MIB), 0.5)
QUICK = Amounts(256, 8 * MIB, (4096, 64 * 1024, MIB), 0.02)
FILE, QUICK_FILE = 256 * MIB, 8 * MIB


class Machine(NamedTuple):
    """What was measured."""

    cluster: Cluster
    timings: list[Timing]
    """What the links were fitted to; none where there was one process."""


def measure(folder: Path, nproc: int | None = None, quick: bool = False) -> Machine:
    """Measure this machine.

    Args:
        folder: Where a file is written, read and removed, to measure the disk.
        nproc: Processes. Default: one for each GPU; without GPUs 2.
        quick: Measure with little, in seconds; less exact.
    """
    processes = _processes(nproc)
    writing, reading = measure_disk(folder, QUICK_FILE if quick else FILE)
    with tempfile.TemporaryDirectory(prefix="cornstarch-measure-") as place:
        told = Path(place) / "times.json"
        command = [sys.executable, "-m", "cornstarch.launch.measuring", str(told), *(["quick"] if quick else [])]
        code = launch(command, processes, Path(place) / "logs")
        if code != 0:
            several = "its process" if processes == 1 else f"one of its {processes} processes"
            raise ConfigError(f"The machine could not be measured: {several} ended with exit code {code}.")
        found = json.loads(told.read_text(encoding="utf-8"))
    timings = [Timing(*one) for one in found["timings"]]
    cluster = cluster_of(found, timings, processes)
    return Machine(replace(cluster, disk=_short(writing), disk_read=_short(reading)), timings)


def _processes(nproc: int | None) -> int:
    if current_world().size > 1:
        raise ConfigError("A machine is measured by one command, which starts its processes itself: without torchrun.")
    gpus = _gpu_count()
    if nproc is not None and nproc > gpus > 0:
        raise ConfigError(f"nproc = {nproc}: {gpus} GPUs cannot be measured by more processes. Use at most {gpus}.")
    return nproc if nproc is not None else gpus or CPU_PROCESSES


def cluster_of(found: Mapping[str, Any], timings: list[Timing], processes: int) -> Cluster:
    """Return one node as it was measured; what could not be measured is the catalogue's."""
    rates = {dtype: _short(rate) for dtype, rate in found["rates"].items()}
    one = replace(
        with_rates(device_or_unknown(found["name"]), rates),
        memory=found["memory"],
        bandwidth=_short(found["bandwidth"]),
        has_bf16=found["has_bf16"],
    )
    inside = _short_link(fit_links(timings)) if timings else joined(one)
    return Cluster(1, processes, one, inside, LINKS[BETWEEN_NODES], name=f"{processes}x{one.name}", measured=True)


def _short_link(link: Link) -> Link:
    each = tuple((kind, _short_link(one)) for kind, one in link.collectives)
    return Link(_short(link.bandwidth), _short(link.latency), each)


def _short(value: float) -> float:
    """Return a measured figure without digits that mean nothing."""
    return float(f"{value:.4g}")


# ------------------------------------------------------------------------------------------------ the disk


def measure_disk(folder: Path, size: int) -> tuple[float, float]:
    """Return the bytes a second that are written to a folder and read from it, not from the system's memory."""
    block = os.urandom(MIB)  # disks that compress must not gain by it
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".cornstarch-measure-") as file:
            start = time.perf_counter()
            for _ in range(size // MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            writing = size / (time.perf_counter() - start)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            with open(file.name, "rb", buffering=0) as again:
                while again.read(MIB):
                    pass
            return writing, size / (time.perf_counter() - start)
    except OSError as error:
        needs = f"{size // MIB} MiB must fit there for a moment"
        raise ConfigError(f"{folder}: the disk cannot be measured: {error.strerror}. {needs}.") from error


# ------------------------------------------------------------------------------------------------ processes


class Clock:
    """Takes times that all processes agree on: those of the slowest."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device, self._seconds = device, seconds

    def time(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call; every process must time it, and repeats it as often as the others."""
        call()  # what is set up at the first call is not counted
        once = self._slowest(self._block(call, 1))
        repetitions = min(MOST_REPETITIONS, max(1, int(self._seconds / BLOCKS / max(once, 1e-9))))
        blocks = BLOCKS if once < self._seconds else 1
        return self._slowest(min(self._block(call, repetitions) for _ in range(blocks)))

    def _block(self, call: Callable[[], object], repetitions: int) -> float:
        self._slowest(0.0)  # all begin together
        self._wait()
        start = time.perf_counter()
        for _ in range(repetitions):
            call()
        self._wait()
        return (time.perf_counter() - start) / repetitions

    def _slowest(self, seconds: float) -> float:
        """Return the longest time of all processes, which wait for one another here."""
        import torch
        from torch import distributed

        value = torch.tensor([seconds], dtype=torch.float64)
        distributed.all_reduce(value, op=distributed.ReduceOp.MAX)
        return float(value)

    def _wait(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def matrix_rates(clock: Clock, device: torch.device, size: int) -> dict[str, float]:
    """Return the operations a second of square matrices, by dtype."""
    import torch

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if device.type == "cuda":
        dtypes = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            del dtypes["bf16"]
    rates = {}
    for name, dtype in dtypes.items():
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        with _float32_as("high" if name == "tf32" else "highest"):
            rates[name] = 2 * size**3 / clock.time(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))  # type: ignore[misc]
    return rates


@contextmanager
def _float32_as(precision: str) -> Iterator[None]:
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def memory_bandwidth(clock: Clock, device: torch.device, size: int) -> float:
    """Return the bytes a second that are read and written together while memory is copied."""
    import torch

    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / clock.time(lambda: target.copy_(source))


def exchange_times(clock: Clock, device: torch.device, world: World, sizes: tuple[int, ...]) -> list[Timing]:
    """Return how long every collective takes, over several sizes."""
    timings = []
    for size in sizes:
        count = -(-size // (4 * world.size)) * world.size  # the same part of it for everybody
        for kind in COLLECTIVES:
            seconds = clock.time(_exchange(kind, count, device, world))
            timings.append(Timing(kind, 4 * count, world.size, seconds / (2 if kind == "send" else 1)))
    return timings


def _exchange(kind: Collective, count: int, device: torch.device, world: World) -> Callable[[], object]:
    """Return what does a collective once. A message goes there and back between ranks 0 and 1; the others wait."""
    import torch
    from torch import distributed

    whole, other = torch.zeros(count, device=device), torch.zeros(count, device=device)
    part = torch.zeros(count // world.size, device=device)

    def there_and_back() -> None:
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
        "send": there_and_back,
    }
    return calls[kind]


def _take_times(told: Path, quick: bool) -> None:
    """Be one of the processes."""
    import warnings

    import torch

    # Newer versions of torch have other names for the same collectives, which older ones do not know.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated")
    world = current_world()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    amounts = QUICK if quick else ON_GPU if kind == "cuda" else ON_CPU
    with start_process_group(world, kind, timeout=300.0) as device:
        clock = Clock(device, amounts.seconds)
        found: dict[str, Any] = _identity(device, world)
        found["rates"] = matrix_rates(clock, device, amounts.matrix)
        found["bandwidth"] = memory_bandwidth(clock, device, amounts.copied)
        found["timings"] = exchange_times(clock, device, world, amounts.messages) if world.size > 1 else []
        if world.rank == 0:
            told.write_text(json.dumps(found), encoding="utf-8")


def _identity(device: torch.device, world: World) -> dict[str, Any]:
    """Return what this process computes on: its name, and its share of the memory."""
    import psutil
    import torch

    if device.type == "cpu":
        return {"name": "cpu", "memory": int(psutil.virtual_memory().total) // world.local_size, "has_bf16": False}
    properties = torch.cuda.get_device_properties(device)
    sharing = -(-world.local_size // torch.cuda.device_count())
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return {"name": properties.name, "memory": int(properties.total_memory) // sharing, "has_bf16": has_bf16}


if __name__ == "__main__":
    _take_times(Path(sys.argv[1]), "quick" in sys.argv[2:])
