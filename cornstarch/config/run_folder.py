"""The folder of a run: whose it is, what is in it, and whether a run may go on in it. No torch."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cornstarch.config import RunConfig
from cornstarch.config.config_file import config_difference, dump_config, load_config
from cornstarch.errors import ConfigError
from cornstarch.files import replace_file

CONFIG, METRICS, SUMMARY, CHECKPOINTS, SAMPLES = "config.yaml", "metrics.jsonl", "run.json", "checkpoints", "samples"
REPORT = "report.html"
PLAN = "plan.yaml"
_LOCK = ".lock"

# What may change from one start to the next without another result.
_FREE = (
    "name", "output", "launch.", "logging.", "checkpoint.every", "checkpoint.keep", "checkpoint.peer", "threads",
    "data.workers", "data.prefetch", "loop.exchange_check", "loop.check_replicas", "parallel.verify", "features.",
    "compile_cache",
)  # fmt: skip


class RunFolder:
    """A run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Make the folder and keep other runs out of it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = open(self / _LOCK, "a+")  # noqa: SIM115  (closed below, which also unlocks it)
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written: {error.strerror}.\n  Choose another folder: output=<folder>."
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(
                    f"Another run is writing to {self.path}.\n  Wait for it, or give this one another folder: "
                    "output=<folder>."
                ) from error
            yield

    def check_config(self, config: RunConfig) -> list[str]:
        """Return in what a config differs from the stored one, leaving out what changes no result."""
        differences = config_difference(load_config(self / CONFIG), config) if (self / CONFIG).exists() else []
        return [line for line in differences if not line.startswith(_FREE)]

    def store_config(self, config: RunConfig) -> None:
        """Write the resolved config: it reproduces the run."""
        self.write(CONFIG, dump_config(config))

    def write(self, name: str, content: str | bytes) -> None:
        """Write a file, at once or not at all."""
        path = self / name
        try:
            replace_file(path, content.encode() if isinstance(content, str) else content)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error

    def read_summary(self) -> dict[str, Any]:
        """Return what run.json says; nothing if it is not there, or damaged."""
        try:
            summary = json.loads((self / SUMMARY).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return summary if isinstance(summary, dict) else {}

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self.write(SUMMARY, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")

    def set_aside(self) -> Path | None:
        """Rename the folder, if there is a run in it, to make room for a new one; return the new name."""
        if not any((self / name).exists() for name in (CONFIG, METRICS, CHECKPOINTS)):
            return None  # whatever is there is no run's
        path = Path(os.path.abspath(self.path))
        if Path.cwd().is_relative_to(path):
            raise ConfigError(
                f"{self.path} has a run, and is the folder that you are in: it cannot be renamed.\n  Go elsewhere, or "
                "choose another folder: output=<folder>."
            )
        with self.claim():
            number = 1
            while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
                number += 1
            try:
                os.rename(path, aside)
            except OSError as error:
                raise ConfigError(f"{self.path} cannot be renamed to {aside}: {error.strerror}.") from error
        return aside


def read_run_config(path: Path) -> RunConfig:
    """Return the config of the run in a folder."""
    if not path.is_dir():
        raise ConfigError(f"There is no folder {path}. Expected that of a run, as `cornstarch train` writes it.")
    if not (path / CONFIG).is_file():
        raise ConfigError(
            f"{path} is no run: it has no {CONFIG}. Expected a folder that `cornstarch train` has written."
        )
    return load_config(path / CONFIG)


def check_trace(is_pipeline: bool) -> None:
    """Raise ConfigError if there is nothing to trace."""
    if not is_pipeline:
        raise ConfigError(
            "--trace: a trace shows the stages of a pipeline, and this run has none.\n  Cut the model into stages: "
            "parallel.modules.language_model.stages=2, or leave --trace out."
        )
