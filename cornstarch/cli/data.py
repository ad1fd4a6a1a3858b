"""`cornstarch data`: what there is to know about data before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_WRONG_INPUT = 2


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    data = typer.Typer(help="Look at data.", no_args_is_help=True)
    data.command("check")(check)
    data.callback()(_group)
    app.add_typer(data, name="data")


def _group() -> None:
    """Look at data."""


def check(
    config: Annotated[Path, typer.Argument(help="The run's config.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Look at so many samples of each source only.")] = None,
    rows: Annotated[bool, typer.Option("--rows", help="Rows and media only, without the model's tokenizer.")] = False,
) -> None:
    """Read, decode and tokenize all of a config's data; list what is broken and show five samples with their labels."""
    from rich.console import Console

    from cornstarch.train.data.check import check_data, render
    from cornstarch.train.source import load_config

    run = load_config(config, overrides or ())
    look = None
    if not rows:
        from cornstarch.cli.train import quiet_libraries
        from cornstarch.train.tasks.looking import look_of

        quiet_libraries()
        look = look_of(run)
    report = check_data(run.data, look, most=samples)
    Console().print(render(report))
    if report.problems:
        raise typer.Exit(_WRONG_INPUT)  # the report has told them
