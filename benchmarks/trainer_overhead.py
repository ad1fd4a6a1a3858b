"""Measure the overhead of the Trainer: a step against a hand-written loop, `transformers.Trainer` and Lightning.

All train the same Llama from the same weights on the same rows with the same fused AdamW, schedule and clipping, and
log a loss every few steps; the benchmark checks that all losses are equal, step by step. Ours runs as it does for a
user: it writes metrics.jsonl and a progress line, while the others are configured to log as little as possible.

Each contender has its own thread, but only one runs at a time: for a turn of several steps, including a line of
metrics, from one forward pass of its model to another. Then the next contender has its turn, in a random order, so that
other load on the machine affects all of them. A round is a turn of each. The memory addresses of weights and batches
make two identical loops differ for as long as they live, so all contenders are created anew several times, in a random
order. Reported: the median over these repetitions of the ratio to the hand-written loop (the median over rounds), with
its smallest and largest value, in wall time and in CPU time of this process, and the difference. The hand-written loop
runs twice, to show the noise between two identical contenders.

    python benchmarks/trainer_overhead.py         # prints tables; with --output FILE.json also writes them
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import logging
import math
import platform
import random
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from rich.console import Console
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from cornstarch.train import Trainer

RATE, DECAY, CLIP, WARMUP = 1e-3, 0.01, 1.0, 5
OURS, BY_HAND, AGAIN, HUGGING_FACE, LIGHTNING = "Cornstarch", "by hand", "by hand, again", "transformers", "Lightning"
LIMIT = 1.02  # of the loop by hand
COUNTS = "larger"  # the case that the limit applies to; the others show constant overhead
Rows = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Case:
    """The amount of work in a step."""

    name: str
    hidden: int
    layers: int
    vocabulary: int
    length: int
    batch: int

    def model(self) -> LlamaForCausalLM:
        """Return the model, always with the same weights."""
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=8 * self.hidden // 3,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 32,
            max_position_embeddings=self.length,
            use_cache=False,
        )
        return LlamaForCausalLM(config).train()

    def rows(self, steps: int) -> Rows:
        """Return tokens for a number of steps."""
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, self.vocabulary, (steps * self.batch, self.length), generator=generator)
        tokens[:, 1::2] = (tokens[:, ::2] + 1) % self.vocabulary  # there is something to learn
        labels = tokens.clone()
        labels[:, 0] = -100  # never predicted: masked, so that no contender counts it
        return [{"input_ids": one, "labels": label} for one, label in zip(tokens, labels, strict=True)]


CASES = [
    Case("tiny", hidden=64, layers=2, vocabulary=256, length=32, batch=8),  # shows constant overhead
    Case("small", hidden=128, layers=4, vocabulary=2048, length=64, batch=8),
    Case("larger", hidden=256, layers=4, vocabulary=4096, length=128, batch=8),
]


@dataclass(frozen=True)
class Job:
    """The task of a contender."""

    model: LlamaForCausalLM
    rows: Rows
    batch: int
    steps: int
    every: int
    """Steps between two lines of the log."""
    folder: Path

    def loader(self) -> DataLoader[Any]:
        """Return a loader of batches in order, for contenders without their own."""
        return DataLoader(self.rows, batch_size=self.batch)  # type: ignore[arg-type]

    def optimizer(self) -> torch.optim.AdamW:
        """Return AdamW with two groups: biases and norms are not decayed."""
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=RATE, fused=True)

    def schedule(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """Return warm-up and cosine, by the step."""

        def factor(step: int) -> float:
            if step < WARMUP:
                return (step + 1) / (WARMUP + 1)
            return (1 + math.cos(math.pi * min((step - WARMUP) / (self.steps - WARMUP), 1))) / 2

        return LambdaLR(optimizer, factor)


# ---------------------------------------------------------------------------------------------------- contenders


def train_by_hand(job: Job) -> None:
    """Train with a hand-written loop."""
    model, optimizer = job.model, job.optimizer()
    schedule = job.schedule(optimizer)
    parameters = list(model.parameters())
    total = torch.zeros(())
    with open(job.folder / "log.jsonl", "w", buffering=1) as log:
        for step, batch in enumerate(job.loader(), start=1):
            loss = model(**batch).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += loss.detach()
            if step % job.every == 0:
                line = {"step": step, "loss": total.item() / job.every, "grad_norm": norm.item()}
                log.write(json.dumps({**line, "learning_rate": schedule.get_last_lr()[0]}) + "\n")
                total.zero_()


def train_ours(job: Job) -> None:
    """Train with our Trainer with its defaults outside of a terminal."""
    Trainer.from_objects(
        job.model,
        train_data=job.rows,
        console=Console(file=io.StringIO(), width=120),
        output=str(job.folder / "run"),
        device="cpu",
        precision="fp32",
        data={"shuffle": False},
        optimizer={"learning_rate": RATE, "weight_decay": DECAY, "clip": CLIP},
        schedule={"name": "cosine", "warmup": WARMUP},
        loop={"steps": job.steps, "batch_size": job.batch},
        logging={"every": job.every, "progress": "lines"},
    ).fit()


def train_with_transformers(job: Job) -> None:
    """Train with `transformers.Trainer`, without progress bar and printing."""
    optimizer = job.optimizer()
    arguments = transformers.TrainingArguments(
        output_dir=str(job.folder),
        max_steps=job.steps,
        per_device_train_batch_size=job.batch,
        train_sampling_strategy="sequential",
        max_grad_norm=CLIP,
        logging_steps=job.every,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(
        job.model, arguments, train_dataset=job.rows, optimizers=(optimizer, job.schedule(optimizer))
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()


def train_with_lightning(job: Job) -> None:
    """Train with Lightning, with metrics in a CSV file, without progress bar and checkpoints."""
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = job.optimizer()
            return [optimizer], [{"scheduler": job.schedule(optimizer), "interval": "step"}]

    trainer = lightning.Trainer(
        max_steps=job.steps,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=CLIP,
        logger=CSVLogger(job.folder),
        log_every_n_steps=job.every,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), job.loader())


CONTENDERS: dict[str, Callable[[Job], None]] = {
    OURS: train_ours,
    BY_HAND: train_by_hand,
    AGAIN: train_by_hand,
    HUGGING_FACE: train_with_transformers,
    LIGHTNING: train_with_lightning,
}


# ---------------------------------------------------------------------------------------------------- taking turns


@dataclass(frozen=True)
class Seconds:
    """The mean time of a step over a turn."""

    wall: float
    cpu: float  # of this process: excludes other load on the machine


class Seat:
    """A contender in its own thread, which waits before the forward pass that follows its turn."""

    def __init__(self, train: Callable[[Job], None], job: Job) -> None:
        self.seconds: list[Seconds] = []  # turn by turn
        self.losses: list[Tensor] = []
        self._train, self._job = train, job
        self._mine, self._others = threading.Semaphore(0), threading.Semaphore(0)
        self._began = (0.0, 0.0)
        self._left = self._steps = 0
        self._free = False
        self._error: BaseException | None = None
        job.model.register_forward_pre_hook(self._wait)
        job.model.register_forward_hook(self._note)
        threading.Thread(target=self._run, daemon=True).start()

    def turn(self, steps: int) -> None:
        """Run a number of steps, until the forward pass of the next one; 0: until the first forward pass."""
        self._left = self._steps = steps
        self._mine.release()
        self._others.acquire()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Run to the end."""
        self._free = True
        self.turn(0)

    def _run(self) -> None:
        self._mine.acquire()
        try:
            self._train(self._job)
            if not self._free:
                raise RuntimeError(f"{self._train.__name__} ended after {len(self.losses)} steps")
        except BaseException as error:
            self._error = error
        finally:
            self._others.release()

    def _wait(self, *_: object) -> None:
        if self._free:
            return
        if self._left:
            self._left -= 1
            return
        wall, cpu = time.perf_counter(), time.process_time()
        if self._steps:
            self.seconds.append(Seconds((wall - self._began[0]) / self._steps, (cpu - self._began[1]) / self._steps))
        self._others.release()
        self._mine.acquire()
        self._left -= 1
        self._began = time.perf_counter(), time.process_time()

    def _note(self, module: object, arguments: object, output: Any) -> None:
        if not self._free:
            self.losses.append(output.loss.detach())


