"""Measure the pipeline runtime: 1F1B in two processes against `torch.distributed.pipelining` and DeepSpeed.

All train the same blocks from the same weights on the same microbatches, split into the same two stages, with the same
SGD, over gloo. The benchmark checks that all losses, step by step, and all gradients of the first step are equal.
Cornstarch takes part twice: its runtime, with the loss on the last stage, as in torch; and its `train_batch`, which
returns the loss in both processes, as in DeepSpeed. torch runs twice, to show the noise between identical contenders.

All contenders run in the same two processes and take turns of several steps, in a random order that is the same in
both. The processes synchronize before each turn. The time of a turn is that of the slower process. All contenders are
created anew several times. Reported: the median over these repetitions of the ratio (the median over rounds), with its
smallest and largest value. The main case is `larger`. The tables show wall time and CPU time, the latter for both
processes and all of their threads: other load on the machine affects it less.

Overhead of an action: with stages that compute next to nothing, the time of a step divided by its number of actions (a
forward or a backward of a microbatch), minus that of the same messages in the same order, sent and received by hand;
and minus that of the same messages with the same computations between them, by hand. These take turns with the
contenders.

Bubble: with stages that sleep (virtual_devices.py), the fraction of a step in which places do not compute, against
(K - 1) / (M + K - 1). All time that is not sleep counts as bubble.

    python benchmarks/pipeline_runtime.py         # prints tables; with --output FILE.json also writes them

DeepSpeed takes part if it is installed, with DS_BUILD_OPS=0 (DS_ACCELERATOR=cpu is set here).
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import logging
import os
import platform
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss
from virtual_devices import Job, run

from cornstarch.launch import current_world, launch, start_process_group
from cornstarch.parallel import distributed
from cornstarch.pipeline import PipelineModule, initialize
from cornstarch.pipeline.p2p import P2PChannel, Route, StageEdge
from cornstarch.pipeline.runtime import Runtime
from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.policies import make_schedule

STAGES, MICROBATCHES, RATE = 2, 8, 0.01
OURS, BATCH, TORCH, AGAIN, DEEPSPEED = "Cornstarch", "Cornstarch, train_batch", "torch", "torch, again", "DeepSpeed"
MESSAGES, BY_HAND = "messages alone", "messages and computing by hand"
AGAINST = {OURS: TORCH, BATCH: DEEPSPEED, AGAIN: TORCH}
LIMIT, OVERHEAD, BUBBLE = 1.0, 200.0, 0.05  # ratio to the others; µs per action; relative to the formula
COUNTS = "larger"  # the case that the limit applies to; the others show constant overhead
CPU = torch.device("cpu")


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add the output of the block."""
        return hidden + self.down(nn.functional.gelu(self.up(hidden)))


class Scale(nn.Module):
    """Computes next to nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Multiply by the weight."""
        return hidden * self.weight


