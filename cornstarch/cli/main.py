"""The command `cornstarch`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated

import typer

from cornstarch import __version__
from cornstarch.cli import INTERRUPTED, WRONG_INPUT
from cornstarch.config.user_code import allow_code, import_extensions
from cornstarch.errors import ConfigError, escape_controls

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
_GLOBAL_OPTIONS = ("--import", "--allow-code")
GROUPS = {"data": "Inspect data.", "checkpoint": "Inspect and convert checkpoints."}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. A user's mistake ends in a message, never in a traceback."""
    if "" not in sys.path:  # the current folder may have functions that a config names
        sys.path.append("")  # last, so that no file there hides a library
    try:
        make_app()(args=_move_global_options(sys.argv[1:] if arguments is None else arguments), prog_name="cornstarch")
    except ConfigError as error:
        print(f"{type(error).__name__}: {escape_controls(str(error))}", file=sys.stderr)
        sys.exit(WRONG_INPUT)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _move_global_options(arguments: list[str]) -> list[str]:
    """Return the arguments with the options that stand for every command in front, where typer looks for them."""
    moved: list[str] = []
    rest = list(arguments)
    end = rest.index("--") if "--" in rest else len(rest)
    while found := [n for n, one in enumerate(rest[:end]) if one.partition("=")[0] in _GLOBAL_OPTIONS]:
        taken = 1 if "=" in rest[found[0]] else 2
        moved += rest[found[0] : found[0] + taken]
        del rest[found[0] : found[0] + taken]
        end -= taken
    return [*moved, *rest]


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
    allowed: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-code",
            metavar="MODULE",
            help="A package, module or model whose code the config may use: functions that it names, and "
            "`trust_remote_code`. Can stand behind the command. May be repeated.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Compose multimodal language models from Hugging Face parts, and train them."""
    allow_code(*allowed or ())
    import_extensions(imports or ())


if __name__ == "__main__":
    main()
