"""Measure what it costs to reach the first training step: CPU seconds and wall time, from the start of the process.

The same tiny Llama trains on the same rows: by `cornstarch train` with a YAML file, by a plain script with
`transformers.Trainer`, and by a script with torch and transformers alone, which shows what importing them costs. Each
contender is a process of its own; they take turns. A measurement ends when the first step has been logged: CPU time is
user and system time of the process and all of its children until then. The built-in demo, with images and sounds, is
measured as well.

Packages are installed with or without compiled bytecode. Without it, and where Python may not write it
(PYTHONDONTWRITEBYTECODE), every start compiles all sources that are imported. Both cases are measured.

    python benchmarks/startup.py         # prints a table; with --output FILE.json also writes it
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from cornstarch.demo import TOKENIZER

OURS, DEMO, HUGGING_FACE, ALONE = "cornstarch train", "cornstarch train (demo)", "transformers.Trainer", "by hand"
MODEL = {
    "vocab_size": 26, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
BATCH, RATE, STEPS = 8, 1e-3, 100
WORDS = "which digit is even or odd who says one two three four five six seven eight nine".split()
FIRST_STEP = "step 1/"  # in the line that every contender prints


@dataclass(frozen=True)
class Reached:
    """The cost of one start until its first step was logged."""

    contender: str
    bytecode: bool
    cpu: float
    wall: float


# ------------------------------------------------------------------------ contenders


def train_by_hand(rows: list[str]) -> None:
    """Train one step with torch and transformers alone."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    model = LlamaForCausalLM(LlamaConfig(**MODEL, use_cache=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    batch = tokenizer(rows[:BATCH], return_tensors="pt", padding=True)
    loss = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
    loss.backward()
    optimizer.step()
    print(f"{FIRST_STEP}{STEPS} {loss.item()}", flush=True)


def train_with_transformers(rows: list[str], folder: str) -> None:
    """Train with `transformers.Trainer` as its documentation shows, with as little logging as possible."""
    import torch
    from transformers import (
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class PrintFirstStep(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **others):  # type: ignore[no-untyped-def]
            if state.global_step == 1:
                print(f"{FIRST_STEP}{STEPS} {logs}", flush=True)

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    trainer = Trainer(
        LlamaForCausalLM(LlamaConfig(**MODEL, use_cache=False)),
        TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=RATE, logging_steps=1,
            use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        ),
        train_dataset=[{"input_ids": tokenizer(row)["input_ids"]} for row in rows],  # type: ignore[arg-type]
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[PrintFirstStep()],
    )  # fmt: skip
    trainer.train()


# ------------------------------------------------------------------------ measuring


def write_inputs(folder: Path) -> None:
    """Write the rows, and the config of `cornstarch train`."""
    generator = random.Random(0)
    rows = [" ".join(generator.choices(WORDS, k=24)) for _ in range(BATCH * 20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    config = {
        "device": "cpu",
        "threads": 1,
        "model": {"language_model": {"tokenizer": str(TOKENIZER), "config": {"model_type": "llama", **MODEL}}},
        "data": {"train": [{"path": str(folder / "rows.jsonl"), "format": "text"}]},
        "optimizer": {"learning_rate": RATE},
        "loop": {"steps": STEPS, "batch_size": BATCH},
        "logging": {"every": 1, "progress": "lines"},
    }
    (folder / "run.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML


def build_commands(folder: Path) -> dict[str, list[str]]:
    """Return the command of each contender."""
    train = [sys.executable, "-m", "cornstarch", "train"]
    output = ["--restart", f"output={folder / 'run'}"]
    own = [sys.executable, __file__, "--contender"]
    return {
        OURS: [*train, str(folder / "run.yaml"), *output],
        HUGGING_FACE: [*own, HUGGING_FACE, "--folder", str(folder)],
        ALONE: [*own, ALONE, "--folder", str(folder)],
        DEMO: [*train, *output, "logging.every=1", "logging.progress=lines"],
    }


def measure(command: list[str], environment: Mapping[str, str]) -> tuple[float, float]:
    """Return the CPU seconds and the wall time until a process has logged its first step; then end it."""
    began, lines = time.perf_counter(), []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as started:
        assert started.stdout is not None
        for line in started.stdout:
            lines.append(line)
            if FIRST_STEP in line:
                break
        else:
            sys.exit(f"{' '.join(command)} ended before its first step:\n{''.join(lines)}")
        wall, process = time.perf_counter() - began, psutil.Process(started.pid)
        family = [process, *process.children(recursive=True)]
        cpu = sum(sum(one.cpu_times()[:4]) for one in family)  # own and ended children's, user and system
        for one in family:
            one.kill()
    return cpu, wall


def measure_all(starts: int) -> list[Reached]:
    """Measure all contenders in turn, with and without bytecode."""
    found = []
    for bytecode in (True, False):
        with TemporaryDirectory(prefix="startup-") as name:
            folder = Path(name)
            write_inputs(folder)
            # Installed bytecode may be there or not: a folder of its own is empty at first.
            environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
            environment["PYTHONDONTWRITEBYTECODE"] = "" if bytecode else "1"
            commands = build_commands(folder)
            for turn in range(starts + 1):  # the first one writes bytecode, and reads all files once
                for contender, command in commands.items():
                    cpu, wall = measure(command, environment)
                    if turn:
                        found.append(Reached(contender, bytecode, cpu, wall))
    return found


def describe(found: list[Reached]) -> str:
    """Return the table of medians, with the smallest and largest start, as Markdown."""
    lines = ["| | bytecode | CPU seconds | wall |", "|---|---|---|---|"]
    for bytecode in (True, False):
        for contender in (OURS, HUGGING_FACE, ALONE, DEMO):
            starts = [one for one in found if (one.contender, one.bytecode) == (contender, bytecode)]
            cpu, wall = sorted(one.cpu for one in starts), sorted(one.wall for one in starts)
            lines.append(
                f"| {contender} | {'kept' if bytecode else 'none'} | {statistics.median(cpu):.2f} "
                f"({cpu[0]:.2f} – {cpu[-1]:.2f}) | {statistics.median(wall):.1f} s |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5, help="of each contender")
    parser.add_argument("--output", type=Path, help="a JSON file for all measurements")
    parser.add_argument("--contender", choices=(HUGGING_FACE, ALONE), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender is not None:
        rows = [json.loads(line)["text"] for line in (options.folder / "rows.jsonl").read_text().splitlines()]
        if options.contender == ALONE:
            train_by_hand(rows)
        else:
            train_with_transformers(rows, str(options.folder / "transformers"))
        return
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate"))
    print(f"{date.today()}, Python {platform.python_version()}, {packages}, {options.starts} starts each\n")
    found = measure_all(options.starts)
    print(describe(found))
    if options.output is not None:
        options.output.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
