"""`cornstarch export`: a run's model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from cornstarch.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("export")(export)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="The folder of a run.", show_default=False)],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder to write.", show_default=False)],
    checkpoint: Annotated[str, typer.Option(help="best, last, or the number of a step.")] = "best",
    unchecked: Annotated[bool, typer.Option("--unchecked", help="Do not compare it with the run.")] = False,
) -> None:
    """Write a run's model and its tokenizer or processors to a folder, load it again and compare their logits."""
    if folder.exists():
        raise ConfigError(f"{folder} exists already.\n  Give a new folder.")
    which = chosen(checkpoint)
    from cornstarch.cli.train import quiet_libraries
    from cornstarch.train.using import export_run, load_run

    quiet_libraries()
    loaded = load_run(run, which)
    difference = export_run(loaded, folder, compare=not unchecked)
    said = "not compared" if difference is None else f"loaded again, largest difference of logits {difference:.1e}"
    print(f"{folder}: the {loaded.task.name} model of step {loaded.step}; {said}")


def chosen(checkpoint: str) -> Literal["best", "last"] | int:
    """Read which checkpoint is meant."""
    if checkpoint in ("best", "last"):
        return checkpoint  # type: ignore[return-value]
    if not checkpoint.isdecimal():
        raise ConfigError(f"--checkpoint {checkpoint}\n  Expected best, last, or the number of a step.")
    return int(checkpoint)
