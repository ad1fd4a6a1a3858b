"""Measure the overhead of data parallelism: a step of Cornstarch's Trainer in two processes against torch's own DDP and
FSDP2 in a hand-written loop, Accelerate and Lightning Fabric.

All train the same Llama from the same weights on the same rows with the same fused AdamW, schedule and clipping, over
the same process group (gloo). The benchmark checks that all losses are equal, step by step. Each contender uses its own
loader, which gives a process its part of a batch.

All contenders run in the same two processes and take turns of several steps, in a random order that is the same in
both. The processes synchronize before each turn. The time of a turn is that of the slower process. All contenders are
created anew several times. Reported: the median over these repetitions of the ratio to the hand-written loop (the
median over rounds), with its smallest and largest value, in wall time and in the mean CPU time of both processes. The
hand-written loop runs twice, to show the noise between two identical contenders. The quartiles of the ratios of all
rounds follow the table. No new repetition starts that would probably end after --seconds.

Cornstarch runs three times with DDP: with its defaults, which detect unused parameters; with find_unused: false, which
is torch's default; and in the hand-written loop with only its wrapper and its synchronization of replicas (compression:
none), which must add nothing to torch's DDP.

For weak scaling, rank 0 trains its own half of each batch alone while the other process waits ("1 process"), and both
train their own halves at the same time without communication ("2 processes, apart"): the ratio of the first to the
second is the cost of sharing the machine, the ratio of the second to the others is the cost of reducing gradients.

    python benchmarks/dp_overhead.py              # prints tables; with --output FILE.json also writes them
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from trainer_overhead import (
    CASES,
    CLIP,
    DECAY,
    RATE,
    WARMUP,
    Case,
    Job,
    Seconds,
    against,
    be_quiet,
    compared,
    table,
    versions,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from cornstarch.launch import current_world, launch, start_process_group
from cornstarch.parallel import apply_data_parallel, data_mesh, distributed
from cornstarch.parallel.low_bandwidth import build_replica_sync
from cornstarch.plan import DataPlan
from cornstarch.train import Trainer

KINDS = ("ddp", "fsdp2")
OURS, DEFAULTS, BY_HAND, AGAIN = "Cornstarch", "Cornstarch, defaults", "torch by hand", "torch by hand, again"
WRAPPED = "Cornstarch's DDP by hand"
ACCELERATE, FABRIC = "Accelerate", "Lightning Fabric"
ALONE, APART = "1 process", "2 processes, apart"
LIMIT, LIMIT_WRAPPED = 1.02, 1.01  # of torch by hand
STEPS = {"tiny": 10, "small": 5, "larger": 1}  # steps per turn by default: short turns see similar machine load
Steps = Iterator[Tensor]
"""Runs one step per iteration and yields the loss of this process; the step's loss is their mean."""


# ---------------------------------------------------------------------------------------------------- contenders


def halves(job: Job) -> DataLoader[Any]:
    """Return a loader of this process's rows of each batch, as in a hand-written loop."""
    rows: Any = job.rows
    return DataLoader(rows, job.batch, sampler=DistributedSampler(rows, shuffle=False))


