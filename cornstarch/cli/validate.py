"""`cornstarch validate`: is the config right, and is everything there that it names?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cornstarch.train.config import PartConfig, RunConfig


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("validate")(validate)


def validate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The config, a YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Values that win over the file's.")
    ] = None,
) -> None:
    """Check a config and that the files and folders in it are there, and show what the run is.

    What is in the data is checked by `cornstarch data check`.
    """
    from rich.console import Console
    from rich.table import Table

    from cornstarch.cli.paths import path_mistakes
    from cornstarch.train.source import read_config
    from cornstarch.train.tree import raise_mistakes

    reading = read_config(config, overrides or ())
    raise_mistakes([*reading.mistakes, *path_mistakes(reading.values)])
    assert reading.config is not None
    table = Table(title=f"{config} is right", show_header=False, title_justify="left")
    for name, text in summary(reading.config):
        table.add_row(name, text)
    Console(markup=False, highlight=False).print(table)


def summary(config: RunConfig) -> list[tuple[str, str]]:
    """Return what a run is, in a few lines."""
    loop, optimizer, schedule = config.loop, config.optimizer, config.schedule
    epochs = loop.epochs or 1
    times = "once" if epochs == 1 else f"{epochs:g} times"
    length = f"{loop.steps} steps" if loop.steps is not None else f"{times} through the data"
    portions = f" in {loop.accumulation} portions" if loop.accumulation > 1 else ""
    return [
        ("run", f"{config.name}, seed {config.seed}, into {config.folder}"),
        *_model(config),
        *[("training data", f"{source.path} ({source.format})") for source in config.data.train],
        *[("evaluation data", f"{source.path} ({source.format})") for source in config.data.evaluation],
        ("samples", f"at most {config.data.max_length} tokens{', packed' if config.data.packing else ''}"),
        ("length", f"{length}, {loop.batch_size} samples per step{portions}"),
        ("optimizer", f"{optimizer.name}, learning rate {optimizer.learning_rate:g}, {schedule.name}"),
        ("device", f"{config.device}, precision {config.precision}"),
    ]


def _model(config: RunConfig) -> list[tuple[str, str]]:
    model = config.model
    if model.factory is not None:
        return [("model", model.factory.function)]
    if model.whole is not None:
        return [("model", f"{_part(model.whole)}, task {model.whole.task}")]
    assert model.language_model is not None
    encoders = [
        (f"{name} encoder", f"{_part(part)}, {part.projector} projector") for name, part in model.encoders.items()
    ]
    return [*encoders, ("language model", _part(model.language_model))]


def _part(part: PartConfig) -> str:
    from cornstarch.cli.paths import is_hub_name

    if part.path is None:
        kind = (part.config or {}).get("model_type", part.class_name or "model")
        source = f"new {kind}, random weights"
    else:
        source = f"{part.path} (hub, not checked)" if is_hub_name(part.path) else part.path
    rate = f", learning rate {part.learning_rate:g}" if part.learning_rate is not None else ""
    return f"{source}, train: {part.train}{rate}"
