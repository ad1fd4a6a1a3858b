"""From text to `RunConfig` and back: a YAML file, `key.path=value` on the command line, and defaults; no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from cornstarch.errors import ConfigError
from cornstarch.train import tree
from cornstarch.train.config import RunConfig
from cornstarch.train.mistakes import explain
from cornstarch.train.tree import COMMAND_LINE, Mistake, Node, Where

PLANNED = ("parallel", "loop")
"""The sections that a file of `cornstarch plan` has."""
UNDECIDED = (
    "parallel: auto: the plan is chosen when the run is started.\n  To see it: cornstarch plan CONFIG --cluster "
    "2x8xH100 --output plan.yaml."
)
"""What is said where a plan is needed that has not been chosen yet."""


@dataclass(frozen=True)
class Reading:
    """What was read: the description if it is right, what is wrong if not, and where every value was written."""

    config: RunConfig | None
    mistakes: list[Mistake]
    values: Node
    """The values as far as they could be read, misspelt keys put right."""


def load_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    plan: str | Path | None = None,
) -> RunConfig:
    """Return the run that a YAML file describes.

    path: the file; None: `base` and `overrides` alone.
    overrides: `key.path=value`, as on the command line; they win over the file.
    base: values under the file's; mappings are merged key by key, everything else is replaced.
    plan: a file of `cornstarch plan`; its plan stands for the file's, and what it says of `loop` wins over the file.

    Raises ConfigError that names every mistake at once, each with its line.
    """
    reading = read_config(path, overrides, base, plan)
    tree.raise_mistakes(reading.mistakes)
    assert reading.config is not None
    return reading.config


def read_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    plan: str | Path | None = None,
) -> Reading:
    """Read as `load_config` does, and return the mistakes instead of raising them."""
    start = Node({}, COMMAND_LINE) if base is None else tree.tree_of(base, Where("defaults"))
    values, mistakes = (start, []) if path is None else _read_file(Path(path))
    readable = values is not None
    values = tree.merged(start, values) if values is not None else start
    if plan is not None:
        values, wrong = _with_plan(values, Path(plan))
        mistakes = [*mistakes, *wrong]
    _spell_out(values)
    for override in overrides:
        mistakes = [*mistakes, *_apply(override, values)]
        _spell_out(values)
    _replace_length(values, {override.partition("=")[0].strip() for override in overrides})
    if not readable:  # all else would be "missing"
        return Reading(None, mistakes, values)
    config, further = _validated(values)
    mistakes = [*mistakes, *further]
    return Reading(config if not mistakes else None, mistakes, values)


def _validated(values: Node) -> tuple[RunConfig | None, list[Mistake]]:
    """Return the description, or every mistake that was not told before.

    A section with a misspelt key is not looked at as a whole, so the key is put right and the section read again.
    """
    found: list[Mistake] = []
    told: set[str] = set()
    while True:
        try:
            # JSON and strict: a list may be a tuple and a text a path, but `true` is no number and "5" neither.
            config = RunConfig.model_validate_json(json.dumps(values.plain()), strict=True)
        except ValidationError as error:
            mistakes, unknown = explain(error, values)
        else:
            return config, found
        found += [mistake for mistake in mistakes if mistake.key not in told]
        told |= {mistake.key for mistake in mistakes}
        if not unknown:
            return None, found
        for path, meant in unknown:
            section = tree.descend(values, path[:-1])
            assert section is not None and isinstance(section.value, dict)
            node = section.value.pop(str(path[-1]))
            if meant is not None:
                section.value[meant] = node


# ------------------------------------------------------------------------------------------------ reading


def _read_file(
    path: Path, made_by: str = "cornstarch init", keys: str = "`model:` and `data:`"
) -> tuple[Node | None, list[Mistake]]:
    """Return the values of a YAML file, None if it cannot be read, and what is wrong with it."""
    source = Where(str(path))

    def unreadable(text: str, line: int | None = None) -> tuple[None, list[Mistake]]:
        return None, [Mistake(Where(str(path), line), "", None, text)]

    try:
        with path.open("rb") as file:
            content = file.read(tree.LARGEST_FILE + 1)
    except IsADirectoryError:
        return unreadable("It is a folder; expected a YAML file.")
    except FileNotFoundError:
        return unreadable(f"There is no such file (seen from {os.getcwd()}).\nTo make one: {made_by}.")
    except (OSError, ValueError) as error:
        return unreadable(f"It cannot be read: {getattr(error, 'strerror', None) or error}.")
    if len(content) > tree.LARGEST_FILE:
        return unreadable(f"It has more than {tree.LARGEST_FILE} bytes; expected a description of a run.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return unreadable(f"Byte {content[error.start]:#04x} is not UTF-8.\nSave the file as UTF-8.", line)
    values, mistakes = tree.read_yaml(text, source)
    if values is not None and not isinstance(values.value, dict):
        kind = "a list" if isinstance(values.value, list) else "a single value"
        return unreadable(f"It holds {kind}; expected keys such as {keys}.", values.where.line)
    return values, mistakes


def _with_plan(values: Node, path: Path) -> tuple[Node, list[Mistake]]:
    """Return values with what a file of `cornstarch plan` says on top, and what is wrong with that file."""
    found, mistakes = _read_file(path, "cornstarch plan CONFIG --output PLAN", "`parallel:` and `loop:`")
    if found is None or not isinstance(found.value, dict) or not isinstance(values.value, dict):
        return values, mistakes
    for name, node in found.value.items():
        if name not in PLANNED:
            said = f"A plan says nothing about it.\nExpected {' and '.join(f'`{one}`' for one in PLANNED)} only."
            mistakes.append(Mistake(node.where, name, node.shown(), said))
    kept = {name: node for name, node in found.value.items() if name in PLANNED}
    without = {name: node for name, node in values.value.items() if not (name == "parallel" and name in kept)}
    return tree.merged(Node(without, values.where), Node(kept, found.where)), mistakes


def _spell_out(values: Node) -> None:
    """Write what may be said in short at its full length, so that overrides find their way in it."""
    _list_sources(values)
    parallel = tree.descend(values, ("parallel",))
    if parallel is not None and parallel.value == "auto":
        parallel.value = {"auto": Node(True, parallel.where, "true")}


def _list_sources(values: Node) -> None:
    """Write one source as a list of one, and a path as a source, so that overrides find `data.train.0.path`."""
    data = tree.descend(values, ("data",))
    if data is None or not isinstance(data.value, dict):
        return
    for key in ("train", "evaluation"):
        node = data.value.get(key)
        if node is None or node.value is None:
            continue
        many = node.value if isinstance(node.value, list) else [node]
        sources = [Node({"path": one}, one.where) if isinstance(one.value, str) else one for one in many]
        data.value[key] = Node([*sources], node.where)


# ------------------------------------------------------------------------------------------------ overrides


def _replace_length(values: Node, overridden: set[str]) -> None:
    """Let `loop.steps=100` stand in for the file's `epochs`, and the other way round: only one of them can be meant."""
    loop = values.value.get("loop") if isinstance(values.value, dict) else None
    for given, other in (("steps", "epochs"), ("epochs", "steps")):
        is_meant = f"loop.{given}" in overridden and f"loop.{other}" not in overridden
        if is_meant and loop is not None and isinstance(loop.value, dict) and loop.value[given].value is not None:
            loop.value.pop(other, None)


