"""How many processes prepare the data of a rank: `data.workers`, where `auto` decides by cores, work and memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from cornstarch.data.formats import DataSource
from cornstarch.data.sample import Media, Sample, SampleError

Work = Literal["decode", "tokenize", "none"]
"""What a sample costs: images and sounds are decoded, texts are tokenized, numbers are only stacked."""

_MOST = {"decode": 8, "tokenize": 2, "none": 0}  # per rank; one process tokenizes a million tokens in some seconds
_FEW_CORES = 4  # per rank: on a CPU, workers would take these from the step
_INSPECTED = 20  # rows of a source
_MEMORY_FRACTION = 0.25  # of the free memory, for the batches that workers hold ready
_SHARED_MEMORY = Path("/dev/shm")  # through which workers hand over batches
_SHARED_FRACTION = 0.5
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class WorkerCount:
    """The number of worker processes of a rank, and why."""

    count: int
    reason: str

    def __str__(self) -> str:
        return f"data.workers: {self.count} ({self.reason})"


@dataclass(frozen=True)
class NodeResources:
    """What the processes of a run on this node may use together."""

    cores: int
    memory: int  # free bytes that batches may be kept in

    @classmethod
    def here(cls) -> NodeResources:
        return cls(count_cores(), free_memory())


def choose_worker_count(
    work: Work, on_gpu: bool, ranks: int, node: NodeResources, ahead_bytes: Callable[[], int]
) -> WorkerCount:
    """Return the number of workers of each of the `ranks` on a node.

    Args:
        work: What a sample costs.
        on_gpu: Whether steps are computed by a GPU, so that the cores are free.
        ranks: The ranks on this node, which share its cores and memory.
        node: The cores and the memory.
        ahead_bytes: Measures the bytes of the batches that one worker holds ready. Called only if there are workers.
    """
    cores = node.cores // ranks
    share = f"{node.cores} cores" + (f" for {ranks} ranks" if ranks > 1 else "")
    if work == "none":
        return WorkerCount(0, "samples need no decoding")
    if not on_gpu and (cores <= _FEW_CORES or work == "tokenize"):
        return WorkerCount(0, f"{share}, which compute the steps")
    # On a GPU machine one core is left to each rank's own process; on a CPU three of four compute.
    count = min(cores - 1 if on_gpu else cores // 4, _MOST[work])
    if count < 1:
        return WorkerCount(0, f"{share}: none is free")
    needed = max(ahead_bytes(), 1)
    fitting = node.memory // ranks // needed
    if fitting < count:
        held = f"{needed / 1e9:.1f} GB of batches ahead per worker, {node.memory / ranks / 1e9:.1f} GB free for them"
        return WorkerCount(fitting, held)
    return WorkerCount(count, f"{share}, samples to {work}")


def classify_work(sources: Iterable[DataSource]) -> Work:
    """Return what the samples of sources cost, by some rows of each."""
    found: Work = "none"
    for sample in (sample for source in sources for sample in _some_samples(source)):
        work = _work_of(sample)
        if work == "decode":
            return work  # nothing costs more: the other rows need not be read
        found = work if work != "none" else found
    return found


def _some_samples(source: DataSource) -> Iterator[Sample]:
    count = min(len(source), _INSPECTED)
    for number in range(count):  # through the whole source: texts without images may come first
        with suppress(SampleError):
            yield source[number * len(source) // count]


def _work_of(sample: Sample) -> Work:
    in_fields = (one for value in sample.fields.values() for one in (value if isinstance(value, list) else [value]))
    media = [*sample.media, *(one for one in in_fields if isinstance(one, Media))]
    if any(isinstance(one.source, str | os.PathLike | bytes | bytearray | memoryview) for one in media):
        return "decode"
    return "tokenize" if sample.messages or sample.document else "none"


def count_cores() -> int:
    """Return the cores that this process may use: its affinity, and the limits of its control groups."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [float(quota) / float(period) for quota, period in _read_cpu_limits()]
    return max(1, min([own, *(int(quota) for quota in quotas)]))


def free_memory() -> int:
    """Return the bytes that batches may take: a part of the memory, and of the shared memory that carries them."""
    free = [int(psutil.virtual_memory().available * _MEMORY_FRACTION)]
    for limit, used in _read_limits("memory.max", "memory.current"):
        free.append(int((int(limit) - int(used)) * _MEMORY_FRACTION))
    if _SHARED_MEMORY.is_dir():
        free.append(int(shutil.disk_usage(_SHARED_MEMORY).free * _SHARED_FRACTION))
    return max(0, min(free))


def _read_cpu_limits() -> list[Sequence[str]]:
    limits: list[Sequence[str]] = [line[0].split() for line in _read_limits("cpu.max")]
    # The first version of control groups, as in older containers.
    names = [_CGROUPS / "cpu" / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    with suppress(OSError):
        limits.append([name.read_text().strip() for name in names])
    return [limit for limit in limits if limit[0] not in ("max", "-1")]


def _read_limits(*names: str) -> list[list[str]]:
    """Return the contents of files of this process's control group and of those around it, where there is a limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    group = next((line[3:] for line in lines if line.startswith("0::")), "/").strip("/")
    folder = _CGROUPS / group
    found = []
    for one in (folder, *folder.parents):
        if one == _CGROUPS.parent:
            break
        with suppress(OSError):  # the outermost group has no limits
            found.append([(one / name).read_text().strip() for name in names])
    return [values for values in found if not values[0].startswith("max")]


def allow_open_files() -> None:
    """Raise the limit of open files as far as the system allows: a tensor from a worker is a file until it is read."""
    try:
        import resource
    except ImportError:  # not a Unix system
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def bytes_of(value: Any) -> int:
    """Return the bytes of the tensors in a batch."""
    from cornstarch.trees import tensors_in  # torch, which choosing does not need

    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))
