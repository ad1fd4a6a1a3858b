"""`cornstarch verify`: does a plan do what one process does?"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cornstarch.train.witness import Difference

DIFFERENT = 1


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify")(verify)


def verify(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it.", show_default=False)
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", metavar="N", help="Processes. Default: two replicas of the plan, if few.")
    ] = None,
) -> None:
    """Try the plan of a config on a tiny twin of its model, in local processes, against one process.

    The twin has the same classes and options, but few and narrow layers. Three steps on the first samples are compared,
    some of them without their images and sounds: the loss, every gradient and every parameter. No GPU is needed.
    """
    from cornstarch.cli.paths import path_mistakes
    from cornstarch.errors import ConfigError
    from cornstarch.plan.layout import Layout, check_executable
    from cornstarch.train.source import UNDECIDED, read_config
    from cornstarch.train.tree import raise_mistakes

    reading = read_config(config, list(changes or []))
    raise_mistakes([*reading.mistakes, *path_mistakes(reading.values)])
    assert reading.config is not None
    run = reading.config
    if run.parallel.auto:
        raise ConfigError(UNDECIDED)
    plan = run.parallel.plan()
    check_executable(plan)
    from cornstarch.cli.train import quiet_libraries

    quiet_libraries()
    from cornstarch.train.verification import TrialError, processes_for, tried, twin_run

    ranks, replicas = processes_for(plan) if nproc is None else (nproc, Layout.of(plan, nproc).dp)
    if ranks == 1:
        print("The plan has one process; there is nothing to compare.")
        return
    with TemporaryDirectory() as folder:
        place = Path(folder)
        twin = twin_run(run, place / "run", replicas)
        print(f"{plan.describe()}\n\nA tiny twin of the model, {ranks} processes against one:", flush=True)
        try:
            found = tried(twin, ranks, place)
        except TrialError as error:
            if not error.is_shown:
                print(error, file=sys.stderr)
            raise typer.Exit(error.code) from None
    print(_table(found))
    if not found.is_equal:
        where = f" It begins in {found.begins}." if found.begins else ""
        print(f"\nThe plan does something else than one process.{where} Do not train with it.", file=sys.stderr)
        raise typer.Exit(DIFFERENT)
    print("\nThe plan does what one process does.")


def _table(found: Difference) -> str:
    from cornstarch.train.witness import TOLERANCE

    width = max(len(one.part) for one in found.parts)
    lines = [f"{'':{width}}  largest difference of a gradient, of a parameter after 3 steps (allowed: {TOLERANCE:g})"]
    for one in found.parts:
        missing = f"  only on one side: {', '.join(one.missing[:3])}" if one.missing else ""
        lines.append(f"{one.part:{width}}  {one.gradients:.1e}  {one.parameters:.1e}{missing}")
    lines.append(f"{'loss':{width}}  {found.loss:.1e}")
    return "\n".join(lines)
