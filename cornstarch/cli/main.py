"""The command `cornstarch`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated

import typer

from cornstarch import __version__
from cornstarch.cli import INTERRUPTED, WRONG_INPUT
from cornstarch.errors import ConfigError
from cornstarch.launch.launcher import import_extensions

# In the order of the help: command -> file of this folder and function. A new command is one file and one line here.
# All files are imported for `cornstarch --help`, so they import torch and other heavy packages inside functions.
COMMANDS = {
    "train": "train:train",
    "init": "validate:init",
    "validate": "validate:validate",
    "data check": "data:check_data",
    "inspect-data": "data:inspect_data",
    "generate": "generate:generate",
    "export": "generate:export",
    "report": "generate:report",
    "checkpoint list": "checkpoint:list_checkpoints",
    "checkpoint verify": "checkpoint:verify_checkpoints",
    "checkpoint convert": "checkpoint:convert_checkpoint",
    "layout": "layout:layout",
    "estimate": "estimate:estimate",
    "profile": "estimate:profile",
    "verify": "train:verify",
    "plan": "plan:plan",
    "explain": "layout:explain",
    "schema": "validate:schema",
    "doctor": "doctor:doctor",
}
GROUPS = {"data": "Inspect data.", "checkpoint": "Inspect and convert checkpoints."}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. A user's mistake ends in a message, never in a traceback."""
    if "" not in sys.path:  # the current folder may have functions that a config names
        sys.path.append("")  # last, so that no file there hides a library
    try:
        make_app()(args=arguments, prog_name="cornstarch")
    except ConfigError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(WRONG_INPUT)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def make_app() -> typer.Typer:
    """Return the application with all commands."""
    app = typer.Typer(
        help="Compose multimodal language models from Hugging Face parts, and train them.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_prepare)
    groups: dict[str, typer.Typer] = {}
    for command, target in COMMANDS.items():
        group, _, name = command.rpartition(" ")
        if group and group not in groups:
            groups[group] = typer.Typer(help=GROUPS[group], no_args_is_help=True)
            groups[group].callback()(lambda: None)  # or typer would merge a group of one command into it
            app.add_typer(groups[group], name=group)
        file, function = target.split(":")
        (groups[group] if group else app).command(name)(getattr(import_module(f"cornstarch.cli.{file}"), function))
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"cornstarch {__version__}")
        raise typer.Exit


def _prepare(
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import", metavar="MODULE", help="A module to import first: one that registers parts. May be repeated."
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Compose multimodal language models from Hugging Face parts, and train them."""
    import_extensions(imports or ())


if __name__ == "__main__":
    main()
