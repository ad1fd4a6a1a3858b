"""`cornstarch checkpoint`: list, verify and convert the checkpoints of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cornstarch.cli import WRONG_INPUT
from cornstarch.errors import ConfigError

if TYPE_CHECKING:
    from cornstarch.checkpoint import Checkpoint, CheckpointStore

_EXPECTED = "Expected the folder of a run, of its checkpoints, or of one checkpoint."
_FOLDER_HELP = "The folder of a run, of its checkpoints, or of one checkpoint (step_…)."
_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help=_FOLDER_HELP, show_default=False)]


def list_checkpoints(folder: _Folder) -> None:
    """List checkpoints: step, metric, size, layout, versions, and whether all files are there.

    The sizes of files are compared; `verify` reads their contents.
    """
    from rich.console import Console
    from rich.table import Table

    found, problems = _read_checkpoints(folder)
    if found:
        table = Table("step", "metric", "size", "layout", "versions", "files", box=None, pad_edge=False)
        for one in found:
            files = f"{len(one.files)} complete"
            try:
                one.check_sizes()
            except ConfigError as error:
                problems.append(str(error))
                files = "damaged"
            metric = "" if one.metric is None else f"{one.metric:.6g}"
            versions = " ".join(f"{name} {version}" for name, version in one.versions.items() if name != "python")
            table.add_row(str(one.step), metric, _format_size(one.size), _format_layout(one), versions, files)
        Console(soft_wrap=True).print(table)
    _report_damage(problems)


def verify_checkpoints(
    folder: _Folder,
    step: Annotated[int | None, typer.Option(min=0, help="Only the checkpoint of this step.")] = None,
) -> None:
    """Read all bytes of checkpoints and compare their checksums."""
    found, problems = _read_checkpoints(folder)
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
            print(f"{one.folder}: intact, {len(one.files)} files, {_format_size(one.size)}")
    _report_damage(problems)


def convert_checkpoint(
    folder: _Folder,
    out: Annotated[Path, typer.Argument(metavar="NEW_FOLDER", help="A new folder to write.", show_default=False)],
    form: Annotated[str, typer.Option(help="full (whole tensors) or sharded.")] = "full",
    processes: Annotated[
        int | None, typer.Option(min=1, help="sharded: the number of processes. Default: as saved.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="The step to convert. Default: the newest.")] = None,
) -> None:
    """Convert a checkpoint between full and sharded, and compare the result with the original."""
    from cornstarch.checkpoint.reader import convert_checkpoint

    found, problems = _read_checkpoints(folder)
    candidates = [one for one in found if step is None or one.step == step]
    if not candidates:
        wanted = "no intact checkpoint" if step is None else f"no intact checkpoint of step {step}"
        raise ConfigError("\n".join([f"{folder} has {wanted}.", *problems]))
    written = convert_checkpoint(candidates[-1], out, form, processes)  # type: ignore[arg-type]
    layout, size = _format_layout(written), _format_size(written.size)
    print(f"{written.folder}: step {written.step}, {layout}, {size}; equal to the original")


def _read_checkpoints(folder: Path) -> tuple[list[Checkpoint], list[str]]:
    """Return the checkpoints of a folder and the problems with others; ConfigError if there is neither."""
    from cornstarch.checkpoint import CheckpointStore, LocalStorage, read_checkpoint
    from cornstarch.checkpoint.storage import resolve_storage
    from cornstarch.checkpoint.weights import open_store
    from cornstarch.config.run_folder import CHECKPOINTS, CONFIG, read_run_config

    if (folder / "checkpoint.json").is_file() or folder.name.startswith("step_"):
        return [read_checkpoint(folder)], []
    if not isinstance(resolve_storage(folder)[0], LocalStorage):
        store = CheckpointStore(folder, keep=1)
        return _list_found(store, folder)
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}. {_EXPECTED}")
    inside = folder / CHECKPOINTS
    if (folder / CONFIG).is_file() and not inside.is_dir():
        store = open_store(read_run_config(folder), folder)
    else:
        store = CheckpointStore(inside if inside.is_dir() else folder, keep=1)
    return _list_found(store, folder)


def _list_found(store: CheckpointStore, folder: Path) -> tuple[list[Checkpoint], list[str]]:
    found = store.list()
    if not found and not store.problems:
        raise ConfigError(f"{folder} has no checkpoint. {_EXPECTED}")
    return found, list(store.problems)


def _report_damage(problems: list[str]) -> None:
    for problem in problems:
        print(f"damaged: {problem}")
    if problems:
        raise typer.Exit(WRONG_INPUT)


def _format_layout(checkpoint: Checkpoint) -> str:
    count, meshes = checkpoint.layout["processes"], checkpoint.layout.get("meshes") or []
    text = f"{count} process{'' if count == 1 else 'es'}, {checkpoint.form}"
    return f"{text} ({', '.join(meshes)})" if meshes else text


def _format_size(count: float) -> str:
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if count < 999.95:
            break
        count, unit = count / 1000, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
