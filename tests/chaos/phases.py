"""Reports of the processes of a run: in which phase they are, and whether two of them write to one folder.

`install` puts a line into a file before and after each phase of a `Trainer`. It is called in the process from which
`tests.warm` forks the processes of a run, or, with `python -m tests.chaos.phases`, in an interpreter that starts cold.
Nothing is reported unless `CHAOS_REPORTS` names a folder.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER, ONLY = "CHAOS_REPORTS", "CHAOS_ONLY"
INIT, LOAD, STEP, SAVE, EVALUATION, END = PHASES = ("init", "load", "step", "save", "evaluation", "end")
CLAIMED, DOUBLE, RESUMED, SAMPLES = "claimed", "double", "resumed", "samples"
RARE = (INIT, RESUMED, CLAIMED, DOUBLE)
"""What a process reports once: runs of hours report nothing else (`CHAOS_ONLY`)."""


def report(phase: str, number: int = 0, mark: str = "+", text: str = "") -> None:
    """Write a line: when, which rank, which phase, whether it begins or ends, a number, a text."""
    folder, only = os.environ.get(FOLDER), os.environ.get(ONLY)
    if folder and (not only or phase in only.split(",")):
        line = f"{time.monotonic():.6f} {os.environ.get('RANK', '0')} {phase} {mark} {number} {text}\n"
        with open(Path(folder, str(os.getpid())), "a") as file:  # one write: a killed process leaves whole lines
            file.write(line)


def begin() -> None:
    """Say that this process has begun. Only the processes that train do; a launcher has no rank."""
    if "RANK" in os.environ:
        report(INIT)


def install() -> None:
    """Let every `Trainer` of this process, and of those forked from it, report its phases."""
    from cornstarch.config.run_folder import RunFolder
    from cornstarch.trainer import trainer
    from cornstarch.trainer.checkpointer import Checkpointer

    kind = trainer.Trainer
    trainer.find_checkpoint = _around(LOAD, trainer.find_checkpoint)  # type: ignore[assignment]
    Checkpointer.restore = _around(LOAD, Checkpointer.restore, _report_resumed)  # type: ignore[method-assign]
    Checkpointer.save = _around(SAVE, Checkpointer.save)  # type: ignore[method-assign]
    kind.step = _around(STEP, _report_samples(kind.step), lambda result: report(STEP, result.step, "="))  # type: ignore[method-assign]
    kind.evaluate = _around(EVALUATION, kind.evaluate)  # type: ignore[method-assign]
    trainer.finish_run = _around(END, trainer.finish_run)
    RunFolder.claim = _watch_claim(RunFolder.claim)  # type: ignore[assignment,method-assign]


def _around(phase: str, function: Callable[..., Any], then: Callable[[Any], None] | None = None) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        report(phase)
        result = function(*arguments, **options)
        if then is not None:
            then(result)
        report(phase, mark="-")
        return result

    return call


def _report_samples(step: Callable[..., Any]) -> Callable[..., Any]:
    """Report which samples of which epoch a step has trained on."""

    @functools.wraps(step)
    def call(trainer: Any, batch: Any) -> Any:
        result = step(trainer, batch)
        if SAMPLES in os.environ.get(ONLY, ""):
            names = [name for one in batch.microbatches for name in one.sample_ids]
            report(SAMPLES, result.step, text=json.dumps([batch.epoch, trainer.replica.index, names]))
        return result

    return call


def _report_resumed(position: Any) -> None:
    report(RESUMED, position.step)


def _watch_claim(claim: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def call(folder: Any) -> Iterator[None]:
        with claim(folder):
            reports = os.environ.get(FOLDER)
            if reports and "RANK" in os.environ:
                for pid in _find_other_writers(Path(reports)):
                    report(DOUBLE, pid)
                report(CLAIMED)
            yield

    return call


def _find_other_writers(reports: Path) -> list[int]:
    """Return the processes that have claimed the folder before and still have a file open."""
    found = []
    for file in reports.iterdir():
        if file.name != str(os.getpid()) and f" {CLAIMED} + " in file.read_text():
            try:
                if os.listdir(f"/proc/{file.name}/fd"):  # a process that is being killed closes its files first
                    found.append(int(file.name))
            except OSError:
                continue
    return found


def main() -> None:
    """Be `python -m MODULE ARGUMENTS` that reports its phases, or the plain interpreter for anything else."""
    arguments = sys.argv[1:]
    what = arguments[1:] if arguments[:1] == ["-u"] else arguments
    if what[:1] != ["-m"]:
        os.execv(sys.executable, [sys.executable, *arguments])
    sys.executable = os.environ.get("CHAOS_PYTHON", sys.executable)
    sys.argv = what[1:]
    run = runpy.run_module

    def run_and_report(*arguments: Any, **options: Any) -> Any:
        begin()
        if "RANK" in os.environ:
            install()
        return run(*arguments, **options)

    runpy.run_module = run_and_report  # type: ignore[assignment]  # forked workers of a fork server call it, too
    runpy.run_module(what[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
