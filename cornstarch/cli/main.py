"""The command `cornstarch`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated

import typer

from cornstarch import __version__
from cornstarch.errors import ConfigError

# In the order of the help. Each is a file of this folder with `register(app)`, and imports what it works with
# inside its functions: all of them are imported for `cornstarch --help`.
COMMANDS = (
    "train", "init", "validate", "data", "inspect_data", "generate", "export", "report", "checkpoint", "layout",
    "estimate", "profile", "verify", "plan", "explain", "schema", "doctor",
)  # fmt: skip

WRONG_INPUT = 2
INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a user's mistake ends in a message, never in a traceback."""
    if "" not in sys.path:  # the current folder: functions that a config names may stand there
        sys.path.append("")  # last, so that no file of the user's hides a library
    try:
        make_app()(args=arguments, prog_name="cornstarch")
    except ConfigError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(WRONG_INPUT)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def make_app() -> typer.Typer:
    """Return the application with every command that there is."""
    app = typer.Typer(
        help="Compose multimodal language models out of Hugging Face parts, and train them.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for name in COMMANDS:
        import_module(f"cornstarch.cli.{name}").register(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"cornstarch {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Compose multimodal language models out of Hugging Face parts, and train them."""


if __name__ == "__main__":
    main()