def loop(job: Job, wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> Steps:
    """Train with a hand-written loop."""
    schedule = job.schedule(optimizer)
    parameters = list(wrapped.parameters())
    for batch in halves(job):
        loss = wrapped(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.detach()


def by_hand(job: Job, kind: str) -> Steps:
    """Train with torch's own wrappers."""
    if kind == "ddp":
        return loop(job, DistributedDataParallel(job.model, gradient_as_bucket_view=True), job.optimizer())
    return loop(job, sharded(job.model), job.optimizer())


def wrapped_by_ours(job: Job, kind: str) -> Steps:
    """Train in the hand-written loop with our DDP, without compression."""
    mesh, plan, optimizer = data_mesh("cpu"), DataPlan(find_unused=False), job.optimizer()
    wrapped = apply_data_parallel(job.model, mesh, plan)
    if build_replica_sync(job.model, wrapped, mesh, plan, optimizer) is not None:
        raise RuntimeError("without compression a loop should have nothing to call")
    return loop(job, wrapped, optimizer)


def sharded(model: nn.Module) -> nn.Module:
    """Shard a model in place: its layers, then the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if isinstance(module, LlamaDecoderLayer):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def ours(job: Job, kind: str, **options: Any) -> Steps:
    """Train with our Trainer, step by step."""
    trainer = Trainer.from_objects(
        job.model,
        train_data=job.rows,
        console=Console(file=io.StringIO(), width=120),
        output=str(job.folder / "run"),
        device="cpu",
        precision="fp32",
        data={"shuffle": False},
        optimizer={"learning_rate": RATE, "weight_decay": DECAY, "clip": CLIP},
        schedule={"name": "cosine", "warmup": WARMUP},
        loop={"steps": job.steps, "batch_size": job.batch * dist.get_world_size()},
        logging={"progress": "none"},
        parallel={"data": {"kind": kind, **options}},
    )
    trainer.setup()
    return (trainer.step(batch).loss * dist.get_world_size() for batch in trainer.batches())  # the loss of this process


def ours_like_torch(job: Job, kind: str) -> Steps:
    """Train with our Trainer, with torch's default options."""
    return ours(job, kind, **({"find_unused": False} if kind == "ddp" else {}))


def with_accelerate(job: Job, kind: str) -> Steps:
    """Train with Accelerate, which splits each batch into equal parts."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import DistributedDataParallelKwargs

    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    rows: Any = job.rows
    optimizer = job.optimizer()
    loader = DataLoader(rows, job.batch * dist.get_world_size())
    model, optimizer, loader, schedule = accelerator.prepare(job.model, optimizer, loader, job.schedule(optimizer))
    assert isinstance(model, DistributedDataParallel)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.detach()


def with_fabric(job: Job, kind: str) -> Steps:
    """Train with Lightning Fabric."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

    world = dist.get_world_size()
    strategy: Any
    if kind == "ddp":
        strategy = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
    else:
        strategy = ModelParallelStrategy(
            lambda model, mesh: sharded(model), data_parallel_size=world, tensor_parallel_size=1
        )
    # tells Fabric that another program launched the processes
    os.environ.update({"TORCHELASTIC_RUN_ID": "benchmark", "GROUP_RANK": "0"})
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    rows: Any = job.rows
    if kind == "ddp":
        model, optimizer = fabric.setup(job.model, job.optimizer())
    else:  # sharded parameters are new
        model = fabric.setup(job.model)
        optimizer = fabric.setup_optimizers(job.optimizer())
    schedule = job.schedule(optimizer.optimizer)
    for batch in fabric.setup_dataloaders(DataLoader(rows, job.batch)):
        loss = model(**batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.detach()


def train_unsynchronized(job: Job, kind: str) -> Steps:
    """Train on this process's rows without communication."""
    return loop(job, job.model, job.optimizer())


CONTENDERS: dict[str, Callable[[Job, str], Steps]] = {
    OURS: ours_like_torch,
    DEFAULTS: ours,
    WRAPPED: wrapped_by_ours,
    BY_HAND: by_hand,
    AGAIN: by_hand,
    ACCELERATE: with_accelerate,
    FABRIC: with_fabric,
    ALONE: train_unsynchronized,
    APART: train_unsynchronized,
}


def chosen(kind: str, found: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the contenders, and why others are left out."""
    names, absent = [OURS, BY_HAND, AGAIN, ALONE, APART], []
    if kind == "ddp":
        names += [DEFAULTS, WRAPPED]
        if found["accelerate"] == "not installed":
            absent.append("Accelerate is left out: it is not installed (pip install accelerate).")
        else:
            names += [ACCELERATE]
    else:
        absent.append("Accelerate is left out: its FSDP needs GPUs.")
    if found["lightning"] == "not installed":
        absent.append("Lightning Fabric is left out: it is not installed (pip install lightning).")
    else:
        names += [FABRIC]
    return [name for name in CONTENDERS if name in names], absent


# ---------------------------------------------------------------------------------------------------- taking turns


@dataclass
class Seat:
    """A contender and its measured steps."""

    steps: Steps
    seconds: list[list[float]]
    """Wall and CPU time of a step, turn by turn."""
    losses: list[Tensor]


def take_turns(
    case: Case, kind: str, names: list[str], rounds: int, steps: int, folder: Path, chance: random.Random
) -> dict[str, list[Seconds]]:
    """Return the step times of each contender by turn; both processes must call it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    count = (rounds + 1) * steps  # the first round warms up
    seats = {}
    for number, name in enumerate(chance.sample(names, len(names))):
        own = folder / str(number)
        own.mkdir(parents=True, exist_ok=True)
        job = Job(case.model(), case.rows(count * world), case.batch, count, steps, own)
        seats[name] = Seat(CONTENDERS[name](job, kind), [], [])
    gc.collect()
    gc.freeze()  # keep the garbage of all contenders out of the step of one of them
    order = list(names)
    for _ in range(rounds + 1):
        chance.shuffle(order)
        for name in order:
            take_turn(seats[name], steps, sits_out=name == ALONE and rank > 0)
    gc.unfreeze()
    losses = {name: distributed.all_gather_json(list(map(float, seats[name].losses))) for name in names}
    check_losses({name: losses[name] for name in names if name not in (ALONE, APART)}, count)
    seconds = {name: distributed.all_gather_json(seats[name].seconds) for name in names}
    return {name: slower([one for one in seconds[name] if one])[1:] for name in names}


def take_turn(seat: Seat, steps: int, sits_out: bool) -> None:
    """Run some steps of a contender after a barrier."""
    dist.barrier()
    if sits_out:
        return
    wall, cpu = time.perf_counter(), time.process_time()
    seat.losses += [next(seat.steps) for _ in range(steps)]
    seat.seconds.append([(time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps])


def slower(seconds: list[list[list[float]]]) -> list[Seconds]:
    """Return by turn the wall time of the slower process and the mean CPU time."""
    return [
        Seconds(max(wall for wall, _ in ranks), sum(cpu for _, cpu in ranks) / len(ranks))
        for ranks in zip(*seconds, strict=True)
    ]


def check_losses(losses: dict[str, list[list[float]]], count: int) -> None:
    """Check that all contenders computed the same."""
    means = {name: torch.tensor(ranks).mean(0) for name, ranks in losses.items()}
    wanted = means[BY_HAND]
    if len(wanted) != count or not wanted[-1] < wanted[0]:
        raise RuntimeError(f"{len(wanted)} losses, the last {wanted[-1]:.4f}; expected {count} that fall")
    for name, found in means.items():
        try:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)
        except AssertionError as error:
            raise RuntimeError(f"{name} does not match torch in the hand-written loop. {error}") from None


# ---------------------------------------------------------------------------------------------------- what it says


def repeated(given: argparse.Namespace, case: Case, kind: str, names: list[str]) -> dict[str, list[list[Seconds]]]:
    """Return the step times of each contender by repetition; both processes must call it."""
    chance, began = random.Random(0), time.monotonic()
    taken: dict[str, list[list[Seconds]]] = {name: [] for name in names}
    for number in range(given.repetitions):
        own = given.folder / f"{case.name}-{kind}-{number}"
        steps = given.steps or STEPS[case.name]
        for name, seconds in take_turns(case, kind, names, given.rounds, steps, own, chance).items():
            taken[name].append(seconds)
        passed = max(distributed.all_gather_json(time.monotonic() - began))
        if passed * (number + 2) / (number + 1) > given.seconds:
            break
    return taken


def paired(found: list[list[Seconds]], base: list[list[Seconds]]) -> str:
    """Return the quartiles of the ratios of all rounds."""
    ratios = [a.wall / b.wall for one, other in zip(found, base, strict=True) for a, b in zip(one, other, strict=True)]
    low, middle, high = statistics.quantiles(ratios)
    return f"{middle:.3f} ({low:.3f} – {high:.3f}) of {len(ratios)}"


def measure(given: argparse.Namespace, case: Case, kind: str) -> dict[str, Any]:
    """Measure one case under one kind of parallelism, print its tables, and return its numbers."""
    names, absent = chosen(kind, versions())
    names = [name for name in names if name in (only(given) or names)]
    taken = repeated(given, case, kind, names)
    pairs = {name: paired(taken[name], taken[BY_HAND]) for name in names if name not in (BY_HAND, ALONE, APART)}
    results = {name: compared(taken[name], taken[BY_HAND]) for name in names}
    others = {name: compared(taken[OURS], taken[name]) for name in names if name in (ACCELERATE, FABRIC)}
    # The time of one process alone divided by that of two with the same number of rows each.
    weak = {name: compared(taken[ALONE], taken[name]) for name in (APART, BY_HAND, OURS) if ALONE in taken}
    parameters = sum(p.numel() for p in case.model().parameters())
    if dist.get_rank() == 0:
        print(
            f"\n{kind}, {case.name}: {parameters / 1e6:.1f} M parameters, 2 × {case.batch} rows of {case.length} tokens"
        )
        print(table(results))
        parts = [f"{name} {text}" for name, text in pairs.items()]
        print(f"{len(taken[BY_HAND])} repetitions; to torch by hand, median and quartiles: {'; '.join(parts)}")
        limits = {name: limit for name, limit in ((OURS, LIMIT), (WRAPPED, LIMIT_WRAPPED)) if name in results}
        parts = [
            f"{name} is {'within' if results[name].ratio <= limit else 'above'} {limit} of torch by hand"
            for name, limit in limits.items()
        ]
        print("; ".join([*parts, *map(against, others, others.values())]))
        parts = [f"{name} {one.ratio:.2f} ({one.range[0]:.2f} – {one.range[1]:.2f})" for name, one in weak.items()]
        print(f"weak scaling, 1 process to 2 (1 is ideal): {'; '.join(parts)}" if parts else "")
        print("\n".join(absent), flush=True)
    return {
        **asdict(case),
        "kind": kind,
        "parameters": parameters,
        "results": {name: asdict(result) for name, result in results.items()},
        "rounds": pairs,
        "ours_to": {name: asdict(result) for name, result in others.items()},
        "weak_scaling": {name: {"ratio": one.ratio, "range": one.range} for name, one in weak.items()},
        "left_out": absent,
    }


def work(given: argparse.Namespace) -> None:
    """Run as one of the two processes."""
    be_quiet()
    torch.set_num_threads(given.threads)
    found = versions()
    machine = f"{platform.machine()} CPU, threads of a process: {given.threads}"
    with start_process_group(current_world(), "cpu", timeout=600):
        if dist.get_rank() == 0:
            print(", ".join(f"{name} {text}" for name, text in found.items()))
            print(
                f"{machine}, 2 processes, up to {given.repetitions} × {given.rounds} rounds of "
                f"{given.steps or ', '.join(f'{STEPS[name]} ({name})' for name in given.cases)} steps",
                flush=True,
            )
        cases = [measure(given, case, kind) for kind in given.kinds for case in CASES if case.name in given.cases]
        if given.output is not None and dist.get_rank() == 0:
            result = {
                "command": f"python benchmarks/dp_overhead.py {' '.join(arguments(given))}",
                "date": date.today().isoformat(),
                "versions": found,
                "machine": machine,
                "cases": cases,
            }
            given.output.parent.mkdir(parents=True, exist_ok=True)
            given.output.write_text(json.dumps(result, indent=2) + "\n")


def only(given: argparse.Namespace) -> list[str]:
    """Return the requested contenders; default: all."""
    return [OURS, BY_HAND, *given.only] if given.only else []


def arguments(given: argparse.Namespace) -> list[str]:
    """Return the options as command-line arguments."""
    numbers = [f"--repetitions={given.repetitions}", f"--rounds={given.rounds}"]
    numbers += [f"--seconds={given.seconds:g}", f"--threads={given.threads}"]
    numbers += [f"--steps={given.steps}"] if given.steps else []
    chosen_ones = ["--only", *given.only] if given.only else []
    return [*numbers, "--kinds", *given.kinds, "--cases", *given.cases, *chosen_ones]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="with newly created contenders")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, help="steps per turn; default: 10 (tiny), 5 (small), 1 (larger)")
    parser.add_argument("--seconds", type=float, default=150.0, help="approximate time of one case with one kind")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--cases", nargs="+", choices=[c.name for c in CASES], default=[c.name for c in CASES])
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), help="besides Cornstarch and torch by hand")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # passed to the two processes
    given = parser.parse_args()
    if given.folder is not None:
        work(given)
        return 0
    with TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--folder", folder, *arguments(given)]
        if given.output is not None:
            command += ["--output", str(given.output)]
        return launch(command, 2, Path(folder) / "logs")


if __name__ == "__main__":
    sys.exit(main())
