"""`cornstarch init`: a starter config for given models and data, every key explained."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from cornstarch.errors import ConfigError

WIDTH = 110


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("init")(init)


def init(
    language_model: Annotated[str, typer.Option(help="Folder or hub name of the language model.", show_default=False)],
    data: Annotated[str, typer.Option(help="The training data: JSON, JSONL, tars.", show_default=False)],
    vision: Annotated[str | None, typer.Option(help="Folder or hub name of a vision encoder.")] = None,
    audio: Annotated[str | None, typer.Option(help="Folder or hub name of an audio encoder.")] = None,
    output: Annotated[Path, typer.Option(help="The config to write.")] = Path("run.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Write a starter config: every key with its default and what it means."""
    from cornstarch.cli.paths import path_mistakes
    from cornstarch.train.source import load_config
    from cornstarch.train.tree import COMMAND_LINE, raise_mistakes, tree_of

    encoders = {name: path for name, path in (("vision", vision), ("audio", audio)) if path is not None}
    given = starter(language_model, encoders, data)
    raise_mistakes(path_mistakes(tree_of(given, COMMAND_LINE)))
    config = load_config(None, base=given)
    write(output, starter_text(config, output.name), force)
    print(f"Wrote {output}. Look through it, then:")
    for command, _ in next_commands(str(output), str(config.folder)):
        print(f"  {command}")


def starter(language_model: str, encoders: dict[str, str], data: str) -> dict[str, Any]:
    """Return what the starter config says beside defaults."""
    # With encoders: first let the new projectors learn the language model's language, which is cheap and
    # spoils nothing; the second stage is a change of one word.
    mode = "frozen" if encoders else "full"
    return {
        "model": {
            "encoders": {name: {"path": path} for name, path in encoders.items()},
            "language_model": {"path": language_model, "train": mode},
        },
        "data": {"train": [{"path": data}]},
    }


def write(path: Path, text: str, force: bool) -> None:
    """Write a file, and replace one only if told to."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} is already there.\n  Give --force to replace it, or --output another.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.\n  Give --output another place.") from error


# ------------------------------------------------------------------------------------------------ text


def next_commands(config: str, folder: str) -> list[tuple[str, str]]:
    """Return what to do with a config, in order, and what for."""
    name, run = shlex.quote(config), shlex.quote(folder)
    return [
        (f"cornstarch validate {name}", "is it right, and is everything there?"),
        (f"cornstarch data check {name}", "what is in the data?"),
        (f"cornstarch train {name}", "train; after an interruption the same command goes on"),
        (f"cornstarch generate {run}", "ask the trained model"),
    ]


def starter_text(config: Any, name: str) -> str:
    """Return a description as YAML in which every key is explained."""
    from cornstarch.train.source import as_data

    steps = next_commands(name, str(config.folder))
    longest = max(len(command) for command, _ in steps)
    head = [
        "# What is trained, on what, and how. Every key stands here with its value; those you do not change can go.",
        *(f"#   {command:<{longest}}  {said}" for command, said in steps),
        "",
    ]
    return "\n".join([*head, *_section(as_data(config), (), "")]) + "\n"


def _section(values: dict[str, Any], path: tuple[str | int, ...], indent: str) -> Iterator[str]:
    for key, value in values.items():
        here = (*path, key)
        if not path and isinstance(value, dict):
            yield ""
        if isinstance(value, dict) and value:
            yield from _explained(f"{indent}{key}:", here, indent)
            yield from _section(value, here, f"{indent}  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from _explained(f"{indent}{key}:", here, indent)
            for index, item in enumerate(value):
                yield from _item(_section(item, (*here, index), f"{indent}    "), indent)
        else:
            yield from _explained(f"{indent}{key}: {_written(value)}", here, indent)


def _item(lines: Iterator[str], indent: str) -> Iterator[str]:
    """Yield the lines of one item of a list: a dash before its first key."""
    started = False
    for line in lines:
        if not started and not line.lstrip().startswith("#"):
            line = f"{indent}  - {line.lstrip()}"
            started = True
        yield line


def _written(value: Any) -> str:
    from cornstarch.train.source import write_data

    return write_data(value, flow=True).strip()


def _explained(line: str, path: tuple[str | int, ...], indent: str) -> Iterator[str]:
    """Yield a line with its explanation: behind it if there is room, else above it."""
    said = explanation(path)
    if len(line) + len(said) + 4 <= WIDTH:
        yield f"{line}  # {said}"
    else:
        yield from (f"{indent}# {part}" for part in textwrap.wrap(said, WIDTH - len(indent) - 2))
        yield line


def explanation(path: tuple[str | int, ...]) -> str:
    """Return what a key means: the field's documentation, and what may stand there."""
    from cornstarch.train.schema import alternatives, describe, locate

    schema = locate(path)
    assert schema is not None
    choices = list(alternatives(schema))
    sections = [choice for choice in choices if "properties" in choice]
    if sections:
        return schema.get("description") or sections[0].get("description", "")
    document = schema.get("description", "")
    if document and not any("enum" in choice or "enum" in choice.get("items", {}) for choice in choices):
        return document
    if any("patternProperties" in choice for choice in choices):
        return "A section for each name."
    expected = describe(schema)
    return f"{document} {expected[:1].upper()}{expected[1:]}.".strip()
