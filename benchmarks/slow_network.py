"""Measure the cost of slow links and the methods against it: real processes in network namespaces with limited links.

Every method (slow_ways.py) trains the same model from the same weights on the same batches (slow_task.py). The ranks
run in network namespaces that are connected by links of 100 Mbit/s or 1 Gbit/s (namespaces.py). For each method:

- ms per step: over blocks of 16 steps, without the first, in the slowest rank: the fastest block, because other load on
  the machine disturbs some blocks, and the median; and the mean of all steps, including the warm-up of compression;
- CPU: the CPU time of a rank per step, also of the fastest block;
- bytes: the bytes that a rank's interface sent per step after the first block, next to those of the formula;
- loss: on held-out text, with the mean of all ranks' weights, after all steps.

The straggler part has more ranks. Each rank sleeps for some milliseconds in place of a device's computation, and the
last rank for three times as long. The result is the number of steps per second of the other ranks, against the same
ranks without a straggler.

    python benchmarks/slow_network.py --rate 100mbit 1gbit --output slow_network.json       # needs root and iproute2
    python benchmarks/slow_network.py --rate 100mbit --ways gossip --steps 96 --output slow_network.json
    python benchmarks/slow_network.py --straggler --output slow_network.json
    python benchmarks/slow_picture.py slow_network.json --page tables.md --picture loss.svg

Results are added to an existing file, and replace earlier ones of the same method, so that the methods can be measured
one at a time. A method that takes long in a slow network can run fewer steps; its loss is then not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from namespaces import Unable, network, sent_bytes

BLOCK = 16  # steps; a multiple of the synchronization interval of every method
SLOWER = 3  # slowdown of the straggler


# ------------------------------------------------------------------------------------------------ one rank


@dataclass
class Diary:
    """Measurements of a rank, step by step."""

    losses: list[float] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    """Start time, and the end time of each step."""
    sent: list[int] = field(default_factory=list)
    """Bytes sent until then."""
    worked: list[float] = field(default_factory=list)
    """CPU seconds of this process until then."""

    def note(self) -> None:
        """Record the time and the bytes sent."""
        self.moments.append(time.perf_counter())
        self.sent.append(sent_bytes())
        self.worked.append(time.process_time())


def train(name: str, steps: int, pretended: float) -> dict[str, Any]:
    """Train with one method and return the measurements of all ranks; every rank must call it."""
    import torch
    import torch.distributed as dist
    from slow_task import Task
    from slow_ways import WAYS

    from cornstarch.parallel import distributed

    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    task, way, diary = Task(steps), WAYS[name], Diary()
    wrapped, exchange = way.made(task.model, task.optimizer)
    dist.barrier()
    diary.note()
    for step in range(1, steps + 1):
        if exchange is not None:
            exchange.before_step()
        loss = task.loss(wrapped, task.batch(rank, ranks))
        if pretended:  # a device computes, and the CPU is free
            time.sleep(pretended)
        loss.backward()
        task.optimizer.step()
        task.schedule.step()
        task.optimizer.zero_grad()
        if exchange is not None:
            exchange.after_step(step)
        diary.losses.append(float(loss.detach()))
        diary.note()
    with exchange.averaged() if exchange is not None else nullcontext():
        held_out = task.held_out_loss()
    figures = exchange.figures() if exchange is not None else {}
    seen = distributed.all_gather_json([held_out, diary.losses, diary.moments, diary.sent, diary.worked, figures])
    if exchange is not None:
        exchange.finish()
    held, losses, moments, sent, worked, figures = zip(*seen, strict=True)
    return {
        "way": name, "words": way.words, "ours": way.is_ours, "ranks": ranks, "steps": steps, "numbers": task.numbers,
        "held_out": held[0], "losses": losses, "sent": sent, "formula": way.sent(task.model, ranks), "figures": figures,
        "moments": [[moment - begin for moment in own] for begin, *own in moments],
        "worked": [[second - begin for second in own] for begin, *own in worked],
    }  # fmt: skip


def work(given: argparse.Namespace) -> None:
    """Run as one of the ranks."""
    from cornstarch.launch import current_world, start_process_group

    world = current_world()
    slow = given.slowed and world.rank == world.size - 1
    pretended = given.pretended / 1000 * (SLOWER if slow else 1)
    with start_process_group(world, "cpu", timeout=given.seconds):
        seen = train(given.ways[0], given.steps, pretended)
        if world.rank == 0:
            given.results.write_text(json.dumps(seen))


# ------------------------------------------------------------------------------------------------ figures


def blocks(values: list[float]) -> Iterator[float]:
    """Yield the mean step of each block but the first, from cumulative sums."""
    for before, after in pairwise(values[BLOCK - 1 :: BLOCK]):
        yield (after - before) / BLOCK


def figures_of(seen: dict[str, Any]) -> dict[str, float]:
    """Return the table entries of a method."""
    slowest = [max(times) for times in zip(*seen["moments"], strict=True)]
    last = seen["steps"] // BLOCK * BLOCK
    sent = max(own[last] - own[BLOCK] for own in seen["sent"]) / (last - BLOCK)
    return {
        "step_ms": 1000 * min(blocks(slowest)),
        "median_ms": 1000 * median(blocks(slowest)),
        "mean_ms": 1000 * slowest[-1] / seen["steps"],
        "cpu_ms": 1000 * max(min(blocks(own)) for own in seen["worked"]),
        "bytes": sent,
        "formula": seen["formula"],
        "held_out": seen["held_out"],
    }


def fast_steps(seen: dict[str, Any]) -> float:
    """Return the steps per second of the other ranks, without the first few."""
    begin = seen["steps"] // 5
    return min((seen["steps"] - begin) / (own[-1] - own[begin - 1]) for own in seen["moments"][:-1])


# ------------------------------------------------------------------------------------------------ all of it


def measured(given: argparse.Namespace, name: str, rate: str, ranks: int, slowed: bool) -> dict[str, Any]:
    """Run a method on its own network."""
    before = os.getloadavg()[0]
    with TemporaryDirectory() as folder, network(ranks, rate) as joined:
        results = Path(folder) / "results.json"
        command = [sys.executable, __file__, "--results", str(results), "--ways", name, "--steps", str(given.steps)]
        command += ["--seconds", str(given.seconds)]
        if given.straggler:
            command += ["--pretended", str(given.pretended), *(["--slowed"] if slowed else [])]
        joined.run(command, Path(folder) / "logs", given.seconds)
        return {**json.loads(results.read_text()), "rate": rate, "load": [before, os.getloadavg()[0]]}


def compare(given: argparse.Namespace, name: str, rate: str) -> dict[str, Any]:
    """Measure one method and print the result."""
    seen = measured(given, name, rate, given.ranks, False)
    found = figures_of(seen)
    print(
        f"{rate:8} {name:16} {found['step_ms']:8.1f} ms, median {found['median_ms']:8.1f}, "
        f"mean {found['mean_ms']:8.1f}, CPU {found['cpu_ms']:6.1f}  {found['bytes'] / 1e6:8.3f} MB, to the formula "
        f"{found['bytes'] / found['formula']:.4f}  loss {found['held_out']:.4f}",
        flush=True,
    )
    return seen


def with_straggler(given: argparse.Namespace, name: str, rate: str) -> dict[str, Any]:
    """Measure one method with and without a straggler and print the result."""
    even, uneven = (measured(given, name, rate, given.ranks, slowed) for slowed in (False, True))
    found = {"even": fast_steps(even), "uneven": fast_steps(uneven), "pretended_ms": given.pretended}
    kept = found["uneven"] / found["even"]
    print(f"{rate:8} {name:16} {found['even']:6.2f} steps/s, {found['uneven']:6.2f} beside a straggler: {kept:.1%}")
    figures = {"even": even["figures"], "uneven": uneven["figures"]}
    return {"way": name, "words": even["words"], "rate": rate, "ranks": given.ranks, **found, "figures": figures}


def keep(path: Path, part: str, found: dict[str, Any]) -> None:
    """Write a result into a file, replacing an older one."""
    content = json.loads(path.read_text()) if path.exists() else {}
    place = content.setdefault(part, {})
    place[f"{found['rate']} {found['way']}"] = found
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content))
    os.replace(unfinished, path)


def main() -> int:
    """Measure the requested methods."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", nargs="+", default=["100mbit"], help="rate of every link, in tc format")
    parser.add_argument("--ways", nargs="+", help="methods of slow_ways.py; default: all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--straggler", action="store_true", help="measure with one slow rank")
    parser.add_argument("--pretended", type=float, default=0.0, help="milliseconds that a rank sleeps as computation")
    parser.add_argument("--seconds", type=float, default=290.0, help="timeout of a method")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)  # passed to the ranks
    parser.add_argument("--slowed", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.results is not None:
        work(given)
        return 0
    from slow_ways import WAYS

    if unknown := [name for name in given.ways or () if name not in WAYS]:
        parser.error(f"--ways {' '.join(unknown)}: expected some of {', '.join(WAYS)}")
    failed = 0
    for rate in given.rate:
        for name in given.ways or WAYS:
            try:
                found = (with_straggler if given.straggler else compare)(given, name, rate)
            except Unable as error:
                print(f"Cannot create a slow network here: {error}.", file=sys.stderr)
                return 1
            except RuntimeError as error:
                print(f"{rate:8} {name:16} failed: {error}", flush=True)
                failed += 1
                continue
            if given.output is not None:
                keep(given.output, "straggler" if given.straggler else "ways", found)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
