"""The command line: `main.py` lists the commands. Here is what they share. torch is imported inside functions only."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cornstarch.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cornstarch.config import RunConfig

WRONG_INPUT = 2
INTERRUPTED = 130
_MIN_WIDTH = 120  # columns of a table even on a narrower terminal: truncated figures are useless

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The config, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Values that override the config's.")
]
RanksPerNode = Annotated[int, typer.Option(metavar="N", help="Ranks on each node.")]
Facts = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Facts about the data, from `cornstarch inspect-data`.")
]


def read_checked_config(path: Path, overrides: list[str] | None, plan: Path | None = None) -> RunConfig:
    """Return a config; one ConfigError lists all mistakes in it and all files it names that are missing."""
    from cornstarch.cli.validate import find_path_mistakes
    from cornstarch.config.config_file import read_config
    from cornstarch.plan.validation import raise_mistakes

    reading = read_config(path, overrides or (), plan=plan)
    raise_mistakes([*reading.mistakes, *find_path_mistakes(reading.values)])
    assert reading.config is not None
    return reading.config


@contextmanager
def import_quickly() -> Iterator[None]:
    """Import torch and other large packages in this block without garbage collections.

    Imports create a million objects that stay. Walking through them again and again takes a sixth of the time to the
    first step. Afterwards they are left out of all collections, also in data workers, which share their memory.
    """
    if "torch" in sys.modules or not gc.isenabled():  # a process with objects of its own, among them garbage
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def quiet_libraries() -> None:
    """Turn off the progress bars and hints of other libraries."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def wide_console() -> Console:
    """Return a console for tables of figures."""
    from rich.console import Console

    return Console(markup=False, highlight=False, width=max(Console().width, _MIN_WIDTH))


def build_figure_table(
    first: str, *names: str, left: tuple[str, ...] = (), no_wrap: bool = False, **options: Any
) -> Table:
    """Return a table whose columns after the first are figures, except for those named in `left`."""
    from rich.table import Table

    table = Table(first, **options)
    for name in names:
        is_text = name in left
        table.add_column(name, justify="left" if is_text else "right", no_wrap=no_wrap and not is_text)
    return table


def write_file(option: str, path: Path, text: str) -> None:
    """Write the file that an option names; ConfigError if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: the file cannot be written ({error.strerror}).") from error
