"""Rows that wait: a run on them stands still where a test wants it to, as long as a file is there."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


class GatedRows:
    """Rows of a file; those after the first so many that are read wait until the gate, a file, is gone.

    While they wait, the gate grows: a test sees that Python code has run since.
    """

    def __init__(self, path: str, gate: str, free: int) -> None:
        self._rows = json.loads(Path(path).read_text())
        self._gate, self._free, self._read = Path(gate), free, 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._read += 1
        while self._read > self._free and self._gate.exists():
            with suppress(FileNotFoundError), open(self._gate, "r+") as file:
                file.seek(0, 2)
                file.write(".")
            time.sleep(0.005)
        return self._rows[index]


def rows(path: str, gate: str, free: int) -> GatedRows:
    """Return the rows."""
    return GatedRows(path, gate, free)
