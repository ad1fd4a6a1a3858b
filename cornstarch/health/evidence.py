"""What is written beside a run that hangs: the stacks of all threads, and the last collectives of each rank."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

from cornstarch.compat import read_flight_recorder
from cornstarch.errors import ConfigError
from cornstarch.files import open_regular
from cornstarch.parallel.activity import Activity

FOLDER = "health"
"""In the run's folder."""


def write_evidence(folder: Path, rank: int, activity: Activity, words: str) -> None:
    """Write what this rank does now; a folder that cannot be written is no reason to fail again."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [words, "", f"rank {rank}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {activity.describe()}"]
    for number, frame in sys._current_frames().items():
        is_training = " (the training thread)" if number == activity.thread else ""
        lines += ["", f"thread {names.get(number, number)}{is_training}:", "".join(traceback.format_stack(frame))]
    _write(folder / FOLDER / f"stacks_rank_{rank}.txt", "\n".join(lines))
    recorded = json.dumps(read_flight_recorder(), indent=1)
    _write(folder / FOLDER / f"collectives_rank_{rank}.json", recorded)


def _write(path: Path, text: str) -> None:
    with suppress(OSError, ConfigError):
        path.parent.mkdir(exist_ok=True)
        with os.fdopen(open_regular(path, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8") as file:
            file.write(text + "\n")