def take_turns(
    case: Case, names: list[str], rounds: int, steps: int, folder: Path, chance: random.Random
) -> dict[str, list[Seconds]]:
    """Return the step times of each contender by turn."""
    count = (rounds + 1) * steps  # the first round warms up
    rows = case.rows(count + 1)
    seats: dict[str, Seat] = {}
    for number, name in enumerate(chance.sample(names, len(names))):
        own = folder / str(number)
        own.mkdir(parents=True)
        # One more step: the last timed one ends with the next forward pass.
        seats[name] = Seat(CONTENDERS[name], Job(case.model(), rows, case.batch, count + 1, steps, own))
    for seat in seats.values():
        seat.turn(0)  # until the first forward pass
    gc.collect()
    gc.freeze()  # keep the garbage of all trainers out of the step of one of them
    order = list(seats.values())
    for _ in range(rounds + 1):
        chance.shuffle(order)
        for seat in order:
            seat.turn(steps)
    check_losses({name: seat.losses for name, seat in seats.items()}, count)
    for seat in seats.values():
        seat.end()
    gc.unfreeze()
    return {name: seats[name].seconds[1:] for name in names}


def check_losses(losses: dict[str, list[Tensor]], count: int) -> None:
    """Check that all contenders computed the same."""
    wanted = torch.stack(losses[BY_HAND])
    if len(wanted) != count or not wanted[-1] < wanted[0]:
        raise RuntimeError(f"{len(wanted)} losses, the last {wanted[-1]:.4f}; expected {count} that fall")
    for name, found in losses.items():
        try:
            torch.testing.assert_close(torch.stack(found), wanted, rtol=1e-4, atol=0)
        except AssertionError as error:
            raise RuntimeError(f"{name} does not match the hand-written loop. {error}") from None


