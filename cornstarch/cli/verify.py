"""`cornstarch verify`: does a plan do what one process does?"""

from __future__ import annotations

import subprocess
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

    The twin has the same classes and options, but few and narrow layers. Two steps on the first samples are compared:
    the loss, every gradient and every parameter. No GPU is needed.
    """
    from cornstarch.cli.paths import path_mistakes
    from cornstarch.plan.layout import Layout, check_executable
    from cornstarch.train.source import read_config
    from cornstarch.train.tree import raise_mistakes

    reading = read_config(config, list(changes or []))
    raise_mistakes([*reading.mistakes, *path_mistakes(reading.values)])
    assert reading.config is not None
    run = reading.config
    plan = run.parallel.plan()
    check_executable(plan)
    from cornstarch.cli.train import quiet_libraries

    quiet_libraries()
    from cornstarch.train.source import dump_config
    from cornstarch.train.verification import processes_for, twin_run
    from cornstarch.train.witness import difference

    ranks, replicas = processes_for(plan) if nproc is None else (nproc, Layout.of(plan, nproc).dp)
    if ranks == 1:
        print("The plan has one process; there is nothing to compare.")
        return
    with TemporaryDirectory() as folder:
        place = Path(folder)
        twin = twin_run(run, place / "run", replicas)
        one = twin.model_copy(update={"parallel": type(twin.parallel)(), "output": place / "alone"})
        for name, described in (("several", twin), ("one", one)):
            (place / f"{name}.yaml").write_text(dump_config(described), encoding="utf-8")
        print(f"{plan.describe()}\n\nA tiny twin of the model, {ranks} processes against one:", flush=True)
        _run(place, "one", 1)
        _run(place, "several", ranks)
        found = difference(place / "record several", place / "record one")
    print(_table(found))
    if not found.is_equal:
        where = f" The first wrong gradient is in {found.begins}." if found.begins else ""
        print(f"\nThe plan does something else than one process.{where} Do not train with it.", file=sys.stderr)
        raise typer.Exit(DIFFERENT)
    print("\nThe plan does what one process does.")


def _run(place: Path, name: str, ranks: int) -> None:
    from cornstarch.launch import launch

    command = [
        sys.executable,
        "-m",
        "cornstarch.train.verification",
        f"{place / name}.yaml",
        f"{place / 'record'} {name}",
    ]
    code = subprocess.run(command).returncode if ranks == 1 else launch(command, ranks, place / "logs")
    if code:
        raise typer.Exit(code)


def _table(found: Difference) -> str:
    from cornstarch.train.witness import TOLERANCE

    width = max(len(one.part) for one in found.parts)
    lines = [f"{'':{width}}  largest difference of a gradient, of a parameter after 2 steps (allowed: {TOLERANCE:g})"]
    for one in found.parts:
        missing = f"  only on one side: {', '.join(one.missing[:3])}" if one.missing else ""
        lines.append(f"{one.part:{width}}  {one.gradients:.1e}  {one.parameters:.1e}{missing}")
    lines.append(f"{'loss':{width}}  {found.loss:.1e}")
    return "\n".join(lines)
