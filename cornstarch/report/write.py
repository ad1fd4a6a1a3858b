"""Write the report into the run folder."""

from __future__ import annotations

import os
from pathlib import Path

from cornstarch.errors import ConfigError
from cornstarch.report.page import render
from cornstarch.report.picture import loss_picture
from cornstarch.report.reading import read_run

PAGE, PICTURE = "report.html", "loss.png"


def write_report(folder: Path) -> Path:
    """Write `report.html` and `loss.png` into a run folder, from what is in it so far, and return the page's path."""
    folder = Path(folder)
    run = read_run(folder)
    # JSON may hold halves of characters that UTF-8 cannot.
    page = render(run).encode("utf-8", errors="replace")
    picture = loss_picture(run)
    try:
        _replace(folder / PICTURE, picture)
        _replace(folder / PAGE, page)
    except OSError as error:
        raise ConfigError(f"The report cannot be written into {folder}: {error.strerror}.") from error
    return folder / PAGE


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that a reader finds the old one or the new one, never half of one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
