"""Runs of a tiny model in processes of their own, of which one does something wrong at a chosen moment."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from cornstarch.launch import current_world, start_process_group
from cornstarch.train import Trainer
from cornstarch.trainer.callbacks import Callback
from tests import forked
from tests.cli.started import free_port, variables
from tests.trainer.odd import SIZES

PATIENCE = 90  # seconds, on a machine with other things to do

Fault = Callable[["FaultyTrainer"], None]


class Rows:
    """Numbers to learn from."""

    def __init__(self, count: int) -> None:
        self._x = torch.randn(count, 8, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self._x[index], "labels": self._x[index].sum(0, keepdim=True)}


def compute_loss(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(module(batch["x"]), batch["labels"])


class FaultyTrainer(Callback):
    """Calls the fault of this rank: at the begin of a step, before a batch, after a step, or in a pause."""

    def __init__(self, rank: int, fault: Fault | None, at: tuple[str, int]) -> None:
        self.rank, self.fault, (self.name, self.step) = rank, fault, at
        self.trainer: Any = None

    def _call(self, name: str, trainer: Trainer) -> None:
        if self.fault is not None and name == self.name and trainer.position.step + 1 >= self.step:
            fault, self.fault, self.trainer = self.fault, None, trainer
            fault(self)

    def on_batch_begin(self, trainer: Trainer) -> None:
        self._call("batch", trainer)

    def on_step_begin(self, trainer: Trainer, batch: Any) -> None:
        self._call("step", trainer)

    def on_step_end(self, trainer: Trainer, result: Any, batch: Any, is_logged: bool) -> None:
        self._call("end", trainer)

    def on_pause(self, trainer: Trainer) -> None:
        self._call("pause", trainer)


def build_net() -> tuple[nn.Module, Any, Any, Any]:
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)]
    return nn.Sequential(*layers), compute_loss, Rows(64), Rows(16)


def build_language_model() -> tuple[nn.Module, Any, Any, Any]:
    ids = torch.randint(3, 64, (32, 12), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": one, "labels": one} for one in ids]
    return LlamaForCausalLM(LlamaConfig(**SIZES)), None, rows, rows[:8]


@dataclass
class Ended:
    """How a rank ended."""

    code: int | None
    """None: it was still there."""
    said: str

    @property
    def error(self) -> str:
        """The last error that it raised."""
        return self.said.rpartition("RAISED ")[2]


def _run(
    folder: str,
    environment: Mapping[str, str],
    fault: Fault | None,
    at: tuple[str, int],
    steps: int,
    sections: Mapping[str, Any],
) -> None:
    rank = int(environment["RANK"])
    file = os.open(f"{folder}/rank_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    torch.set_num_threads(1)
    os.environ.update(environment)
    options: dict[str, Any] = {
        "output": f"{folder}/run", "device": "cpu", "precision": "fp32",
        "loop": {"steps": steps, "batch_size": 8, "check_replicas": "off"},
        "checkpoint": {"every": 1000}, "logging": {"every": 1, "progress": "none"},
        "launch": {"hang_timeout": 2.0},
    }  # fmt: skip
    for name, section in sections.items():
        options[name] = {**options.get(name, {}), **section} if isinstance(section, Mapping) else section
    torch.manual_seed(0)
    is_pipeline = "modules" in options.get("parallel", {})
    model, loss, rows, others = build_net() if not is_pipeline else build_language_model()
    console = Console(file=sys.stdout, width=200, soft_wrap=True)
    try:
        with start_process_group(current_world()):
            trainer = Trainer.from_objects(
                model, train_data=rows, evaluation_data=others, loss=loss, console=console,
                callbacks=[FaultyTrainer(rank, fault, at)], **options,
            )  # fmt: skip
            print("ENDED", trainer.fit().status, flush=True)
    except Exception as error:
        if not os.environ.get("QUIET"):
            traceback.print_exc()
        print(f"RAISED {type(error).__name__}: {error}", flush=True)
        os._exit(3)
    os._exit(0)


def run_ranks(
    folder: Path,
    ranks: int,
    faults: Mapping[int, Fault] | None = None,
    at: tuple[str, int] = ("step", 5),
    steps: int = 20,
    beside: Callable[[list[ForkServerProcess]], None] | None = None,
    **sections: Any,
) -> list[Ended]:
    """Run to the end in so many processes; those that are left over when the others have ended are killed.

    Args:
        folder: Where they run.
        ranks: The number of processes.
        faults: By rank, what goes wrong.
        at: When: the name of a callback's method, and the step.
        steps: Of the run.
        beside: Called with the processes once they run.
        sections: Of the config.
    """
    with free_port() as port:
        processes = []
        for rank in range(ranks):
            own = (faults or {}).get(rank)
            arguments = (own, at, steps, sections)
            one = forked.process(_run, str(folder), variables(rank, ranks, port), *arguments)
            one.start()
            processes.append(one)
        try:
            if beside is not None:
                beside(processes)
            end, left = time.monotonic() + PATIENCE, set(range(ranks))
            while left and time.monotonic() < end:
                left = {rank for rank in left if processes[rank].exitcode is None}
                if left and len(left) < ranks:
                    end = min(end, time.monotonic() + 12.0)  # those that can end do so soon after the first
                if left and left <= {rank for rank, one in (faults or {}).items() if one in NEVER_END}:
                    break
                if left:
                    processes[min(left)].join(0.1)
        finally:
            codes = [one.exitcode for one in processes]
            for one in processes:
                one.kill()
                one.join()
    texts = [(folder / f"rank_{rank}.txt") for rank in range(ranks)]
    return [Ended(code, text.read_text() if text.exists() else "") for code, text in zip(codes, texts, strict=True)]


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run."""
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "event"]


# ------------------------------------------------------------------------------------------------ faults


def stop_itself(faulty: FaultyTrainer) -> None:
    """Be stopped as by a debugger."""
    os.kill(os.getpid(), signal.SIGSTOP)


def stand_still(faulty: FaultyTrainer) -> None:
    """Wait in Python for nothing."""
    time.sleep(600)


NEVER_END = (stop_itself, stand_still)


def begin_collective(faulty: FaultyTrainer) -> None:
    """Begin a collective that the other rank leaves out, in a group that nothing else uses."""
    dist.all_reduce(torch.zeros(3), group=dist.new_group([0, 1]))


def leave_out_collective(faulty: FaultyTrainer) -> None:
    dist.new_group([0, 1])


def flip_bit(faulty: FaultyTrainer) -> None:
    """Change one bit of a weight."""
    weight = next(iter(faulty.trainer.model.parameters()))
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    with torch.no_grad():
        local.view(-1).view(torch.int32)[0] ^= 1 << 12
