"""`cornstarch checkpoint`: what a run has saved, whether it is whole, and in which form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cornstarch.errors import ConfigError

if TYPE_CHECKING:
    from cornstarch.train.checkpoint import Checkpoint, CheckpointStore

_WRONG_INPUT = 2

_Folder = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER",
        help="The folder of a run, of its checkpoints, or of one of them (step_…).",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    checkpoint = typer.Typer(help="Look at checkpoints.", no_args_is_help=True)
    checkpoint.command("list")(list_)
    checkpoint.command("verify")(verify)
    checkpoint.command("convert")(convert)
    checkpoint.callback()(_group)
    app.add_typer(checkpoint, name="checkpoint")


def _group() -> None:
    """Look at checkpoints."""


def list_(folder: _Folder) -> None:
    """List checkpoints: step, metric, size, by which processes and versions they were saved, whether files are there.

    Sizes of files are compared, their bytes are not read: that is what `verify` does.
    """
    from rich.console import Console
    from rich.table import Table

    found, problems = _found(folder)
    console = Console(soft_wrap=True)
    if found:
        table = Table("step", "metric", "size", "layout", "versions", "files", box=None, pad_edge=False)
        for one in found:
            trouble = _trouble(one)
            table.add_row(
                str(one.step),
                "" if one.metric is None else f"{one.metric:.6g}",
                _size(one.size),
                _layout(one),
                " ".join(f"{name} {version}" for name, version in one.versions.items() if name != "python"),
                f"{len(one.files)} there" if trouble is None else "damaged",
            )
        console.print(table)
    problems += [trouble for one in found if (trouble := _trouble(one)) is not None]
    _tell_damage(problems)


def verify(
    folder: _Folder,
    step: Annotated[int | None, typer.Option(min=0, help="Of this step only.", show_default=False)] = None,
) -> None:
    """Read all bytes of checkpoints and compare them with what was saved."""
    found, problems = _found(folder)
    if step is not None:
        found = [one for one in found if one.step == step]
        problems = [problem for problem in problems if f"step_{step:08d}" in problem]
        if not found and not problems:
            raise ConfigError(f"{folder} has no checkpoint of step {step}.")
    for one in found:
        try:
            one.verify()
        except ConfigError as error:
            problems.append(str(error))
        else:
            print(f"{one.folder}: whole, {len(one.files)} files, {_size(one.size)}")
    _tell_damage(problems)


def convert(
    folder: _Folder,
    out: Annotated[Path, typer.Argument(metavar="NEW_FOLDER", help="A new folder to write.", show_default=False)],
    form: Annotated[str, typer.Option(help="full (whole tensors) or sharded.")] = "full",
    processes: Annotated[
        int | None, typer.Option(min=1, help="sharded: for how many processes. Default: as it was saved.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Default: the newest.", show_default=False)] = None,
) -> None:
    """Write a checkpoint again in another form, compare both, and print where it is."""
    from cornstarch.train.checkpoint.convert import convert as converted

    found, problems = _found(folder)
    chosen = [one for one in found if step is None or one.step == step]
    if not chosen:
        wanted = "no whole checkpoint" if step is None else f"no whole checkpoint of step {step}"
        raise ConfigError("\n".join([f"{folder} has {wanted}.", *problems]))
    written = converted(chosen[-1], out, form, processes)  # type: ignore[arg-type]
    print(f"{written.folder}: step {written.step}, {_layout(written)}, {_size(written.size)}; equal to the original")


# ---------------------------------------------------------------------------------------------------- what is there


def _found(folder: Path) -> tuple[list[Checkpoint], list[str]]:
    """Return the checkpoints of a folder and what is wrong with others; an error if there is neither."""
    from cornstarch.train.checkpoint import read_checkpoint

    if (folder / "checkpoint.json").is_file() or folder.name.startswith("step_"):
        return [read_checkpoint(folder)], []
    store = _store(folder)
    found = store.list()
    if not found and not store.problems:
        raise ConfigError(f"{folder} has no checkpoint. Expected the folder of a run, of checkpoints, or of one.")
    return found, list(store.problems)


def _store(folder: Path) -> CheckpointStore:
    from cornstarch.train.checkpoint import CheckpointStore
    from cornstarch.train.runs import CHECKPOINTS

    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}. Expected that of a run, of checkpoints, or of one of them.")
    inside = folder / CHECKPOINTS
    return CheckpointStore(inside if inside.is_dir() else folder, keep=1)


def _trouble(checkpoint: Checkpoint) -> str | None:
    try:
        checkpoint.check_sizes()
    except ConfigError as error:
        return str(error)
    return None


def _tell_damage(problems: list[str]) -> None:
    for problem in problems:
        print(f"damaged: {problem}")
    if problems:
        raise typer.Exit(_WRONG_INPUT)


def _layout(checkpoint: Checkpoint) -> str:
    layout: dict[str, Any] = checkpoint.layout
    count = layout["processes"]
    said = f"{count} process{'' if count == 1 else 'es'}, {checkpoint.form}"
    meshes = layout.get("meshes") or []
    return f"{said} ({', '.join(meshes)})" if meshes else said


def _size(count: float) -> str:
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if count < 999.95:
            break
        count, unit = count / 1000, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