@dataclass(frozen=True)
class Case:
    """The amount of work in a step."""

    name: str
    width: int
    blocks: int
    rows: int
    """Rows per microbatch."""

    def layers(self) -> list[nn.Module]:
        """Return all blocks, always with the same weights."""
        torch.manual_seed(0)
        return [Block(self.width) if self.name != NOTHING.name else Scale(self.width) for _ in range(self.blocks)]

    def own(self) -> nn.Sequential:
        """Return the blocks of this process's stage."""
        half = self.blocks // STAGES
        return nn.Sequential(*self.layers()[dist.get_rank() * half :][:half])

    def data(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return inputs and targets, by microbatch."""
        generator = torch.Generator().manual_seed(1)
        both = torch.randn(2, MICROBATCHES, self.rows, self.width, generator=generator)
        return list(both[0]), list(both[1])


CASES = [
    Case("small", width=64, blocks=4, rows=8),
    Case("medium", width=256, blocks=8, rows=32),
    Case("larger", width=512, blocks=8, rows=64),
]
NOTHING = Case("nothing", width=64, blocks=2, rows=8)


class Sgd(torch.optim.SGD):
    """SGD that stores the gradients of its first step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=RATE)
        self.first: list[Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights."""
        if not self.first:
            self.first = [p.grad.clone() for group in self.param_groups for p in group["params"]]
        super().step(closure)


# ---------------------------------------------------------------------------------------------------- contenders


@dataclass
class Seat:
    """A contender and its measured steps."""

    step: Callable[[], Tensor | None]
    """Runs a step and returns its mean loss where it is known."""
    optimizer: Sgd | None
    """None: nothing is trained."""
    close: Callable[[], None] = lambda: None
    seconds: list[tuple[float, float]] = field(default_factory=list)
    """Wall and CPU seconds per step, by turn, in this process."""
    losses: list[Tensor] = field(default_factory=list)


class Stage(nn.Module):
    """Blocks, as a program of the runtime."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: Mapping[str, Tensor], received: Mapping[int, Any]) -> Any:
        """Run the blocks on the received or given input."""
        return self.layers(next(iter(received.values()), None) if received else inputs["input"])


def ours(case: Case) -> Seat:
    """Train with our runtime."""
    rank, layers = dist.get_rank(), case.own()
    optimizer = Sgd(layers.parameters())
    post = P2PChannel(dist.new_group(backend="gloo"), CPU)
    route = Route.between(np.array([[0]]), np.array([[1]]), is_same_module=True)
    edges = {(0, 1): StageEdge(rank, route, post, 0, "model 0")}
    schedule = make_schedule(StageGraph.chain(STAGES), MICROBATCHES, "1f1b")
    runtime = Runtime(schedule, rank, {rank: Stage(layers)}, edges, post)
    inputs, targets = case.data()
    microbatches = [{"input": one} for one in inputs]
    losses: list[Tensor] = []

    def finish(m: int, output: Tensor) -> Tensor:
        loss = mse_loss(output, targets[m])
        losses.append(loss.detach())
        return loss / MICROBATCHES

    def step() -> Tensor | None:
        losses.clear()
        runtime.train(microbatches, finish)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if losses else None

    return Seat(step, optimizer, post.close)


def ours_by_batches(case: Case) -> Seat:
    """Train with our `train_batch`."""
    model = PipelineModule(case.layers(), STAGES, mse_loss, partition_method="uniform")
    optimizer = Sgd(model.parameters())
    engine = initialize(model, optimizer, microbatches=MICROBATCHES)
    pairs = list(zip(*case.data(), strict=True))
    assert model.parallel.pipeline is not None
    return Seat(lambda: engine.train_batch(iter(pairs)), optimizer, model.parallel.pipeline.close)


def with_torch(case: Case) -> Seat:
    """Train with torch's own pipelining."""
    rank, layers = dist.get_rank(), case.own()
    optimizer = Sgd(layers.parameters())
    stage = PipelineStage(layers, rank, STAGES, CPU)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=mse_loss)
    inputs, targets = (torch.cat(one) for one in case.data())

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).detach().mean() if losses else None

    return Seat(step, optimizer)


def with_deepspeed(case: Case) -> Seat:
    """Train with DeepSpeed's pipeline."""
    import deepspeed
    from deepspeed.pipe import PipelineModule as Pipes

    with redirect_stdout(io.StringIO()):  # it lists all layers
        model = Pipes(case.layers(), num_stages=STAGES, loss_fn=mse_loss, partition_method="uniform")
    optimizer = Sgd(model.parameters())
    options = {
        "train_micro_batch_size_per_gpu": case.rows,
        "gradient_accumulation_steps": MICROBATCHES,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=options)
    pairs = list(zip(*case.data(), strict=True))
    return Seat(lambda: engine.train_batch(iter(pairs)).detach(), optimizer)


CONTENDERS: dict[str, Callable[[Case], Seat]] = {
    OURS: ours,
    TORCH: with_torch,
    AGAIN: with_torch,
    BATCH: ours_by_batches,
    DEEPSPEED: with_deepspeed,
}


# ---------------------------------------------------------------------------------------------------- taking turns


@dataclass
class Times:
    """Seconds per step, by repetition and turn."""

    passing: list[list[float]] = field(default_factory=list)
    """In the slower process."""
    working: list[list[float]] = field(default_factory=list)
    """CPU time of both processes together."""

    def add(self, turns: list[list[list[float]]]) -> None:
        """Add a repetition: wall and CPU time by process and turn."""
        together = list(zip(*turns, strict=True))[1:]  # the first turn warms up
        self.passing.append([max(passing for passing, _ in ranks) for ranks in together])
        self.working.append([sum(working for _, working in ranks) for ranks in together])