def _apply(override: str, values: Node) -> list[Mistake]:
    """Set what one `key.path=value` says; return what is wrong with it."""
    key, equals, text = override.partition("=")
    steps = tuple(key.strip().split("."))
    if not equals or not all(steps) or not key.isprintable():  # half characters of a shell are not printable
        said = "Expected `key.path=value`, for example `optimizer.learning_rate=1e-4`."
        return [Mistake(COMMAND_LINE, tree.shorten(override), None, said)]
    path = tuple(int(step) if step.isascii() and step.isdigit() and len(step) < 9 else step for step in steps)
    node, mistakes = _value(text.strip(), path)
    complaint = _set(values, path, node)
    return [*mistakes, Mistake(COMMAND_LINE, tree.dotted(path), node.shown(), complaint)] if complaint else mistakes


def _value(text: str, path: tree.Path) -> tuple[Node, list[Mistake]]:
    """Return the value of an override: lists, mappings and quoted texts as in YAML, all else one plain scalar.

    `data.system=Answer: yes or no # really` is a text on a command line, though it would not be one in a file, and so
    is a Jinja template: no mapping that we read begins with `{{` or `{%`.
    """
    if text[:1] in ("[", "{", '"', "'") and text[:2] not in ("{{", "{%", "{#"):
        node, mistakes = tree.read_yaml(text, COMMAND_LINE, path)
        return node or Node(None, COMMAND_LINE, text, broken=True), mistakes
    try:
        return Node(tree.scalar(text, path), COMMAND_LINE, text), []
    except ValueError as error:
        broken = Node(None, COMMAND_LINE, text, broken=True)
        return broken, [Mistake(COMMAND_LINE, tree.dotted(path), tree.shorten(text), str(error))]