# ---------------------------------------------------------------------------------------------------- what it says


@dataclass(frozen=True)
class Result:
    """The ratio of two contenders: medians over repetitions of medians over rounds."""

    milliseconds: float
    """Milliseconds per step."""
    ratio: float
    range: tuple[float, float]
    """The smallest and the largest ratio of a repetition."""
    ratio_cpu: float
    more_us: float
    """Additional microseconds per step."""
    more_us_cpu: float


def compared(found: list[list[Seconds]], base: list[list[Seconds]]) -> Result:
    """Compare repetition by repetition, and in each round by round."""

    def over(values: Callable[[Seconds, Seconds], float]) -> list[float]:
        return [
            statistics.median(values(a, b) for a, b in zip(one, other, strict=True))
            for one, other in zip(found, base, strict=True)
        ]

    ratios = over(lambda a, b: a.wall / b.wall)
    return Result(
        1e3 * statistics.median(over(lambda a, b: a.wall)),
        statistics.median(ratios),
        (min(ratios), max(ratios)),
        statistics.median(over(lambda a, b: a.cpu / b.cpu)),
        1e6 * statistics.median(over(lambda a, b: a.wall - b.wall)),
        1e6 * statistics.median(over(lambda a, b: a.cpu - b.cpu)),
    )


def against(name: str, ours: Result) -> str:
    """Compare ours with another contender."""
    low, high = ours.range
    return f"to {name} it is {ours.ratio:.3f} ({low:.3f} – {high:.3f}), CPU {ours.ratio_cpu:.3f}"


def table(results: dict[str, Result]) -> str:
    """Return the results of a case as a table in Markdown."""
    lines = [
        "| | ms per step | ratio, wall (range) | ratio, CPU | µs more, wall | µs more, CPU |",
        "|---|---|---|---|---|---|",
    ]
    for name, r in results.items():
        ratio = f"{r.ratio:.3f} ({r.range[0]:.3f} – {r.range[1]:.3f})"
        row = [name, f"{r.milliseconds:.2f}", ratio, f"{r.ratio_cpu:.3f}", f"{r.more_us:.0f}", f"{r.more_us_cpu:.0f}"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Return the versions of the compared packages."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "accelerate", "lightning"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def be_quiet() -> None:
    """Silence the output of the other packages."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    with suppress(ImportError):
        import lightning  # noqa: F401  it sets its level when it is imported
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def measure(case: Case, names: list[str], repetitions: int, rounds: int, steps: int) -> dict[str, Any]:
    """Measure one case, print its table, and return its numbers."""
    chance = random.Random(0)
    taken: dict[str, list[list[Seconds]]] = {name: [] for name in names}
    for _ in range(repetitions):
        with TemporaryDirectory() as folder:
            for name, seconds in take_turns(case, names, rounds, steps, Path(folder), chance).items():
                taken[name].append(seconds)
    results = {name: compared(taken[name], taken[BY_HAND]) for name in names}
    others = {name: compared(taken[OURS], taken[name]) for name in names if name in (HUGGING_FACE, LIGHTNING)}
    parameters = sum(p.numel() for p in case.model().parameters())
    print(f"\n{case.name}: {parameters / 1e6:.1f} M parameters, {case.batch} rows of {case.length} tokens per step")
    print(table(results))
    verdict = "within" if results[OURS].ratio <= LIMIT else "above"
    counts = "" if case.name == COUNTS else f" (the limit applies to {COUNTS})"
    said = [f"{OURS} is {verdict} {LIMIT} of the loop by hand{counts}", *map(against, others, others.values())]
    print("; ".join(said))
    sys.stdout.flush()
    return {
        **asdict(case),
        "parameters": parameters,
        "results": {name: asdict(result) for name, result in results.items()},
        "ours_to": {name: asdict(result) for name, result in others.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7, help="with newly created contenders")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10, help="steps per round, and between two lines of metrics")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cases", nargs="+", choices=[c.name for c in CASES], default=[c.name for c in CASES])
    parser.add_argument("--output", type=Path, help="a JSON file")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    be_quiet()
    found = versions()
    machine = f"{platform.machine()} CPU, threads: {given.threads}"
    names = [name for name in CONTENDERS if name != LIGHTNING or found["lightning"] != "not installed"]
    print(", ".join(f"{name} {text}" for name, text in found.items()))
    print(f"{machine}, {given.repetitions} × {given.rounds} rounds of {given.steps} steps")
    if LIGHTNING not in names:
        print("Lightning is left out: it is not installed (pip install lightning).")
    chosen = [case for case in CASES if case.name in given.cases]
    cases = {case.name: measure(case, names, given.repetitions, given.rounds, given.steps) for case in chosen}
    if given.output is not None:
        result = {
            "command": f"python benchmarks/trainer_overhead.py --repetitions {given.repetitions} "
            f"--rounds {given.rounds} --steps {given.steps} --threads {given.threads} --cases {' '.join(given.cases)}",
            "date": date.today().isoformat(),
            "versions": found,
            "machine": machine,
            "cases": cases,
        }
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