def take_turns(
    case: Case, names: list[str], rounds: int, steps: int, chance: random.Random
) -> dict[str, list[list[list[float]]]]:
    """Return the seconds of a step of each contender, by process and turn; both processes must call it."""
    known = {**CONTENDERS, MESSAGES: messages, BY_HAND: by_hand}
    seats = {name: known[name](case) for name in chance.sample(names, len(names))}
    gc.collect()
    gc.freeze()  # keep the garbage of all contenders out of the step of one of them
    order = list(names)
    for _ in range(rounds + 1):
        chance.shuffle(order)
        for name in order:
            take_turn(seats[name], steps)
    gc.unfreeze()
    check(seats)
    seconds = {name: distributed.all_gather_json(seats[name].seconds) for name in names}
    dist.barrier()
    for seat in seats.values():
        seat.close()
    return seconds


def take_turn(seat: Seat, steps: int) -> None:
    """Run some steps of a contender after a barrier."""
    dist.barrier()
    began, worked = time.perf_counter(), time.process_time()
    losses = [seat.step() for _ in range(steps)]
    seat.seconds.append(((time.perf_counter() - began) / steps, (time.process_time() - worked) / steps))
    seat.losses += [loss for loss in losses if loss is not None]


def check(seats: Mapping[str, Seat]) -> None:
    """Check that all contenders computed the same."""
    wanted = seats[TORCH]
    assert wanted.optimizer is not None
    for name, seat in seats.items():
        if seat.optimizer is None:
            continue
        try:
            if wanted.losses:
                torch.testing.assert_close(torch.stack(seat.losses), torch.stack(wanted.losses), rtol=1e-4, atol=1e-7)
            for found, gradient in zip(seat.optimizer.first, wanted.optimizer.first, strict=True):
                torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6)
        except (AssertionError, ValueError) as error:
            raise RuntimeError(f"{name} does not match torch. {error}") from None


# ---------------------------------------------------------------------------------------------------- what it says


@dataclass(frozen=True)
class Ratio:
    """The ratio of two contenders: the median over repetitions of the medians over rounds."""

    to: str
    ratio: float
    range: tuple[float, float]
    """The smallest and the largest of a repetition."""

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.range[0]:.3f} – {self.range[1]:.3f}) of {self.to}"


def compared(name: str, found: list[list[float]], base: list[list[float]]) -> Ratio:
    """Compare repetition by repetition, and in each round by round."""
    ratios = [
        statistics.median(a / b for a, b in zip(one, other, strict=True))
        for one, other in zip(found, base, strict=True)
    ]
    return Ratio(name, statistics.median(ratios), (min(ratios), max(ratios)))


def measure(case: Case, names: list[str], given: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Times]]:
    """Measure one case, print its table, and return its numbers and the seconds of all turns."""
    chance = random.Random(0)
    taken = {name: Times() for name in names}
    for _ in range(given.repetitions):
        for name, turns in take_turns(case, names, given.rounds, given.steps, chance).items():
            taken[name].add(turns)
    passing = {name: milliseconds(taken[name].passing) for name in names}
    working = {name: milliseconds(taken[name].working) for name in names}
    pairs = [(name, other) for name, other in AGAINST.items() if name in names and other in names]
    ratios = {name: compared(other, taken[name].passing, taken[other].passing) for name, other in pairs}
    work_ratios = {name: compared(other, taken[name].working, taken[other].working) for name, other in pairs}
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for layer in case.layers() for p in layer.parameters())
        print(f"\n{case.name}: {parameters / 1e6:.1f} M parameters, {MICROBATCHES} microbatches of {case.rows} rows")
        print("| | ms per step | ratio (range) | CPU ms | ratio (range) |\n|---|---|---|---|---|")
        for name in names:
            cells = [f"{passing[name]:.2f}", ratios.get(name, ""), f"{working[name]:.2f}", work_ratios.get(name, "")]
            print(f"| {' | '.join(map(str, [name, *cells]))} |")
        if case.name != NOTHING.name:
            print(verdict(case, ratios), flush=True)
    found = {
        **asdict(case),
        "milliseconds": passing,
        "ratios": {name: asdict(one) for name, one in ratios.items()},
        "processor_milliseconds": working,
        "processor_ratios": {name: asdict(one) for name, one in work_ratios.items()},
    }
    return found, taken


def milliseconds(seconds: list[list[float]]) -> float:
    """Return the median over repetitions of the median over turns."""
    return 1e3 * statistics.median(map(statistics.median, seconds))


def verdict(case: Case, ratios: Mapping[str, Ratio]) -> str:
    """Compare our ratio with the limit."""
    said = []
    for name in (OURS, BATCH):
        if (one := ratios.get(name)) is not None:
            words = "within" if one.ratio <= LIMIT else "within the spread of" if one.range[0] <= LIMIT else "above"
            said.append(f"{name} is {words} {LIMIT:.2f} of {one.to}")
    return "; ".join(said) + ("" if case.name == COUNTS else f" (the limit applies to {COUNTS})")


