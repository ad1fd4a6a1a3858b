"""`cornstarch schema`: the JSON schema of a run's description, for editors."""

from __future__ import annotations

import json

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("schema")(schema)


def schema() -> None:
    """Print the JSON schema of a config. Editors complete and check YAML with it."""
    from cornstarch.train.schema import run_schema

    print(json.dumps(run_schema(), indent=2))
