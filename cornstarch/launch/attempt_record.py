"""What the attempts of a run leave behind: the step each rank is in, and `restarts.jsonl` in the run's folder.

A supervisor appends a line for every failure, and rank 0 of the next attempt a line when training goes on. The lines
stay when `metrics.jsonl` is rewound to a checkpoint. No torch here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cornstarch.errors import ConfigError
from cornstarch.files import open_regular
from cornstarch.report.restarts import RESTARTS, read_restarts

ATTEMPT = "CORNSTARCH_ATTEMPT"
"""A variable of workers that a supervisor has started: the number of the attempt, from 0."""
STEP_FILE = "CORNSTARCH_STEP_FILE"
"""A variable of workers: the file in which a rank keeps the number of the step it is in."""
MODULES_FILE = "CORNSTARCH_MODULES_FILE"
"""A variable of one worker: the file in which it lists the modules it has imported, for workers after it."""
_FIRST_STEPS = 3  # after which everything that a step needs has been imported


class StepFile:
    """Keeps the number of the step that this rank is in where its supervisor finds it, whatever happens to the rank."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._until_listed = _FIRST_STEPS

    def write(self, step: int) -> None:
        os.pwrite(self._file, b"%20d\n" % step, 0)  # one write of one length: a reader never finds half of one
        if self._until_listed:
            self._until_listed -= 1
            if not self._until_listed:
                list_modules()


def open_step_file() -> StepFile | None:
    """Return this rank's step file; None if no supervisor asks for one."""
    path = os.environ.get(STEP_FILE)
    if not path:
        return None
    try:
        return StepFile(path)
    except OSError:  # the folder of a launcher that is no longer there; a run does not depend on it
        return None


def list_modules() -> None:
    """Write the names of the modules of this process, in the order in which they were imported, if it is asked to."""
    if path := os.environ.get(MODULES_FILE):
        whole = Path(f"{path}.part")
        with suppress(OSError):  # a launcher that is gone; a run does not depend on it
            whole.write_text(json.dumps(list(sys.modules)), encoding="utf-8")
            whole.replace(path)


def read_step(path: Path) -> int | None:
    """Return the step in a step file; None if there is none yet."""
    try:
        return int(path.read_bytes())
    except (OSError, ValueError):
        return None


def is_supervised(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether a supervisor has started this process."""
    return bool((os.environ if environment is None else environment).get(ATTEMPT))


@dataclass(frozen=True)
class FailureLine:
    """A line of restarts.jsonl: an attempt has failed."""

    attempt: int
    time: float
    ranks: int
    rank: int | None
    step: int | None
    cause: str
    message: str = ""
    ending_seconds: float | None = None
    """From when the failure was noticed until the last worker had ended."""
    kind: str = "failure"


def append_line(folder: Path, line: Mapping[str, Any]) -> None:
    """Append a line to restarts.jsonl. A full disk must not hide the failure itself: what cannot be written is lost."""
    if not folder.is_dir():
        return
    with suppress(OSError):
        file = open_regular(folder / RESTARTS, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, json.dumps(line).encode() + b"\n")
        finally:
            os.close(file)


def append_failure(folder: Path, line: FailureLine) -> None:
    append_line(folder, asdict(line))


def describe_restart(folder: Path, step: int, ranks: int) -> tuple[str, dict[str, Any]] | None:
    """Record that training goes on after a failure; return a text for the log and the figures.

    None if this process is not a further attempt, or nothing has failed: the supervisor was asked for another size.

    Args:
        folder: The run's folder.
        step: The step of the checkpoint from which training goes on; 0 without one.
        ranks: The number of ranks of this attempt.
    """
    attempt = int(os.environ.get(ATTEMPT) or 0)
    lines = read_restarts(folder) if attempt else []
    failures = [line for line in lines if line.kind == "failure" and line.attempt == attempt - 1]
    if not failures:
        return None
    failure, now = failures[-1], time.time()
    lost_steps = max(0, (failure.step or 0) - 1 - step)  # the step that was running is not done
    saved = _find_save_time(folder, step)
    down = max(0.0, now - failure.time) if failure.time is not None else 0.0
    lost = max(down, now - saved) if saved is not None else down
    figures = {"attempt": attempt, "lost_steps": lost_steps, "down_seconds": round(down, 2)}
    figures |= {"lost_seconds": round(lost, 2)}
    append_line(folder, {"kind": "restart", "time": now, "step": step, "ranks": ranks, **figures})
    where = f"after step {step}" if step else "at the first step"
    text = f"restart {attempt}: {failure.cause}; goes on {where}, {lost_steps} steps and {lost:.1f} s were lost"
    return text, figures


def _find_save_time(folder: Path, step: int) -> float | None:
    """Return when the checkpoint of a step was complete, or, for step 0, when the run was started."""
    from cornstarch.config.run_folder import METRICS, RunFolder  # late: pydantic takes a third of a second
    from cornstarch.metrics.metrics import read_metrics

    if not step:
        started = RunFolder(folder).read_summary().get("started")
        return float(started) if isinstance(started, int | float) else None
    with suppress(ConfigError):
        for line in reversed(read_metrics(folder / METRICS)):
            if line.get("event") == "saved" and line.get("step") == step:
                return float(line.get("time", 0.0)) or None
    return None


def close_run(folder: Path, step: int | None, cause: str, status: str = "failed") -> None:
    """Write into the folder of a run whose workers have ended how, and why. Its rank 0 may have been killed.

    A run that another process is writing to is left alone.
    """
    from cornstarch.config.run_folder import METRICS, SUMMARY, RunFolder
    from cornstarch.metrics.metrics import MetricsFile
    from cornstarch.report import write_report

    run = RunFolder(folder)
    if not (run / SUMMARY).exists():
        return
    with suppress(ConfigError), run.claim():
        summary = run.read_summary()
        if summary.get("status") not in ("running", "failed"):
            return
        ended = {"ended": time.time()} if summary.get("status") == "running" else {}
        run.write_summary({**summary, "status": status, **ended, "cause": cause})
        at = step if step is not None else summary.get("step") or 0
        with MetricsFile(run / METRICS) as metrics:
            metrics.append({"kind": "event", "step": at, "time": time.time(), "event": status, "text": cause})
        write_report(folder)