# ---------------------------------------------------------------------------------------------------- overhead


def exchange(case: Case, compute: Callable[[bool], None]) -> Seat:
    """Send and receive the messages of a step of two stages, in the same order; receives are posted early.

    compute: Called before each send, with whether it is forward, and after each receive of a gradient.
    """
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    own, others = ([torch.zeros(case.rows, case.width) for _ in range(MICROBATCHES)] for _ in range(2))
    ahead = 1 - rank  # the first stage is a forward ahead

    def step() -> None:
        due = [dist.irecv(one, 1 - rank, group=group) for one in others]
        sent: list[Any] = []
        for m in range(-ahead, MICROBATCHES):
            if rank == 0 and m + ahead < MICROBATCHES:
                compute(True)
                sent.append(dist.isend(own[m + ahead], 1 - rank, group=group))
            if m < 0:
                continue
            due[m].wait()
            if rank == 1:
                compute(True)
            compute(False)
            if rank == 1:
                sent.append(dist.isend(own[m], 1 - rank, group=group))
        for one in sent:
            one.wait()

    return Seat(step, None, lambda: None)  # keep the group: torch names groups by their number


def messages(case: Case) -> Seat:
    """Send and receive only."""
    return exchange(case, lambda forward: None)


def by_hand(case: Case) -> Seat:
    """Send and receive, with the computations of the stages in between."""
    layers, (inputs, targets) = case.own(), case.data()
    gradient, rank = torch.ones_like(inputs[0]), dist.get_rank()
    made: list[Tensor] = []

    def compute(forward: bool) -> None:
        if forward:
            output = layers(inputs[0].detach().requires_grad_(rank > 0))
            made.append(output if rank == 0 else mse_loss(output, targets[0]) / MICROBATCHES)
        else:
            made.pop(0).backward(gradient if rank == 0 else None)

    return exchange(case, compute)


def measure_overhead(names: list[str], given: argparse.Namespace) -> dict[str, Any]:
    """Measure, print and return the cost of an action beyond the transfer."""
    found, taken = measure(NOTHING, [*names, MESSAGES, BY_HAND], given)
    actions = {name: 1e3 * one / (2 * MICROBATCHES) for name, one in found["milliseconds"].items()}
    overhead, own = (
        {name: beyond(taken[name].passing, taken[base].passing) for name in names} for base in (MESSAGES, BY_HAND)
    )
    if dist.get_rank() == 0:
        print("| | µs per action | beyond the messages (range) | beyond messages and computing |\n|---|---|---|---|")
        for name in names:
            cells = [f"{middle:.0f} ({low:.0f} – {high:.0f})" for middle, low, high in (overhead[name], own[name])]
            print(f"| {name} | {actions[name]:.0f} | {' | '.join(cells)} |")
        print(f"{OURS}: {overhead_words(*overhead[OURS])}", flush=True)
    return {**found, "actions_us": actions, "overhead_us": overhead, "own_us": own}


def beyond(found: list[list[float]], bare: list[list[float]]) -> tuple[float, float, float]:
    """Return the microseconds of an action beyond those of others: the median over repetitions, and the range."""
    each = [
        1e6 * statistics.median(a - b for a, b in zip(one, other, strict=True)) / (2 * MICROBATCHES)
        for one, other in zip(found, bare, strict=True)
    ]
    return statistics.median(each), min(each), max(each)


def overhead_words(middle: float, low: float, high: float) -> str:
    """Compare an overhead with its limit; a negative overhead only shows that the machine is busy."""
    if low < 0:
        return f"unknown ({low:.0f} – {high:.0f} µs): messages alone took longer than a step. Is the machine busy?"
    return f"{'within' if middle <= OVERHEAD else 'above'} {OVERHEAD:.0f} µs"


# ---------------------------------------------------------------------------------------------------- bubble