def _set(values: Node, path: tree.Path, node: Node) -> str:
    """Put `node` at `path`, making the sections on the way; return what is wrong, or an empty text."""
    here = values
    for depth, step in enumerate(path):
        last = depth == len(path) - 1
        if here.broken:  # already told
            return ""
        if here.value is None:
            here.value = [] if isinstance(step, int) else {}
        if isinstance(here.value, list):
            if not isinstance(step, int) or step > len(here.value):
                return _no_index(path[:depth], len(here.value))
            if step == len(here.value):
                here.value.append(Node(None, COMMAND_LINE))
            if last:
                here.value[step] = node
            here = here.value[step]
        elif isinstance(here.value, dict):
            here.value[str(step)] = node if last else here.value.get(str(step), Node(None, COMMAND_LINE))
            here = here.value[str(step)]
        else:
            return f"`{tree.dotted(path[:depth])}` is the value {here.shown()}, which has no keys."
    return ""


def _no_index(path: tree.Path, length: int) -> str:
    name = tree.dotted(path)
    return f"`{name}` is a list of {length}.\nGive a position: `{name}.0` is the first, `{name}.{length}` a new one."


# ------------------------------------------------------------------------------------------------ writing


class _Writer(yaml.SafeDumper):
    """Writes texts so that `tree.scalar` reads the same texts again, and every value where it stands."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(writer: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        # Beside line feeds, YAML folds U+0085, U+2028 and U+2029; in double quotes all are escaped.
        plain = tree.scalar(text) == text and text != "<<" and text.isprintable()
    except ValueError:
        plain = False
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Writer.add_representer(str, _represent_text)


def dump_config(config: RunConfig) -> str:
    """Return the whole description, defaults written out, as YAML that loads to an equal one."""
    return write_data(as_data(config))


def write_data(data: Any, flow: bool = False) -> str:
    """Return mappings, lists and scalars as YAML; `flow`: on one line."""
    style, width = (True, float("inf")) if flow else (False, 100)
    try:
        text = yaml.dump(
            data, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=width, default_flow_style=style
        )
    except yaml.YAMLError as error:
        raise ConfigError(f"the run cannot be written as YAML: {error}") from error
    return text.removesuffix("...\n")


def as_data(value: Any) -> Any:
    """Return a description as mappings, lists and scalars."""
    if isinstance(value, BaseModel):
        return {name: as_data(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {str(key): as_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_data(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def config_difference(a: RunConfig, b: RunConfig) -> list[str]:
    """Return what differs between two descriptions, a line each: `loop.steps: 100 → 200`."""
    return _difference(as_data(a), as_data(b), ())


_ABSENT = object()


def _difference(a: Any, b: Any, path: tree.Path) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys: list[Any] = list(dict.fromkeys([*a, *b]))
        pairs = [(key, a.get(key, _ABSENT), b.get(key, _ABSENT)) for key in keys]
    elif isinstance(a, list) and isinstance(b, list):
        length = max(len(a), len(b))
        pairs = [(i, a[i] if i < len(a) else _ABSENT, b[i] if i < len(b) else _ABSENT) for i in range(length)]
    elif type(a) is type(b) and a == b:
        return []
    else:
        return [f"{tree.dotted(path)}: {_shown(a)} → {_shown(b)}"]
    return [line for key, left, right in pairs for line in _difference(left, right, (*path, key))]


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else tree.shorten(json.dumps(value, ensure_ascii=False, default=str), 200)
