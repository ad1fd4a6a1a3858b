"""What slow links cost, and what helps: real processes, each in a network of its own, joined by limited links.

Every way to keep replicas together (slow_ways.py) trains the same model from the same weights on the same batches
(slow_task.py). Ranks stand in network namespaces that see one another through links of 100 Mbit/s or 1 Gbit/s
(namespaces.py). For each way:

- ms per step: of blocks of 16 steps, without the first, in the slowest rank: the quickest block, because what else the
  machine does disturbs some, and the median; and the mean of all steps, those that a compression warms up in included;
- CPU: the time that the CPU works for a rank in a step, also of the quickest block;
- bytes: what a rank's interface has sent per step after the first block, beside what the formula says;
- loss: on text that nobody trains on, with the mean of all ranks' weights, after all steps.

The straggler part has more ranks. Each pretends to compute for so many milliseconds, as if it had a device of its own,
and the last rank for three times as many. Counted is how many steps the other ranks do in a second, against the same
ranks without a straggler.

    python benchmarks/slow_network.py --rate 100mbit 1gbit --output slow_network.json       # needs root and iproute2
    python benchmarks/slow_network.py --rate 100mbit --ways gossip --steps 96 --output slow_network.json
    python benchmarks/slow_network.py --straggler --output slow_network.json
    python benchmarks/slow_picture.py slow_network.json --page tables.md --picture loss.svg

A file that is there already is added to: a way that was measured before is replaced. So all can be measured bit by bit.
A way that takes long in a slow network can be given fewer steps; its loss is then not compared with that of the others.
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

BLOCK = 16  # steps; a multiple of the steps between two exchanges of every way
SLOWER = 3  # so many times longer than the others the straggler computes


# ------------------------------------------------------------------------------------------------ one rank


@dataclass
class Diary:
    """What a rank has seen, step by step."""

    losses: list[float] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    """When it began, and when each step ended."""
    sent: list[int] = field(default_factory=list)
    """Bytes until then."""
    worked: list[float] = field(default_factory=list)
    """Seconds that the CPU has worked for this process until then."""

    def note(self) -> None:
        """Write down the time, and what has been sent."""
        self.moments.append(time.perf_counter())
        self.sent.append(sent_bytes())
        self.worked.append(time.process_time())


def train(name: str, steps: int, pretended: float) -> dict[str, Any]:
    """Train one way, and return what all ranks have seen; every rank must call it."""
    import torch
    import torch.distributed as dist
    from slow_task import Task
    from slow_ways import WAYS

    from cornstarch.parallel import processes

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
        if pretended:  # a device computes, and the CPU is free for others
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
    seen = processes.gather_data([held_out, diary.losses, diary.moments, diary.sent, diary.worked, figures])
    if exchange is not None:
        exchange.finish()
    held, losses, moments, sent, worked, told = zip(*seen, strict=True)
    return {
        "way": name, "words": way.words, "ours": way.is_ours, "ranks": ranks, "steps": steps, "numbers": task.numbers,
        "held_out": held[0], "losses": losses, "sent": sent, "formula": way.sent(task.model, ranks), "figures": told,
        "moments": [[moment - begin for moment in own] for begin, *own in moments],
        "worked": [[second - begin for second in own] for begin, *own in worked],
    }  # fmt: skip


def work(given: argparse.Namespace) -> None:
    """Be one of the ranks."""
    from cornstarch.launch import current_world, start_process_group

    world = current_world()
    slow = given.slowed and world.rank == world.size - 1
    pretended = given.pretended / 1000 * (SLOWER if slow else 1)
    with start_process_group(world, "cpu", timeout=given.seconds):
        seen = train(given.ways[0], given.steps, pretended)
        if world.rank == 0:
            given.told.write_text(json.dumps(seen))


# ------------------------------------------------------------------------------------------------ figures


def blocks(values: list[float]) -> Iterator[float]:
    """Yield the mean step of each block but the first, of sums over steps."""
    for before, after in pairwise(values[BLOCK - 1 :: BLOCK]):
        yield (after - before) / BLOCK


def figures_of(seen: dict[str, Any]) -> dict[str, float]:
    """Return what a table says of a way."""
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
    """Return the steps a second of the ranks that are no stragglers, without the first few."""
    begin = seen["steps"] // 5
    return min((seen["steps"] - begin) / (own[-1] - own[begin - 1]) for own in seen["moments"][:-1])


# ------------------------------------------------------------------------------------------------ all of it


def measured(given: argparse.Namespace, name: str, rate: str, ranks: int, slowed: bool) -> dict[str, Any]:
    """Run a way on a network of its own."""
    before = os.getloadavg()[0]
    with TemporaryDirectory() as folder, network(ranks, rate) as joined:
        told = Path(folder) / "told.json"
        command = [sys.executable, __file__, "--told", str(told), "--ways", name, "--steps", str(given.steps)]
        command += ["--seconds", str(given.seconds)]
        if given.straggler:
            command += ["--pretended", str(given.pretended), *(["--slowed"] if slowed else [])]
        joined.run(command, Path(folder) / "logs", given.seconds)
        return {**json.loads(told.read_text()), "rate": rate, "load": [before, os.getloadavg()[0]]}


def compare(given: argparse.Namespace, name: str, rate: str) -> dict[str, Any]:
    """Measure one way, and say so."""
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
    """Measure one way with and without a straggler, and say so."""
    even, uneven = (measured(given, name, rate, given.ranks, slowed) for slowed in (False, True))
    found = {"even": fast_steps(even), "uneven": fast_steps(uneven), "pretended_ms": given.pretended}
    kept = found["uneven"] / found["even"]
    print(f"{rate:8} {name:16} {found['even']:6.2f} steps/s, {found['uneven']:6.2f} beside a straggler: {kept:.1%}")
    figures = {"even": even["figures"], "uneven": uneven["figures"]}
    return {"way": name, "words": even["words"], "rate": rate, "ranks": given.ranks, **found, "figures": figures}


def keep(path: Path, part: str, found: dict[str, Any]) -> None:
    """Write a result into a file, in the place of an older one."""
    content = json.loads(path.read_text()) if path.exists() else {}
    place = content.setdefault(part, {})
    place[f"{found['rate']} {found['way']}"] = found
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content))
    os.replace(unfinished, path)


def main() -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", nargs="+", default=["100mbit"], help="of every link, as tc writes it")
    parser.add_argument("--ways", nargs="+", help="of slow_ways.py; default: all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--straggler", action="store_true", help="the part with one rank that is slow")
    parser.add_argument("--pretended", type=float, default=0.0, help="milliseconds that a rank pretends to compute")
    parser.add_argument("--seconds", type=float, default=290.0, help="after which a way is given up")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--told", type=Path, help=argparse.SUPPRESS)  # given to the ranks
    parser.add_argument("--slowed", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.told is not None:
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
                print(f"A slow network cannot be made here: {error}.", file=sys.stderr)
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