def measure_bubbles(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure, print and return the bubbles of stages that sleep."""
    forward, backward = given.sleep, 2 * given.sleep
    print(f"\nbubble: stages that sleep {1e3 * forward:.0f} ms forward and {1e3 * backward:.0f} ms backward")
    print("| | K | M | measured (range) | (K - 1) / (M + K - 1) | apart, % of it | step, % longer |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for policy in ("gpipe", "1f1b"):
        for places in given.places:
            for count in given.microbatches:
                rows.append(bubble(policy, places, count, (forward, backward, 0.0), given.steps_asleep))
                one = rows[-1]
                low, high = one["range"]
                cells = [
                    policy,
                    places,
                    count,
                    f"{one['bubble']:.4f} ({low:.4f} – {high:.4f})",
                    f"{one['formula']:.4f}",
                ]
                cells += [f"{100 * one['apart']:+.1f}", f"{100 * one['longer']:+.2f}"]
                print(f"| {' | '.join(map(str, cells))} |", flush=True)
    worst = max(abs(row["apart"]) for row in rows)
    print(f"largest difference {100 * worst:.1f} % of the formula: {'within' if worst <= BUBBLE else 'above'} 5 %")
    return rows


def bubble(policy: str, places: int, count: int, cost: tuple[float, float, float], steps: int) -> dict[str, Any]:
    """Return the bubble of a number of equal stages."""
    job = Job(StageGraph.chain(places, costs=cost), ((cost,),) * places, count, policy, steps)
    found = sorted(1 - job.compute / (places * seconds) for seconds in run(job))
    formula = (places - 1) / (count + places - 1)
    middle = statistics.median(found)
    return {
        "policy": policy,
        "stages": places,
        "microbatches": count,
        "bubble": middle,
        "range": [found[0], found[-1]],
        "formula": formula,
        "apart": middle / formula - 1,
        "longer": (1 - formula) / (1 - middle) - 1,
    }


# ---------------------------------------------------------------------------------------------------- all of it


def versions() -> dict[str, str]:
    """Return the versions of the compared packages."""
    found = {"python": platform.python_version()}
    for name in ("torch", "deepspeed"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def be_quiet() -> None:
    """Silence the output of the other packages."""
    warnings.filterwarnings("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Measure everything except the bubble; both processes must call it."""
    names = [name for name in CONTENDERS if name != DEEPSPEED or given.deepspeed]
    overhead = measure_overhead(names, given)
    return {
        "overhead": overhead,
        "cases": [measure(case, names, given)[0] for case in CASES if case.name in given.cases],
    }


def work(given: argparse.Namespace) -> None:
    """Run as one of the two processes."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    be_quiet()
    torch.set_num_threads(1)
    with start_process_group(current_world(), "cpu", timeout=300):
        if given.deepspeed:
            import deepspeed

            with redirect_stdout(io.StringIO()):
                deepspeed.init_distributed("gloo", verbose=False)
            be_quiet()
        found = compare(given)
        if dist.get_rank() == 0:
            given.result.write_text(json.dumps(found))


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the arguments; default: those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="with newly created contenders; 0: bubbles only")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="steps per round")
    parser.add_argument("--cases", nargs="*", choices=[c.name for c in CASES], default=[c.name for c in CASES])
    parser.add_argument("--sleep", type=float, default=0.1, help="seconds of a forward, for the bubble")
    parser.add_argument("--places", nargs="*", type=int, default=[2, 4], help="stages, for the bubble; none: skip it")
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 8, 16], help="for the bubble")
    parser.add_argument("--steps-asleep", type=int, default=3, help="steps per bubble; the median counts")
    parser.add_argument("--deepspeed", action=argparse.BooleanOptionalAction, help="default: if it is installed")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # passed to the two processes
    return parser.parse_args(arguments)


def in_two_processes() -> dict[str, Any] | None:
    """Run this script in two processes and return their results; None if they failed."""
    with TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--result", str(result)]
        found: dict[str, Any] | None = None
        if launch(command, 2, Path(folder) / "logs") == 0:
            found = json.loads(result.read_text())
        return found


def main() -> int:
    given = options()
    found = versions()
    if given.deepspeed is None:
        given.deepspeed = found["deepspeed"] != "not installed"
    if given.result is not None:
        work(given)
        return 0
    print(", ".join(f"{name} {text}" for name, text in found.items()))
    print(
        f"{platform.machine()} CPU, 2 processes of 1 thread, {given.repetitions} × {given.rounds} × {given.steps} steps"
    )
    if not given.deepspeed:
        print("DeepSpeed is left out: it is not installed, or not requested.")
    sys.stdout.flush()
    measured = in_two_processes() if given.repetitions else {}
    if measured is None:
        return 1
    bubbles = measure_bubbles(given) if given.places else []
    if given.output is not None:
        command = f"python benchmarks/pipeline_runtime.py {' '.join(sys.argv[1:])}".rstrip()
        head = {"command": command, "date": date.today().isoformat(), "versions": found, "machine": platform.machine()}
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps({**head, **measured, "bubbles": bubbles}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
