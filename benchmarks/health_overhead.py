"""Measure what the health checks cost: heartbeats, marks of the training thread, the comparison of ranks, checksums.

Each part is measured by itself, in CPU time or as the least latency, because whole steps of two processes vary by more
than what is measured. The results are fractions of a step of 10 ms and of 100 ms.

    python benchmarks/health_overhead.py          # prints a table, writes benchmarks/results/health_overhead.md
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from cornstarch.health.comparison_group import ComparisonGroup
from cornstarch.health.replica_check import compute_checksums
from cornstarch.health.step_comparison import RankComparison
from cornstarch.health.watch import HealthWatch
from cornstarch.parallel.activity import Activity, here

RESULT = Path(__file__).parent / "results" / "health_overhead.md"
SECONDS = 10.0  # that heartbeats are measured
STEPS = (0.010, 0.100)


def time_calls(call: Callable[[], object], count: int) -> float:
    """Return the least seconds per call over three rounds."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - began) / count)
    return best


def measure_marks() -> float:
    """Return the seconds that the marks of a step of one microbatch take."""
    activity = Activity()

    def mark() -> None:
        for phase in ("data", "step", "between"):
            activity.enter(phase)
        activity.begin_wait("all_reduce")
        activity.end_wait()

    return time_calls(mark, 10_000)


def measure_cpu() -> float:
    """Return the CPU time of this process, of all its threads, as a fraction of the time."""
    before, began = time.process_time(), time.monotonic()
    time.sleep(SECONDS)
    return (time.process_time() - before) / (time.monotonic() - began)


def measure_ranks(rank: int, port: int, results: mp.SimpleQueue) -> None:
    """Measure heartbeats and comparisons in one of two processes."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=2)
    here.enter("step")
    watch = HealthWatch(here, None, lambda text, has_store: None)
    idle = measure_cpu()  # threads of gloo and of the store
    watch.start()
    heartbeats = measure_cpu() - idle
    watch.stop()
    assert dist.group.WORLD is not None
    group = ComparisonGroup()
    comparison = RankComparison(group, here, [rank], {str(dist.group.WORLD.group_name)})
    latencies = []
    for step in range(300):
        comparison.begin_step(step, 0, step, ["rows.json:1"], 0)
        dist.barrier()
        began = time.perf_counter()
        assert comparison.check() is None
        latencies.append(time.perf_counter() - began)
    results.put((rank, heartbeats, min(latencies), sorted(latencies)[len(latencies) // 2]))
    dist.barrier()
    dist.destroy_process_group()


def measure_checksums() -> float:
    """Return the seconds that checksums of 10 million fp32 parameters take on this CPU."""
    module = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(10)))
    return time_calls(lambda: compute_checksums(module.named_parameters()), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=29599)
    port = parser.parse_args().port
    torch.set_num_threads(1)
    marks, checksums = measure_marks(), measure_checksums()
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(measure_ranks, args=(port, results), nprocs=2)
    (_, heartbeats, least, median), (_, other, _, _) = sorted(results.get() for _ in range(2))
    lines = [
        "# What the health checks cost",
        "",
        f"`python benchmarks/health_overhead.py`, {date.today()}, torch {torch.__version__}, {platform.machine()}, "
        f"2 processes on one machine of {os.cpu_count()} cores, one thread each; load {os.getloadavg()[0]:.1f}.",
        "",
        "| part | measured | of a step of 10 ms | of 100 ms |",
        "|---|---|---|---|",
        f"| marks of the training thread, per step | {1e6 * marks:.1f} µs | "
        + " | ".join(f"{marks / step:.3%}" for step in STEPS) + " |",
        f"| heartbeats, CPU time of a rank (rank 0, reading all; rank 1) | {heartbeats:.2%}, {other:.2%} of a core | "
        f"{heartbeats:.2%} | {heartbeats:.2%} |",
        f"| comparison of ranks, per exchange (median {1e6 * median:.0f} µs) | {1e6 * least:.0f} µs | "
        "at most 0.5 %: every " + " | at most 0.5 %: every ".join(
            f"{max(1, -(-least // (0.005 * step))):.0f} steps" for step in STEPS) + " |",
        f"| checksums of 10 M fp32 parameters on a CPU core | {1e3 * checksums:.1f} ms | "
        + " | ".join(f"at most 0.1 %: every {checksums / (0.001 * step):,.0f} steps" for step in STEPS) + " |",
        "",
    ]  # fmt: skip
    RESULT.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
