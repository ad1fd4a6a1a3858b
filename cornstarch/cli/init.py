"""`cornstarch init` writes a starter config with every key explained; `cornstarch schema` prints the JSON schema."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from cornstarch.errors import ConfigError

WIDTH = 110


def schema() -> None:
    """Print the JSON schema of a config. Editors complete and check YAML with it."""
    from cornstarch.config.json_schema import run_schema

    print(json.dumps(run_schema(), indent=2))


def init(
    language_model: Annotated[str, typer.Option(help="Folder or hub name of the language model.", show_default=False)],
    data: Annotated[str, typer.Option(help="The training data: JSON, JSONL, tars.", show_default=False)],
    vision: Annotated[str | None, typer.Option(help="Folder or hub name of a vision encoder.")] = None,
    audio: Annotated[str | None, typer.Option(help="Folder or hub name of an audio encoder.")] = None,
    output: Annotated[Path, typer.Option(help="The config to write.")] = Path("run.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a starter config: every key with its default and its meaning."""
    from cornstarch.cli.validate import find_path_mistakes
    from cornstarch.config.config_file import load_config
    from cornstarch.config.yaml_tree import tree_of
    from cornstarch.plan.validation import COMMAND_LINE, raise_mistakes

    encoders = {name: path for name, path in (("vision", vision), ("audio", audio)) if path is not None}
    # With encoders, train only the new projectors first: that is cheap and harms neither model. The second stage is a
    # change of one word.
    values: dict[str, Any] = {
        "model": {
            "encoders": {name: {"path": path} for name, path in encoders.items()},
            "language_model": {"path": language_model, "train": "frozen" if encoders else "full"},
        },
        "data": {"train": [{"path": data}]},
    }
    raise_mistakes(find_path_mistakes(tree_of(values, COMMAND_LINE)))
    config = load_config(None, base=values)
    try:
        with output.open("w" if force else "x", encoding="utf-8") as file:
            file.write(format_starter(config, output.name))
    except FileExistsError as error:
        raise ConfigError(f"{output} exists already.\n  Use --force to overwrite it, or --output another.") from error
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}.\n  Use --output another path.") from error
    print(f"Wrote {output}. Review it, then run:")
    for command, _ in _list_next_commands(str(output), str(config.folder)):
        print(f"  {command}")


def _list_next_commands(config: str, folder: str) -> list[tuple[str, str]]:
    """Return the commands to run with a config, in order, each with its purpose."""
    name, run = shlex.quote(config), shlex.quote(folder)
    return [
        (f"cornstarch validate {name}", "check the config and the files it names"),
        (f"cornstarch data check {name}", "check the data"),
        (f"cornstarch train {name}", "train; after an interruption the same command resumes"),
        (f"cornstarch generate {run}", "try the trained model"),
    ]


def format_starter(config: Any, name: str) -> str:
    """Return a config as YAML in which every key is explained."""
    from cornstarch.plan.validation import as_data

    commands = _list_next_commands(name, str(config.folder))
    longest = max(len(command) for command, _ in commands)
    head = [
        "# What is trained, on which data, and how. Every key is listed; those that you do not change can be removed.",
        *(f"#   {command:<{longest}}  {purpose}" for command, purpose in commands),
        "",
    ]
    return "\n".join([*head, *_format_section(as_data(config), (), "")]) + "\n"


def _format_section(values: dict[str, Any], path: tuple[str | int, ...], indent: str) -> Iterator[str]:
    from cornstarch.config.config_file import write_data

    for key, value in values.items():
        here = (*path, key)
        if not path and isinstance(value, dict):
            yield ""
        if isinstance(value, dict) and value:
            yield from _add_explanation(f"{indent}{key}:", here, indent)
            yield from _format_section(value, here, f"{indent}  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from _add_explanation(f"{indent}{key}:", here, indent)
            for index, item in enumerate(value):
                yield from _format_item(_format_section(item, (*here, index), f"{indent}    "), indent)
        else:
            yield from _add_explanation(f"{indent}{key}: {write_data(value, flow=True).strip()}", here, indent)


def _format_item(lines: Iterator[str], indent: str) -> Iterator[str]:
    """Yield the lines of one item of a list: a dash before its first key."""
    started = False
    for line in lines:
        if not started and not line.lstrip().startswith("#"):
            line = f"{indent}  - {line.lstrip()}"
            started = True
        yield line


def _add_explanation(line: str, path: tuple[str | int, ...], indent: str) -> Iterator[str]:
    """Yield a line with its explanation: behind it if there is room, else above it."""
    text = explain_key(path)
    if len(line) + len(text) + 4 <= WIDTH:
        yield f"{line}  # {text}"
    else:
        yield from (f"{indent}# {part}" for part in textwrap.wrap(text, WIDTH - len(indent) - 2))
        yield line


def explain_key(path: tuple[str | int, ...]) -> str:
    """Return the meaning of a key: the documentation of the field, and the values it takes."""
    from cornstarch.config.json_schema import alternatives, describe, locate

    found = locate(path)
    assert found is not None
    choices = list(alternatives(found))
    sections = [choice for choice in choices if "properties" in choice]
    if sections:
        return found.get("description") or sections[0].get("description", "")
    document = found.get("description", "")
    if document and not any("enum" in choice or "enum" in choice.get("items", {}) for choice in choices):
        return document
    if any("patternProperties" in choice for choice in choices):
        return "One section per name."
    expected = describe(found)
    return f"{document} {expected[:1].upper()}{expected[1:]}.".strip()
